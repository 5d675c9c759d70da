"""`dlrm.train` that dies, once, when the second state that it keeps as the best is about to be committed."""

import os
import signal

from cpr.checkpoint import checkpointer
from cpr.faults.storages import FaultyStorage
from dlrm.launch.process import leave
from dlrm.train import work


class Deadly(FaultyStorage):
    def before(self, operation, path):
        """Kill this process; the restarted one gives its save another number."""
        if operation == "create" and "/00000001" in path and path.endswith("manifest.json"):
            os.kill(os.getpid(), signal.SIGKILL)


def open_deadly(uri, open_storage=checkpointer.open_storage):
    storage = open_storage(uri)
    return Deadly(storage) if uri.endswith("/best") else storage


if __name__ == "__main__":
    checkpointer.open_storage = open_deadly
    leave(work())
