"""`cpr plan`: how often to save; flags, output, errors."""

import json

import pytest

from cpr.checkpoint.storage.local import LocalStorage
from cpr.cli.main import entry
from cpr.estimator.history import write_history
from tests.cpr.estimator.histories import make_failure, make_history, make_save

JOB = ["--total", "56h", "--fail", "28h", "--save", "5.6m", "--reschedule", "5.4m", "--nodes", "8"]

MIRROR = ["--rows", "12000000", "--row-bytes", "260", "--changed-rows", "40000"]


@pytest.fixture
def run(tmp_path):
    history = make_history(
        steps_done=10_000,
        samples_done=320_000,
        samples_total=3_200_000,
        elapsed_s=1500.0,
        saves=[make_save(9, seconds=12.0, blocked_s=0.05)],
        failures=[make_failure(400.0, restart=3.0, restore=2.0)],
    )
    write_history(LocalStorage(tmp_path / "run"), history)
    return tmp_path / "run"


def test_json_output(capsys):
    assert entry(["plan", *JOB, "--json", "--ratio", "1", "--pls", "0.001"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["recovery"], about["row_interval_s"], about["failures"]) == ("full", None, None)
    assert about["full"]["overhead"]["total"] == pytest.approx(0.085, abs=5e-4)
    assert about["inputs"]["O_save"] == {"value": pytest.approx(336.0), "source": "given"}
    assert about["thresholds"]["pls"] == pytest.approx(0.0026, abs=5e-5)


def test_inputs_from_a_run(run, capsys):
    assert entry(["plan", "--run", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Partial recovery")
    assert "1 failure in 25 min" in out
    assert "measured in 1 run, 1 save" in out


def test_mirror_with_the_step_of_a_run(run, capsys):
    plan = ["plan", "--run", str(run), *MIRROR, "--json"]
    assert entry(plan) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["mirror"]["bytes_per_step"] == pytest.approx(40_000 * 268)
    assert entry([*plan, "--step", "1s"]) == 0
    slower = json.loads(capsys.readouterr().out)
    assert about["mirror"]["slow_share"] == pytest.approx(10 * slower["mirror"]["slow_share"])
    assert entry(["plan", "--run", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mirror"] is None


def test_every_flag_of_mirrors_is_read(capsys):
    """Each changes the plan; as does the group, of which nodes are lost together."""

    def planned(*flags):
        assert entry(["plan", *JOB, *MIRROR, "--step", "250ms", *flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    racks = ("--group-share", "0.5", "--group-nodes", "4")
    flags = {
        (): (),
        ("--workers-per-node", "4"): (),
        ("--link", "1"): (),
        ("--mirror-every", "8"): (),
        ("--mirror-share", "0.125"): (),
        ("--mirror-slows", "1ms"): (),
        racks: (),
        ("--mirror-apart",): racks,
    }
    plans = {flag: planned(*flag, *with_) for flag, with_ in flags.items()}
    assert len({json.dumps(plan["mirror"]) for plan in plans.values()}) == len(flags)
    assert plans[racks]["job"]["nodes_lost"] == 2.5
    assert plans[racks]["mirror"]["apart"] == plans[("--mirror-apart",)]["mirror"]["own"]


def test_mirror_is_told_after_the_plan(capsys):
    assert entry(["plan", *JOB]) == 0
    alone = capsys.readouterr().out
    assert entry(["plan", *JOB, *MIRROR, "--step", "250ms"]) == 0
    assert capsys.readouterr().out.startswith(f"{alone}\nA mirror in a neighbour's memory")


def test_failure_log_and_picture(tmp_path, capsys):
    log = tmp_path / "log.csv"
    log.write_text(
        "lasted,failed\n" + "".join(f"{hours}h,yes\n" for hours in (13, 4, 40, 22, 9, 31)) + "9h,no\n"
    )
    picture = tmp_path / "plan.png"
    given = ["--total", "56h", "--save", "5m", "--nodes", "8"]
    assert entry(["plan", *given, "--failures", str(log), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "6 failures in 5.33 d" in out
    assert "p = " in out
    assert f"Drawn: {picture}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_recommendation_is_printed_although_it_cannot_be_drawn(tmp_path, capsys):
    (tmp_path / "plan.svg").mkdir()
    assert entry(["plan", *JOB, "--pls", "0.001", "--plot", str(tmp_path / "plan.svg")]) == 2
    text = capsys.readouterr()
    assert text.out.startswith("Full recovery")
    assert "plan.svg" in text.err


@pytest.mark.filterwarnings("error::UserWarning")
def test_picture_without_overhead(tmp_path):
    """Without any overhead, a logarithmic axis would begin at 0."""
    free = ["--total", "56h", "--fail", "28h", "--save", "5m", "--blocked", "0s", "--nodes", "8"]
    assert entry(["plan", *free, "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_run_is_named_by_its_folder_or_by_its_checkpoint_directory(run, tmp_path, capsys, is_elsewhere):
    assert entry(["plan", "--run", str(run)]) == 0
    wanted = capsys.readouterr().out
    folder = tmp_path / "folder"
    folder.mkdir()
    place = run if is_elsewhere else run.rename(folder / "checkpoint")
    uri = str(place) if is_elsewhere else ""
    (folder / "config.json").write_text(json.dumps({"recipe": "tiny", "checkpoint": {"uri": uri}}))
    for each in (folder, place):
        assert entry(["plan", "--run", str(each)]) == 0
        assert capsys.readouterr().out == wanted


@pytest.mark.parametrize("flag", ["--fail", "--save"])
def test_a_negative_time_is_a_value_and_no_flag(capsys, flag):
    with pytest.raises(SystemExit):
        entry(["plan", *JOB, flag, "-1h"])
    assert f"argument {flag}: '-1h' is not a span of time; write a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this is missing: --total (T_total), --fail"),
        (["--run", "{}"], "has no history"),
        (["--run", "{}/nowhere"], "nowhere is no folder: name a checkpoint directory, or a run's folder"),
        (["--run", "{}"], "or give the job's times: --total, --fail, --save and --nodes"),
        (
            ["--failures", "{}/nowhere.csv"],
            "nowhere.csv cannot be read (No such file or directory): give a CSV",
        ),
        (["--failures", "{}"], "cannot be read (Is a directory): give a CSV file"),
        ([*JOB, "--pls", "1.5"], "the target PLS is 1.5"),
        ([*JOB, "--ratio", "0"], "the ratio is 0"),
        ([*JOB, *MIRROR], "a mirror cannot be planned without --step"),
        ([*JOB, "--link", "1"], "without --rows, --row-bytes, --changed-rows, --step"),
        ([*JOB, *MIRROR, "--step", "1s", "--mirror-apart"], "says nothing where nodes fail alone"),
        ([*JOB, *MIRROR, "--step", "1s", "--mirror-share", "2"], "it is a share of the rows"),
        ([*JOB[:-1], "1", *MIRROR, "--step", "1s"], "a mirror needs another node"),
        ([*JOB, "--group-share", "0.1"], "belong together"),
        ([*JOB, "--group-share", "1", "--group-nodes", "9"], "there are only N_emb = 8"),
        ([*JOB, "--blocked", "1h"], "of which it is a part"),
        ([*JOB, "--plot", "{}/plan.tablet"], "plan.tablet: the ending says the format; choose one of .png"),
        ([*JOB, "--plot", "{}/plan"], "the ending says the format"),
        ([*JOB, "--plot", "{}/none/plan.png"], "there is no folder"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    assert entry(["plan", *(part.format(tmp_path) for part in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_times_need_units(capsys):
    with pytest.raises(SystemExit) as left:
        entry(["plan", "--total", "56"])
    assert left.value.code == 2
    assert "'56' is not a span of time; write a number with its unit" in capsys.readouterr().err
