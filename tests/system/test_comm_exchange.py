"""Whole exchanges between four real ranks on two nodes, and hooks of DDP models: one start for all."""

import pytest

from tests.system import comm_disagreement_worker as disagreement
from tests.system import comm_exchange_worker as worker
from tests.system.ranks import in_group

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_exchanges_and_hooks_of_four_ranks(start_ranks):
    work = (
        worker.replicas_stay_equal_and_nothing_is_forgotten,
        worker.what_is_owed_goes_on_from_one_collective_to_the_next,
        worker.without_error_feedback_each_step_stands_alone,
        worker.everything_kept_is_dense,
        worker.scalars_arrive_whatever_becomes_of_the_gradient,
        worker.gradients_that_are_no_numbers_reach_all_and_do_not_stay,
        disagreement.a_rank_that_has_no_gradient_is_told_of_by_all,
        disagreement.a_rank_that_has_no_gradient_when_a_plan_is_due_is_told_of_by_all,
        disagreement.a_rank_in_another_state_is_told_of_by_all,
        worker.what_was_owed_comes_back_is_handed_on_or_counts_as_lost,
        worker.a_hook_does_what_an_exchange_of_the_whole_gradient_does,
        worker.a_hooks_state_goes_on_to_the_bit,
        worker.uneven_batches_train_as_one_process_on_all_samples,
        disagreement.replicas_of_different_models_are_refused_by_all,
        disagreement.hooks_that_are_called_in_a_wrong_order_say_so,
        worker.all_ways_to_keep_replicas_alike,
    )
    start_ranks(in_group, *work, world_size=4).wait(timeout_s=150)
