"""Scripts that reproduce a table or a figure: `python -m experiments.NAME [--quick]`."""
