"""A fork server on each node, from which restarted workers start without importing anything again.

Most of the restart of a worker is Python importing torch and TorchRec: seconds of processor time for each
worker, at the same time. So the first worker of a node, after its imports, forks a copy of itself that waits:
the fork server. When torchrun starts the workers again, each new process asks the fork server for a fork,
passes its environment, command line and streams to the fork, and becomes its proxy: it forwards signals, and
ends as the fork ends. To torchrun the proxy is the worker: killing one kills the other.

    def prepare():
        import my_model          # everything heavy: but no threads, no CUDA, no process group

    def work() -> int:
        ...                      # training

    if __name__ == "__main__":
        raise SystemExit(forkserver.run(prepare, work))

A script that begins with its imports moves them into `prepare`, or into modules that `prepare` imports.
Modules that read `RANK` at import do not belong there: every fork has the value that rank 0 read.

A process that gets no answer, or a refusal because a file of the program has changed, imports by itself, and
rank 0 leaves a new fork server behind. Nothing is left on disk; other users are refused.

Differences from a process of its own: the worker has another pid, session and parent than the process that
torchrun started; stopping the proxy (SIGSTOP) does not stop the worker; string hashes are the same in all
forks; if the fork server is killed, its forks end with it and torchrun restarts them. The fork server shares
its memory, page by page, with the worker it was forked from and with the forks, until one of them writes to
it.
"""

from cpr.forkserver.start import run

__all__ = ["run"]
