"""Collectives of gradients between four real ranks, on nodes of 1, 2 and 4."""

import pytest

from tests.system.comm import collectives_worker as comm_worker
from tests.system.ranks import in_group

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_sums_bytes_and_plans_of_four_ranks(start_ranks):
    work = (
        comm_worker.dense_and_density_one_are_exact,
        comm_worker.sums_are_kept,
        comm_worker.hundred_steps,
        comm_worker.groups_of_some_ranks,
        comm_worker.bytes_are_those_of_the_formulas,
        comm_worker.predictions_are_those_of_the_papers,
        comm_worker.ranks_that_disagree,
        comm_worker.not_finite_values_are_seen_by_all,
        comm_worker.who_chooses_for_all,
        comm_worker.plans_are_agreed,
        comm_worker.trials_are_agreed,
        comm_worker.plans_are_made_again_together,
    )
    start_ranks(in_group, *work, world_size=4).wait(timeout_s=150)
