"""Residuals that are restored, inherited, or lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.compression.compressors import RandomK, TopK
from dlrm.comm.feedback.error_feedback import ErrorFeedback
from dlrm.comm.feedback.residual import LostResiduals, Residual, find_lost

CPU = torch.device("cpu")


def make_residual(values, rank=0, num_ranks=1, compressor=None):
    memory = ErrorFeedback(len(values), CPU)
    memory.add(torch.tensor(values))
    residual = Residual(memory, compressor or TopK(), rank, num_ranks)
    residual.is_pending = True
    return residual


def values_of(residual):
    return residual.state_dict()["memory"]["residual"].tolist()


def test_inherited_residuals_are_added_up_and_replace_the_current_one():
    residual = make_residual([100.0, 100.0], rank=1, num_ranks=2)
    residual.inherit(
        [make_residual([1.0, 2.0], 1, 3).state_dict(), make_residual([0.5, -2.0], 2, 3).state_dict()]
    )
    residual.is_pending = True
    assert values_of(residual) == [1.5, 0.0]
    assert residual.inherited == [(3, 1), (3, 2)]
    residual.inherit([])
    assert residual.energy == 0
    assert residual.inherited == []
    assert not residual.is_pending


def test_no_residual_is_saved_unless_one_is_pending():
    residual = make_residual([1.0])
    residual.is_pending = False
    state = residual.state_dict()
    assert state["memory"] == {}
    other = make_residual([3.0])
    other.inherit([state])
    assert other.energy == 0
    assert other.inherited == []


def test_only_the_same_rank_of_as_many_continues_its_random_draws():
    vector = torch.zeros(50)

    def state_after_two_draws(rank, num_ranks):
        compressor = RandomK(7)
        for _ in range(2):
            compressor.select(vector, 5)
        return make_residual([1.0], rank, num_ranks, compressor).state_dict(), compressor.select(vector, 5)

    state, third = state_after_two_draws(1, 4)
    same, other = RandomK(7), RandomK(7)
    make_residual([1.0], 1, 4, same).inherit([state])
    make_residual([1.0], 0, 4, other).inherit([state])
    assert torch.equal(same.select(vector, 5), third)
    assert torch.equal(other.select(vector, 5), RandomK(7).select(vector, 5))
    make_residual([1.0], 1, 4, TopK()).inherit([state])  # the state of another compressor is ignored


def test_a_residual_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        make_residual([1.0, 2.0]).inherit([make_residual([1.0]).state_dict()])


def test_no_residual_is_saved_without_error_feedback():
    residual = Residual(ErrorFeedback(2, CPU, keeps=False), TopK(), 0, 1)
    assert not residual.needs_saving
    assert residual.state_dict()["memory"] == {}


def test_random_draws_are_restored_without_error_feedback():
    vector, drawing, again = torch.zeros(50), RandomK(7), RandomK(7)
    residual = Residual(ErrorFeedback(50, CPU, keeps=False), drawing, 0, 2)
    drawing.select(vector, 5)
    assert residual.needs_saving
    state = residual.state_dict()
    Residual(ErrorFeedback(50, CPU, keeps=False), again, 0, 2).inherit([state])
    assert torch.equal(again.select(vector, 5), drawing.select(vector, 5))


def test_a_missing_residual_is_lost_with_its_share_of_energy():
    lost = find_lost(3, [1.0, 2.0, 5.0], [[(3, 0)], [], [(3, 1)]], step=40)
    assert lost == LostResiduals(step=40, ranks=(2,), of_ranks=3, energy_share=5 / 8)
    assert "step 40, gradients that rank 2 of 3 had not sent yet: 62.5% of the energy" in str(lost)
    unknown = find_lost(2, [], [[], [(2, 1)]], step=1)
    assert (unknown.ranks, unknown.energy_share) == ((0,), None)
    of_fewer = find_lost(4, [1.0, 2.0], [[(4, 0)], [(4, 1)], [(4, 2)], []], step=1)
    assert (of_fewer.ranks, of_fewer.energy_share) == ((3,), None)
    of_more = find_lost(1, [1.0, 2.0], [[]], step=1)
    assert (of_more.ranks, of_more.energy_share) == ((0,), None)
    assert "an unknown share" in str(unknown)
    assert LostResiduals.from_dict({**vars(lost), "ranks": [2]}) == lost
    assert find_lost(0, [], [[], []], step=0) is None


@given(st.integers(1, 9), st.integers(1, 9))
def test_nothing_is_lost_when_the_number_of_ranks_changes(before, now):
    """Checkpoints give a state to the rank of the same number, modulo the number of ranks."""
    held = [[(before, rank) for rank in range(new, before, now)] for new in range(now)]
    assert find_lost(before, [1.0] * before, held, step=5) is None
