"""Two ranks train the same model as one: tables of all kinds, dense parameters, losses, metrics."""

from itertools import chain

import pytest
import torch

from tests.system.sharding import exactness_worker as worker

ATOL = {"sgd": 2e-6, "rowwise_adagrad": 2e-6, "adagrad": 1e-5}
"""Sums in another order differ in the last bit. Adagrad divides each gradient by its own size, which makes
the last bit of one that nearly cancelled a larger part of the update."""


def put_together(pieces):
    tables = {}
    shapes = {feature.name: feature.rows for feature in worker.FEATURES}
    for name, row, column, weights in pieces:
        rows, dim = shapes[name.removeprefix("wide_")], 4 if name.startswith("wide_") else worker.DIM
        whole = tables.setdefault(name, torch.full((rows, dim), torch.nan))
        whole[row : row + weights.shape[0], column : column + weights.shape[1]] = weights
    return tables


@pytest.mark.system
@pytest.mark.timeout(120)
def test_two_ranks_equal_one(start_ranks, world_of_one, tmp_path):
    ranks = start_ranks(worker.main, tmp_path / "results", world_size=2)
    ours = [worker.train(case) for case in worker.CASES]
    ranks.wait(timeout_s=100)
    theirs = torch.load(tmp_path / "results", weights_only=False)
    for case, one, two in zip(worker.CASES, ours, theirs, strict=True):
        held = [{name for name, *_ in pieces} for pieces in two["pieces"]]
        assert {"cat_0", "cat_1", "cat_2"} <= held[0] & held[1], "replicated, or cut into columns"
        assert held[0] ^ held[1], "table-wise"
        columns = [column for pieces in two["pieces"] for name, _, column, _ in pieces if name == "cat_2"]
        assert sorted(columns) == [0, worker.DIM // 2]
        replicas = [{piece[0]: piece[3] for piece in pieces} for pieces in two["pieces"]]
        for name in ("cat_0", "cat_1"):
            assert torch.equal(replicas[0][name], replicas[1][name]), (case, name)

        wanted = put_together(one["pieces"][0])
        found = put_together(chain(*two["pieces"]))
        assert found.keys() == wanted.keys()
        for name, table in found.items():
            torch.testing.assert_close(
                table,
                wanted[name],
                rtol=1e-5,
                atol=ATOL[case.tables],
                msg=lambda message, where=(case, name): f"{where}: {message}",
            )
        for one_parameter, two_parameter in zip(one["dense"], two["dense"], strict=True):
            torch.testing.assert_close(two_parameter, one_parameter, rtol=1e-5, atol=ATOL[case.dense])
        torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-5, atol=1e-6)
        assert one["losses"][-5:].mean() < one["losses"][:5].mean()
        assert two["metrics"].num_samples == one["metrics"].num_samples == worker.TEST_SAMPLES
        assert two["metrics"].auc == pytest.approx(one["metrics"].auc, abs=1e-4)
        assert two["metrics"].log_loss == pytest.approx(one["metrics"].log_loss, abs=1e-6)
