"""`cpr simulate`: flags, output, exit codes."""

import json

import pytest

from cpr.cli.command import FAILED, FINE
from cpr.cli.main import entry
from cpr.estimator.planning.estimator_inputs import EstimatorInputs
from cpr.estimator.planning.formulas import Job, expected_pls

TIMES = {"--total": "56h", "--fail": "28h", "--save": "5.6m", "--load": "2.7m", "--reschedule": "2.7m"}
JOB = [*(word for pair in TIMES.items() for word in pair), "--nodes", "8"]
LOG = "lasted,failed\n1h,yes\n13h,yes\n20h,yes\n2h,yes\n40m,yes\n31h,yes\n5h,no\n"


def simulate(capsys, *flags):
    assert entry(["simulate", *flags]) == FINE
    return capsys.readouterr().out


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "failures.csv"
    path.write_text(LOG)
    return str(path)


def test_text_and_picture(capsys, tmp_path):
    out = simulate(capsys, *JOB, "--plot", str(tmp_path / "runs.png"))
    assert "O_save          5.6 min  given" in out
    assert "partial recovery saves" in out
    assert f"drawn in {tmp_path / 'runs.png'}" in out
    assert (tmp_path / "runs.png").stat().st_size > 10_000


def test_json_output(capsys):
    body = json.loads(simulate(capsys, *JOB, "--json", "--trials", "50", "--seed", "7"))
    assert (body["num_trials"], body["seed"]) == (50, 7)
    assert body["job"]["T_fail"] == {"value": 28 * 3600, "source": "given"}
    assert body["full"]["formula"]["overhead"] == pytest.approx(0.085, abs=5e-4)
    assert body["partial"]["interval_s"] == pytest.approx(44.8 * 3600)
    assert body["partial"]["simulated"]["pls"]["mean"] > 0
    assert body == json.loads(simulate(capsys, *JOB, "--json", "--trials", "50", "--seed", "7"))
    assert body != json.loads(simulate(capsys, *JOB, "--json", "--trials", "50", "--seed", "8"))


def test_mirror_is_simulated_beside_the_others(capsys, tmp_path):
    picture = tmp_path / "runs.png"
    flags = [*JOB, "--trials", "50", "--group-share", "0.5", "--group-nodes", "2"]
    mirror = ["--rows", "1000000", "--row-bytes", "260", "--changed-rows", "4000", "--step", "250ms"]
    out = simulate(capsys, *flags, *mirror, "--plot", str(picture))
    assert out.count("by formula") == 3
    assert "with mirrors" in out
    assert "saves and mirrors" in out
    assert picture.stat().st_size > 10_000
    body = json.loads(simulate(capsys, *flags, *mirror, "--json"))
    without = json.loads(simulate(capsys, *flags, "--json"))
    assert body["partial"] == without["partial"]
    assert "mirror" not in without
    assert body["mirror"]["interval_s"] == body["partial"]["interval_s"]
    # one of the two nodes that half of the failures take loses its keeper: a third of all lost nodes, and a
    # few before mirrors are whole
    share = body["mirror"]["formula"]["pls"] / body["partial"]["formula"]["pls"]
    assert 1 / 3 < share < 0.35
    assert 0 < body["mirror"]["simulated"]["pls"]["mean"] < body["partial"]["simulated"]["pls"]["mean"]
    apart = json.loads(simulate(capsys, *flags, *mirror, "--mirror-apart", "--json"))
    assert apart["mirror"]["simulated"]["pls"]["mean"] < body["mirror"]["simulated"]["pls"]["mean"] / 10


def test_default_intervals_are_those_of_plan(capsys):
    """Also where saves in the background are worth having more often than the target asks for."""
    job = ["--total", "20h", "--fail", "40m", "--save", "5m", "--blocked", "1s", "--load", "5m", *JOB[-2:]]
    assert entry(["plan", *job, "--json"]) == FINE
    planned = json.loads(capsys.readouterr().out)
    simulated = json.loads(simulate(capsys, *job, "--json", "--trials", "2"))
    for recovery in ("full", "partial"):
        assert simulated[recovery]["interval_s"] == planned[recovery]["interval_s"]
        assert simulated[recovery]["formula"]["pls"] == pytest.approx(planned[recovery]["expected_pls"])


def first_lines(out):
    return out.split("\n\n")[1]


def test_distribution_from_a_log(capsys, log):
    job = ["--total", "200h", "--save", "1m", "--nodes", "16", "--failures", log, "--trials", "20"]
    assert "a failure every 12.1 h, at random" in first_lines(simulate(capsys, *job))
    recorded = simulate(capsys, *job, "--distribution", "recorded")
    assert "as 6 recorded ones" in first_lines(recorded)
    fitted = first_lines(simulate(capsys, *job, "--distribution", "weibull"))
    assert "weibull of shape 0." in fitted  # in bursts: most of these times are far from their mean
    given = simulate(capsys, *job, "--distribution", "weibull", "--shape", "3", "--of-nodes")
    assert "weibull of shape 3, of each node by itself" in first_lines(given)


