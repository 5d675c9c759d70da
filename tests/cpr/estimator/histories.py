"""Histories of runs for tests."""

from cpr.estimator.history import FailureCost, RunHistory, SaveCost


def make_save(step, seconds=10.0, blocked_s=0.5, kind="base", share=1.0, slowed_s=None):
    return SaveCost(
        step=step,
        kind=kind,
        num_bytes=1000,
        blocked_s=blocked_s,
        seconds=seconds,
        share=share,
        slowed_s=slowed_s,
    )


def make_failure(elapsed_s, nodes_lost=1.0, **seconds):
    return FailureCost(
        elapsed_s=elapsed_s, kind="partial", lost_share=0.5, nodes_lost=nodes_lost, seconds=seconds
    )


def make_history(**fields):
    """A tenth of a run in 150 s: 1,000 steps of 0.1 s on two nodes."""
    values = {
        "world_size": 4,
        "nodes": 2,
        "step_s": 0.1,
        "steps_done": 1000,
        "samples_done": 32_000,
        "samples_total": 320_000,
        "elapsed_s": 150.0,
    }
    return RunHistory(**{**values, **fields})
