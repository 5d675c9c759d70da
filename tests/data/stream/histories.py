"""Ranks that train a stream, are killed and go on, as a stateful test plays them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from data.stream.agreement import Offer, PartitionState, Rules, decide, limits
from data.stream.reader import PartitionReader, ReaderConfig
from data.stream.source import StreamSource
from data.stream.units import KnownUnits
from tests.data.stream.streams import ids_of

MOST_RANKS = 5


@dataclass
class Saved:
    states: dict[str, PartitionState]
    known: dict[str, bytes] = field(default_factory=dict)
    late: int = 0
    trained: list[int] = field(default_factory=list)


class RankHistories(RuleBasedStateMachine):
    """Ranks train what has come, are killed, and go on from a save on any number of ranks."""

    def begin(self, open_stream: Callable[[], StreamSource], rules: Rules, config: ReaderConfig) -> None:
        """Start with one rank; for subclasses to call."""
        self.open_stream, self.names = open_stream, open_stream().partitions
        self.rules, self.config = rules, config
        self.states = {name: PartitionState() for name in self.names}
        self.known = {name: KnownUnits() for name in self.names}
        self.late = 0
        self.trained: list[int] = []
        self.saves = [Saved(dict(self.states))]
        self.start(1)

    def start(self, world_size: int) -> None:
        self.readers = []
        for rank in range(world_size):
            states = {name: self.states[name] for name in self.names[rank::world_size]}
            known = {name: self.known[name].known for name in states}
            self.readers.append(PartitionReader(self.open_stream(), states, self.config, known))
        self.limits = [0] * world_size

    @rule(rank=st.integers(0, MOST_RANKS - 1), times=st.integers(1, 5))
    def read(self, rank: int, times: int) -> None:
        for _ in range(times):
            self.readers[rank % len(self.readers)].read_once()

    @rule()
    def step(self) -> None:
        offers = [reader.offer(limit) for reader, limit in zip(self.readers, self.limits, strict=True)]
        self.note(offers)
        decision = decide(offers, self.rules)
        self.limits = limits(offers, self.rules.global_batch)
        if all(offer.has_looked for offer in offers):
            assert sum(self.limits) == self.rules.global_batch
            assert min(self.limits) >= 1
        else:
            assert (decision, sum(self.limits)) == ("wait", 0)
        if decision == "train":
            total = 0
            for reader, offer in zip(self.readers, offers, strict=True):
                ids = ids_of(reader.take(offer.size))
                assert len(ids) == offer.size
                self.trained += ids
                self.states |= offer.states
                total += offer.size
            assert 0 < total <= self.rules.global_batch

    def note(self, offers: Sequence[Offer]) -> None:
        """Note what the offers of all ranks tell."""
        for offer in offers:
            for name, units in offer.found.items():
                self.known[name].add(units)
                self.late += sum(each.num_records for each in units if each.is_late)

    @rule()
    def save(self) -> None:
        loaded = {name: PartitionState.from_json(each.to_json()) for name, each in self.states.items()}
        known = {name: self.known[name].encoded(state.place) for name, state in loaded.items()}
        self.saves.append(Saved(loaded, known, self.late, list(self.trained)))

    @rule(world_size=st.integers(1, MOST_RANKS), age=st.integers(0, 2))
    def die(self, world_size: int, age: int) -> None:
        self.go_back(self.saves[-1 - min(age, len(self.saves) - 1)])
        self.start(world_size)

    def go_back(self, saved: Saved) -> None:
        self.states, self.late, self.trained = dict(saved.states), saved.late, list(saved.trained)
        self.known = {name: KnownUnits() for name in self.names}
        self.known |= {name: KnownUnits.decoded(each) for name, each in saved.known.items() if each}

    @rule(world_size=st.integers(1, MOST_RANKS))
    def die_at_once(self, world_size: int) -> None:
        self.save()
        self.die(world_size, 0)

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if hasattr(self, "names"):
            assert len(set(self.trained)) == len(self.trained)
            assert sum(each.trained for each in self.states.values()) == len(self.trained)

    def drain(self) -> None:
        """Train all that can be read now."""
        for _ in range(10_000):
            read = [reader.read_once() for reader in self.readers]
            before, could_offer = len(self.trained), sum(self.limits) > 0
            self.step()
            if could_offer and not any(read) and len(self.trained) == before:
                return
        raise AssertionError("it does not end")


def play(machine: type[RankHistories], max_examples: int = 60) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
