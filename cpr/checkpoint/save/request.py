"""Agreement of all ranks on each save before it begins: a rank that began another save would mix two up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cpr.checkpoint.format.manifest import Kind, Moment


@dataclass(frozen=True)
class SaveRequest:
    """The save that a rank is about to begin, for all ranks to compare."""

    kind: Kind
    moment: Moment
    step: int
    is_ready: bool
    """Whether the previous save is finished on this rank."""
    replicated: Mapping[str, Tensor]
    """Rows of replicated shards by the shard's name; each rank names those that it has touched."""
    problem: Exception | None
    """Why this rank cannot begin the save; None: it can."""


def agree(own: SaveRequest, requests: Sequence[SaveRequest]) -> bool:
    """Whether all ranks can begin the same save now; a problem on one rank is raised on all.

    Raises:
        ValueError: the ranks request different saves.
        CheckpointError, FloatingPointError: the problem of some rank.
    """
    problems = [request.problem for request in requests if request.problem is not None]
    if problems:
        raise own.problem or problems[0]
    if len({(request.kind, request.moment, request.step) for request in requests}) > 1:
        asked = "; ".join(f"rank {rank}: {each.kind}, step {each.step}" for rank, each in enumerate(requests))
        raise ValueError(f"ranks ask for different saves: {asked}. Call save() alike on all of them")
    return all(request.is_ready for request in requests)
