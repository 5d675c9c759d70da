"""Optimizer state is found by shared memory, for any view of the tables as parameter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr.shards.matching import match_state
from cpr.shards.optimizers import create_state

DIM = 4
KINDS = st.sampled_from(["tall", "flat", "own"])


def tables_in(flat, rows, dim=DIM):
    """Tables of `rows` one after another in flat memory."""
    ends = torch.tensor(rows).cumsum(0).tolist()
    return [
        flat.detach()[(end - count) * dim : end * dim].view(count, dim)
        for end, count in zip(ends, rows, strict=True)
    ]


def stepped(optimizer):
    """Take a step that gives each element a different state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
    optimizer.step()
    return optimizer


@settings(max_examples=40)
@given(rows=st.lists(st.integers(1, 6), min_size=1, max_size=5), kind=KINDS)
def test_rows_of_a_table_in_any_parameter(rows, kind):
    flat = nn.Parameter(torch.ones(sum(rows) * DIM))
    tables = tables_in(flat, rows)
    parameters = {
        "tall": [nn.Parameter(flat.detach().view(-1, DIM))],
        "flat": [flat],
        "own": [nn.Parameter(table) for table in tables],
    }[kind]
    optimizer = stepped((torch.optim.Adagrad if kind == "flat" else RowWiseAdagrad)(parameters))
    whole = torch.cat([optimizer.state[parameter]["sum"].view(-1) for parameter in parameters])
    found = [match_state("t", table, [optimizer]) for table in tables]
    assert torch.equal(torch.cat([state["sum"].reshape(-1) for state, _ in found]), whole)
    for table, (state, counters) in zip(tables, found, strict=True):
        assert state["sum"].shape == (table.shape if kind == "flat" else table.shape[:1])
        assert counters["iter"].shape == ()
        assert counters["iter"].item() == 1.0
    for state, counters in found:
        state["sum"].fill_(-1.0)
        counters["iter"].fill_(5.0)
    for parameter in parameters:
        assert torch.all(optimizer.state[parameter]["sum"] == -1.0)
        assert optimizer.state[parameter]["step"].item() == 5.0


def test_state_by_element_of_a_tall_parameter():
    flat = torch.ones(7 * DIM)
    tall = nn.Parameter(flat.view(-1, DIM))
    optimizer = stepped(torch.optim.Adam([tall]))
    _, second = tables_in(flat, [3, 4])
    state, counters = match_state("t", second, [optimizer])
    assert set(state) == {"exp_avg", "exp_avg_sq"}
    assert set(counters) == {"iter"}
    assert torch.equal(state["exp_avg"], optimizer.state[tall]["exp_avg"][3:])


def test_neighbours_of_another_width_are_not_confused():
    flat = torch.ones(3 * DIM + 5 * 2)
    narrow = flat[3 * DIM :].view(5, 2)
    wide = nn.Parameter(flat[: 3 * DIM].view(3, DIM))
    own = nn.Parameter(narrow)
    optimizer = stepped(RowWiseAdagrad([wide, own]))
    state, _ = match_state("t", narrow, [optimizer])
    assert torch.equal(state["sum"], optimizer.state[own]["sum"].view(-1))


def test_table_without_optimizer_has_no_state():
    table, other = torch.ones(3, DIM), nn.Parameter(torch.ones(3, DIM))
    optimizer = stepped(torch.optim.Adagrad([other]))
    assert match_state("t", table, [optimizer]) == ({}, {})
    assert match_state("t", table, []) == ({}, {})


def test_state_is_looked_up_at_each_read():
    table = nn.Parameter(torch.ones(3, DIM))
    optimizer = torch.optim.Adam([table])
    state, counters = match_state("t", table.detach(), [optimizer])
    assert not state
    assert not counters
    stepped(optimizer)
    assert set(state) == {"exp_avg", "exp_avg_sq"}
    saved = {"state": {0: {name: torch.full((3, DIM), 2.0) for name in state} | {"step": torch.tensor(9.0)}}}
    optimizer.load_state_dict({**optimizer.state_dict(), **saved})
    assert torch.all(state["exp_avg"] == 2.0)
    assert counters["iter"].item() == 9.0


def test_state_other_than_tensors_is_ignored():
    table = nn.Parameter(torch.ones(3, DIM))
    optimizer = torch.optim.SGD([table], lr=0.1)
    optimizer.state[table] = {"step": 3, "momentum_buffer": None}
    assert [dict(part) for part in match_state("t", table.detach(), [optimizer])] == [{}, {}]


def test_two_optimizers_of_one_table_are_refused():
    table = nn.Parameter(torch.ones(3, DIM))
    optimizers = [torch.optim.SGD([table], lr=0.1), torch.optim.Adagrad([table])]
    with pytest.raises(ValueError, match=r"a\.b is updated by 2 parameters of the optimizers; leave one"):
        match_state("a.b", table.detach(), optimizers)


@pytest.mark.parametrize("shape", [(1, DIM), (DIM, 3), (2,)])
def test_state_that_fits_no_rows_is_refused(shape):
    table = nn.Parameter(torch.ones(3, DIM))
    optimizer = torch.optim.SGD([table], lr=0.1)
    optimizer.state[table] = {"factor": torch.ones(shape)}
    with pytest.raises(ValueError, match=r"a\.b: factor of shape .* use an optimizer that keeps its"):
        match_state("a.b", table.detach(), [optimizer])


def test_rows_of_another_width_are_refused():
    flat = torch.ones(3 * DIM)
    optimizer = stepped(RowWiseAdagrad([nn.Parameter(flat.view(-1, 2))]))
    with pytest.raises(ValueError, match=r"t: sum of shape \[6, 1\] fits neither"):
        match_state("t", flat.view(3, DIM), [optimizer])


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_create_state_changes_nothing_else(rate):
    table = nn.Parameter(torch.randn(3, DIM))
    before = table.detach().clone()
    optimizer = torch.optim.Adam([table], lr=rate, weight_decay=0.1)
    create_state(optimizer)
    assert set(optimizer.state[table]) == {"exp_avg", "exp_avg_sq", "step"}
    assert torch.equal(table, before)
    assert optimizer.param_groups[0]["lr"] is rate
    assert table.grad is None


def test_create_state_keeps_existing_state():
    tables = [nn.Parameter(torch.randn(3, DIM)) for _ in range(2)]
    optimizer = torch.optim.Adam(tables)
    tables[0].grad = torch.ones(3, DIM)
    optimizer.step()
    before = {name: state.clone() for name, state in optimizer.state[tables[0]].items()}
    create_state(optimizer)
    assert all(torch.equal(optimizer.state[tables[0]][name], state) for name, state in before.items())
    assert optimizer.state[tables[1]].keys() == before.keys()
