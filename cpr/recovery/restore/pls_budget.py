"""PLS budget: prices a recovery in lost samples (PLS, CPR paper), and charges it to the run.

All ranks make the same calls and get the same answers.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup
from cpr.errors import CheckpointError
from cpr.recovery.decide.assessment import Assessment, MirrorMoment
from cpr.recovery.decide.comparison import FULL
from cpr.recovery.decide.inventory import PROGRESS_STATE
from cpr.recovery.restore.transfer import ShardSources, lost_share_by_rank
from cpr.recovery.run.progress import Charge, RunProgress
from cpr.recovery.run.report import Way

UNKNOWN_RANK: Final = -1
"""Stands for the worker that lost rows which, by the reports, no old worker had."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a recovery costs in lost samples."""

    samples: int = 0
    """Samples trained between the save of the lost rows and the failure."""
    lost: float = 0.0
    """Samples whose training is lost, averaged over the nodes: PLS before it is divided by all samples."""
    pls: float | None = 0.0
    """Portion of lost samples; None: unknown."""
    expected: float | None = None
    """PLS of such a loss on average, at a random moment; None: unknown, or nothing was lost."""
    charges: tuple[Charge, ...] = ()


class PlsBudget:
    """Prices recoveries, and charges them to the progress of the run."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        group: RankGroup,
        progress: RunProgress,
        total_samples: int | None,
    ) -> None:
        self._checkpointer, self._group = checkpointer, group
        self._progress, self._total_samples = progress, total_samples

    def cost_of_loss(self, found: Assessment, plan: Sequence[ShardSources], save_step: int | None) -> Cost:
        """Price rows that come from mirrors, or from a save; no `save_step`: none come from a save.

        The step is that of the oldest save that lost rows come from, on any rank. Samples that an earlier,
        failed attempt to recover from the same failure has charged are not counted again.
        """
        costs = [self._cost_of_mirror(found, rank, moment) for rank, moment in found.mirrored.items()]
        if save_step is not None:
            costs += self._costs_of_save(found, plan, save_step)
        return _together(costs)

    def _cost_of_mirror(self, found: Assessment, rank: int, moment: MirrorMoment) -> Cost:
        """Price the rows of an old worker that come from its mirror, which may be some steps behind."""
        done, share, size = self._progress.samples_done, found.lost[rank], found.old_world_size
        if moment.step >= self._progress.steps_done:
            return Cost()
        if moment.samples is None:
            return Cost(samples=done, lost=share * done / size, pls=None)
        begin = min(moment.samples, done)
        return Cost(
            samples=done - begin,
            lost=samples_lost({rank: share}, done, begin, size, self._progress.charges),
            pls=self._pls_added({rank: share}, done, begin, size),
            charges=(Charge(size, rank, share, begin, done, self._progress.generation),),
        )

    def _costs_of_save(
        self, found: Assessment, plan: Sequence[ShardSources], save_step: int
    ) -> Iterator[Cost]:
        """Price the rows that come from a save: of old workers without mirrors, or that their mirrors lack.

        What the latter lost since the moment of the mirror is in its own price.
        """
        progress, old_world_size = self._progress, found.old_world_size
        saved, done = progress.samples_at(save_step), progress.samples_done
        partly = {rank: moment for rank, moment in found.mirrored.items() if moment.share < 1}
        unmirrored = {rank: share for rank, share in found.lost.items() if rank not in found.mirrored}
        lost = {old_world_size: unmirrored or ({} if partly else {UNKNOWN_RANK: 1.0})}
        if self._group.world_size != old_world_size:
            # The next failure may be counted by the new ranks: both counts must know this loss.
            lost[self._group.world_size] = lost_share_by_rank(plan)
        yield self._cost_between(lost, old_world_size, saved, done)
        for rank, moment in partly.items():
            until = done if moment.samples is None else max(saved, min(moment.samples, done))
            share = found.lost[rank] * (1 - moment.share)
            yield self._cost_between({old_world_size: {rank: share}}, old_world_size, saved, until)

    def _cost_between(
        self, lost: Mapping[int, Mapping[int, float]], old_world_size: int, saved: int, until: int
    ) -> Cost:
        """Price rows of a save that have lost the samples from `saved` to `until`.

        `lost`: share of its shards that each worker lost, by world size and rank.
        """
        progress, of_old = self._progress, lost[old_world_size]
        return Cost(
            samples=progress.samples_done - saved,
            lost=samples_lost(of_old, until, saved, old_world_size, progress.charges),
            pls=self._pls_added(of_old, until, saved, old_world_size),
            expected=pls_expected(
                of_old, progress.samples_between_saves, self._total_samples, old_world_size
            ),
            charges=tuple(
                Charge(world_size, rank, share, saved, until, progress.generation)
                for world_size, shares in lost.items()
                for rank, share in shares.items()
            ),
        )

    def way_back(self, rows_s: float, save_step: int | None) -> Way:
        """Price going back on all ranks. Called by all ranks, as rank 0 reads the newest state's progress.

        Args:
            rows_s: seconds to load all rows.
            save_step: training steps done in the newest save that verifies; None: nothing was saved.
        """
        now, then = self._progress, RunProgress()
        state = None if save_step is None else self._checkpointer.newest_state()
        if state is None or save_step is None:
            added = _difference(now.pls_total, 0.0)
            return Way(name=FULL, rows_s=0.0, redone=now.samples_done, pls_added=added)
        try:
            then.load_state_dict(self._checkpointer.registered_in(state, PROGRESS_STATE))
        except CheckpointError:  # a full recovery will load an older state then
            redone = now.samples_done - now.samples_at(save_step)
            return Way(name=FULL, rows_s=rows_s, redone=redone, pls_added=None, pls=None)
        behind = self._cost_behind(then, state)
        then.add_pls(behind.pls)
        saved = now.samples_at(save_step) if save_step < state.step else then.samples_done
        return Way(
            name=FULL,
            rows_s=rows_s,
            redone=now.samples_done - saved,
            lost=behind.lost,
            pls_added=_difference(now.pls_total, then.pls_total),
            pls=then.pls_total,
        )

    def charge(self, cost: Cost) -> None:
        """Add the cost to the progress of the run."""
        self._progress.add_pls(cost.pls, cost.charges)

    def charge_for_going_back(self, state: State) -> Cost:
        """Charge what the rows of a loaded state are behind its step; the progress is loaded already."""
        cost = self._cost_behind(self._progress, state)
        self.charge(cost)
        self._progress.note_save()  # all live rows are equal to saved ones, whenever these were saved
        return cost

    def _cost_behind(self, progress: RunProgress, state: State) -> Cost:
        """Price loading all rows of a state, of which some are older than its step (row saves)."""
        size, done = state.newest.world_size, progress.samples_done
        saved = progress.samples_at(progress.steps_done)
        shares = dict.fromkeys(range(size), 1.0) if saved < done else {}
        return Cost(
            lost=samples_lost(shares, done, saved, size, progress.charges),
            pls=pls_added(shares, done, saved, self._total_samples, size, progress.charges),
        )

    def _pls_added(self, lost: Mapping[int, float], done: int, saved: int, world_size: int) -> float | None:
        return pls_added(lost, done, saved, self._total_samples, world_size, self._progress.charges)


def _together(costs: Sequence[Cost]) -> Cost:
    known = [each.pls for each in costs if each.pls is not None]
    expected = [each.expected for each in costs if each.expected is not None]
    return Cost(
        samples=max((each.samples for each in costs), default=0),
        lost=sum(each.lost for each in costs),
        pls=sum(known) if len(known) == len(costs) else None,
        expected=sum(expected) if expected else None,
        charges=tuple(charge for each in costs for charge in each.charges),
    )


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def pls_expected(
    lost: Mapping[int, float], samples_between_saves: float | None, total_samples: int | None, world_size: int
) -> float | None:
    """PLS that a failure at a random moment adds on average: half a save interval (CPR paper).

    Arguments are those of `pls_added`, and the mean number of samples between saves; None: unknown.
    """
    if samples_between_saves is None or total_samples is None:
        return None
    return sum(lost.values()) * samples_between_saves / 2 / (total_samples * world_size)


def pls_added(
    lost: Mapping[int, float],
    samples_done: int,
    samples_saved: int,
    total_samples: int | None,
    world_size: int,
    charges: Collection[Charge] = (),
) -> float | None:
    """PLS that one failure adds (CPR paper).

    Args:
        lost: share of its shards that each worker lost, by rank.
        samples_done: samples trained by the run until the failure.
        samples_saved: samples trained until the save that the lost rows come from.
        total_samples: of the whole run; None: unknown, and so is the result unless nothing was lost.
        world_size: number of workers of the generation that failed.
        charges: earlier losses, whose samples are not counted again.
    """
    if not lost:
        return 0.0
    if total_samples is None:
        return None
    return samples_lost(lost, samples_done, samples_saved, world_size, charges) / total_samples


def samples_lost(
    lost: Mapping[int, float],
    samples_done: int,
    samples_saved: int,
    world_size: int,
    charges: Collection[Charge] = (),
) -> float:
    """Samples that one failure loses, averaged over the workers; arguments are those of `pls_added`."""
    assert samples_saved <= samples_done, "rows of a save are newer than the run that they are laid into"
    samples = {rank: share * (samples_done - samples_saved) for rank, share in lost.items()}
    for each in charges:
        if each.world_size == world_size and each.rank in lost:
            again = max(0, min(each.end, samples_done) - max(each.begin, samples_saved))
            samples[each.rank] -= min(each.share, lost[each.rank]) * again
    return sum(samples.values()) / world_size
