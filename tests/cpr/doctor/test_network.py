"""Checks between nodes."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import combinations

import pytest

from cpr.cli.main import entry
from cpr.doctor.network import Link, judge_links, network_findings, rounds
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


def test_nodes_that_do_not_come_are_told():
    (found,) = network_findings(env_at(free_port(), of_agent=False), timedelta(seconds=0.1))
    assert found.state == "PROBLEM"
    assert "rank 1 of 2 did not join" in found.text
    assert "What to do: run `cpr doctor` on all 2 nodes" in found.text


def test_an_address_without_a_route_is_told():
    env = replace(env_at(1, of_agent=False), address="no.such.host.invalid")
    (found,) = network_findings(env, timedelta(seconds=0.1))
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
    assert states[0]["rendezvous"] == states[1]["rendezvous"] == states[0]["storage"] == "ok"
    assert "link" in states[0]
    assert "link" not in states[1]
    assert states[1]["shared memory"] == "PROBLEM"
    assert [node.returncode for node in nodes] == ["PROBLEM" in each.values() for each in states]
