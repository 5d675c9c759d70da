"""The configuration: dataclasses, recipes and generated reference."""
