"""The schedules of `train.pipeline` that `experiments.pipeline` compares."""

from typing import Final

NONE: Final = "none"
SCHEDULES: Final[dict[str, tuple[str, ...]]] = {
    NONE: (),
    "ids": ("train.pipeline=ids",),
    "prefetch": ("train.pipeline=prefetch",),
    "waves": ("train.pipeline=waves",),
    "tick_tock": ("train.pipeline=waves", "train.wave_updates=tick_tock"),
    "delayed": ("train.pipeline=delayed",),
    "delayed_dense": ("train.pipeline=delayed", "train.late_rows=corrected"),
}
"""Settings of each schedule."""
EXACT: Final = (NONE, "ids", "prefetch", "waves")
"""Schedules that give what `none` gives, but for rounding."""
