"""The models: `build` makes the one that a configuration names.

Nothing is imported here, because heads are models' and what splits them knows of heads.
"""
