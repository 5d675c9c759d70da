"""The `cpr` command: flags, output, exit codes."""

import json
import re
import subprocess
import sys

import pytest
import torch

from cpr.checkpoint.format.manifest import save_folder
from cpr.checkpoint.storage.base import open_storage
from cpr.checkpoint.storage.local import LocalStorage
from cpr.cli.checkpoints import IMPORT_LINES
from cpr.cli.main import COMMANDS, build_parser, entry
from tests.cpr.checkpoint.saves import make_shard, randomise, save

# Outside of a process group, as here, torch tells so at every call.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def directory(tmp_path):
    """A base and a row save on it."""
    storage = LocalStorage(tmp_path / "run")
    shard = make_shard("model.a")
    randomise(shard, torch.Generator().manual_seed(1))
    state = {"steps_done": 0, "dense": {"over": torch.ones(3)}, "registered": {}}
    base = save(storage, 0, [shard], state=state)
    save(storage, 1, [shard], base, {shard.name: torch.arange(5)}, state=state)
    return tmp_path / "run"


def flip_bit(directory, sequence):
    path = directory / save_folder(sequence) / "model.a/r0-c0.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return f"{save_folder(sequence)}/model.a/r0-c0.arrow"


JOB = {
    *("--total", "--fail", "--save", "--blocked", "--load", "--reschedule", "--nodes", "--pls", "--run"),
    *("--failures", "--group-share", "--group-nodes", "--rows", "--row-bytes", "--changed-rows", "--step"),
    *("--workers", "--link", "--mirror-every", "--mirror-share", "--mirror-slows", "--mirror-apart"),
}
FLAGS = {
    "doctor": {"--checkpoint", "--json", "--memory", "--node-rank", "--nodes", "--rdzv", "--wait"},
    "describe": {"--json", "directory"},
    "verify": {"directory"},
    "export": {"--out", "--sequence", "--since", "--step", "--to", "directory"},
    "import": {"--out", "--step", "--tables", "source"},
    "plan": {*JOB, "--json", "--plot", "--ratio"},
    "simulate": {
        *(*JOB, "--interval", "--distribution", "--shape", "--of-nodes", "--trials", "--seed"),
        *("--json", "--plot"),
    },
}


@pytest.mark.parametrize("command", FLAGS)
def test_flags(command):
    """Every flag is a promise: add one only if users need it."""
    commands = next(action for action in build_parser()._actions if action.choices)
    actions = commands.choices[command]._actions
    flags = {flag for action in actions for flag in action.option_strings or [action.dest]}
    assert flags == {*FLAGS[command], "-h", "--help"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        entry([command.name, "--help"])
    assert left.value.code == 0
    assert command.help.split(".")[0] in " ".join(capsys.readouterr().out.split())


def test_wrong_usage_exits_with_2(capsys):
    with pytest.raises(SystemExit) as left:
        entry(["export", "somewhere", "--to", "stone-tablets", "--out", "x"])
    assert left.value.code == 2


def test_describe_prints_text_or_json(directory, capsys):
    assert entry(["describe", str(directory)]) == 0
    assert "save 1 at step 10" in capsys.readouterr().out
    assert entry(["describe", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_states"] == 2


def test_verify_reports_an_intact_directory(directory, capsys):
    assert entry(["verify", str(directory)]) == 0
    out = capsys.readouterr()
    assert "4 files" in out.out
    assert "all as they were saved" in out.out
    assert "newest state that verifies: save 1 at step 10 (base 0 and 1 row save)" in out.out
    assert out.err == ""  # no progress bar without a terminal


def test_verify_names_bad_files_and_the_newest_intact_state(directory, capsys):
    path = flip_bit(directory, 1)
    assert entry(["verify", str(directory)]) == 1
    out = capsys.readouterr().out
    assert f"bad: {path}: rows" in out
    assert "newest state that verifies: save 0" in out
    flip_bit(directory, 0)
    assert entry(["verify", str(directory)]) == 1
    assert "no state verifies" in capsys.readouterr().out


def test_verify_accepts_an_unfinished_save(directory, capsys):
    (directory / save_folder(2)).mkdir()
    (directory / save_folder(2) / "half.arrow").write_bytes(b"half")
    assert entry(["verify", str(directory)]) == 0
    assert "unfinished: " in capsys.readouterr().out


@pytest.mark.parametrize("command", [["describe"], ["verify"], ["export", "--to", "dcp", "--out", "{}/out"]])
def test_missing_checkpoint_is_one_line_and_exit_code_2(command, tmp_path, capsys):
    arguments = [part.format(tmp_path) for part in command]
    assert entry([*arguments, str(tmp_path / "nothing")]) == 2
    assert "nothing is no folder: name a checkpoint directory, or a run's folder\n" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "empty").mkdir()
    assert entry([*arguments, str(tmp_path / "empty")]) == 2
    err = capsys.readouterr().err
    assert ": name a directory in which a run has saved" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["describe"], ["verify"], ["export", "--to", "dcp", "--out", "{}/out"]])
