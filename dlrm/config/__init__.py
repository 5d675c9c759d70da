"""The configuration: dataclasses, recipes, generated reference, and the check that all ranks agree."""
