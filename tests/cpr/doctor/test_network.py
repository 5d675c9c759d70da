"""Checks between nodes."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import combinations

import pytest

from cpr.cli.command import INTERRUPTED
from cpr.cli.main import entry
from cpr.doctor.finding import Finding
from cpr.doctor.links import Link, judge_links, rounds
from cpr.doctor.network import check_equality, network_findings
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


def test_nodes_with_other_packages_or_gpus_are_told():
    nodes = [("torch 2", 8), ("torch 1", 8), ("torch 2", 0)]

    def check(node, meeting):
        return list(check_equality(meeting, *node))

    found = run_nodes(*(partial(check, node) for node in nodes))
    assert [[each.state for each in node] for node in found] == [["PROBLEM", "warning"]] * 3
    assert "this node has torch 2; node 1 (b) has torch 1. What to do: install the same" in found[0][0].text
    assert "this node has 0 GPUs, node 0 (a) 8, node 1 (b) 8" in found[2][1].text
    (same,), _ = run_nodes(*2 * [partial(check, nodes[0])])
    assert same.state == "ok"


def test_nodes_that_do_not_come_are_told():
    (found,) = network_findings(env_at(free_port(), of_agent=False), timedelta(seconds=0.1), None)
    assert found.state == "PROBLEM"
    assert "rank 1 of 2 did not join" in found.text
    assert "What to do: run `cpr doctor` on all 2 nodes" in found.text


def test_an_address_without_a_route_is_told():
    env = replace(env_at(1, of_agent=False), address="no.such.host.invalid")
    (found,) = network_findings(env, timedelta(seconds=0.1), None)
    assert found.state == "PROBLEM"
    assert "no route to no.such.host.invalid: [Errno" in found.text


@pytest.mark.parametrize(
    "words", [[], ["--rdzv", "somewhere"], ["--rdzv", "host:1", "--node-rank", "2"]], ids=str
)
def test_links_take_an_address_and_a_rank(words, capsys):
    assert entry(["doctor", "--nodes", "2", *words]) == 2
    assert "--rdzv HOST:PORT" in capsys.readouterr().err


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
