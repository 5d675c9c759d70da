"""Saves again and again and is killed (`-9`) at every moment that matters, one process after the other.

`python tests/system/checkpoint/crash_worker.py FOLDER` imports once and then forks a process for each moment:
it runs the same script of saves and kills itself at its n-th touch of the storage. A log next
to the directory lists the saves whose commit was reported, which the test compares with the loaded state.
"""

import json
import os
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from cpr.checkpoint.catalog.committer import Retention
from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.save import snapshot
from cpr.checkpoint.storage.local import LocalStorage
from tests.cpr.shards.models import bags, shard

ROWS = {"a": 60, "b": 20}
LAYOUT = {"a": "tw", "b": "tw"}
SCRIPT = ("base", "rows", "rows", "rows", "base", "rows", "base", "base")
"""Kinds of the saves; with `merge_after` of 2, the third row save is followed by a merge."""
KILLS_OF_A_KIND = 3
"""Moments that are tried of each kind of touch (create, write, rename, delete), spread over the script."""


class Moments:
    """Notes touches of the storage and kills the process at one of them.

    A touch is what was done to which file, and how often that was done before: the same in every run, however
    its threads take turns.
    """

    def __init__(self, folder, fatal):
        self.folder = folder
        self.fatal = fatal
        self.seen = []
        self.counts = Counter()

    def __call__(self, what, path):
        path = str(path).removeprefix(f"{self.folder}/")
        self.counts[what, path] += 1
        touch = (what, path, self.counts[what, path])
        self.seen.append(touch)
        if touch == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


class _Sink:
    def __init__(self, sink, path, moment):
        self._sink, self._path, self._moment = sink, path, moment

    def write(self, data):
        self._sink.write(data)
        self._moment("write", self._path)


def watch(moment):
    """Let every touch of a local storage, and every rename, be a moment."""
    create, delete, replace = LocalStorage.create, LocalStorage.delete, os.replace

    @contextmanager
    def watched_create(self, path):
        moment("create", path)
        with create(self, path) as sink:
            yield _Sink(sink, path, moment)
        moment("created", path)

    def watched_delete(self, path):
        moment("delete", path)
        delete(self, path)
        moment("deleted", path)

    def watched_replace(source, target, **options):
        moment("replace", target)
        replace(source, target, **options)
        moment("replaced", target)

    LocalStorage.create, LocalStorage.delete = watched_create, watched_delete
    os.replace = watched_replace


def fill(shards, step):
    for each in shards:
        for column in each.columns.values():
            column.fill_(step)


def run(folder, fatal):
    """The script; in a process of its own."""
    moment = Moments(folder, fatal)
    watch(moment)
    snapshot.rows_per_piece = lambda _: 20
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = shard(LAYOUT, ebc=bags(**ROWS))
    config = CheckpointConfig(uri=str(folder), merge_after=2, retention=Retention(keep_last=2))
    checkpointer = Checkpointer(model, config)
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        for step, kind in enumerate(SCRIPT, 1):
            checkpointer.step()
            fill(checkpointer.shards, step)
            if kind == "base":
                checkpointer.save("consistent")
            else:
                checkpointer.save_rows({each.name: torch.tensor([1, step]) for each in checkpointer.shards})
            checkpointer.wait()
            log.write(json.dumps(step) + "\n")
            log.flush()
    checkpointer.close()
    (folder.parent / "moments.json").write_text(json.dumps(moment.seen))


def in_a_fork(function, *arguments):
    """Run it in a child of this process; how the child ended."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def chosen(touches):
    """The touches to die at: some of each kind, spread over the script."""
    for kind in sorted({what for what, _, _ in touches}):
        alike = [touch for touch in touches if touch[0] == kind]
        for part in range(KILLS_OF_A_KIND):
            yield alike[(2 * part + 1) * len(alike) // (2 * KILLS_OF_A_KIND)]


def main(root):
    torch.set_num_threads(1)
    (root / "whole").mkdir()
    assert in_a_fork(run, root / "whole", None) == 0
    touches = [tuple(touch) for touch in json.loads((root / "moments.json").read_text())]
    for number, fatal in enumerate(chosen(touches)):
        folder = root / f"killed-{number}"
        folder.mkdir()
        code = in_a_fork(run, folder, fatal)
        assert code == -signal.SIGKILL, f"{fatal}: the process ended with {code}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
