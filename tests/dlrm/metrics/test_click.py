"""Click metrics against scikit-learn, also for hostile scores."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.metrics import ClickMetrics
from tests import forks

CPU = torch.device("cpu")


def measure(logits, labels, batch=4096, **options):
    metrics = ClickMetrics(CPU, **options)
    for start in range(0, len(logits), batch):
        metrics.update(
            torch.from_numpy(logits[start : start + batch]), torch.from_numpy(labels[start : start + batch])
        )
    return metrics.compute()


def random_labels(rng, number: int):
    return (rng.random(number) < 0.25).astype(np.float32)


def neighbours(rng, labels):
    """Every click's score is the float right above that of a non-click, all close to -1.3."""
    steps = rng.integers(0, 4000, len(labels)).astype(np.int32) * 2 - labels.astype(np.int32)
    return (np.float32(-1.3).view(np.int32) + steps).view(np.float32)


# A million samples: enough for both sketches to collapse several times.
HOSTILE = {
    "normal": lambda rng, labels: rng.normal(size=len(labels)) + labels,
    "tiny range, as of a young model": lambda rng, labels: (
        -1.1 + 1e-6 * (rng.normal(size=len(labels)) + labels)
    ),
    "adjacent floats": neighbours,
    "all equal": lambda rng, labels: np.full(len(labels), 0.3),
    "saturated at 0 and 1": lambda rng, labels: 1e30 * np.sign(rng.normal(size=len(labels)) + labels),
    "heavy tails": lambda rng, labels: np.clip(rng.standard_cauchy(len(labels)) ** 5 + labels, -1e38, 1e38),
    "rising while it is measured": lambda rng, labels: np.arange(len(labels)) + 1000 * labels,
    "constant, then spread": lambda rng, labels: np.where(
        np.arange(len(labels)) < len(labels) / 2, 0.0, rng.normal(size=len(labels)) + labels
    ),
    "few values": lambda rng, labels: np.round(rng.normal(size=len(labels)) + labels),
    "alternating extremes": lambda rng, labels: (
        (np.arange(len(labels)) % 2) * 1e6 + rng.random(len(labels)) + labels
    ),
}


@pytest.mark.system
@pytest.mark.parametrize("kind", HOSTILE)
def test_auc_is_within_1e_4_of_the_exact_value(kind):
    rng = np.random.default_rng(7)
    labels = random_labels(rng, 1_200_000)
    logits = HOSTILE[kind](rng, labels).astype(np.float32)
    values = measure(logits, labels, batch=2**17)
    difference = abs(values.auc - roc_auc_score(labels, logits))
    assert difference <= min(values.auc_error_bound, 1e-4)
    assert values.auc_error_bound < 1e-4


scores_of_any_kind = st.lists(
    st.tuples(
        st.one_of(
            st.floats(-(2.0**100), 2.0**100, width=32),
            st.floats(-(2.0**-10), 2.0**-10, width=32),
            st.sampled_from([-50.0, -1.0, 0.0, -0.0, 50.0]),
        ),
        st.booleans(),
    ),
    min_size=2,
    max_size=400,
).filter(lambda pairs: 0 < sum(label for _, label in pairs) < len(pairs))


@given(pairs=scores_of_any_kind, batch=st.integers(1, 100))
def test_few_samples_are_exact(pairs, batch):
    logits, labels = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    values = measure(logits, labels, batch)
    assert values.auc_error_bound == 0.0
    assert values.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)


@given(
    pairs=scores_of_any_kind,
    capacity=st.sampled_from([16, 64, 2**18]),
    points=st.sampled_from([2, 5, 20, 100]),
)
def test_the_stated_bound_holds_however_small_the_memory(pairs, capacity, points):
    logits, labels = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    values = measure(logits, labels, capacity=capacity, points=points)
    assert abs(values.auc - roc_auc_score(labels, logits)) <= values.auc_error_bound + 1e-12


