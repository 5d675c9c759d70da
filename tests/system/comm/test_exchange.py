"""Whole exchanges between four real ranks on two nodes, and hooks of DDP models."""

import pytest

from tests.system.comm import disagreement_worker as disagreement
from tests.system.comm import exchange_worker as exchanges
from tests.system.comm import hook_worker as hooks
from tests.system.comm import owed_worker as owed
from tests.system.comm import replicas_worker as replicas
from tests.system.ranks import in_group

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def test_all_ways_to_exchange_over_a_hundred_steps(start_ranks):
    start_ranks(in_group, exchanges.replicas_stay_equal_and_nothing_is_forgotten, world_size=4).wait(
        timeout_s=200
    )


def test_exchanges_and_hooks_of_four_ranks(start_ranks):
    work = (
        owed.what_is_owed_goes_on_from_one_collective_to_the_next,
        owed.without_error_feedback_each_step_stands_alone,
        exchanges.everything_kept_is_dense,
        exchanges.scalars_arrive_whatever_becomes_of_the_gradient,
        exchanges.figures_of_a_threshold_tell_what_was_sent,
        exchanges.gradients_that_are_no_numbers_reach_all_and_do_not_stay,
        disagreement.a_rank_that_has_no_gradient_is_told_of_by_all,
        disagreement.a_rank_that_has_no_gradient_when_a_plan_is_due_is_told_of_by_all,
        disagreement.a_rank_in_another_state_is_told_of_by_all,
        disagreement.ranks_that_would_go_on_from_different_states_are_told_of_by_all,
        owed.what_was_owed_comes_back,
        owed.what_was_owed_is_handed_on_to_fewer_ranks,
        owed.what_was_owed_by_one_rank_counts_as_lost,
        owed.what_was_owed_is_sent_by_an_exchange_that_keeps_nothing,
        hooks.a_hook_does_what_an_exchange_of_the_whole_gradient_does,
        hooks.a_hooks_state_goes_on_to_the_bit,
        hooks.several_backward_passes_before_an_exchange,
        hooks.a_hook_that_was_used_takes_another_state_as_a_new_one_would,
        hooks.uneven_batches_train_as_one_process_on_all_samples,
        disagreement.replicas_of_different_models_or_options_are_refused_by_all,
        disagreement.different_commands_are_told_of_by_all,
        disagreement.priority_over_different_slices_is_refused_by_all,
        disagreement.hooks_that_are_called_in_a_wrong_order_say_so,
        replicas.averaged_replicas_are_alike,
        replicas.prioritized_replicas_are_the_averaged_ones,
        replicas.replicas_that_never_part_are_the_averaged_ones,
        replicas.replicas_that_part_meet_again_when_joined,
        replicas.replicas_that_parted_meet_after_a_failure,
    )
    start_ranks(in_group, *work, world_size=4).wait(timeout_s=200)
