import time

import psutil
import pytest

from experiments.harness.launch import running, torchrun, torchrun_command

pytestmark = pytest.mark.system


def test_the_output_of_a_failed_launch_is_told():
    with pytest.raises(RuntimeError, match="not_a_module"):
        torchrun("experiments.not_a_module", [], processes=1, threads=1)


def test_an_interrupted_experiment_leaves_no_worker_behind():
    command = torchrun_command("http.server", ["0"], processes=2)  # a worker that never ends by itself
    workers: list[psutil.Process] = []

    def wait_for_workers_and_interrupt():
        with running(command, threads=1) as launch:
            # torchrun loses workers that it is about to start: they are to be at work
            while len([each for each in workers if each.net_connections()]) < 2:
                time.sleep(0.05)
                workers[:] = psutil.Process(launch.process.pid).children()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_workers_and_interrupt()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
