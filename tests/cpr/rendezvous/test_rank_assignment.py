import json
from dataclasses import asdict, replace
from itertools import chain, permutations

from hypothesis import given
from hypothesis import strategies as st

from cpr.rendezvous.rank_assignment import HeldSegment, WorkerInfo, assign_ranks


def segment(session="a", rank=0, world_size=4, step=10, generation=0):
    return HeldSegment(
        session_id=session, rank=rank, world_size=world_size, step_finished=step, generation=generation
    )


def info(*held, restarted=True):
    return WorkerInfo(restarted=restarted, host="h", pid=1, held=held)


segments = st.builds(
    segment,
    session=st.sampled_from("abc"),
    rank=st.integers(0, 5),
    world_size=st.sampled_from([3, 4]),
    step=st.integers(-1, 20),
    generation=st.integers(0, 5),
)
infos = st.builds(
    lambda held, restarted: info(*held, restarted=restarted), st.lists(segments, max_size=3), st.booleans()
)
worlds = st.lists(infos, min_size=1, max_size=6)


@given(worlds)
def test_session_with_the_most_steps_continues_in_a_new_generation(world):
    decision = assign_ranks(world)
    assert sorted(decision.ranks) == list(range(len(world)))
    held = [each for one in world for each in one.held]
    if not any(one.restarted for one in world):
        assert not decision.continues
    if not any(one.restarted for one in world) or not held:
        assert decision.generation == 0
        assert decision.session_id not in "abc"
        assert decision.ranks == tuple(range(len(world)))
        return
    assert decision.continues
    of_it = [each for each in held if each.session_id == decision.session_id]
    assert max(each.step_finished for each in of_it) == max(each.step_finished for each in held)
    assert decision.generation > max(each.generation for each in of_it)


@given(infos)
def test_info_survives_json(each):
    assert WorkerInfo.from_json(json.loads(json.dumps(asdict(each)))) == each


# --- nodes of several workers ---


def claimed(memory, launched):
    """Infos of workers at (rank, local rank, workers of the node), each with its part of the memory."""
    return [
        replace(
            info(*(each for each in memory[node] if (each.rank - rank) % local_size == 0)),
            local_rank=local_rank,
            local_world_size=local_size,
        )
        for node, rank, local_rank, local_size in launched
    ]


def even(order, size):
    """Workers of nodes of one size, in the launcher's order of the nodes."""
    return [(node, place * size + i, i, size) for place, node in enumerate(order) for i in range(size)]


@st.composite
def failures(draw):
    """Nodes with the remaining memory of their ranks, and perhaps older memory."""
    size, num_nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    world_size = size * num_nodes
    memory = []
    for node in range(num_nodes):
        ranks = range(node * size, (node + 1) * size)
        left = draw(st.sampled_from([ranks, ()]) | st.lists(st.sampled_from(ranks), unique=True))
        older = draw(st.lists(st.integers(0, world_size - 1), max_size=2, unique=True))
        memory.append(
            [
                segment(rank=rank, world_size=world_size, step=draw(st.integers(8, 9)), generation=2)
                for rank in left
            ]
            + [segment(rank=rank, world_size=world_size, step=30, generation=1) for rank in older]
        )
    return size, memory


def of_node(order, size, ranks):
    """The new ranks of each node, by node."""
    return {node: ranks[place * size : (place + 1) * size] for place, node in enumerate(order)}


@given(failures(), st.randoms(use_true_random=False))
def test_nodes_with_memory_keep_their_ranks_in_any_launch_order(failure, chance):
    """Nodes without memory take the remaining ranks; those of a node stay together, by local rank."""
    size, memory = failure
    order = chance.sample(range(len(memory)), len(memory))
    world = claimed(memory, even(order, size))
    ranks = assign_ranks(world).ranks
    assert sorted(ranks) == list(range(len(ranks)))
    for node, mine in of_node(order, size, ranks).items():
        assert mine[0] % size == 0  # TorchRec: the node is rank // size, the device rank % size
        assert mine == tuple(range(mine[0], mine[0] + size))
        if any(each.generation == 2 for each in memory[node]):
            assert mine == tuple(range(node * size, (node + 1) * size))
    for one, rank in zip(world, ranks, strict=True):
        assert {each.rank for each in one.held if each.generation == 2} <= {rank}


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_as_much_memory_as_possible_stays_in_place(size, num_nodes, data):
    """Several nodes may have memory of the same ranks, of different steps, each of one block only."""
    world_size = size * num_nodes
    blocks = st.integers(0, num_nodes - 1)
    memory = []
    for _ in range(num_nodes):
        first = size * data.draw(blocks)
        left = data.draw(st.lists(st.integers(first, first + size - 1), unique=True))
        steps = st.integers(0, 2)
        memory.append([segment(rank=rank, world_size=world_size, step=data.draw(steps)) for rank in left])
    ranks = assign_ranks(claimed(memory, even(range(num_nodes), size))).ranks
    found = [(node, each) for node, held in enumerate(memory) for each in held]
    best = {
        each.rank: max(other.step_finished for _, other in found if other.rank == each.rank)
        for _, each in found
    }

    def in_place(blocks):
        return sum(
            each.step_finished == best[each.rank] and each.rank // size == blocks[node]
            for node, each in found
        )

    chosen = [ranks[node * size] // size for node in range(num_nodes)]
    assert in_place(chosen) == max(map(in_place, permutations(range(num_nodes))))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_launchers_order_stays_if_nodes_differ_in_size(sizes, chance):
    if len(set(sizes)) == 1:
        sizes = [*sizes, sizes[0] + 1]
    firsts = [sum(sizes[:node]) for node in range(len(sizes))]
    memory = [
        [segment(rank=firsts[node] + i, world_size=sum(sizes)) for i in range(size)]
        for node, size in enumerate(sizes)
    ]
    order = chance.sample(range(len(sizes)), len(sizes))
    launched = list(
        chain.from_iterable([(node, i, sizes[node]) for i in range(sizes[node])] for node in order)
    )
    world = claimed(memory, [(node, rank, i, size) for rank, (node, i, size) in enumerate(launched)])
    decision = assign_ranks(world)
    assert decision.ranks == tuple(range(sum(sizes)))
    assert decision.session_id == "a"


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_launchers_order_stays_at_another_world_size(old_size, old_nodes, size, num_nodes):
    old_world_size = old_size * old_nodes
    if old_world_size == size * num_nodes:
        return
    memory = [
        [segment(rank=node * old_size + i, world_size=old_world_size) for i in range(old_size)]
        for node in range(old_nodes)
    ] + [[]] * num_nodes
    decision = assign_ranks(claimed(memory, even(range(num_nodes), size)))
    assert (decision.ranks, decision.session_id) == (tuple(range(size * num_nodes)), "a")


def test_more_and_newer_memory_wins_a_block():
    more = [[segment(rank=0)], [segment(rank=0), segment(rank=1)]]
    assert assign_ranks(claimed(more, even([0, 1], 2))).ranks == (2, 3, 0, 1)
    newer = [[segment(rank=0, generation=1)], [segment(rank=0, step=30), segment(rank=1, step=30)]]
    assert assign_ranks(claimed(newer, even([0, 1], 2))).ranks == (0, 1, 2, 3)
