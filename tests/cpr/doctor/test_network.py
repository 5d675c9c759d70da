"""Checks between nodes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import combinations

import pytest
from torch.distributed import DistNetworkError

from cpr.cli.command import INTERRUPTED
from cpr.cli.main import entry
from cpr.doctor import network
from cpr.doctor.finding import Finding
from cpr.doctor.links import Link, judge_links, rounds
from cpr.doctor.network import check_equality, network_findings, versions_here
from cpr.rendezvous.messages import Connection
from tests.cpr.doctor.nodes import run_nodes
from tests.cpr.rendezvous.workers import env_at, free_port

LINK = Link(gbps=(10.0, 9.0), latency_s=1e-4, skew_s=-0.01)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7, 8])
def test_every_pair_is_measured_once_and_no_node_is_in_two_pairs_of_a_round(num_nodes):
    found = list(rounds(num_nodes))
    assert Counter(pair for pairs in found for pair in pairs) == Counter(combinations(range(num_nodes), 2))
    for pairs in found:
        nodes = [node for pair in pairs for node in pair]
        assert len(set(nodes)) == len(nodes)


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({}, "ok", "link to b (node 1): 10 Gb/s there, 9 back"),
        ({"gbps": (10.0, 4.0)}, "warning", "MTU"),
        ({"latency_s": 0.02}, "warning", "20 ms round trip"),
        ({"skew_s": -1.5}, "warning", "NTP"),
        ({"skew_s": 400.0}, "PROBLEM", "NTP"),
        ({"skew_s": -1.5, "gbps": (10.0, 4.0)}, "warning", "times in logs mislead; look at MTU"),
    ],
)
def test_links_are_judged(changes, state, words):
    links = {(0, 1): replace(LINK, **changes), (0, 2): LINK, (1, 2): LINK}
    first, second = judge_links(links, ["a", "b", "c"], 0)
    assert first.state == state
    assert words in str(first)
    assert second.state == "ok"
    assert len(judge_links(links, ["a", "b", "c"], 1)) == 1
    assert not judge_links(links, ["a", "b", "c"], 2)


def test_slow_links_are_told_even_if_all_are():
    (found,) = judge_links({(0, 1): replace(LINK, gbps=(0.9, 0.9))}, ["a", "b"], 0)
    assert found.state == "warning"


def check_equal(*nodes):
    def check(node, meeting):
        return list(check_equality(meeting, *node))

    return run_nodes(*(partial(check, node) for node in nodes))


def test_nodes_with_other_versions_or_gpus_are_told():
    here = {"torch": "2", "numpy": "5"}
    found = check_equal((here, 8), ({"torch": "1", "numpy": "5"}, 8), (here, 0))
    assert [[each.state for each in node] for node in found] == [["PROBLEM", "warning"]] * 3
    text = (
        "node 0 (a) has torch 2; node 1 (b) has torch 1; node 2 (c) has torch 2. What to do: install the same"
    )
    assert text in found[0][0].text
    assert "this node has 0 GPUs, node 0 (a) 8, node 1 (b) 8" in found[2][1].text
    (same,), _ = check_equal((here, 8), (here, 8))
    assert str(same) == "ok       same versions: all nodes have the same torch, numpy, and 8 GPUs"
    (tolerated,), _ = check_equal((here, 8), (here | {"numpy": "6"}, 8))
    assert tolerated.state == "warning"
    assert "node 1 (b) has numpy 6" in tolerated.text


def test_code_is_compared_by_all_modules_of_this_project(tmp_path):
    def hash_of():
        return versions_here(tmp_path)["code of cpr, data, dlrm"]

    assert {"Python", "torch", "numpy", "pyarrow"} < versions_here().keys()
    assert versions_here() == versions_here()
    module = tmp_path / "dlrm/models/dot.py"
    module.parent.mkdir(parents=True)
    found = [hash_of()]
    for change in (
        lambda: module.write_text("a = 1"),
        lambda: module.write_text("a = 2"),
        lambda: module.rename(module.with_name("cross.py")),
    ):
        change()
        found.append(hash_of())
    assert len(set(found)) == 4
    (tmp_path / "dlrm/models/notes.txt").touch()
    assert hash_of() == found[-1]


def test_nodes_that_do_not_come_are_told():
    (found,) = network_findings(env_at(free_port(), of_agent=False), timedelta(seconds=0.1), None)
    assert found.state == "PROBLEM"
    assert "rank 1 of 2 did not join" in found.text
    assert "What to do: run `cpr doctor` on all 2 nodes" in found.text
    assert "open all TCP ports between the nodes" in found.text


def test_a_port_that_a_firewall_closes_is_told(monkeypatch):
    # the store's port is open, and the one that node 0 listens at is not
    monkeypatch.setattr(Connection, "to", lambda *where: None)
    env, timeout = env_at(free_port(), of_agent=False), timedelta(seconds=1)
    with ThreadPoolExecutor() as pool:
        nodes = [
            pool.submit(lambda rank=rank: list(network_findings(replace(env, rank=rank), timeout, None)))
            for rank in (0, 1)
        ]
        (_,), (found,) = (node.result() for node in nodes)
    assert re.search(r"rank 0 cannot be reached at \S+:\d+, its address in .*: a firewall closes", found.text)
    assert "open all TCP ports between the nodes" in found.text
    assert "{" not in found.text
    assert "earlier" not in found.text


def test_an_error_of_torch_is_told_in_one_line(monkeypatch):
    def fail(*_):
        raise DistNetworkError("The client socket has timed out\nframe #0: c10::Error")

    monkeypatch.setattr(network, "join_from", fail)
    (found,) = network_findings(env_at(1, of_agent=False), timedelta(seconds=1), None)
    assert found.state == "PROBLEM"
    assert "rendezvous: The client socket has timed out. What to do: run" in str(found)


def test_an_address_without_a_route_is_told():
    env = replace(env_at(1, of_agent=False), address="no.such.host.invalid")
    (found,) = network_findings(env, timedelta(seconds=0.1), None)
    assert found.state == "PROBLEM"
    assert "no route to no.such.host.invalid: [Errno" in found.text


def test_a_transfer_that_fails_is_told_in_one_line(monkeypatch):
    def fail(meeting):
        raise RuntimeError("to node 1 (b): timed out\nframe #0: c10::Error")

    monkeypatch.setattr(network, "init_process_group", lambda *_: None)
    monkeypatch.setattr(network, "check_links", fail)
    (found,) = network._with_gloo(None, None, timedelta(seconds=1))
    assert "links: to node 1 (b): timed out. What to do: see whether" in str(found)
    assert "the same MTU" in found.text


PLACE = ["--rdzv", "host:1"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--nodes", "2"], "give --nodes N"),
        (["--nodes", "2", "--node-rank", "0", "--rdzv", "somewhere"], "--rdzv HOST:PORT"),
        (["--nodes", "2", "--node-rank", "0", "--rdzv", "host:65536"], "a port of 1 to 65535"),
        (["--nodes", "2", "--node-rank", "0", "--rdzv", "host:0"], "a port of 1 to 65535"),
        (["--nodes", "2", "--node-rank", "2", *PLACE], "--node-rank 0 to N - 1"),
        (["--nodes", "2", *PLACE], "--node-rank 0 to N - 1"),
        (["--nodes", "0", "--node-rank", "0", *PLACE], "give --nodes N"),
        (["--node-rank", "0"], "give --nodes N"),
        (PLACE, "give --nodes N"),
        (["--wait", "5s"], "leave them and --wait out"),
        (["--nodes", "2", "--node-rank", "0", *PLACE, "--wait", "0s"], "give 1s or more"),
        (["--checkpoint", ""], "--checkpoint is empty"),
    ],
    ids=str,
)
def test_incomplete_options_are_refused(words, advice, capsys):
    assert entry(["doctor", *words]) == 2
    assert advice in capsys.readouterr().err


def test_one_node_may_be_checked_with_the_options_of_several(monkeypatch):
    # as in a script whose number of nodes is a setting
    monkeypatch.setattr("cpr.doctor.node.node_findings", lambda *_: iter([Finding("first", "fine")]))
    assert entry(["doctor", "--nodes", "1", "--node-rank", "0", *PLACE, "--wait", "5m"]) == 0


@pytest.mark.system
def test_two_nodes_on_loopback(tmp_path):
    words = ["-m", "cpr.cli", "doctor", "--json", "--nodes", "2", "--rdzv", f"localhost:{free_port()}"]
    memory = {0: ["--memory", "1MB"], 1: ["--memory", "1000TB"]}
    nodes = [
        subprocess.Popen(
            [sys.executable, *words, "--node-rank", str(rank), "--checkpoint", str(tmp_path), *memory[rank]],
            stdout=subprocess.PIPE,
        )
        for rank in memory
    ]
    found = [json.loads(node.communicate(timeout=100)[0])["findings"] for node in nodes]
    states = [
        {each["check"].partition(" to ")[0]: each["state"] for each in each_node} for each_node in found
    ]
    for check in ("rendezvous", "same versions", "same directory", "interfaces"):
        assert states[0][check] == states[1][check] == "ok"
    assert (states[0]["storage"], states[1]["storage"]) == ("ok", "warning")
    assert "link" in states[0]
    assert "link" not in states[1]
    assert states[1]["shared memory"] == "PROBLEM"
    assert [node.returncode for node in nodes] == ["PROBLEM" in each.values() for each in states]


@pytest.fixture(autouse=True)
def _log_level(monkeypatch):
    """The command sets the variable for its own process."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


def test_the_command_silences_torch(monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    levels = []
    monkeypatch.setattr(
        "cpr.doctor.node.node_findings", lambda *_: levels.append(os.environ["TORCH_CPP_LOG_LEVEL"]) or ()
    )
    assert entry(["doctor"]) == 0
    assert levels == ["FATAL"]


def test_sigterm_ends_a_check_by_an_exception_that_cleans_up(monkeypatch, capsys):
    cleaned = []

    def stopped(*_):
        try:
            yield Finding("first", "fine")
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("cpr.doctor.node.node_findings", stopped)
    assert entry(["doctor"]) == INTERRUPTED
    assert "first: fine" in capsys.readouterr().out
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) == before
