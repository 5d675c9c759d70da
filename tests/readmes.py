"""The READMEs of the repository, and their commands, which tests run in their own process."""

import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import dlrm.train
from tests.data.convert.conftest import inline_workers

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FOLDERS = ("cpr", "data", "dlrm", "examples", "experiments", "requirements")
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md") if path.parent.name != "results"
    ),
]
FENCE = re.compile(r"^(?:<!-- (?P<label>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
RUN = "runs/20261121-151353-tiny"
"""The run folder that the pages name."""
STARTS_WORKERS = {
    "data.convert": "data.convert.job",
    "data.prepare": "data.prepare.job",
    "data.synthetic": "data.synthetic.build",
}
"""Commands that start processes, and the modules where they do."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    label: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {self.text.strip().splitlines()[0] if self.text.strip() else 'empty'}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(language: str | None = None) -> list[Block]:
    found = [
        Block(page, match["language"], match["label"] or "", match["text"])
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
    ]
    return [block for block in found if language in (None, block.language)]


def commands(text: str) -> Iterator[list[str]]:
    """Every command of a `bash` block, as a list of words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


COMMAND_LINES = [(block, words) for block in blocks("bash") for words in commands(block.text)]


def command(page: str, part: str) -> list[str]:
    """The words of the only command of a page that holds `part`.

    Call it with texts, not with variables: `test_readme_commands.py` looks for these calls in the tests.
    """
    found = [words for words in commands_of(page) if part in shlex.join(words)]
    assert len(found) == 1, f"{page} has {len(found)} commands with {part}"
    return found[0]


def commands_of(page: str) -> list[list[str]]:
    return [words for block, words in COMMAND_LINES if name_of(block.page) == page]


def as_run(folder: Path) -> None:
    """Give a run the name that the pages use, below the current folder."""
    Path(RUN).parent.mkdir()
    Path(RUN).symlink_to(folder)


def run(words: list[str], *more: str) -> None:
    """Run a command of a page in this process, with more words; it must end well.

    It runs as one rank, whatever torchrun would start. `/data/` and `s3://` are the current folder.
    """
    words = [file for word in words for file in _files(re.sub("(^|=)(s3://|/data/)", r"\1", word))]
    if words[0] == "torchrun":
        options = get_args_parser().parse_args(words[1:])
        module, arguments = options.training_script, options.training_script_args
    else:
        assert words[:2] == ["python", "-m"]
        module, *arguments = words[2:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *arguments, *more])
        if module in STARTS_WORKERS:
            patch.setattr(importlib.import_module(STARTS_WORKERS[module]), "local_workers", inline_workers)
        if module == "dlrm.train":  # without the fork server, and without settings of the whole process
            patch.setattr("dlrm.training.run.keep_freed_memory", lambda: None)
            assert dlrm.train.work() == 0
        else:
            assert not _exit_code(module), shlex.join(words)


def _files(word: str) -> list[str]:
    """What a shell makes of a word: the files that a pattern matches, if any."""
    return (sorted(map(str, Path().glob(word))) if "*" in word else []) or [word]


def _exit_code(module: str) -> object:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code
    return 0
