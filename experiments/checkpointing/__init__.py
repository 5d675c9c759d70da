"""Measures what saving costs while a model trains. `python -m experiments.checkpointing`."""
