"""A model of which rank 1 is slow."""

import os
from time import sleep

from experiments.streaming.model import LogisticRegression

SAMPLE_S = 1e-3


class SlowOnRank1(LogisticRegression):
    """Takes rank 1 a millisecond more for a sample."""

    def forward(self, dense, sparse):
        if os.environ.get("RANK") == "1":
            sleep(SAMPLE_S * len(dense))
        return super().forward(dense, sparse)
