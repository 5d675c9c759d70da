"""The page of a run: its figures are those of the records, whatever state these are in."""

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from cpr.checkpoint.storage.local import LocalStorage
from cpr.cli.main import entry
from cpr.estimator.history import write_history
from cpr.estimator.planning.estimator_inputs import gather
from cpr.estimator.planning.recommend import recommend
from cpr.estimator.planning.recommend_text import headline
from cpr.report.page import as_html, write_page
from cpr.report.records import read_folder, read_run
from tests.cpr.estimator.histories import make_failure, make_history, make_save

SECTIONS = [
    "Learning curve",
    "Speed",
    "Where a step's time goes",
    "Saves",
    "Failures",
    "Portion of lost samples (PLS)",
    "What cpr plan advises now",
    "Run",
]
NOW = datetime.fromtimestamp(2000, UTC)
HOSTILE = "<script>alert(1)</script>\"'&<img src=http://evil.example/x onerror=alert(1)>\ud800\0"
HISTORY = make_history(
    clock_s=1700.0,
    pls=0.0125,
    saves=[make_save(step, seconds=2.0 + step, blocked_s=0.25, slowed_s=0.5) for step in (10, 20, 30)],
    failures=[
        make_failure(60.0, detect=0.5, restart=1.5, restore=2.0),
        make_failure(90.0, detect=1.0, restart=3.0),
    ],
)


class Page(HTMLParser):
    """Text, tags and attributes of a page; fails on a tag that is not closed."""

    VOID = ("meta",)

    def __init__(self, source):
        super().__init__()
        self.source, self.words, self.tags, self.attributes, self.open = source, [], [], [], []
        self.feed(source)
        self.close()
        assert not self.open
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    def attributes_of(self, wanted):
        return [(name, value) for tag, name, value in self.attributes if tag == wanted]

    @property
    def sections(self):
        return re.findall("<h2>(.*?)</h2>", self.source.replace("&#x27;", "'"))


def train_line(step, **more):
    parts = {"data": 0.01, "forward_backward": 0.06, "dense_exchange": 0.02, "saving": 0.01}
    figures = {
        "samples": 32 * step,
        "loss": 1 / step,
        "auc": 0.5 + step / 1000,
        "samples_per_s": 300.0 + step,
    }
    return {"kind": "train", "step": step, "time": 1000.0 + step, **figures, "step_seconds": parts, **more}


def evaluation(step, auc):
    figures = {"auc": auc, "log_loss": 0.5, "metrics": {"top1": 0.25}, "best_auc": 0.8}
    return {"kind": "evaluation", "step": step, "time": 1000.0 + step, "samples": 32 * step, **figures}


def make_folder(folder, lines, history=None, **config):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"recipe": "tiny", **config}))
    if history is not None:
        write_history(LocalStorage(folder / "checkpoint"), history)
    return folder


SAVE = {"bytes": 2000, "seconds": 2.0, "wait_seconds": 0.5}
LINES = [
    {"kind": "hyperparameters", "step": 0, "time": 990.0},
    *(train_line(step) for step in (10, 20)),
    {"kind": "hyperparameters", "step": 20, "time": 1021.0},
    train_line(30),
    evaluation(30, 0.7125),
]


def page_of(folder):
    return Page(as_html(read_run(str(folder)), NOW))


def test_figures_are_those_of_the_records(tmp_path):
    page = page_of(make_folder(tmp_path / "run", LINES, HISTORY))
    assert page.sections == SECTIONS
    tiles = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page.source))
    assert tiles == {
        "steps": "1,000",
        "samples": "32,000 (10%)",
        "AUC": "0.7125",
        "PLS": "0.012500",
        "failures": "2",
        "saves": "3",
    }
    assert "Median 320 samples/s, newest 330" in page.text
    assert "100 ms for a step on rank 0, the mean over 3 lines" in page.text
    assert "forward, backward, tables 60 ms, 60%" in page.text
    assert "everything 3 1 kB 22 s 250 ms 500 ms" in page.text  # medians
    assert "Training has waited 750 ms for 3 saves, 0.5% of the run" in page.text
    assert "Failure 1, 1 min after the start: 4 s" in page.text
    assert "detect 500 ms, restart 1.5 s, restore 2 s" in page.text
    assert "width:50.000%" in page.source  # restore, of the first failure
    for line in headline(recommend(gather({}, [HISTORY]).job)).splitlines():
        assert line in page.text
    assert "start 2 at step 20" in page.text
    assert (
        "No end is recorded: the run still trains, or was killed. Its newest record was 5 min old"
        in page.text
    )
    assert {f"Failure {number}" in page.text for number in (1, 2)} == {True}


