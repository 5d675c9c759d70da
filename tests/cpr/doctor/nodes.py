"""Threads in place of nodes, and a store in this process."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import HashStore

from cpr.doctor.meeting import Meeting


def run_nodes(*work, timeout_s=10.0):
    """Run one function for each node, which takes its meeting; returns their results, or what they raised."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    hosts = tuple("abcdefgh"[: len(work)])
    with ThreadPoolExecutor(len(work)) as pool:
        nodes = [pool.submit(each, Meeting(store, rank, hosts)) for rank, each in enumerate(work)]
        return [node.exception() or node.result() for node in nodes]
