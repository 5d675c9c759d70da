"""The fixtures that guard every test really do fail a test that leaves something behind."""

from pathlib import Path
from textwrap import dedent

import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "thread": """
        import threading
        stop = threading.Event()
        def test_leak():
            threading.Thread(target=stop.wait, name="forgotten", daemon=True).start()
        """,
    "environment": """
        import os
        def test_leak():
            os.environ["FORGOTTEN"] = "1"
        """,
    "process_group": """
        import torch.distributed
        def test_leak(tmp_path):
            store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        """,
}


@pytest.mark.system
def test_a_leak_fails_the_test_and_does_not_spread(pytester: pytest.Pytester) -> None:
    guards = (Path(__file__).parent / "conftest.py").read_text()
    pytester.makeconftest(guards.replace("GRACE_S = 5.0", "GRACE_S = 0.1"))
    for kind, leak in LEAKS.items():
        pytester.makepyfile(**{f"test_{kind}": f"{dedent(leak)}\ndef test_next(): pass"})
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    # A leak found after the test body counts as an error beside the test's own pass.
    result.assert_outcomes(passed=2 * len(LEAKS), errors=len(LEAKS))
    for what in ("threads running: forgotten", "variables changed: FORGOTTEN", "a process group"):
        result.stdout.fnmatch_lines([f"*the test left *{what}*"])