def test_drawn_points_are_those_of_the_metrics(tmp_path):
    source = page_of(make_folder(tmp_path / "run", LINES, HISTORY)).source
    speed = re.search(r'aria-label="samples/s".*?class="line s0" d="(.*?)"', source)[1]
    # from 0 to 330 samples/s upwards, 20 s across
    heights = [1000 - 1000 * speed / 330 for speed in (310, 320, 330)]
    assert speed == "L".join(
        f"{'M' if not at else ''}{at:.1f} {height:.1f}"
        for at, height in zip((0, 500, 1000), heights, strict=True)
    )


def test_ends_of_runs(tmp_path):
    ended = [*LINES, {"kind": "end", "step": 30, "time": 1031.0, "reason": "finished"}]
    assert "The run has finished." in page_of(make_folder(tmp_path / "a", ended)).text
    ended[-1]["reason"] = "DivergedError: the loss is nan"
    assert (
        "The run has ended: DivergedError: the loss is nan."
        in page_of(make_folder(tmp_path / "a", ended)).text
    )
    assert "No end is recorded" in page_of(make_folder(tmp_path / "a", [*ended, train_line(40)])).text


def test_what_is_not_recorded_is_said(tmp_path):
    old = [{name: value for name, value in train_line(10).items() if name not in {"time", "step_seconds"}}]
    page = page_of(make_folder(tmp_path / "run", old))
    assert page.sections == SECTIONS
    for note in (
        "It is not recorded whether the run has ended.",
        "No evaluation is recorded yet",
        "Over time, the speed is not known",
        "only dlrm.train times the parts of a step",
        "No committed save is recorded.",
        "there is no history of saves and failures",
    ):
        assert note in page.text
    assert re.search("Failures None[.]", page.text)
    assert re.search(r"PLS\) Not known", page.text)


def test_a_run_of_another_script_has_only_its_history(tmp_path, capsys):
    write_history(LocalStorage(tmp_path), HISTORY)
    assert entry(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    page = Page((tmp_path / "report.html").read_text())
    assert page.sections == SECTIONS
    assert "320 samples/s while no save runs: steps of 100 ms" in page.text
    assert "dlrm.train records losses and metrics, other scripts do not" in page.text
    assert "Failure 2" in page.text
    assert "0.012500 so far" in page.text


def test_without_failures_the_plan_says_what_it_lacks(tmp_path):
    write_history(LocalStorage(tmp_path), make_history(saves=HISTORY.saves, pls=0.0))
    page = page_of(tmp_path)
    assert "how often the job fails is not known" in page.text
    assert f"cpr plan --run {tmp_path} --fail 24h" in page.text
    assert "0.000000 so far" in page.text


def test_costs_come_from_the_metrics_where_there_is_no_history(tmp_path):
    costs = [
        {"kind": "save", "step": 10, "base": SAVE},
        {"kind": "recovery", "step": 12, "how": "partial", "phases": {"restart": 2.0}, "pls": 0.5},
    ]
    page = page_of(make_folder(tmp_path / "run", [*LINES, *costs]))
    assert "everything 1 2 kB 2 s 500 ms unknown" in page.text
    assert "Failure 1 at step 12: 2 s" in page.text
    assert "0.500000 so far" in page.text


def test_lines_newer_than_the_history_continue_it(tmp_path):
    newer = [
        {**train_line(1250), "time": 1750.0},
        {"kind": "recovery", "step": 1255, "time": 1755.0, "how": "process", "phases": {"restart": 2.0}},
        *({"kind": "save", "step": step, "time": 1760.0, "base": SAVE} for step in (30, 1260)),
        {**train_line(1300), "time": 1780.0},
    ]
    page = page_of(make_folder(tmp_path / "run", [*LINES, *newer], HISTORY))
    tiles = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page.source))
    assert (tiles["steps"], tiles["samples"]) == ("1,300", "41,600 (13%)")
    assert (tiles["saves"], tiles["failures"]) == ("4", "3")  # step 30's was known
    assert "The figures are those recorded until 1970-01-01 00:29:40 UTC." in page.text
    assert "newest record was 3.67 min old" in page.text
    assert "Training has waited 1.25 s for 4 saves, 0.543% of the run" in page.text  # 230 s
    assert "Failure 3 at step 1,255, 3.42 min after the start" in page.text


