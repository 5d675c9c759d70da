"""How soon a lost node trains again with rows from a mirror. `python -m experiments.mirror_recovery`."""
