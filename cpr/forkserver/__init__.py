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

A script that begins with its imports moves them into `prepare`, or into modules that `prepare` imports.
Modules that read `RANK` while they are imported do not belong there: every fork has what rank 0 read.

Whoever asks and gets no answer, or a refusal because a file of the program has changed since, imports by
itself, and rank 0 leaves a copy behind again. Nothing is left on disk; other users are refused.

What differs from a process of its own: the worker has another pid, session and parent than what torchrun
started; stopping that one (SIGSTOP) does not stop the worker; hashes of strings are alike in all forks; if
the copy is killed, its forks end with it and torchrun starts them again. The copy's memory is shared, page by
page, with the worker it was forked from and with the forks, until one of them writes to it.
"""

from cpr.forkserver.start import run

__all__ = ["run"]
