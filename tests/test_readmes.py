"""The documents keep what they promise: links work, commands parse, snippets run, figures are generated.

Commands stand in `bash` blocks, or in `code` within a line. A `python` block runs by itself, in a folder with
a small data set in `datasets/tiny`, unless `<!-- snippet: NAME -->` above it names one of `SNIPPETS`, which
gives it what it needs. `<!-- output: COMMAND -->` above a `text` block says whose output it is.
"""

import argparse
import ast
import importlib
import json
import re
import runpy
import shlex
import sys
import tomllib
from dataclasses import fields, is_dataclass

import polars  # noqa: F401  # sets an environment variable when it is first imported
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser

import dlrm.train
from cpr.checkpoint.catalog.chain import own_states
from cpr.checkpoint.storage.base import open_storage
from cpr.cli.main import COMMANDS, build_parser, entry
from data.synthetic import SyntheticConfig, generate
from dlrm.comm.collectives.sparse import SparseAllGather
from dlrm.config.recipe import load_config
from dlrm.config.schema import Config
from examples import recovery_demo
from experiments.harness.launch import torchrun_command
from tests.cpr.shards import models
from tests.data.convert.conftest import inline_workers
from tests.readmes import COMMAND_LINES, FENCE, FOLDERS, PAGES, README, ROOT, blocks, command, name_of
from tests.system.conftest import starting
from tests.system.recovery.takeover_worker import CONTROL, MACHINE
from tests.system.runs import wait_for

MOST_LINES = 220
GENERATED = re.compile(r"<!-- (results|reference): [\w-]+ -->.*?<!-- end -->", re.S)
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
CODE = re.compile(r"`([^`\n]+)`")
MEASURED = re.compile(r"(?<![\w.])\d[\d.,]*(?: ± [\d.,]+)? ?(?:%|x\b|ms\b|times (?:as|faster))")
GIVEN = (
    "95 % confidence interval",
    "63 % where there are as many rows as values",  # these follow from the formula above them
    "99 % for 49 million values",
    "which are 3 to 5 % more in all",
    "of a thousand values 1 % share a row",
    "at most 0.1 % of training",  # the default of IntervalRule.max_overhead
    "More than 80 % of the worker's limit",  # DASK_SHARE of data.jobs.cluster
    "more than 2 % shorter",  # the margin of comm.exchange=auto
)
"""Percentages that are settings of the program or follow from a formula."""


def prose(page):
    """A page without its fenced blocks and without what a program writes into it."""
    return GENERATED.sub("", FENCE.sub("", page.read_text()))


def inline_code(page):
    return sorted(set(CODE.findall(prose(page))))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# Links and names


def anchors(page):
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: {name_of(target)} has no such heading"


def resolves(name):
    """Whether `package.module.Name` exists, without an import."""
    path, parts = ROOT, name.split(".")
    while parts and ((path / parts[0]).is_dir() or (path / f"{parts[0]}.py").is_file()):
        path = path / parts.pop(0)
    module = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return not parts or (
        len(parts) <= 2
        and module.is_file()
        and all(re.search(rf"\b{part}\b", module.read_text()) for part in parts)
    )


@every_page
def test_paths_and_modules_that_are_named_exist(page):
    missing = []
    for code in inline_code(page):
        if re.fullmatch(rf"({'|'.join(FOLDERS)}|tests)/[\w./-]*", code):
            missing += [code] * (not (ROOT / code).exists())
        elif re.fullmatch(r"(cpr|dlrm|examples|experiments)(\.\w+)+", code):
            missing += [code] * (not resolves(code))
    assert not missing


def configuration_keys():
    return {
        f"{section.name}.{field.name}"
        for section in fields(Config)
        if is_dataclass(section.type)
        for field in fields(section.type)
    }


@every_page
def test_configuration_keys_that_are_named_exist(page):
    keys = configuration_keys()
    sections = "|".join(sorted({key.partition(".")[0] for key in keys}))
    named = {
        match[1] for code in inline_code(page) if (match := re.match(rf"((?:{sections})\.\w+)(=|$)", code))
    }
    files = (".py", ".json", ".toml", ".txt")
    unknown = [name for name in named - keys if not name.endswith(files) and not resolves(name)]
    assert not unknown


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "\n## Folders\n" in page.read_text()], ids=name_of
)
def test_folders_are_all_listed(page):
    section = page.read_text().partition("\n## Folders\n")[2].partition("\n## ")[0]
    listed = {
        name.strip("/")
        for line in section.splitlines()
        if line.startswith("| `")
        for name in CODE.findall(line.split("|")[1])
    }
    there = {path.name for path in page.parent.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in page.parent.glob("*.py")}
    assert there <= listed <= there | modules


