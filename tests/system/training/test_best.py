"""The best state is kept, and training stops early, on two ranks of which one dies while it is kept."""

import json
from itertools import accumulate

import pytest

from cpr.checkpoint.catalog.verify import verify
from cpr.checkpoint.storage.local import LocalStorage
from tests.readmes import command
from tests.system.runs import only_folder, report_of, settings

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

EVERY = 10
"""Steps between evaluations."""


def test_a_worker_dies_while_the_best_state_is_kept_which_is_evaluated_in_the_end(
    start, dataset, memory, tmp_path
):
    saves = command("cpr/README.md", "checkpoint.target_pls")
    keep = (
        "train.keep_best=auc",
        "train.patience=3",
        f"train.evaluate_every_steps={EVERY}",
        "train.epochs=9",
    )
    run = start(
        *("-m", "tests.system.training.best_worker"),
        *settings(dataset, tmp_path, "data.global_batch_size=80", *keep, *saves[saves.index("--set") + 1 :]),
        ranks=2,
        restarts=2,
        forks=True,
        environment={"CPR_RESIDENT_ROOT": str(memory)},
    )
    _, said = run.communicate(timeout=150)
    assert run.returncode == 0, said
    folder = only_folder(tmp_path)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [(line["auc"], line["step"]) for line in lines if line["kind"] == "evaluation"]
    better = list(
        dict.fromkeys(accumulate(evaluations, lambda old, new: max(old, new, key=lambda each: each[0])))
    )
    steps = [step for _, step in evaluations]
    assert len(better) > 2
    assert steps == list(range(EVERY, EVERY * len(steps) + 1, EVERY))
    assert steps[-1] == better[-1][1] + 3 * EVERY  # patience
    report = report_of(folder)
    assert (report["best"]["value"], report["best"]["step"]) == better[-1]
    assert report["best"]["stopped_early"] == "no better AUC in 3 evaluations"
    died = [(each["step"], each["kind"]) for each in report["failures"]["recoveries"]]
    assert died == [(better[1][1], "process")]
    found = verify(LocalStorage(str(folder / "best")))
    assert [state.step for state in found.states] == [step for _, step in better[:-3:-1]]
    assert not [*found.bad, *found.rejected]

    figures = tmp_path / "figures.json"
    options = ("--run-folder", folder, "--json", figures)
    evaluation = start("-m", "dlrm.evaluate", *options, ranks=2, forks=True)
    _, said = evaluation.communicate(timeout=60)
    assert evaluation.returncode == 0, said
    assert json.loads(figures.read_text())["metrics"] == report["metrics"]