def test_loss_entropy_and_calibration_follow_their_definitions():
    rng = np.random.default_rng(3)
    labels = random_labels(rng, 100_000)
    logits = (rng.normal(size=len(labels)) * 3 - 1).astype(np.float32)
    values = measure(logits, labels, batch=777)
    wide = 1 / (1 + np.exp(-logits.astype(np.float64)))
    base = np.full(len(labels), labels.mean(dtype=np.float64))
    assert values.num_samples == len(labels)
    assert values.log_loss == pytest.approx(log_loss(labels, wide), rel=1e-9)
    assert values.normalized_entropy == pytest.approx(
        log_loss(labels, wide) / log_loss(labels, base), rel=1e-9
    )
    assert values.calibration == pytest.approx(wide.sum() / labels.sum(dtype=np.float64), rel=1e-9)
    assert values.note == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_predictions_on_a_gpu_give_the_same_values():
    rng = np.random.default_rng(5)
    labels = random_labels(rng, 100_000)
    logits = rng.normal(size=len(labels)).astype(np.float32)
    metrics = ClickMetrics(torch.device("cuda"))
    for part in range(0, len(labels), 2048):
        batch = slice(part, part + 2048)
        metrics.update(torch.from_numpy(logits[batch]).cuda(), torch.from_numpy(labels[batch]).cuda())
    assert metrics.compute() == measure(logits, labels, batch=2048)


@pytest.mark.parametrize("label", [0, 1])
def test_the_auc_of_one_class_is_undefined_with_a_note(label):
    values = measure(np.zeros(10, np.float32), np.full(10, label, np.float32))
    assert values.auc is None
    assert values.normalized_entropy is None
    assert values.log_loss == pytest.approx(np.log(2))
    assert f"all 10 labels are {label}" in values.note
    assert (values.calibration is None) == (label == 0)


def test_no_samples_leave_everything_undefined():
    values = ClickMetrics(CPU).compute()
    assert (values.num_samples, values.auc, values.log_loss, values.calibration) == (0, None, None, None)
    assert values.note == "there are no samples"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_predictions_that_are_not_finite_are_refused(bad):
    with pytest.raises(FloatingPointError, match="1 of 3 predictions"):
        measure(np.array([0.0, bad, 1.0], np.float32), np.array([0.0, 1.0, 1.0], np.float32))


@pytest.mark.parametrize("bad", [0.5, 2.0, np.nan])
def test_other_labels_than_0_and_1_are_refused(bad):
    with pytest.raises(ValueError, match="labels must be 0 or 1"):
        measure(np.zeros(2, np.float32), np.array([1.0, bad], np.float32))


def shards(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Very unlike parts: rank 0 has few and low scores, rank 1 many, rank 2 none."""
    rng = np.random.default_rng(rank)
    labels = random_labels(rng, (1000, 300_000, 0)[rank])
    return (rng.normal(size=len(labels)) + labels - 2 * (rank == 0)).astype(np.float32), labels


def reduce_on_three_ranks(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    values = measure(*shards(rank))
    torch.save(values.__dict__, f"{folder}/rank{rank}")
    dist.destroy_process_group()


@pytest.mark.system
@pytest.mark.timeout(120)
def test_all_ranks_get_the_metrics_of_all_samples(tmp_path):
    method = forks.context().get_start_method()
    mp.start_processes(reduce_on_three_ranks, (str(tmp_path),), nprocs=3, start_method=method)
    first, *others = (torch.load(tmp_path / f"rank{rank}") for rank in range(3))
    assert all(other == first for other in others)
    logits, labels = (np.concatenate(parts) for parts in zip(*map(shards, range(3)), strict=True))
    together = measure(logits, labels)
    assert first["num_samples"] == len(labels)
    assert abs(first["auc"] - roc_auc_score(labels, logits)) <= first["auc_error_bound"] < 1e-5
    assert first["log_loss"] == pytest.approx(together.log_loss, rel=1e-12)
    assert first["calibration"] == pytest.approx(together.calibration, rel=1e-12)
