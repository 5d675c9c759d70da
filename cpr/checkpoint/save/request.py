"""Before every save, all ranks agree on it: a rank that began another one alone would mix two saves up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cpr.checkpoint.format.manifest import Kind, Moment


@dataclass(frozen=True)
class SaveRequest:
    """What a rank wants to save, for all ranks to agree on."""

    kind: Kind
    moment: Moment
    step: int
    is_ready: bool
    """Whether the save before it is over."""
    replicated: Mapping[str, Tensor]
    """Rows of replicated shards; each rank asks for those that it has touched."""
    problem: Exception | None
    """Why it cannot be begun."""


def agree(own: SaveRequest, wishes: Sequence[SaveRequest]) -> bool:
    """Whether all ranks begin the same save now; what one of them cannot do, none does.

    Args:
        own: of this rank.
        wishes: of all ranks.

    Raises:
        ValueError: they ask for different saves.
        CheckpointError, FloatingPointError: one of them cannot save; the same is raised on all.
    """
    problems = [wish.problem for wish in wishes if wish.problem is not None]
    if problems:
        raise own.problem or problems[0]
    if len({(wish.kind, wish.moment, wish.step) for wish in wishes}) > 1:
        asked = "; ".join(f"rank {rank}: {w.kind}, step {w.step}" for rank, w in enumerate(wishes))
        raise ValueError(f"ranks ask for different saves: {asked}. Call save() alike on all of them")
    return all(wish.is_ready for wish in wishes)