def test_the_folder_of_a_run_stands_for_its_checkpoint_directory(directory, tmp_path, command):
    directory.rename(tmp_path / "checkpoint")
    (tmp_path / "config.json").write_text('{"recipe": "tiny", "checkpoint": {"uri": ""}}')
    assert entry([part.format(tmp_path) for part in [*command, "{}"]]) == 0


def test_a_negative_size_is_a_value_and_no_flag(capsys, monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # which the command would set
    assert entry(["doctor", "--memory", "-5GB"]) == 2
    assert "'-5GB' is not a size; write a number with its unit" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["dcp", "safetensors", "parquet"])
def test_export_writes_each_format_once(directory, tmp_path, capsys, to):
    out = tmp_path / "out"
    assert entry(["export", str(directory), "--to", to, "--out", str(out)]) == 0
    text = capsys.readouterr()
    assert "exported save 1" in text.out
    assert entry(["export", str(directory), "--to", to, "--out", f"{out}-0", "--step", "0"]) == 0
    assert "exported save 0 at step 0" in capsys.readouterr().out
    assert ("dense parameters" in text.out) == (to == "parquet")
    assert text.err == ""
    assert entry(["export", str(directory), "--to", to, "--out", str(out)]) == 2
    assert "in use" in capsys.readouterr().err


def test_export_writes_an_increment(directory, tmp_path, capsys):
    words = ["export", str(directory), "--to", "parquet"]
    assert entry([*words, "--since", "0", "--out", str(tmp_path / "increment")]) == 0
    assert (
        "exported what has changed since step 0 until save 1 at step 10 (base 0 and 1 row save) to "
        f"{tmp_path / 'increment'}: 0 rows, 0 tombstones"
    ) in capsys.readouterr().out
    assert (tmp_path / "increment/cpr-increment.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--since", "5"], "no state of step 5, .* it has those of steps 0, 10.* make a full export"),
        (["--since", "20"], "no state of step 20 yet; its last is of step 10.* Give --since the step in"),
        (["--since", "10", "--step", "0"], "save 0 .* is older than save 1 .* give --since an earlier step"),
        (["--since", "0", "--to", "safetensors"], "with --to parquet, and a full model, without --since"),
        (["--since", "0", "--to", "dcp"], "with --to parquet, and a full model, without --since"),
        (["--since", "0", "--step", "7"], "no state of step 7; steps that can be loaded: 0, 10"),
    ],
)
def test_increments_that_cannot_be_made_are_refused_in_one_line(directory, tmp_path, capsys, words, said):
    out = tmp_path / "out"
    assert entry(["export", str(directory), "--to", "parquet", "--out", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert error.count("\n") == 1
    assert not out.exists()


def test_export_reports_damaged_saves(directory, tmp_path, capsys):
    path = flip_bit(directory, 1)
    assert entry(["export", str(directory), "--to", "parquet", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "exported save 0" in out
    assert path in out


def test_import_is_refused_with_the_lines_to_run_instead(tmp_path, capsys):
    assert entry(["import", "a", "--out", "b", "--tables", "*.weight", "--step", "3"]) == 2
    assert IMPORT_LINES in capsys.readouterr().err


def test_interruption_prints_no_traceback(directory, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cpr.checkpoint.catalog.describe.describe", interrupted)
    assert entry(["describe", str(directory)]) == 130
    assert capsys.readouterr().err == "cpr: interrupted\n"


@pytest.mark.parametrize(
    "command", ["describe {}", "clean", "plan --total 56h --fail 28h --save 5m --nodes 8"]
)
def test_quick_commands_do_not_import_torch(directory, monkeypatch, command):
    monkeypatch.setenv("CPR_RESIDENT_ROOT", str(directory))
    code = "import sys, cpr.cli; code = cpr.cli.entry(); sys.exit(code or ('torch' in sys.modules) * 9)"
    words = [word.format(directory) for word in command.split()]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_commands_take_the_uri_of_an_object_store(s3, tmp_path, capsys):
    uri = s3.uri("bucket/cli")
    shard = make_shard("model.a")
    randomise(shard, torch.Generator().manual_seed(1))
    state = {"steps_done": 0, "dense": {}, "registered": {}}
    save(open_storage(uri), 0, [shard], state=state)
    assert entry(["describe", uri]) == 0
    assert entry(["verify", uri]) == 0
    assert entry(["export", uri, "--to", "dcp", "--out", str(tmp_path / "dcp")]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    assert "secret" not in out.out


def test_a_reader_that_leaves_early_is_no_traceback(directory):
    command = [sys.executable, "-m", "cpr.cli", "describe", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 2
    assert process.stderr.read() == b""
    process.stderr.close()