def test_output_names_the_distribution_and_its_fit(capsys, tmp_path, log):
    job = ["--total", "200h", "--save", "1m", "--nodes", "16", "--trials", "2", "--failures"]
    fits = " ".join(simulate(capsys, *job, log).split())
    assert "drawn from exponential of shape 1 and mean 12.1 h, fitted to 6 failures (p = 0." in fits
    recorded = " ".join(simulate(capsys, *job, log, "--distribution", "recorded").split())
    assert "drawn from 6 recorded times between them, with T_fail as their mean; 1 time that no" in recorded
    beat = tmp_path / "beat.csv"
    beat.write_text("lasted,failed\n" + "24h,yes\n" * 6)
    out = simulate(capsys, *job, str(beat))
    assert "as 6 recorded ones" in first_lines(out)
    text = " ".join(out.split())
    assert "No distribution describes these failures; the best is exponential of shape 1 and" in text
    anyhow = " ".join(simulate(capsys, *job, str(beat), "--distribution", "exponential").split())
    assert "(p = 0.01), with T_fail as their mean; but they hardly come like that" in anyhow
    about = json.loads(simulate(capsys, *job, str(beat), "--json"))["failures"]
    assert about["distribution"] == "recorded"
    assert entry(["simulate", *job, str(beat), "--distribution", "gamma"]) == FAILED
    assert "--distribution recorded" in capsys.readouterr().err


def test_groups_and_an_interval(capsys):
    flags = [*JOB, "--trials", "200", "--interval", "5h", "--json"]
    alone = json.loads(simulate(capsys, *flags))
    groups = json.loads(simulate(capsys, *flags, "--group-share", "0.5", "--group-nodes", "5"))
    assert groups["partial"]["formula"]["pls"] == pytest.approx(3 * alone["partial"]["formula"]["pls"])
    assert groups["partial"]["simulated"]["pls"]["mean"] > 2 * alone["partial"]["simulated"]["pls"]["mean"]
    assert alone["full"]["interval_s"] == alone["partial"]["interval_s"] == 5 * 3600


def test_measured_losses_of_several_nodes_become_groups(capsys, monkeypatch):
    """2.5 nodes' worth of rows in each failure: three nodes, in three failures of four."""
    job = Job(T_total=1e5, T_fail=2e4, O_save=100, O_load=0, O_res=0, N_emb=8, nodes_lost=2.5)
    monkeypatch.setattr(
        "cpr.cli.simulate_command.inputs_of",
        lambda options: EstimatorInputs(job=job, sources={"nodes_lost": "measured"}),
    )
    out = simulate(capsys, *JOB, "--trials", "20", "--interval", "1000s")
    assert "0.75 of them take 3 nodes" in out
    assert f"{expected_pls(job, 1000):.4f}" in out


def test_mean_time_to_failure_is_required(capsys, tmp_path):
    calm = tmp_path / "calm.csv"
    calm.write_text("lasted,failed\n100h,no\n")
    job = ["--total", "56h", "--save", "5m", "--nodes", "8"]
    for flags in ([], ["--failures", str(calm)]):
        assert entry(["simulate", *job, *flags]) == FAILED
        assert "--fail" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--distribution gamma", "needs its --shape, or a log"),
        ("--shape 2", "give one of them"),
        ("--distribution recorded", "there are no recorded failures"),
        ("--group-share 0.1", "belong together"),
        ("--rows 1000", "a mirror cannot be planned without --row-bytes, --changed-rows, --step"),
        ("--group-share 0.1 --group-nodes 9", "cannot happen to 8"),
        ("--group-share 2 --group-nodes 2", "from 0 to 1"),
        ("--trials 1", "2 at least"),
        ("--trials 100000000", "1,000,000 can be simulated at most"),
        ("--seed -1", "must not be negative"),
        ("--interval 60h", "not longer than the job"),
        ("--interval 0s", "positive"),
        ("--interval 5", "not a span of time"),
        ("--nodes 1000000000000", "1,000,000 nodes can be simulated at most"),
        ("--pls 1.2", "at most 1"),
        ("--fail 0s", "T_fail is 0"),
        ("--plot runs.nothing", "the ending says the format"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(capsys, flags, message):
    assert entry(["simulate", *JOB, *flags.split()]) == FAILED
    out = capsys.readouterr()
    assert message in out.err
    assert out.out == ""
