"""The trainer with split operators: same losses as TorchRec's plan, and a stored choice."""

import json

import pytest

from tests.system.training.test_resume import only_folder, settings

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

STEPS = 40
SHORT = (f"train.max_steps={STEPS}", "data.global_batch_size=40", "train.precision=fp32")


@pytest.fixture
def train(start, dataset, tmp_path):
    """Trains on two ranks or more; the output, and the run folder."""

    def work(name, *arguments, ranks=2, more=(), **options):
        runs = tmp_path / name
        command = arguments
        if "--resume" not in arguments:
            command = (
                *settings(dataset, runs, *SHORT, *more),
                *arguments,
            )
        process = start("-m", "dlrm.train", *command, ranks=ranks, forks=True, **options)
        _, said = process.communicate(timeout=150)
        assert process.returncode == 0, said
        return said, only_folder(runs)

    return work


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_split_is_the_same_run_as_exchanged(train):
    """`test_dynamic` kills a worker of a run with split tables."""
    model = ["model.kind=deepfm", "model.top_mlp=[16,1]", "sharding.data_parallel_rows=0"]
    said, split = train("des", "--sharding", "des", more=model)
    assert "table_wise, split" in said
    said, exchanged = train("torchrec", more=model)
    assert "split" not in said
    assert len(losses(split)) >= 4
    assert losses(split) == pytest.approx(losses(exchanged), rel=1e-4)


def test_autos_choice_is_kept_on_resume(train):
    said, folder = train("auto", "--sharding", "auto", more=["checkpoint.every_steps=20"])
    assert "strategies on 2 ranks" in said
    choice = folder / "sharding.json"
    content = json.loads(choice.read_text())
    chosen = content["heads"]["sparse"]["strategy"]
    other = "split" if chosen == "exchange" else "exchange"
    content["heads"]["sparse"]["strategy"] = other  # as if the links had been others
    choice.write_text(json.dumps(content))
    said, _ = train("auto", "--resume", folder, "--set", f"train.max_steps={STEPS + 10}", ranks=4)
    assert "strategies on" not in said
    assert (", split" in said) == (other == "split")
