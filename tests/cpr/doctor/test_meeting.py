"""Nodes tell each other what they found."""

from cpr.errors import RendezvousError
from tests.cpr.doctor.nodes import run_nodes


def test_all_nodes_get_all_values_by_rank():
    def work(meeting):
        found = [meeting.gather("name", meeting.rank), meeting.gather("other", [None, meeting.name(1)])[0]]
        meeting.leave()
        return found

    assert run_nodes(work, work, work) == 3 * [[[0, 1, 2], [None, "node 1 (b)"]]]


def test_a_node_that_ends_is_named():
    def work(meeting):
        return meeting.gather("size", 1)

    first, _, third = run_nodes(work, lambda meeting: None, work, timeout_s=0.1)
    assert isinstance(first, RendezvousError)
    assert str(first) == str(third) == "node 1 (b) has ended, or does not answer: no size from it"
