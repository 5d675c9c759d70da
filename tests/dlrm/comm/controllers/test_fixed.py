"""A fixed share."""

import pytest
import torch

from dlrm.comm.controllers import Fixed, Selection


@pytest.mark.parametrize(
    ("ratio", "num_values", "num_kept"),
    [(0.01, 1000, 10), (1.0, 1000, 1000), (0.1, 3, 1), (0.999, 10, 10), (0.5, 0, 0)],
)
def test_fixed_sends_its_share_of_any_vector(ratio, num_values, num_kept):
    controller = Fixed(ratio)
    controller.load_state_dict(controller.state_dict())
    controller.observe(1.0)
    assert controller.choose(torch.zeros(num_values), compressor=None) == Selection(num_kept)
