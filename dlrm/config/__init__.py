"""Configuration: the dataclasses, recipes, and the check that all ranks have the same."""
