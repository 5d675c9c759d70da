"""Lost and repeated records are counted; those of a step in which a worker died are not repeated."""

import os

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from data.dataset import Feature, read_manifest
from data.synthetic import SyntheticConfig
from dlrm.models.contract import ModelInputs
from experiments.streaming.model import RECORD, Recording
from experiments.streaming.records import Account, Trained, account, number_records, read_trained
from tests.datasets import NUM_FEATURES, generate_few


def trained(generation, *batches):
    return Trained(generation=generation, batches=batches)


def of_two_ranks(*, second=((4,), (5,), (6,), (7,))):
    """A rank is killed in step 3, in which the other one trains record 2, too; then two more steps."""
    return [
        trained(0, [0], [1], [2]),
        trained(0, *second[:2]),
        trained(1, [2], [3]),
        trained(1, *second[2:]),
    ]


def test_a_step_in_which_a_worker_died_is_trained_again():
    assert account(of_two_ranks(), {1: 2}, 8) == Account(lost=0, repeated=0, interrupted=1)


def test_a_record_that_no_step_has_is_lost():
    assert account(of_two_ranks(), {1: 2}, 9).lost == 1
    assert account(of_two_ranks(second=([4], [5], [], [7])), {1: 2}, 8).lost == 1


def test_a_record_of_two_finished_steps_is_repeated():
    assert account(of_two_ranks(second=([4], [5], [4], [7])), {1: 2}, 8) == Account(
        lost=1, repeated=1, interrupted=1
    )


def test_the_last_step_before_a_death_counts_if_the_next_workers_begin_after_it():
    """As when a worker is killed between two steps: record 2 was trained, and is trained again."""
    found = account(of_two_ranks(), {1: 3}, 8)
    assert (found.repeated, found.interrupted) == (1, 0)


def test_steps_before_the_interrupted_one_are_repeated_if_a_run_goes_back_to_them():
    again = [trained(0, [0], [1], [2]), trained(1, [0], [1], [2])]
    assert account(again, {1: 0}, 3) == Account(lost=0, repeated=2, interrupted=1)


def test_workers_that_died_before_their_first_step_change_nothing():
    assert account([trained(0, [0]), trained(2, [1])], {1: 1, 2: 1}, 2) == Account(
        lost=0, repeated=0, interrupted=0
    )


@pytest.fixture
def recording(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("RANK", "0")
    features = (Feature(name=RECORD, rows=10),)
    inputs = ModelInputs(features=features, dense=("x",), dtype=torch.float32, embedding_dim=4)
    model = Recording({"folder": str(tmp_path)}, inputs)
    model.tables = model.tables.to_empty(device="cpu")
    yield model
    if model._file >= 0:
        os.close(model._file)


class Sharded(nn.Module):
    """Tables of another class than the model's, as sharding makes them."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def forward(self, sparse):
        return self.tables(sparse)


def forward(model, records):
    lengths = torch.ones(len(records), dtype=torch.int64) if records else torch.zeros(1, dtype=torch.int64)
    sparse = KeyedJaggedTensor([RECORD], torch.tensor(records, dtype=torch.int64), lengths=lengths)
    return model(torch.zeros(len(lengths), 1), sparse)


def test_forward_passes_of_training_are_written_down(recording, tmp_path):
    recording.tables = Sharded(recording.tables)
    for records in ([1, 2], [], [3]):
        forward(recording, records)
    recording.eval()
    forward(recording, [4])
    assert read_trained(tmp_path) == [Trained(generation=1, batches=[[1, 2], [], [3]])]


def test_the_trial_before_training_is_not_written_down(recording, tmp_path):
    assert forward(recording, [1, 2]).shape == (2,)
    assert read_trained(tmp_path) == []


def test_each_record_of_a_numbered_data_set_has_a_number_of_its_own(tmp_path):
    import polars as pl  # noqa: PLC0415  # forks badly

    config = SyntheticConfig(scale=1e-4, days=2, rows_per_day=300, rows_per_block=100, rows_per_file=200)
    generate_few(config, tmp_path / "data")
    number_records(tmp_path / "data", tmp_path / "numbered")
    manifest = read_manifest(str(tmp_path / "numbered"))
    assert [feature.name for feature in manifest.features][-1] == RECORD
    assert len(manifest.features) < NUM_FEATURES
    assert manifest.features[-1].rows == 600
    frames = [pl.read_parquet(tmp_path / "numbered" / part.path) for part in manifest.parts]
    assert pl.concat(frames)[RECORD].to_list() == list(range(600))
    assert set(manifest.columns) <= set(frames[0].columns)
