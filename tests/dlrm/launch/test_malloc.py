"""Memory settings of the process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm import train
from dlrm.launch.malloc import HUGE_PAGES, ask_for_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

IN_HUGE_PAGES = """
import re
from pathlib import Path
from dlrm.launch.malloc import ask_for_huge_pages
ask_for_huge_pages()
import torch
tensor = torch.zeros(16 << 20)
print(sum(map(int, re.findall(r"AnonHugePages: *([0-9]+) kB", Path("/proc/self/smaps").read_text()))))
"""


@pytest.fixture
def no_wish(monkeypatch):
    for name in HUGE_PAGES:
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_wish")
def test_huge_pages_are_requested_before_torch_is_imported(monkeypatch):
    asked = []
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train.forkserver, "run", lambda *_: asked.append(dict(os.environ)) or 0)
    train.main()
    assert asked[0].items() >= HUGE_PAGES.items()
    modules = "import sys; import dlrm.train; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", modules], text=True) == "False\n"


@pytest.mark.usefixtures("no_wish")
def test_the_environment_overrides_huge_pages(monkeypatch):
    name = next(iter(HUGE_PAGES))
    monkeypatch.setenv(name, "0")
    ask_for_huge_pages()
    assert os.environ[name] == "0"


@pytest.mark.system
@pytest.mark.skipif(
    not SETTING.exists() or re.search(r"\[(madvise|always)\]", SETTING.read_text()) is None,
    reason="the kernel has no transparent huge pages",
)
@pytest.mark.usefixtures("no_wish")
def test_large_tensors_lie_in_huge_pages():
    kilobytes = subprocess.check_output([sys.executable, "-c", IN_HUGE_PAGES], text=True)
    assert int(kilobytes) > 0  # as many of the 64 MB as the kernel found
