"""What a beginning costs in lost samples: priced, weighed against `max_pls`, charged to the run's course.

All ranks call alike, and get the same answers.
"""

import logging
from dataclasses import dataclass
from typing import Final

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup
from cpr.errors import CheckpointError
from cpr.recovery.decide.assessment import Assessment
from cpr.recovery.decide.inventory import COURSE
from cpr.recovery.decide.transfer_plan import ShardSources, lost_share_by_rank
from cpr.recovery.run.pls import Charge, pls_added, pls_expected
from cpr.recovery.run.policy import RecoveryPolicy
from cpr.recovery.run.progress import RunProgress

SOMEBODY: Final = -1
"""A worker that lost rows which memory of none should have held."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a beginning."""

    samples: int = 0
    """Of which lost rows know nothing: trained since their save, before the failure."""
    pls: float | None = 0.0
    """Portion of lost samples; None: not known."""
    expected: float | None = None
    """What such a loss costs on average, at a random moment; None: not known, or nothing was lost."""
    charges: tuple[Charge, ...] = ()


class PlsBudget:
    """Knows what was lost before, and what this beginning adds to it.

    Args:
        checkpointer: of the run.
        group: all ranks.
        progress: of the run; is charged.
        policy: how much loss is put up with.
        total_samples: of the whole run; None: not known.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        group: RankGroup,
        progress: RunProgress,
        policy: RecoveryPolicy,
        total_samples: int | None,
    ) -> None:
        self._checkpointer, self._group = checkpointer, group
        self._progress, self._policy, self._total_samples = progress, policy, total_samples

    def cost_of_loss(self, found: Assessment, plan: list[ShardSources], save_step: int | None) -> Cost:
        """Of rows that come from a save while others go on.

        Without what an attempt to recover from the same failure, which failed itself, has charged already.

        Args:
            found: what the workers before have left.
            plan: where rows come from.
            save_step: of the save that this rank's rows came from; None: it lost none.
        """
        steps = [each for each in self._group.gather(save_step) if each is not None]
        if not steps:
            return Cost()
        progress, old_world_size = self._progress, found.old_world_size
        saved, done = progress.samples_at(min(steps)), progress.samples_done
        lost = {old_world_size: found.lost or {SOMEBODY: 1.0}}
        if self._group.world_size != old_world_size:  # some may count by the new ranks when others die
            lost[self._group.world_size] = lost_share_by_rank(plan)
        return Cost(
            samples=done - saved,
            pls=pls_added(
                lost[old_world_size], done, saved, self._total_samples, old_world_size, progress.charges
            ),
            expected=pls_expected(
                lost[old_world_size], progress.samples_between_saves, self._total_samples, old_world_size
            ),
            charges=tuple(
                Charge(world_size, rank, share, saved, done, progress.generation)
                for world_size, shares in lost.items()
                for rank, share in shares.items()
            ),
        )

    def objection_to(self, cost: Cost) -> str | None:
        """Why everybody should go back rather than bear it; None if that is not so."""
        reason = self._policy.against_pls(self._progress.pls_total, cost.pls)
        return reason if reason and self._is_less_to_go_back(cost) else None

    def charge(self, cost: Cost) -> None:
        """It is borne."""
        self._progress.add_pls(cost.pls, cost.charges)

    def charge_for_going_back(self, state: State) -> Cost:
        """Everybody has gone back to a state: the course is as it was then, and rows may be older than it."""
        cost = Cost(pls=self._pls_behind(self._progress, state))
        self.charge(cost)
        self._progress.note_save()  # all rows are as they were saved, whenever that was
        return cost

    def _is_less_to_go_back(self, cost: Cost) -> bool:
        """Whether the run's PLS would be smaller after a full recovery than if this is borne."""
        state, pls_total = self._checkpointer.newest_state(), self._progress.pls_total
        if pls_total is None or cost.pls is None or state is None:
            return True
        then = RunProgress()
        try:
            then.load_state_dict(self._checkpointer.registered_in(state, COURSE))
        except CheckpointError:
            return True  # to an older state, then
        then.add_pls(self._pls_behind(then, state))
        if then.pls_total is None or then.pls_total < pls_total + cost.pls:
            return True
        if self._group.rank == 0:
            logger.warning(
                "the portion of lost samples rises above max_pls = %s, to %.6f; going back would not help: "
                "it would be %.6f, because rows of the newest save are of several ages",
                self._policy.max_pls,
                pls_total + cost.pls,
                then.pls_total,
            )
        return False

    def _pls_behind(self, progress: RunProgress, state: State) -> float | None:
        """What going on from a state costs because its rows are older than its step, as in row saves.

        Args:
            progress: as it was saved in it.
            state: all rows of which are live.
        """
        world_size = state.newest.world_size
        done, saved = progress.samples_done, progress.samples_at(progress.steps_done)
        lost = dict.fromkeys(range(world_size), 1.0) if saved < done else {}
        return pls_added(lost, done, saved, self._total_samples, world_size, progress.charges)
