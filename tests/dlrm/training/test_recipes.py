"""The recipes for the default data train."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.training.data import prepare
from experiments.harness.training import Training


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("recipe", ["tiny", "dcnv2", "deepfm", "fm", "lr"])
def test_a_recipe_learns_a_batch_by_heart(recipe, small_dataset):
    """At the end of the warm-up; a wrong rate or initial value leaves the loss at 0.69 or above."""
    config = load_config(
        recipe,
        [f'data.uri="{small_dataset}"', "data.global_batch_size=128", "schedule.warmup_steps=2"],
    )
    inputs = prepare(config, recipe, Ranks(0, 0, 1))
    batch = next(iter(inputs.loader))
    inputs.close()
    training = Training(inputs, iter([batch] * 60))
    training.timed_steps(60)
    with torch.no_grad():
        loss = binary_cross_entropy_with_logits(training.model(batch.dense, batch.sparse), batch.labels)
    share = batch.labels.mean()
    of_the_mean = binary_cross_entropy_with_logits(torch.full_like(batch.labels, share.logit()), batch.labels)
    assert loss < 0.8 * of_the_mean
