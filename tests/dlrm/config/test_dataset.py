"""What the trainer reads from the data set of a configuration."""

from types import SimpleNamespace

from dlrm.config.dataset import best_auc


def test_the_best_auc_of_real_data_or_of_several_days_is_unknown():
    days = {"1": {"best_auc": 0.8}, "2": {"best_auc": 0.7}}
    assert best_auc(SimpleNamespace(days=(2,), provenance={"days": days})) == 0.7
    assert best_auc(SimpleNamespace(days=(1, 2), provenance={"days": days})) is None
    assert best_auc(SimpleNamespace(days=(2,), provenance={})) is None
