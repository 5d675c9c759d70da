"""Links of a chosen speed: who shares them, that they have it, and that nothing is left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.harness.network import LINK, PREFIX, Network, remove_leftovers
from tests.experiments.harness.namespaces import namespaces, own_namespaces

SIZE = 1_000_000
SINK = """
import socket
with socket.create_server(("", 9000)) as end:
    print("listening", flush=True)
    for _ in range(2):
        peer, _ = end.accept()
        while peer.recv(65536):
            pass
        peer.close()
"""
SOURCE = f"""
import socket
from experiments.harness.network import sent_bytes
before = sent_bytes()
with socket.create_connection(("10.77.0.2", 9000)) as sink:
    sink.sendall(bytes({SIZE}))
    sink.shutdown(socket.SHUT_WR)
    sink.recv(1)
print(sent_bytes() - before, flush=True)
"""
LISTEN = """
import socket
with socket.create_server(("", 9000)):
    print("listening", flush=True)
    input()
"""


def test_workers_of_a_node_share_its_namespace_and_know_it():
    network = Network(4, per_node=2)
    commands = [network.command(worker) for worker in range(4)]
    assert commands[0] == commands[1] != commands[2] == commands[3]
    told = [network.environment(worker) for worker in range(4)]
    assert [(each["RANK"], each["GROUP_RANK"], each["LOCAL_RANK"]) for each in told] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"]) for each in told} == {
        ("4", "2", "10.77.0.1")
    }
    with pytest.raises(ValueError, match="3 workers cannot be dealt out to nodes of 2"):
        Network(3, per_node=2)


@pytest.mark.usefixtures("links")
def test_links_have_their_speed_and_leave_nothing_behind():
    with Network(2) as network:
        assert len(own_namespaces()) == 3
        show = [*network.command(1), "tc", "qdisc", "show", "dev", LINK]
        for gbit_per_s, expected in ((5.0, "rate 5Gbit"), (1.0, "rate 1Gbit")):
            network.limit(gbit_per_s)
            assert expected in subprocess.run(show, capture_output=True, text=True, check=True).stdout
        network.limit(None)
        network.limit(None)
        assert "tbf" not in subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert not own_namespaces()
    with pytest.raises(KeyboardInterrupt), Network(1):
        raise KeyboardInterrupt
    assert not own_namespaces()


@pytest.mark.usefixtures("links")
def test_what_a_dead_process_left_is_removed_and_nothing_else():
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, own = f"{PREFIX}-{gone.pid}-0", f"{PREFIX}-{os.getpid()}-mine"
    for name in (left, own):
        subprocess.run(["ip", "netns", "add", name], check=True)
    stray = subprocess.Popen(["ip", "netns", "exec", left, "sleep", "100"])
    try:
        while Path(f"/proc/{stray.pid}/comm").read_text().strip() != "sleep":
            pass
        remove_leftovers()
        assert stray.wait(10) < 0
        assert left not in namespaces()
        assert own in namespaces()
    finally:
        stray.kill()
        subprocess.run(["ip", "netns", "del", own], check=True)


@pytest.mark.usefixtures("links")
def test_what_workers_of_a_node_send_each_other_does_not_pass_its_link():
    with Network(4, per_node=2) as network:

        def run(worker, program):
            return subprocess.Popen(
                [*network.command(worker), sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
            )

        sink = run(2, SINK)
        try:
            assert sink.stdout.readline() == "listening\n"
            sent = [int(run(worker, SOURCE).communicate(timeout=20)[0]) for worker in (0, 3)]
            assert sink.wait(20) == 0
        finally:
            sink.kill()
            sink.communicate()
    assert SIZE < sent[0] < 1.05 * SIZE
    assert sent[1] < 1000


@pytest.mark.usefixtures("links")
def test_a_link_that_is_cut_lets_nothing_pass_until_it_is_healed():
    with Network(2) as network:

        def reaches():
            ask = f"import socket; socket.create_connection(({network.address(1)!r}, 9000), timeout=1)"
            command = [*network.command(0), sys.executable, "-c", ask]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        command = [*network.command(1), sys.executable, "-c", LISTEN]
        sink = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        try:
            assert sink.stdout.readline() == "listening\n"
            link = network.link(1)
            assert reaches()
            link.cut()
            link.cut()
            assert not reaches()
            link.heal()
            link.heal()
            assert reaches()
        finally:
            sink.kill()
            sink.communicate()
