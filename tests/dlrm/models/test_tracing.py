"""TorchRec's pipelines trace a model to find its tables, whose exchange they start ahead."""

import pytest
import torch
from torch.fx import GraphModule
from torchrec.distributed.train_pipeline.tracing import Tracer, _get_leaf_module_names

from dlrm.config.schema import MODELS, ModelConfig


@pytest.mark.parametrize("kind", MODELS)
def test_a_sharded_model_is_traced_and_computes_the_same(kind, shard_model, make_batch):
    config = ModelConfig(
        kind=kind, embedding_dim=8, bottom_mlp=(16, 8), top_mlp=(16, 1), cross_layers=2, cross_rank=5
    )
    other_order = {"linear_cat_0" if kind == "lr" else "cat_0": "column_wise"}
    model, batch = shard_model(other_order, model=config).module, make_batch(16, seed=1)
    graph = Tracer(leaf_modules=_get_leaf_module_names(model)).trace(model)
    traced = GraphModule(model, graph)
    expected = model(batch.dense, batch.sparse)
    torch.testing.assert_close(traced(batch.dense, batch.sparse), expected, rtol=0, atol=0)
