from collections import Counter

import pytest

from dlrm.comm import cost
from experiments.communication.winners import MEASURED_MS, _num_bytes, cells, table_vi_hits


def test_formulas_name_all_winners_of_table_vi():
    assert len(list(cells())) == 36
    assert table_vi_hits() == 36
    assert Counter(cell.measured for cell in cells()) == {"ring": 22, "all-gather": 13, "tree": 1}


def test_wrong_formula_names_fewer_winners(monkeypatch):
    monkeypatch.setattr(cost, "broadcast_s", lambda *_: 0.0)
    assert table_vi_hits() < 36


def test_inferred_bytes_are_the_known_sizes_of_the_models():
    found = [_num_bytes(each[0][0][0]) for each in MEASURED_MS.values()]
    assert [each / 1e6 for each in found] == pytest.approx([45.5, 100.1, 240.0, 526.6], abs=0.06)
