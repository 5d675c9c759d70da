"""`cpr plan --workers`: how many workers to rent; flags, output, errors."""

import json
import shutil

import pytest

from cpr.cli.main import entry
from tests.cpr.estimator.renting.lines import CONFIG, DATA, LINK, seconds, write_run
from tests.readmes import command

SIZES = ((1, 512), (1, 4096), (4, 512), (4, 4096), (2, 1024))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of short runs; those of one worker have reached an AUC of 0.7."""
    place = tmp_path_factory.mktemp("runs")
    reached = {512: 30_000.0, 4096: 90_000.0}
    return [
        write_run(
            place / f"{workers}-{batch}",
            workers,
            batch,
            curve=[(0, 0.5), (2 * reached[batch], 0.9)] if workers == 1 else (),
        )
        for workers, batch in SIZES
    ]


@pytest.fixture
def plan(runs):
    return ["plan", "--workers", "1", "2", "4", "--trial", *runs, "--price", "0.5"]


def told(capsys, arguments):
    assert entry([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_of_runs_that_reached_the_target(plan, capsys):
    about = told(capsys, [*plan, "--target", "auc=0.7"])
    assert [(each["workers"], each["batch"]) for each in about["offers"]] == [
        (workers, batch) for workers in (1, 2, 4) for batch in (512, 1024, 4096)
    ]
    for each in about["offers"]:
        assert each["step_s"] == pytest.approx(seconds(each["workers"], each["batch"]))
        samples = 30_000 + 60_000 / (4096 - 512) * (each["batch"] - 512)
        assert each["hours"] == pytest.approx(samples / each["batch"] * each["step_s"] / 3600)
        assert each["money"] == pytest.approx(0.5 * each["workers"] * each["hours"])
    assert about["cheapest"]["money"] == min(each["money"] for each in about["offers"])
    assert about["fastest"]["hours"] == min(each["hours"] for each in about["offers"])
    assert about["failures"] is None
    assert len(about["trials"]) == len(SIZES)


def test_damaged_lines_of_a_run_are_told(plan, runs, tmp_path, capsys):
    cut = shutil.copytree(runs[-1], tmp_path / "cut")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    plan[plan.index(runs[-1])] = str(cut)
    about = told(capsys, [*plan, "--samples", "1e9"])
    assert ["lines of metrics.jsonl are damaged" in each for each in about["trials"]] == [
        *[False] * (len(SIZES) - 1),
        True,
    ]


def test_every_flag_changes_the_plan(plan, capsys):
    flags = (
        ("--target", "auc=0.6"),
        ("--samples", "1e9"),
        ("--samples", "1e9", "--batches", "2048"),
        ("--samples", "1e9", "--link", "10"),
        ("--samples", "1e9", "--worker-fail", "100h", "--save", "1m"),
        ("--samples", "1e9", "--worker-fail", "100h", "--save", "1m", "--blocked", "1s"),
        ("--samples", "1e9", "--worker-fail", "100h", "--save", "1m", "--load", "1m"),
        ("--samples", "1e9", "--worker-fail", "100h", "--save", "1m", "--reschedule", "5m"),
        ("--samples", "1e9", "--worker-fail", "100h", "--save", "1m", "--pls", "0.001"),
    )
    assert len({json.dumps(told(capsys, [*plan, *each])["offers"]) for each in flags}) == len(flags)


def test_other_links_are_predicted(plan, capsys):
    about = told(capsys, [*plan, "--samples", "1e9", "--link", "10"])
    for each in about["offers"]:
        assert each["step_s"] == pytest.approx(seconds(each["workers"], each["batch"], 10 * LINK))


def test_text_and_picture(plan, capsys, tmp_path):
    picture = tmp_path / "plan.png"
    failures = ["--worker-fail", "1000h", "--save", "1m", "--batches", "8192", "--link", "100"]
    assert entry([*plan, "--samples", "1e10", *failures, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Cheapest: 1 worker, batch 8,192: ")
    assert "\nFastest:  4 workers, batch 8,192: " in out
    assert "  * 1 " in out, "8,192 samples on a worker were not measured"
    out = " ".join(out.split())
    assert "A step takes 10 ms fixed; 20 ms per thousand samples of a worker; 1 ms per further worker" in out
    assert "noise scale of the dense parameters, 800 samples" in out
    assert "The critical batch is 800" in out
    assert "With 1 worker a failure comes each 41.7 d: " in out
    assert "4-512: 4 workers, batch 512, " in out
    assert "Failures and saves are not counted" not in out
    assert (
        "; 10 ms per MB that a worker sends, 8 ms of it for the links, as in the run with the slowest" in out
    )
    assert "Errors in the runs that this was fitted to: " in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_that_is_named_twice_is_refused(runs, is_copied, capsys, tmp_path):
    again = shutil.copytree(runs[0], tmp_path / "copy") if is_copied else f"{runs[0]}/."
    plan = ["plan", "--workers", "1", "--samples", "1", "--price", "1", "--trial", *runs, str(again)]
    assert entry(plan) == 2
    assert "are the same run, which tells no more than once" in capsys.readouterr().err


def test_the_command_of_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, workers, batch in (("alone-1024", 1, 1024), ("alone-4096", 1, 4096), ("pair-4096", 2, 4096)):
        write_run(tmp_path / "runs" / name, workers, batch)
    assert entry(command("cpr/README.md", "cpr plan --workers")[1:]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Cheapest and fastest: 1 worker, batch 1,024: ")
    assert "With 1 worker a failure comes each 41.7 d" in out
    assert "nothing is known of their errors" in " ".join(out.split()), "three runs, three figures"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"data": {**DATA, "label": "bought"}}, "were trained on different data sets"),
        (
            {"config": {**CONFIG, "model": {"kind": "lr", "embedding_dim": 16}}},
            "model.kind is 'dlrm' and 'lr'. Give runs that differ in workers and data.global_batch_size",
        ),
        ({"config": {**CONFIG, "train": {"precision": "bf16"}}}, "train.precision is 'fp32' and 'bf16'"),
        ({"config": {}}, "no readable config.json or data.json"),
        ({"data": {}}, "copy the whole folder of the run"),
    ],
)
def test_runs_of_different_jobs_are_refused(other, message, runs, tmp_path, capsys):
    foreign = write_run(tmp_path / "foreign", 2, 4096, **other)
    assert entry(["plan", "--workers", "1", "--samples", "1", "--price", "1", "--trial", *runs, foreign]) == 2
    assert message in capsys.readouterr().err


def test_a_larger_batch_that_saves_no_steps(tmp_path, capsys):
    """Runs whose larger batch needed as many steps: all samples are those of steps."""
    reached = {512: 51_200.0, 4096: 409_600.0}
    runs = [
        write_run(tmp_path / str(batch), 1, batch, curve=[(0, 0.5), (2 * samples, 0.9)])
        for batch, samples in reached.items()
    ]
    arguments = ["--workers", "1", "--price", "1", "--target", "auc=0.7", "--trial", *runs]
    assert entry(["plan", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "By these runs, a larger batch needs as many steps" in out
    assert "critical batch" not in out


def test_one_offer_is_cheapest_and_fastest(plan, capsys):
    plan[2:5] = ["1"]
    assert entry([*plan, "--samples", "1e9", "--batches", "512"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Cheapest and fastest: 1 worker, batch 512: ")
    assert "cheapest, knee, fastest" in out
    assert "Failures and saves are not counted: --worker-fail and --save count them." in out


WORKERS = ("plan", "--workers", "1", "2")
RUNS = ("--price", "1", "--trial", "{}/1-512", "{}/1-4096", "{}/2-1024")
GIVEN = (*WORKERS, *RUNS)
PAIR = ("plan", "--workers", "2", *RUNS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (WORKERS, "this is missing: --trial, --price"),
        (("plan", "--price", "1"), "--price: about the number of workers to rent; give --workers"),
        (GIVEN, "give --target METRIC=VALUE, or --samples N, one of them"),
        ((*GIVEN, "--samples", "1e9", "--target", "auc=0.7"), "one of them"),
        ((*GIVEN, "--samples", "0"), "more than 0"),
        ((*GIVEN, "--target", "auc=0.99"), "none of these runs has reached auc=0.99; their best is 0.9"),
        ((*GIVEN, "--target", "speed=3"), "no known metric"),
        ((*GIVEN, "--samples", "1e9", "--total", "5h", "--run", "x"), "does not read --total, --run"),
        ((*GIVEN, "--samples", "1e9", "--rows", "5"), "does not read --rows"),
        ((*GIVEN, "--samples", "1e9", "--group-share", ".5"), "does not read --group-share"),
        ((*GIVEN, "--samples", "1e9", "--mirror-apart"), "does not read --mirror-apart"),
        ((*GIVEN, "--samples", "1e9", "--worker-fail", "9h"), "give both, or neither"),
        ((*GIVEN, "--samples", "1e9", "--load", "9m"), "--load: costs of failures; give --worker-fail"),
        ((*GIVEN, "--samples", "1e9", "--link", "0"), "--link is 0 Gb/s"),
        ((*PAIR, "--samples", "1e9", "--batches", "3"), "can be divided among 2 workers"),
        ((*GIVEN[:-3], "{}/1-512", "--samples", "1"), "another run, with another data.global_batch_size"),
        ((*GIVEN[:-1], "--samples", "1"), "give a run of two or more, too"),
        ((*GIVEN, "{}/none", "--samples", "1"), "none is no folder: name a run's folder"),
        ((*GIVEN, "--samples", "1", "--plot", "{}/x.txt"), "the ending says the format"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, message, runs, capsys):
    place = runs[0].rpartition("/")[0]
    assert entry([part.format(place) for part in arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