def test_failed_saves_and_waits_for_saves_without_a_commit_are_shown(tmp_path):
    lines = [
        {"kind": "save_begun", "step": 10, "wait_seconds": 0.25},
        {"kind": "save", "step": 10, "base": SAVE},
        {"kind": "save_begun", "step": 20, "wait_seconds": 1.5},
        {"kind": "save_failed", "step": 24, "reason": "save 2: no space left"},
        {"kind": "save_begun", "step": 30, "wait_seconds": 7.5},
    ]
    page = page_of(make_folder(tmp_path / "run", [*LINES, *lines]))
    assert dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page.source))["saves"] == "1 (1 failed)"
    assert "1 save failed. The newest after step 24: save 2: no space left." in page.text
    assert (
        "2 saves without a commit (failed, interrupted, or being written), the newest of step 30" in page.text
    )
    assert "training waited 9 s" in page.text
    write_history(LocalStorage(tmp_path / "other"), make_history(failed_saves=4))
    assert "4 saves failed." in page_of(tmp_path / "other").text


def test_damaged_records_are_told_and_left_out(tmp_path):
    folder = make_folder(tmp_path / "run", LINES)
    broken = [b'{"kind": "train", "st', b"\xff\xfe", b"[1]", b'{"kind": 7}', b"[" * 100_000, b"null"]
    strange = [
        {"kind": "train", "step": "x", "samples": True, "loss": float("nan"), "auc": 10**400, "time": None},
        {"kind": "train", "samples": -1e18, "loss": 5e-324, "samples_per_s": 1e18, "step_seconds": [1]},
        {"kind": "evaluation", "metrics": 3, "best_auc": "y", "auc": {}},
        {"kind": "save", "base": 3},
        {"kind": "save_begun", "wait_seconds": [], "time": -1e18},
        {"kind": "save_failed", "step": {}, "time": 1e18},
        {"kind": "recovery", "how": "?", "phases": {"detect": "z"}},
    ]
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            b"\n".join([*broken, *(json.dumps(each).encode() for each in strange)]) + b'\n{"kind": "tr'
        )
    (folder / "versions.json").write_text("{")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "history.json").write_text('{"format": "cpr-history"')
    page = page_of(folder)
    assert page.sections == SECTIONS
    assert (
        "7 of 20 lines of metrics.jsonl are damaged, and left out (line 7, 8, 9, 10, 11, 12, 20)" in page.text
    )
    assert "versions.json cannot be read" in page.text
    assert "the history of saves and failures cannot be read" in page.text


def test_texts_of_users_are_escaped(tmp_path):
    failure = make_failure(60.0, detect=0.5)
    told = HOSTILE.replace("\ud800", "")
    history = make_history(failures=[type(failure)(**{**vars(failure), "reason": told, "dead": [told]})])
    lines = [*LINES, {"kind": "hyperparameters", "step": HOSTILE, "time": 1025.0}, evaluation(30, 0.7)]
    lines[-1]["metrics"] = {HOSTILE: 0.5}
    lines.append({"kind": "end", "step": 1, "reason": HOSTILE})
    folder = make_folder(tmp_path / "<b>run", lines, history, recipe=HOSTILE)
    versions = {
        "command": [HOSTILE],
        "machine": {"name": HOSTILE},
        "world_size": HOSTILE,
        "torch_build": HOSTILE,
    }
    (folder / "versions.json").write_text(json.dumps(versions))
    page = page_of(folder)
    assert page.text.count("<script>alert(1)</script>") >= 8
    assert not {"script", "img", "b", "a", "link", "iframe", "image"} & set(page.tags)
    assert not {name for _, name, _ in page.attributes} & {"href", "src", "onerror", "xlink:href"}
    assert "url(" not in page.source


def test_long_runs_give_small_pages(tmp_path):
    folder = make_folder(tmp_path / "run", [train_line(step) for step in range(1, 5001)])
    assert len(page_of(folder).source) < 60_000


@pytest.mark.parametrize("lines", [[], LINES[:1], [LINES[1]], [evaluation(30, None)]])
def test_runs_that_have_hardly_begun(tmp_path, lines):
    assert page_of(make_folder(tmp_path / "run", lines)).sections == SECTIONS


