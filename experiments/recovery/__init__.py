"""What a failure costs under `cpr.PartialRecovery`. `python -m experiments.recovery`."""
