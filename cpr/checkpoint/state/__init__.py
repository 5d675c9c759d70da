"""State that is not in tables: models, optimizers, random generators and registered objects."""
