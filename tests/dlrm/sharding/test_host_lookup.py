"""The host lookup against FBGEMM's own CPU operators: same rows out, same rows after the update."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from dlrm.sharding.host_lookup import UPDATES, use_host_lookups

ROWS = (7, 40, 1000)
DIM = 8
FEATURE_TABLES = [0, 1, 2]


def make_tbe(optimizer, dim=DIM, **kwargs):
    torch.manual_seed(3)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
        feature_table_map=FEATURE_TABLES,
        optimizer=optimizer,
        learning_rate=0.1,
        eps=1e-6,
        **kwargs,
    )
    tbe.init_embedding_weights_uniform(-1, 1)
    return tbe


def make_bags(generator, batch, one_hot):
    num_bags = len(FEATURE_TABLES) * batch
    lengths = (
        torch.ones(num_bags, dtype=torch.int64)
        if one_hot
        else torch.randint(0, 4, (num_bags,), generator=generator)
    )
    table_of_bag = torch.tensor(FEATURE_TABLES).repeat_interleave(batch)
    limits = torch.tensor(ROWS)[table_of_bag].repeat_interleave(lengths)
    ids = (torch.rand(limits.numel(), generator=generator).pow(3) * limits).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids, offsets


def assert_equal_to_rounding(ours, theirs, weights):
    """Of what is added up from rows of these weights, which may cancel each other."""
    largest = float(weights.detach().abs().max())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * max(1.0, largest))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "multi_hot"])
@pytest.mark.parametrize("optimizer", list(UPDATES), ids=str)
@pytest.mark.parametrize("dim", [DIM, 16, 64])  # PyTorch has other kernels for longer rows
def test_equals_fbgemm_over_steps(dim, optimizer, one_hot, weighted):
    theirs, ours = make_tbe(optimizer, dim), make_tbe(optimizer, dim)
    assert use_host_lookups([ours], torch.float32) == 1
    generator = torch.Generator().manual_seed(5)
    for step in range(20):
        if step == 10:  # the rate follows the table's
            ours.set_learning_rate(0.05), theirs.set_learning_rate(0.05)
        ids, offsets = make_bags(generator, 32, one_hot)
        grad = torch.randn(32, len(FEATURE_TABLES) * dim, generator=generator)
        weights = torch.randn(ids.numel(), generator=generator) if weighted else None
        outputs = [tbe(ids, offsets, weights) for tbe in (theirs, ours)]
        assert_equal_to_rounding(outputs[1], outputs[0], theirs.weights_host)
        for output in outputs:
            output.backward(grad)
    assert_equal_to_rounding(ours.weights_host, theirs.weights_host, theirs.weights_host)
    torch.testing.assert_close(ours.momentum1_host, theirs.momentum1_host, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "multi_hot"])
@pytest.mark.parametrize(("gap", "shift"), [(DIM, DIM), (2 * DIM, 0), (3, 1)], ids=str)
def test_gradients_may_be_strided(gap, shift, one_hot):
    """As the interaction's do, whose rows also hold the gradient of the dense vector."""
    apart, together = make_tbe(EmbOptimType.EXACT_SGD), make_tbe(EmbOptimType.EXACT_SGD)
    use_host_lookups([apart, together], torch.float32)
    generator = torch.Generator().manual_seed(5)
    ids, offsets = make_bags(generator, 32, one_hot)
    width = len(FEATURE_TABLES) * DIM
    grad = torch.randn(32, width + gap, generator=generator)[:, shift : shift + width]
    apart(ids, offsets).backward(grad)
    together(ids, offsets).backward(grad.contiguous())
    assert torch.equal(apart.weights_host, together.weights_host)


def test_bfloat16_rounds_only_what_is_exchanged():
    exact, rounded = make_tbe(EmbOptimType.EXACT_SGD), make_tbe(EmbOptimType.EXACT_SGD)
    use_host_lookups([exact], torch.float32)
    use_host_lookups([rounded], torch.bfloat16)
    ids, offsets = make_bags(torch.Generator().manual_seed(1), 16, one_hot=True)
    output = rounded(ids, offsets)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact(ids, offsets).to(torch.bfloat16))
    assert rounded.weights_host.dtype == torch.float32


