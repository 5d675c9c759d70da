"""State outside of tables: dense parameters, optimizers, random generators and registered objects."""
