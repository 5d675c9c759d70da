"""Workers that start as forks of a fork server: `-m tests.system.prepared MODULE ARGUMENTS`.

All but the first workers of a torchrun, or of all torchruns of one `cpr run`, are forks.
"""

import importlib
import sys

from cpr import forkserver


def prepare() -> None:
    importlib.import_module(sys.argv[1])


def work() -> int:
    module, *arguments = sys.argv[1:]
    importlib.import_module(module).main(*arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(forkserver.run(prepare, work))
