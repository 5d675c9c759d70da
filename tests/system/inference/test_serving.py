"""A trained run is used by real processes: scored by two ranks, one of which is killed on the way."""

import signal

import numpy as np
import polars as pl
import psutil
import pytest

from tests.programs import at_work
from tests.system.runs import only_folder, settings, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def end(process):
    """What a program said until it ended well."""
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, said + errors
    return errors


@pytest.fixture(scope="module")
def run(start_for_all, dataset, tmp_path_factory):
    """A run of a few steps, whose batches are so small that scoring takes seconds."""
    runs = tmp_path_factory.mktemp("runs")
    small = (
        "data.global_batch_size=8",
        "checkpoint.every_steps=100",
        "train.max_steps=100",
        "data.test_days=[0]",
    )
    end(
        start_for_all(
            "-m", "dlrm.train", *settings(dataset, runs, *small, "train.precision=fp32"), forks=True
        )
    )
    return only_folder(runs)


def test_a_killed_prediction_continues_and_writes_the_same_bytes(start, run, tmp_path):
    def predict(name, ranks):
        command = ("-m", "dlrm.predict", "--run-folder", run, "--out", tmp_path / name, "--days", 0, 1)
        return start(*command, ranks=ranks, forks=True)

    end(predict("whole.parquet", ranks=2))
    killed = predict("killed.parquet", ranks=2)
    wait_for((tmp_path / "killed.parquet.unfinished" / "state" / "position.json").exists, killed)
    workers = psutil.Process(at_work(killed.pid)).children()
    next(child for child in workers if "dlrm.predict" in child.cmdline()).send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert killed.returncode != 0
    assert not (tmp_path / "killed.parquet").exists()
    end(predict("killed.parquet", ranks=2))
    assert (tmp_path / "killed.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()

    end(predict("alone.parquet", ranks=0))
    alone, whole = (pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("alone", "whole"))
    assert alone.drop("score", "logit").equals(whole.drop("score", "logit"))
    assert np.allclose(alone["logit"], whole["logit"], rtol=0, atol=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.parquet" for name in ("alone", "whole", "killed")
    }
