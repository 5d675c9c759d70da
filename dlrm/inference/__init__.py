"""Trained models in use: opening a run on any number of ranks, scoring, exporting."""

from dlrm.inference.opening import OpenedRun, open_run

__all__ = ["OpenedRun", "open_run"]