def test_command_says_what_to_name_instead(tmp_path, capsys):
    make_folder(tmp_path / "runs", []).joinpath("metrics.jsonl").unlink()
    (tmp_path / "runs/config.json").unlink()
    assert entry(["report", str(tmp_path / "none")]) == 2
    assert "is no folder: name a run's folder" in capsys.readouterr().err
    assert entry(["report", str(tmp_path / "runs")]) == 2
    assert "holds no run: there is neither metrics.jsonl" in capsys.readouterr().err
    inside = make_folder(tmp_path / "runs/20261124-000000-tiny", LINES)
    assert entry(["report", str(tmp_path / "runs")]) == 2
    assert f"name one of them, such as {inside}" in capsys.readouterr().err
    (inside / "report.html").mkdir()
    assert entry(["report", str(inside)]) == 2
    assert "`--out FILE` writes the page to another place" in capsys.readouterr().err
    assert entry(["report", str(inside), "--out", str(tmp_path / "page.html")]) == 0
    assert Page((tmp_path / "page.html").read_text()).sections == SECTIONS


def test_a_page_that_cannot_be_finished_leaves_the_older_one(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "run", LINES)
    write_page(read_folder(folder), LocalStorage(folder))
    before, names = (folder / "report.html").read_text(), sorted(each.name for each in folder.iterdir())

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert entry(["report", str(folder)]) == 2
    assert (folder / "report.html").read_text() == before
    assert sorted(each.name for each in folder.iterdir()) == names


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>addEventListener('load', () => {
document.documentElement.style.width = 'WIDTHpx';  // headless Chromium has no window below 500 px
const all = selector => [...document.querySelectorAll(selector)];
const size = e => e.getBoundingClientRect();
const name = e => e.outerHTML.slice(0, 80);
document.body.dataset.measured = JSON.stringify({
    wide: all('body *').filter(e => !e.closest('.wide,pre') && size(e).right > WIDTH + 1).map(name),
    empty: all('section,svg,h2,.bar').filter(e => !(size(e).width * size(e).height)).map(name),
    font: Math.min(...all('p,li,span,td,dd').map(e => parseFloat(getComputedStyle(e).fontSize))),
    loaded: performance.getEntriesByType('resource').length,
});
});</script>"""


@pytest.mark.system
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1200])
def test_browser_shows_the_page(tmp_path, width):
    folder = make_folder(tmp_path / "run", LINES, HISTORY)
    source = as_html(read_run(str(folder)), NOW)
    (tmp_path / "page.html").write_text(source)
    # the page forbids scripts, so the one that measures it comes into a copy that allows them
    allowing = source.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (tmp_path / "measured.html").write_text(
        allowing.replace("</body>", f"{MEASURE.replace('WIDTH', str(width))}</body>")
    )
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
        *(
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path}",
            f"--window-size={width},900",
        ),
    ]
    for name in ("page", "measured"):
        done = subprocess.run(
            [*command, f"file://{tmp_path}/{name}.html"],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        assert "CONSOLE" not in done.stderr
        assert Page(done.stdout).sections == SECTIONS
    measured = json.loads(dict(Page(done.stdout).attributes_of("body"))["data-measured"])
    assert measured.pop("font") >= 12
    assert measured == {"wide": [], "empty": [], "loaded": 0}


def test_a_run_on_a_stream_shows_what_waits_and_windows_of_progressive_validation(tmp_path):
    counts = {"waiting": 1234, "lag_s": 2.5, "trained": 960, "left_out": 17, "bad": 3}
    window = {"kind": "progressive", "samples": 960, "window_samples": 320, "auc": 0.61, "log_loss": 0.6}
    lines = [*LINES, {"kind": "stream", "step": 30, "time": 1030.0, **counts}, {**window, "step": 30}]
    page = page_of(make_folder(tmp_path / "run", lines))
    assert page.sections == [*SECTIONS[:2], "Stream", *SECTIONS[2:]]
    for shown in ("waiting 1,234", "left out 17", "bad 3", "trained 960", "before it was trained"):
        assert shown in page.text, shown
    assert "before it was trained" not in page_of(make_folder(tmp_path / "other", LINES)).text
    damaged = [*LINES, {"kind": "stream", "step": "x", "waiting": HOSTILE}]
    assert "waiting unknown" in page_of(make_folder(tmp_path / "damaged", damaged)).text