@pytest.mark.parametrize("dim", [DIM, 16, 64])
def test_bfloat16_gradients_are_summed_in_fp32(dim):
    tbe = make_tbe(EmbOptimType.EXACT_SGD, dim)
    use_host_lookups([tbe], torch.bfloat16)
    batch, num_features = 512, len(FEATURE_TABLES)
    ids, offsets = make_bags(torch.Generator().manual_seed(1), batch, one_hot=True)
    before = tbe.weights_host.detach().double().view(-1, dim)
    output = tbe(ids, offsets)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    output.backward(grad)
    changed_by = (before - tbe.weights_host.detach().double().view(-1, dim)) / 0.1

    first_rows = torch.tensor([0, *ROWS[:-1]]).cumsum(0)
    rows = (ids.view(num_features, batch) + first_rows.unsqueeze(1)).reshape(-1)
    of_rows = grad.double().view(batch, num_features, dim).transpose(0, 1).reshape(-1, dim)
    exact, magnitude = (
        torch.zeros_like(before).index_add_(0, rows, each) for each in (of_rows, of_rows.abs())
    )
    allowed = 2**-8 * exact.abs() + 1e-6 * (magnitude + before.abs() / 0.1)
    assert ((changed_by - exact).abs() <= allowed).all()
    assert rows.bincount().max() > 60


def test_empty_batches_change_nothing():
    tbe = make_tbe(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    use_host_lookups([tbe], torch.float32)
    before = tbe.weights_host.clone()
    output = tbe(torch.empty(0, dtype=torch.int64), torch.zeros(3 * 5 + 1, dtype=torch.int64))
    assert output.shape == (5, 3 * DIM)
    assert not output.any()
    output.backward(torch.ones_like(output))
    assert torch.equal(tbe.weights_host, before)


@pytest.mark.parametrize(
    "kwargs",
    [{"weights_precision": SparseType.FP16}, {"pooling_mode": PoolingMode.MEAN}],
    ids=["half_precision_tables", "mean_pooling"],
)
def test_unsupported_modules_keep_fbgemms_lookup(kwargs):
    tbe = make_tbe(EmbOptimType.EXACT_SGD, **kwargs)
    assert use_host_lookups([tbe], torch.float32) == 0


def test_weights_that_would_get_no_gradient_are_refused():
    tbe = make_tbe(EmbOptimType.EXACT_SGD)
    use_host_lookups([tbe], torch.float32)
    ids, offsets = make_bags(torch.Generator().manual_seed(1), 4, one_hot=True)
    with pytest.raises(ValueError, match="weights of ids get no gradient"):
        tbe(ids, offsets, per_sample_weights=torch.ones(ids.numel(), requires_grad=True))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "multi_hot"])
def test_replicated_tables_get_the_gradient_of_a_dense_product(one_hot, weighted):
    tbe = DenseTableBatchedEmbeddingBagsCodegen([(rows, DIM) for rows in ROWS], use_cpu=True)
    torch.manual_seed(2)
    torch.nn.init.normal_(tbe.weights)
    assert use_host_lookups([tbe], torch.float32) == 1
    generator = torch.Generator().manual_seed(5)
    ids, offsets = make_bags(generator, 16, one_hot)
    weights = torch.randn(ids.numel(), generator=generator) if weighted else torch.ones(ids.numel())
    output = tbe(ids, offsets, weights if weighted else None)

    tables = [t.view(-1, DIM) for t in tbe.weights.detach().split([rows * DIM for rows in ROWS])]
    tables = [table.clone().requires_grad_() for table in tables]
    pooled = []
    for feature, table in enumerate(tables):
        counts = torch.zeros(16, table.shape[0])  # sample x row: a bag as a matrix product
        for sample in range(16):
            bag = feature * 16 + sample
            for place in range(offsets[bag], offsets[bag + 1]):
                counts[sample, ids[place]] += weights[place]
        pooled.append(counts @ table)
    expected = torch.cat(pooled, dim=1)
    torch.testing.assert_close(output, expected)

    grad = torch.randn(output.shape, generator=generator)
    output.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(tbe.weights.grad.view(-1, DIM), torch.cat([table.grad for table in tables]))
