"""Error feedback keeps and restores residuals, and refuses those of other models and settings."""

import pytest
import torch

from dlrm.comm.feedback.error_feedback import ErrorFeedback

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("keeps", [True, False])


@BOTH
def test_the_first_vector_is_a_copy_of_the_gradient(keeps):
    gradient = torch.tensor([1.0, -2.0, 3.0])
    vector = ErrorFeedback(3, CPU, keeps=keeps).add(gradient)
    assert torch.equal(vector, gradient)
    vector.zero_()
    assert gradient.tolist() == [1.0, -2.0, 3.0]


def test_values_that_were_not_sent_are_added_to_the_next_gradient():
    memory = ErrorFeedback(3, CPU)
    vector = memory.add(torch.tensor([1.0, -2.0, 3.0]))
    vector[1] = 0  # sent
    assert memory.energy == pytest.approx(10)
    again = memory.add(torch.tensor([10.0, 20.0, 30.0]))
    assert again.tolist() == [11.0, 20.0, 33.0]
    assert again.data_ptr() == vector.data_ptr(), "the residual was copied"


def test_without_error_feedback_values_are_forgotten():
    memory = ErrorFeedback(3, CPU, keeps=False)
    memory.add(torch.tensor([1.0, -2.0, 3.0]))
    assert memory.add(torch.tensor([10.0, 20.0, 30.0])).tolist() == [10.0, 20.0, 30.0]
    assert memory.energy == 0


def test_energies_add_up_in_double_precision():
    """1 and 10,000,000 times (1e-4)^2: added one by one in fp32, the small ones would vanish."""
    memory = ErrorFeedback(10_000_001, CPU)
    gradient = torch.full((10_000_001,), 1e-4)
    gradient[0] = 1
    memory.add(gradient)
    assert memory.energy == pytest.approx(1 + 0.1, rel=1e-6)


def test_a_residual_is_restored_in_place():
    saved, restored = ErrorFeedback(5, CPU), ErrorFeedback(5, CPU)
    saved.add(torch.arange(5.0))
    vector = restored.add(torch.ones(5))
    restored.load_state_dict({name: tensor.clone() for name, tensor in saved.state_dict().items()})
    assert vector.tolist() == [0, 1, 2, 3, 4]
    saved.add(torch.ones(5))
    restored.add(torch.ones(5))
    assert torch.equal(saved.state_dict()["residual"], restored.state_dict()["residual"])


def test_a_residual_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        ErrorFeedback(5, CPU).load_state_dict(ErrorFeedback(6, CPU).state_dict())


def test_residuals_of_another_setting_are_refused():
    with pytest.raises(ValueError, match="found nothing"):
        ErrorFeedback(5, CPU).load_state_dict(ErrorFeedback(5, CPU, keeps=False).state_dict())
    with pytest.raises(ValueError, match="would lose gradients"):
        ErrorFeedback(5, CPU, keeps=False).load_state_dict(ErrorFeedback(5, CPU).state_dict())
    ErrorFeedback(5, CPU, keeps=False).load_state_dict({})


@BOTH
def test_a_gradient_of_another_shape_is_refused(keeps):
    for wrong in (torch.zeros(4), torch.zeros(1), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="flatten"):
            ErrorFeedback(3, CPU, keeps=keeps).add(wrong)


def test_nan_stays_until_it_is_sent():
    memory = ErrorFeedback(2, CPU)
    memory.add(torch.tensor([float("nan"), 1.0]))
    vector = memory.add(torch.ones(2))
    assert vector[0].isnan()
    assert memory.energy != memory.energy
    vector[0] = 0
    assert memory.add(torch.ones(2)).tolist() == [1.0, 3.0]
