"""Exact pooled embeddings from a lookup that was made before the last update.

The batch that trains while the next one's embeddings travel changes some rows that the next one has read.
Each owner of tables knows both batches' ids, so it can tell in advance which bags will be wrong, and where
they lie at their samples' ranks: these places travel during the computation, too. After the update only the
rows travel, each of them once to a rank, however many of its samples read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.sharding.host_lookup import HostLookup, Reads

MARKS_PER_ROW: Final = 16
"""Marks by which rows are found; with fewer, more rows are sent again that have not changed."""
NOTHING: Final = Reads(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), None, None)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where the embeddings of this rank's tables lie in the output of an exchange; equal on all ranks."""

    dim: int
    """Of all embeddings."""
    of_ranks: tuple[int, ...]
    """Number of features whose tables each rank has."""

    def place(self, rank: int, sample: Tensor, feature: Tensor) -> Tensor:
        """Row of the output, seen as `[samples * features, dim]`."""
        return sample * sum(self.of_ranks) + (sum(self.of_ranks[:rank]) + feature)


class Correction:
    """Corrects embeddings of a batch for rows that the batch before it changes; all ranks make it together.

    Args:
        lookup: of this rank's tables; None: it has none.
        trained: reads of the batch that trains first, in the same tables.
        following: reads of the batch whose embeddings are corrected, made before the other one's update.
        columns: of the exchange.
        batch_sizes: samples of each rank in the latter batch.
        dtype: of the embeddings.
    """

    def __init__(
        self,
        lookup: HostLookup | None,
        trained: Reads,
        following: Reads,
        columns: Columns,
        batch_sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._lookup, self._columns, self._dtype = lookup, columns, dtype
        found = _to_correct(trained, following, columns, batch_sizes, dist.get_rank())
        self._again, self._places, counts = found
        self._to_each = counts
        self._from_each = torch.empty_like(counts)
        self._work = self._start(self._from_each, counts)

    def send_places(self) -> None:
        """Send where the corrected embeddings belong, when their numbers are known."""
        self._work.wait()
        (to_bags, to_places), (bags, places) = self._to_each.t().tolist(), self._from_each.t().tolist()
        self._bags, self._splits = (bags, to_bags), (places, to_places)
        self._received = torch.empty(2 * sum(places), dtype=torch.int32)
        self._work = self._start(
            self._received, self._places, [2 * each for each in places], [2 * each for each in to_places]
        )

    @torch.no_grad()
    def send_rows(self) -> None:
        """Send the corrected embeddings, after the update."""
        self._work.wait()
        from_each, to_each = self._bags
        again = torch.empty(0, self._columns.dim, dtype=self._dtype)
        if self._lookup is not None:
            again = self._lookup.sums(self._again)
        self._rows = again.new_empty((sum(from_each), self._columns.dim))
        self._work = self._start(self._rows, again, from_each, to_each)

    def apply(self, output: Tensor) -> None:
        """Put the corrected embeddings into the output of the exchange, `[samples, features * dim]`."""
        self._work.wait()
        # not a change that autograd should know of: these are the values that the exchange would have given
        embeddings = output.data.view(-1, self._columns.dim)
        rows = torch.split(self._rows, self._bags[0])
        messages = torch.split(self._received, [2 * places for places in self._splits[0]])
        for of_rank, message in zip(rows, messages, strict=True):
            if message.numel():
                places, bags = message.view(2, -1).to(torch.int64)
                embeddings.index_copy_(0, places, of_rank.index_select(0, bags))

    def _start(
        self,
        received: Tensor,
        sent: Tensor,
        from_each: list[int] | None = None,
        to_each: list[int] | None = None,
    ) -> dist.Work:
        sent = sent.contiguous()
        work: dist.Work = dist.all_to_all_single(received, sent, from_each, to_each, async_op=True)
        return work


def _to_correct(
    trained: Reads, following: Reads, columns: Columns, batch_sizes: Sequence[int], rank: int
) -> tuple[Reads, Tensor, Tensor]:
    """Find the bags of `following` that read a row of `trained`, and few others.

    Returns:
        The bags to be summed again, in the order of the ranks that get them; for each rank the places of its
        embeddings and which of its bags each of them is, int32 `[2 * places]`, one rank after the other; and
        the numbers of bags and places of each rank, int64 `[ranks, 2]`.
    """
    num_features = columns.of_ranks[rank]
    edges = [each * num_features for each in accumulate(batch_sizes, initial=0)]
    wrong = _may_be_among(following.rows, trained.rows)
    is_one_hot = following.places is None and following.factors is None
    # bag k of one row each is row k of the output, and ranks' samples follow each other
    again, slots = (following, wrong) if is_one_hot else _bags_of(following, wrong)
    bounds = torch.searchsorted(slots, torch.tensor(edges)).tolist()
    kept, messages, counts = [], [], []
    for to_rank, (first, last) in enumerate(pairwise(bounds)):
        own = slots[first:last]
        if is_one_hot:
            found, number = _distinct(following.rows[own])
            kept.append(own[found])
        else:
            number = torch.arange(last - first)
        own = own - edges[to_rank]
        feature = own % max(num_features, 1)
        messages += [columns.place(rank, own // max(num_features, 1), feature), number]
        counts.append((kept[-1].numel() if is_one_hot else last - first, last - first))
    if is_one_hot:
        rows = following.rows[torch.cat(kept)]
        again = Reads(rows, torch.arange(rows.numel(), dtype=rows.dtype), None, None)
    return again, torch.cat(messages).to(torch.int32), torch.tensor(counts)


def _may_be_among(rows: Tensor, others: Tensor) -> Tensor:
    """Positions of the rows that are among the others, and few more; sorting would take ten times as long.

    Rows share a mark if they are equal modulo the number of marks.
    """
    mask = _marks_of(rows.numel() + others.numel()) - 1
    marks = torch.zeros(mask + 1, dtype=torch.bool)
    marks[(others & mask).to(torch.int64)] = True
    return marks[(rows & mask).to(torch.int64)].nonzero().view(-1)


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of rows among which all rows are, and for each row the number of its own among them.

    Of rows that are equal modulo the number of marks, those that differ from the last one are all kept.
    """
    mask = _marks_of(rows.numel()) - 1
    marks, places = torch.empty(mask + 1, dtype=torch.int64), torch.arange(rows.numel())
    hashed = (rows & mask).to(torch.int64)
    marks[hashed] = places
    last = marks[hashed]
    last = torch.where(rows[last] == rows, last, places)
    is_kept = last == places
    return is_kept.nonzero().view(-1), (is_kept.cumsum(0) - 1)[last]


def _marks_of(num_rows: int) -> int:
    """Number of marks for so many rows, a power of two."""
    return 1 << (MARKS_PER_ROW * num_rows).bit_length()


def _bags_of(reads: Reads, wrong: Tensor) -> tuple[Reads, Tensor]:
    """The whole bags of the ids at positions `wrong`, and their rows of the output, in this order."""
    places = torch.arange(reads.rows.numel()) if reads.places is None else reads.places.to(torch.int64)
    is_wrong = torch.zeros(int(places.max()) + 1 if places.numel() else 0, dtype=torch.bool)
    is_wrong[places[wrong]] = True
    kept = is_wrong[places].nonzero().view(-1)
    # stable, so that the rows of a bag are summed in the order in which the lookup sums them
    slots, order = places[kept].sort(stable=True)
    kept = kept[order]
    slots, counts = torch.unique_consecutive(slots, return_counts=True)
    rows = reads.rows[kept]
    factors = None if reads.factors is None else reads.factors[kept]
    return Reads(rows, (counts.cumsum(0) - counts).to(rows.dtype), None, factors), slots
