"""Training as a controller sees it: vectors with a residual, and a clock that the test sets."""

import torch

from dlrm.comm.compression.compressors import TopK

NUM_VALUES = 4000


def seeded(step, rank):
    return torch.Generator().manual_seed(1000 * rank + step)


def uneven(step, rank=0):
    """A gradient with most of its energy in few values."""
    return torch.randn(NUM_VALUES, generator=seeded(step, rank)) ** 5


def even(step, rank=0):
    """A gradient whose values all are of one size: each share keeps just its share of energy."""
    return torch.randint(0, 2, (NUM_VALUES,), generator=seeded(step, rank)).float() * 2 - 1


def slow_link(ratio):
    """Seconds of a step that is mostly exchange."""
    return 0.1 + ratio


class Counting(TopK):
    """Counts what is asked of it."""

    calls = 0

    def select(self, vector, num_kept):
        self.calls += 1
        return super().select(vector, num_kept)


class Play:
    """Steps with error feedback, of one rank.

    Args:
        controller: decides what is sent.
        seconds: of a step, by the ratio that was sent.
        gradient: of a step.
        remembers: what is not sent; if not, gains of a share stay as they are.
    """

    def __init__(self, controller, seconds, gradient=uneven, remembers=True):
        self.controller, self.seconds, self.gradient = controller, seconds, gradient
        self.remembers = remembers
        self.compressor = Counting()
        self.residual = torch.zeros(NUM_VALUES)
        self.sent = []
        """Values that each step sent."""
        self.gains = []

    def steps(self, number):
        """So many more; returns how many values each sent."""
        for _ in range(number):
            vector = self.gradient(len(self.sent)) + self.residual.nan_to_num()
            before = vector.clone()
            choice = self.controller.choose(vector, self.compressor)
            assert torch.equal(vector.nan_to_num(), before.nan_to_num())
            indices = choice.indices
            if indices is None:
                indices = TopK().select(vector, choice.num_kept)
            assert len(indices.unique()) == len(indices) == choice.num_kept
            if self.remembers:
                self.residual = vector.index_fill(0, indices, 0)
            whole = vector.square().sum()
            self.gains.append(float(vector[indices].square().sum() / whole) if whole else 1.0)
            self.sent.append(choice.num_kept)
            self.controller.observe(self.seconds(choice.num_kept / NUM_VALUES))
        return self.sent[-number:]
