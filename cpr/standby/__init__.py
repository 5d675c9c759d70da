"""A prepared process on each node, from which restarted workers start without importing anything again.

Most of a worker's way back into training is Python importing torch and TorchRec: seconds of processor time
for each worker, all at once. So the first worker of a node, once it has imported everything, forks a copy of
itself that waits. When torchrun starts the workers again, each new process asks that copy for a fork instead
of importing, hands it its environment, command line and streams, passes signals on, and ends as it ends. To
torchrun it is the worker: killing it kills the worker behind it, and the other way round.

    def prepare():
        import my_model          # everything heavy: but no threads, no CUDA, no process group

    def work() -> int:
        ...                      # training

    if __name__ == "__main__":
        raise SystemExit(standby.run(prepare, work))
"""

from cpr.standby.running import run

__all__ = ["run"]
