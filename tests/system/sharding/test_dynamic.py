"""The trainer with dynamic tables: raw ids, and workers that die."""

import json

import pytest

from cpr.faults import AtStep, KillWorker, Plan
from data.prepare.config import PrepareConfig
from data.prepare.job import prepare
from data.synthetic import SyntheticConfig, generate
from tests.system.training.test_resume import curve, only_folder, report_of, settings

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

STEPS = 40
MODEL = ["model.kind=deepfm", "model.top_mlp=[16,1]", "sharding.strategy=des"]
"""One whose tables are split as well."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Criteo's raw format, prepared with its ids as they are."""
    folder = tmp_path_factory.mktemp("data")
    generate(SyntheticConfig(scale=1e-4, days=2, rows_per_day=1000, format="tsv"), folder / "tsv")
    raw = tuple(sorted(folder.glob("tsv/day_*")))
    prepare(PrepareConfig(raw=raw, out=folder / "dataset", ids="raw", num_processes=1))
    return folder / "dataset"


@pytest.fixture
def train(start, dataset, tmp_path):
    """Trains on two ranks; the output, and the run folder."""

    def work(name, *more, **options):
        dynamic = ["tables.dynamic=['*']", "tables.dynamic_rows=256", "tables.admit_after=2"]
        run = settings(
            dataset, tmp_path / name, f"train.max_steps={STEPS}", "train.precision=fp32", *dynamic, *more
        )
        process = start("-m", "dlrm.train", *run, ranks=2, forks=True, **options)
        _, said = process.communicate(timeout=150)
        assert process.returncode == 0, said
        return said, only_folder(tmp_path / name)

    return work


def test_a_run_loses_nothing_when_a_worker_dies(train, memory, tmp_path):
    """`tests/dlrm/sharding/dynamic/test_recovery.py` shows in one process that it resumes bit for bit."""
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps(Plan(schedules=(AtStep(step=25, kind=KillWorker(), target=1),)).to_json()))
    said, folder = train(
        "disturbed",
        *MODEL,
        "checkpoint.every_steps=10",
        restarts=1,
        environment={"CPR_FAULTS": str(plan), "CPR_RESIDENT_ROOT": str(memory)},
    )
    assert "table_wise, split" in said
    assert "the memory of all workers survived" in said
    assert report_of(folder)["failures"]["pls"] == 0
    assert len(curve(folder)) >= 4


def test_raw_ids_need_dynamic_tables(start, dataset, tmp_path):
    process = start("-m", "dlrm.train", *settings(dataset, tmp_path, "tables.dynamic=['cat_0']"), forks=True)
    _, said = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "cat_1 has raw ids" in said