# Commands


class ParsedError(Exception):
    """A program has accepted its command line, and is not to start."""


@pytest.fixture
def accepts(monkeypatch):
    """Whether a program takes a command line; only what parses it is run."""

    def stopping(parse_args):
        def stop(self, arguments=None, namespace=None):
            parse_args(self, arguments, namespace)
            raise ParsedError

        return stop

    def parse(run, name, arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with monkeypatch.context() as patch:
            for way in ("parse_args", "parse_intermixed_args"):
                patch.setattr(argparse.ArgumentParser, way, stopping(getattr(argparse.ArgumentParser, way)))
            with pytest.raises(ParsedError):
                run(name, run_name="__main__")

    def check(words):
        while re.match(r"[A-Z_]+=", words[0]):  # a variable of the environment
            assert (
                not words[0].startswith("CPR_FAULTS=examples") or (ROOT / words[0].partition("=")[2]).exists()
            )
            words = words[1:]
        program, arguments = words[0].rpartition("/")[2], words[1:]
        CHECKS[program](arguments, check, parse)

    return check


def check_make(arguments, *_):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {each for each in arguments if "=" not in each} <= targets


def check_pip(arguments, *_):
    assert arguments[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    for each in arguments[1:]:
        if extra := re.fullmatch(r"\.\[(\w+)\]", each):
            assert extra[1] in project["optional-dependencies"]
        elif "==" in each:
            assert each in [line.partition(" ")[0] for line in locked] or "torchrec" in each


def check_python(arguments, check, parse):
    assert arguments[0] == "-m", "a command that can be checked starts with python -m"
    check_module(arguments[1], arguments[2:], check, parse)


def check_module(module, arguments, check, parse):
    if module == "dlrm.train":
        options = dlrm.train.parse(arguments)
        load_config(options.recipe or "tiny", options.overrides)
    elif module == "cpr.cli":
        check(["cpr", *arguments])
    elif module == "pytest":
        assert all((ROOT / each).exists() for each in arguments if each.startswith("tests/"))
    elif module == "cpr.versions":
        assert arguments in (["cpu"], ["cuda"])
    else:
        parse(runpy.run_module, module, arguments)


def check_torchrun(arguments, check, parse):
    options = get_args_parser().parse_args([each for each in arguments if each != "..."])
    if options.module:
        check_module(options.training_script, options.training_script_args, check, parse)
    else:
        parse(runpy.run_path, str(ROOT / options.training_script), options.training_script_args)


def check_cpr(arguments, check, _):
    options = build_parser().parse_args(arguments)
    if arguments[0] == "run":
        check(options.command[1:])


def check_source(arguments, *_):
    assert arguments == [".venv/bin/activate"]


def check_dask(arguments, *_):
    command = importlib.import_module(f"distributed.cli.dask_{arguments[0]}").main
    known = {option for parameter in command.params for option in parameter.opts}
    assert {each for each in arguments if each.startswith("--")} <= known


CHECKS = {
    "dask": check_dask,
    ".": check_source,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "torchrun": check_torchrun,
    "cpr": check_cpr,
}


@pytest.mark.parametrize(
    ("block", "words"),
    COMMAND_LINES,
    ids=[f"{name_of(block.page)}: {shlex.join(words)[:80]}" for block, words in COMMAND_LINES],
)
def test_commands_are_accepted_by_their_programs(accepts, block, words):
    accepts(words)


@every_page
def test_commands_within_a_line_name_what_exists(page):
    for code in inline_code(page):
        words = code.split()
        if words[0] == "cpr" and len(words) > 1:
            known = {command.name: command for command in COMMANDS}
            parser = argparse.ArgumentParser()
            known[words[1]].add_arguments(parser)
            assert {word for word in words if word.startswith("--") and word != "--"} <= set(
                parser._option_string_actions
            )
        elif words[0] == "make" and words[1:]:
            check_make(words[1:])
        elif words[:2] == ["python", "-m"] and not words[2].isupper() and "NAME" not in words[2]:
            assert resolves(words[2]), code


@every_page
def test_commands_stand_in_bash_blocks(page):
    """Or else nothing here would look at them."""
    plain = "".join(block.text for block in blocks("") if block.page == page)
    indented = "".join(re.findall(r"^    .*\n", prose(page), re.M))
    assert not re.findall(
        r"^ *(?:\S+=\S+ )*(?:\S*/)?(?:python|torchrun|cpr|make|pip) .*", plain + indented, re.M
    )


def test_the_readme_names_every_command():
    text = README.read_text()
    names = [command.name for command in COMMANDS if not command.help.startswith("Removed")]
    assert [name for name in names if f"`cpr {name}" not in text] == []


# Python


def run_checkpointer_loop(source, folder):
    """The loop saves, and a second call resumes from the newest save."""
    names = {}
    exec(source.replace("s3://bucket/run", str(folder)), names)
    rows = {"table": 50}

    def batches(first, last):
        return [{"ebc": models.batch(number, 8, **rows)} for number in range(first, last)]

    model = models.shard({"table": "rw"}, ebc=models.bags(**rows))
    optimizer = torch.optim.SGD(model.module.dense.parameters(), lr=0.1)
    names["train"](model, optimizer, batches(0, 4), steps_between_saves=2)
    trained = model.module.dense[0].weight.detach().clone()
    other = models.shard({"table": "rw"}, ebc=models.bags(**rows))
    names["train"](other, torch.optim.SGD(other.module.dense.parameters(), lr=0.1), [])
    assert torch.equal(other.module.dense[0].weight, trained)


def run_ddp_hook(source, _):
    """The hook exchanges the gradients of a backward pass, a share of their values even on one node."""
    names = {"model": nn.Linear(2, 2)}
    exec(source, names)
    names["model"](torch.ones(1, 2)).sum().backward()
    assert isinstance(names["hook"].exchange.collective, SparseAllGather)
    assert names["hook"].take_figures().steps == 1


SNIPPETS = {"the checkpointer loop": run_checkpointer_loop, "the DDP hook": run_ddp_hook}
RUN_ELSEWHERE = (
    "a service",  # tests/dlrm/inference/program/test_score.py
    "the genres of films",  # tests/examples/test_own_data.py
)


def standalone():
    return [block for block in blocks("python") if not block.label]


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder in which snippets find the data set that they name."""
    folder = tmp_path_factory.mktemp("snippets")
    small = SyntheticConfig(scale=1e-4, days=3, rows_per_day=2000, rows_per_block=500, rows_per_file=1000)
    generate(small, folder / "datasets" / "tiny")
    return folder


@pytest.mark.parametrize("block", standalone(), ids=str)
def test_snippets_run_by_themselves(block, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr("data.convert.job.local_workers", inline_workers)
    exec(compile(block.text, str(block.page), "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_run_with_what_they_need(name, world_of_one, tmp_path):
    (block,) = [block for block in blocks("python") if block.label == f"snippet: {name}"]
    SNIPPETS[name](block.text, tmp_path)


def test_excerpts_are_lines_of_their_file_in_the_same_order():
    excerpts = [block for block in blocks("python") if block.label.startswith("snippet: excerpt of ")]
    assert excerpts
    for block in excerpts:
        lines = iter((ROOT / block.label.removeprefix("snippet: excerpt of ")).read_text().splitlines())
        ast.parse(block.text)
        for wanted in filter(lambda line: line.strip() not in ("", "..."), block.text.splitlines()):
            assert any(line.strip() == wanted.strip() for line in lines), wanted


def test_every_labelled_snippet_is_looked_at():
    labels = {block.label for block in blocks("python") if block.label}
    known = {f"snippet: {name}" for name in (*SNIPPETS, *RUN_ELSEWHERE)}
    assert {label for label in labels - known if not label.startswith("snippet: excerpt of ")} == set()


# Figures


@every_page
def test_measured_figures_stand_in_generated_tables(page):
    text = " ".join(prose(page).split())
    for given in GIVEN:
        text = text.replace(given, "")
    assert not MEASURED.findall(CODE.sub("", text)), "a measured figure belongs into a generated table"


def test_the_readme_is_short_and_explains_the_papers_words():
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    text = " ".join(lines)
    for word, meaning in {
        "PLS": "portion of lost samples",
        "MFU": "most frequently used",
        "SSU": "sub-sampled",
        "SCAR": "changed most",
    }.items():
        assert abs(text.index(meaning) - text.index(word)) < 100, f"{word} is not spelled out at first"


# Output

SMALL = ("data.global_batch_size=100", "train.log_every_steps=2", "train.device=cpu", "train.precision=fp32")
"""A run of 40 steps on the data set of `workplace`."""
PREFIX = 22
"""Characters of a line that are compared: what follows may differ from run to run."""


def masked(text):
    """The beginnings of lines, with every number as `#`, so that two runs compare."""
    return [re.sub(r"\d[\d.,]*", "#", line).strip()[:PREFIX] for line in text.strip().splitlines()]


def shown(label):
    """The output that a page shows, without the lines that it leaves out."""
    (block,) = [block for block in blocks("text") if block.label == f"output: {label}"]
    return block.text.replace("[...]\n", "")


def lines_of(*starts):
    """The commands of all pages that begin so, without their program."""
    return [words[1:] for _, words in COMMAND_LINES if words[0] == "cpr" and words[1] in starts]


def test_the_plan_is_what_cpr_plan_prints(capsys):
    assert entry(next(words for words in lines_of("plan") if "--total" in words)) == 0
    assert capsys.readouterr().out.startswith(shown("cpr plan").rstrip("\n"))


def test_the_plan_with_mirrors_is_what_cpr_plan_prints(capsys):
    assert entry(next(words for words in lines_of("plan") if "--rows" in words)) == 0
    assert capsys.readouterr().out.endswith(shown("cpr plan, mirrors"))


@pytest.mark.parametrize("words", lines_of("simulate", "clean"), ids=shlex.join)
def test_quick_commands_run(words, tmp_path, monkeypatch):
    monkeypatch.setenv("CPR_RESIDENT_ROOT", str(tmp_path))
    assert entry(words) == 0


@pytest.mark.system
@pytest.mark.timeout(240)
def test_the_demo_prints_what_the_readme_shows(workplace, lender, tmp_path, monkeypatch, capsys):
    def of_forks(module, arguments, **options):
        return torchrun_command("tests.programs", [module, *arguments], **options)

    for name, value in lender.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(recovery_demo, "torchrun_command", of_forks)
    monkeypatch.setattr(recovery_demo, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(recovery_demo, "KILL_STEP", 10)
    settings = [each for each in recovery_demo.SETTINGS if "every_steps=100" not in each]
    monkeypatch.setattr(recovery_demo, "SETTINGS", (*settings, *SMALL[:2], "checkpoint.every_steps=4"))
    assert recovery_demo.main(["--dataset", str(workplace / "datasets" / "tiny")]) == 0
    assert masked(capsys.readouterr().out) == masked(shown("make demo"))


@pytest.fixture(scope="module")
def lost_node(request, workplace, tmp_path_factory):
    """The run of `examples/README.md`, made small: its output, and its folder."""
    folder = tmp_path_factory.mktemp("lost_node")
    plan = json.loads((ROOT / "examples" / "lost_worker.json").read_text())
    plan["schedules"][0]["step"] = 12
    (folder / "faults.json").write_text(json.dumps(plan))
    words = command("examples/README.md", "CPR_FAULTS")
    torchrun = words[words.index("--standalone") : words.index("dlrm.train")]
    settings = [f"data.uri={workplace / 'datasets' / 'tiny'}", f"train.run_folder={folder / 'runs'}", *SMALL]
    arguments = (*words[words.index("dlrm.train") + 1 :], "checkpoint.every_steps=8", *settings)
    worker = ("tests.programs", "tests.system.recovery.takeover_worker", *arguments)
    (folder / "hold").write_text("11")  # until there is a save that has what is lost
    environment = {"CPR_FAULTS": str(folder / "faults.json"), CONTROL: str(folder), MACHINE: "a"}
    with starting(request) as start:
        launch = ("-m", "torch.distributed.run", *torchrun, *worker)
        process = start(*launch, environment=environment, forks=True)
        wait_for(lambda: list(folder.glob("runs/*/checkpoint/saves/*/manifest.json")), process)
        (folder / "hold").write_text("0")
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    (run,) = (folder / "runs").iterdir()
    return stderr + stdout, run


@pytest.mark.system
@pytest.mark.timeout(240)
def test_a_lost_node_is_reported_as_the_examples_show(lost_node):
    output, _ = lost_node
    assert set(masked(shown("a lost node"))) - set(masked(output)) == set()


@pytest.mark.system
@pytest.mark.timeout(240)
def test_commands_about_checkpoint_directories_run(lost_node, tmp_path, monkeypatch):
    _, run = lost_node
    (tmp_path / "runs").mkdir()
    (tmp_path / "failures.csv").write_text("lasted,failed\n13.5h,yes\n20h,yes\n9h,no\n")
    monkeypatch.chdir(tmp_path)
    done = []
    for words in lines_of("describe", "verify", "export", "plan"):
        name = next((word for word in words if word.startswith("runs/")), None)
        if name is not None:
            link = tmp_path / name.removesuffix("/checkpoint")
            if not link.exists():
                link.symlink_to(run)
            if "--since" in words:
                states, _ = own_states(open_storage(name))
                words[words.index("--since") + 1] = str(states[-1].step)
            assert entry(words) == 0
            done.append(words[0])
    assert {"describe", "verify", "export", "plan"} <= set(done)
