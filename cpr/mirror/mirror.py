"""The mirror of a worker: sends what changes in its rows to a worker of the next node, or into shared memory.

Training never waits for the link. Changed rows are copied by a thread during the forward pass of the next
step, which only reads, and sent while training goes on. While a moment is on its way no other is taken: its
rows come with the next one, so that a slow link makes the mirror older, and no queue grows.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.format.tree_file import state_bytes
from cpr.checkpoint.save.snapshot import can_wait
from cpr.errors import NotEnoughMemoryError
from cpr.humanize import size_text
from cpr.mirror.changed_rows import ChangedRows, Rows, united
from cpr.mirror.chosen_rows import ChosenRows
from cpr.mirror.config import MirrorConfig, MirrorFigures
from cpr.mirror.copy import PASS_BYTES, Moment, Owner, ShardForm, digest_of
from cpr.mirror.host import HostKeeper
from cpr.mirror.keeper import Keeper
from cpr.mirror.link import KeeperAddress, Link, LinkLostError
from cpr.mirror.pieces import ShardRows, write_piece
from cpr.mirror.rounding import REST, ROUNDED, Form, RoundedRows
from cpr.mirror.undo import UndoLog, can_undo
from cpr.rendezvous import WorkerGroup, WorkerInfo
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.resident.home import Home
from cpr.resident.segment import Segment
from cpr.shards import before_updates
from cpr.shards.shard import TableShard

REST_BYTES: Final = 1 << 20
"""Bytes of a moment for what rounding has left of earlier rows; more, if the changed rows have more than
`REST_PER_CHANGED` times as many."""
REST_PER_CHANGED: Final = 4
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
"""Pauses between attempts to reach the keeper again."""
SWITCH_AFTER_S: Final = 60.0
"""How long a keeper's connection may be lost before the mirror goes to the next one, if there is another. A
keeper that falls silent is lost after `PATIENCE_S`; with the last pause and attempt it takes 92 s at most."""
MOST_OWED: Final = 0.5
MOST_OWED_BYTES: Final = 64 << 20
"""Share of the rows' bytes, and bytes, that may be sent in one moment after a keeper was lost. If more than
both has changed, the mirror is filled anew, which takes less memory on both sides."""

Place = KeeperAddress | HostKeeper
"""Where a keeper is."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of a shard that travel in one piece."""

    shard: int
    rows: slice | Tensor
    form: Form = Form.EXACT
    places: Tensor | None = None
    """In the mirror; None: as in the shard."""


@dataclass(eq=False)
class _Job:
    """Rows that are to be copied before the next update, and sent."""

    parts: Sequence[_Part]
    step: int
    epoch: int = 0
    state: bytearray = field(default_factory=bytearray)
    """The owner's other state of a moment."""
    is_moment: bool = True
    rounded: int = 0
    """Rows that the mirror has rounded after this moment."""
    copied: threading.Event = field(default_factory=threading.Event)


class Mirror:
    """Sends this worker's rows to the keeper of its mirror, from its creation to `close`.

    Args:
        config: settings.
        keeper: keeps the mirrors of other workers here, or this worker's own.
        places: of the possible keepers of this worker's mirror, the first choice first.
        owner: this worker.
        shards: its shards, in the order of the owner's forms.
        model: with the tables.
        optimizers: ordinary ones that update tables.
        segment: this worker's memory, in which what undoes its last steps is kept; None: nothing is.
        steps_done: training steps done.
        connects_now: reach a keeper before training begins; otherwise the thread does, as after a connection
            was lost, and training does not wait until the keeper has made memory.

    Raises:
        NotEnoughMemoryError: no keeper of this worker's mirror has room.
        OSError: none can be reached.
    """

    def __init__(
        self,
        config: MirrorConfig,
        keeper: Keeper | HostKeeper,
        places: Sequence[Place],
        owner: Owner,
        shards: Sequence[TableShard],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        segment: Segment | None = None,
        steps_done: int = 0,
        *,
        connects_now: bool = True,
    ) -> None:
        self._config, self._keeper, self._owner = config, keeper, owner
        self._shards = shards
        self._closing = threading.Event()
        self._link: Link | HostKeeper | None = None
        self._place, *self._others = self._connect_to_any(places) if connects_now else places
        self._is_whole = False
        """Whether the keeper has a whole moment."""
        self._must_empty = False
        """Whether the keeper may have an older mirror, which does not count any more."""
        self._lost_s: float | None = None
        """Since when nothing has arrived, because the keeper was lost."""
        self._pause_s = FIRST_PAUSE_S
        self._changed = ChangedRows(model, shards, self._before_change)
        self._chosen = ChosenRows(config, shards, model)
        self._chosen.watch()
        self._updates = before_updates(model, optimizers, self._settle)
        num_slots = self._chosen.num_slots
        self._rows = [
            ShardRows(shard.columns, is_numbered=number in num_slots) for number, shard in enumerate(shards)
        ]
        self._forms = {
            number: ROUNDED[config.wire_dtype]
            for number, rows in enumerate(self._rows)
            if rows.can_round and number not in self._changed.whole
        }
        self._rounded = RoundedRows(
            {
                number: num_slots.get(number, self._rows[number].num_rows)
                for number, form in self._forms.items()
                if form in REST
            }
        )
        self._undo: UndoLog | None = None
        if segment is not None and not self._changed.whole and not num_slots:
            held = [number for number, shard in enumerate(shards) if segment.holds(shard)]
            if len(held) in {0, len(shards)} and can_undo(segment, [shards[number] for number in held]):
                self._undo = UndoLog(segment, [self._rows[number] for number in held], steps_done)
        self._to_fill = self._all_parts()
        self._kept: Rows = {}
        """Changed rows of a moment that did not arrive."""
        self.step_sent: int | None = None
        """Training steps done at the newest moment of the mirror; None: it is not whole yet."""
        self.figures = MirrorFigures()
        """Cost so far."""
        self._since = 0
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._job: _Job | None = None
        self._has_job = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpr-mirror", daemon=True)
        self._thread.start()

    def step(self, steps_done: int, epoch: int, state: Mapping[str, Any]) -> None:
        """Take a moment after a training step, unless the one before is still on its way.

        Args:
            steps_done: training steps done.
            epoch: of the checkpoint directory's ownership.
            state: per-rank states and counters, as in `cpr.checkpoint.format.tree_file`; not kept.
        """
        if self._undo is not None:
            self._undo.begin(steps_done + 1)
        self._since += 1
        if self.step_sent is not None:
            age = steps_done - self.step_sent
            self.figures = replace(self.figures, age=age, oldest=max(self.figures.oldest, age))
        if self._job is not None:
            return
        if self._to_fill:
            self._job = _Job(self._to_fill[0], steps_done, is_moment=False)
        elif self._since >= self._config.every_steps:
            self._since = 0
            was_lost = bool(self._kept)
            parts = self._parts_of_moment()
            if was_lost and self._is_too_much(parts):
                logger.warning("the mirror of rank %d is filled anew: much has changed", self._owner.rank)
                self._fill_anew()
                return
            count = self._rounded.count
            data = state_bytes({**state, "mirror": {"rounded": count, "share": self._chosen.share}})
            self._job = _Job(parts, steps_done, epoch, data, rounded=count)
        if self._job is not None:
            if not all(can_wait(self._shards[part.shard]) for part in self._job.parts):
                self._copy(self._job)
            self._has_job.set()

    def close(self, *, remove: bool) -> None:
        """Stop; `remove`: free the mirrors that are kept here, instead of leaving them to a successor."""
        self._closing.set()
        self._updates.remove()
        self._changed.close()
        self._chosen.close()
        if (link := self._link) is not None:
            link.close()
        self._has_job.set()
        self._thread.join()
        self._keeper.close(remove=remove)

    def _all_parts(self) -> list[list[_Part]]:
        """All rows of the shards that the mirror holds whole, about `PASS_BYTES` for each step."""
        passes, num_bytes = list[list[_Part]](), PASS_BYTES
        for part in _parts(self._rows):
            if part.shard not in self._chosen.num_slots:
                if num_bytes + self._num_bytes(part) > PASS_BYTES:
                    passes.append([])
                    num_bytes = 0
                passes[-1].append(part)
                num_bytes += self._num_bytes(part)
        return passes

    def _parts_of_moment(self) -> list[_Part]:
        """Changed rows, rows that join the mirror, and what rounding has left of others."""
        changed, self._kept = united(self._kept, self._changed.take(), self._chosen.join()), {}
        parts = [
            _Part(number, held, self._forms.get(number, Form.EXACT), places)
            for number, rows in changed.items()
            for held, places in [self._chosen.places(number, rows)]
        ]
        rounded = {part.shard: part.places for part in parts if part.places is not None}
        self._rounded.discard(rounded)
        if self._rounded.count:
            form = REST[ROUNDED[self._config.wire_dtype]]
            num_bytes = max(REST_BYTES, sum(map(self._num_bytes, parts)) // REST_PER_CHANGED)
            widest = max(self._rows[number].piece_bytes(1, listed=True, form=form) for number in self._forms)
            parts += [
                _Part(number, self._chosen.rows_at(number, places), form, places)
                for number, places in self._rounded.take(max(1, num_bytes // widest)).items()
            ]
        self._rounded.add(rounded)
        return parts

    def _is_too_much(self, parts: Sequence[_Part]) -> bool:
        total = sum(shard.num_rows * shard.bytes_per_row for shard in self._shards)
        return sum(map(self._num_bytes, parts)) > max(MOST_OWED_BYTES, MOST_OWED * total)

    def _fill_anew(self) -> None:
        """Begin again with an empty mirror; not while rows are copied."""
        self._must_empty, self._is_whole = True, False
        self._to_fill, self._kept = self._all_parts(), {}
        self._chosen.join_again()
        self._rounded.clear()

    def _num_bytes(self, part: _Part) -> int:
        is_listed = isinstance(part.rows, Tensor)
        return self._rows[part.shard].piece_bytes(_count(part.rows), listed=is_listed, form=part.form)

    def _before_change(self, rows: Rows) -> None:
        if self._undo is not None:
            self._undo.copy(rows)

    def _settle(self) -> None:
        """Wait until the thread has stopped reading rows; called before they change."""
        job = self._job
        if job is not None:
            job.copied.wait()

    def _connect_to_any(self, places: Sequence[Place]) -> Sequence[Place]:
        """Reach the first keeper that can be reached and has room; returns it and those after it."""
        for number, place in enumerate(places[:-1]):
            try:
                self._connect(place)
            except (OSError, NotEnoughMemoryError) as error:
                rank, another = self._owner.rank, places[number + 1]
                logger.warning("the mirror of rank %d goes to %s, not %s: %s", rank, another, place, error)
            else:
                return places[number:]
        self._connect(places[-1])
        return places[-1:]

    def _connect(self, place: Place) -> None:
        """Reach a keeper, and be interrupted by `close` while it does not answer."""
        self._link = place.link()
        try:
            if self._closing.is_set():
                raise LinkLostError("closed")
            self._link.introduce(self._owner)
        except BaseException:
            self._link.close()
            self._link = None
            raise

    def _run(self) -> None:
        while True:
            self._has_job.wait()
            self._has_job.clear()
            job = self._job
            if self._closing.is_set() or job is None:
                if job is not None:
                    job.copied.set()
                return
            try:
                data = self._copy(job)
                if self._link is None:
                    self._place, *self._others = self._connect_to_any([self._place, *self._others])
                self._send(job, data)
                self._done(job, data.numel())
            except Exception as error:
                job.copied.set()
                if self._closing.is_set():
                    return
                self._failed(job, error)
            self._job = None

    @torch.no_grad()
    def _copy(self, job: _Job) -> Tensor:
        """Copy the rows of a job, once; returns the bytes to send."""
        num_bytes = sum(map(self._num_bytes, job.parts)) + len(job.state)
        if not job.copied.is_set():
            if self._staging.numel() < num_bytes:
                self._staging = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
            begin = 0
            for part in job.parts:
                self._shards[part.shard].flush()
                free, rows = self._staging[begin:], self._rows[part.shard]
                begin += write_piece(free, part.shard, rows, part.rows, part.form, part.places)
            self._staging.numpy()[begin:num_bytes] = np.frombuffer(job.state, np.uint8)
            job.copied.set()
        return self._staging[:num_bytes]

    def _send(self, job: _Job, data: Tensor) -> None:
        assert self._link is not None
        if self._must_empty:
            self._link.empty()
            self._must_empty = False
        if not job.is_moment:
            self._link.send_rows(data)
            return
        size = len(job.state)
        moment = Moment(
            step=job.step,
            epoch=job.epoch,
            pieces_bytes=data.numel() - size,
            state_bytes=size,
            digest=digest_of(data),
        )
        self._link.send_moment(moment, data)

    def _done(self, job: _Job, num_bytes: int) -> None:
        if self._lost_s is not None:
            seconds = time.monotonic() - self._lost_s
            logger.warning("the mirror of rank %d is sent again, after %.0f s", self._owner.rank, seconds)
            self._lost_s, self._pause_s = None, FIRST_PAUSE_S
        if not job.is_moment:
            self._to_fill.pop(0)
            return
        if not self._is_whole:
            logger.info("the mirror of rank %d is whole, at step %d", self._owner.rank, job.step)
        self.step_sent, self._is_whole = job.step, True
        figures = self.figures
        self.figures = replace(
            figures,
            moments=figures.moments + 1,
            num_bytes=figures.num_bytes + num_bytes,
            num_rows=figures.num_rows + sum(_count(part.rows) for part in job.parts),
            rounded=job.rounded,
            share=self._chosen.share,
        )

    def _failed(self, job: _Job, error: Exception) -> None:
        """Keep the rows for the next moment, and reach the keeper again."""
        if job.is_moment:
            for part in job.parts:
                assert isinstance(part.rows, Tensor)
                self._kept = united(self._kept, {part.shard: part.rows})
        is_told = self._lost_s is not None
        lost_s = self._lost_s = self._lost_s or time.monotonic()
        if self._link is not None:
            self._link.close()
            self._link = None
        while self._link is None and not self._closing.wait(self._pause_s):
            if not is_told:  # after a pause: with the keeper, the run may have ended
                since = "is not whole" if self.step_sent is None else f"stays at step {self.step_sent}"
                logger.warning("the mirror of rank %d %s: %s", self._owner.rank, since, error)
            is_told, self._pause_s = True, min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._connect_again(lost_s)

    def _connect_again(self, lost_s: float) -> None:
        """Reach the keeper, or, if nothing has arrived there for long, another one that answers.

        There, the mirror is filled anew; meanwhile the keeper before has the last moment that arrived.
        """
        is_long = time.monotonic() - lost_s > SWITCH_AFTER_S
        for place in [*(self._others if is_long else ()), self._place]:
            try:
                self._connect(place)
            except Exception as error:
                logger.debug("the mirror's keeper %s cannot be reached: %s", place, error)
                continue
            if place is not self._place:
                logger.warning("the mirror of rank %d goes to %s, and is filled", self._owner.rank, place)
                self._others = [*(each for each in self._others if each is not place), self._place]
                self._place = place
                self._fill_anew()
            return


def start_mirror(
    config: MirrorConfig,
    worker_group: WorkerGroup,
    group: RankGroup,
    home: Home,
    shards: Sequence[TableShard],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    outside: Sequence[TableShard] = (),
    segment: Segment | None = None,
    steps_done: int = 0,
) -> Mirror | None:
    """Start the mirrors of all workers; None if they are not asked for, or, with a warning, of no use.

    Called by all ranks, when the memory of a recovery counts.

    Args:
        config: settings.
        worker_group: all workers.
        group: of all ranks.
        home: folder of the run's memory on this machine.
        shards: of this rank.
        model: with the tables.
        optimizers: ordinary ones that update tables.
        outside: those of the shards that do not live in shared memory.
        segment: this worker's memory, in which what undoes its last steps is kept; None: nothing is.
        steps_done: training steps done.

    Raises:
        NotEnoughMemoryError: at the start of a run, a node has no room for the mirrors that it is to keep, or
            `mirror.memory` is too small; on all ranks, names the node and what to change.
        OSError: workers cannot reach each other; on all ranks.
    """
    if config.to == "none":
        return None
    keeper: Keeper | HostKeeper
    places: Sequence[Place]
    if config.to == "host":
        if not any(group.gather(bool(outside))):
            _log_no_effect(group, "all tables live in shared memory, which outlives their worker")
            return None
        own, keeper = outside, HostKeeper(home)
        ranks, places = [worker_group.rank], [keeper]
    else:
        chosen, env = keepers(worker_group.infos), LauncherEnv.from_environment()
        if chosen is None or env is None:
            _log_no_effect(group, "all workers are on one node, and would be lost together")
            return None
        own = [shard for shard in shards if not shard.replicated]
        keeper = Keeper(home, env.own_address(), worker_group.session_id)
        addresses = group.gather(keeper.address)
        ranks = chosen[worker_group.rank]
        places = [addresses[rank] for rank in ranks]
    mirror: Mirror | None = None
    problem: Exception | None = None
    last_place, num_bytes = "", 0
    try:
        num_slots = ChosenRows(config, own, model).num_slots
        last_place = f"{worker_group.infos[ranks[-1]].host} ({places[-1]})"
        num_bytes = sum(
            num_slots.get(number, shard.num_rows) * shard.bytes_per_row for number, shard in enumerate(own)
        )
        owner = Owner(
            session_id=worker_group.session_id,
            rank=worker_group.rank,
            world_size=worker_group.world_size,
            generation=worker_group.generation,
            shards=tuple(ShardForm.of(each, num_slots.get(number)) for number, each in enumerate(own)),
        )
        mirror = Mirror(
            config,
            keeper,
            places,
            owner,
            own,
            model,
            optimizers,
            segment,
            steps_done,
            connects_now=not worker_group.continues,
        )
    except (OSError, NotEnoughMemoryError) as error:
        problem = error
    try:
        _raise_first(group.gather((problem, last_place, num_bytes)))
    except (OSError, NotEnoughMemoryError):
        (mirror or keeper).close(remove=True)
        raise
    return mirror


def _raise_first(on_all: Sequence[tuple[Exception | None, str, int]]) -> None:
    """Raise the problem of the lowest rank that has one.

    Args:
        on_all: of each rank: its problem, the last place where it tried to have its mirror kept (empty: it
            did not come so far), and the bytes of the rows in its mirror.
    """
    for problem, place, _ in on_all:
        if place and isinstance(problem, NotEnoughMemoryError):
            needed = size_text(sum(num_bytes for _, other, num_bytes in on_all if other == place))
            raise NotEnoughMemoryError(
                f"{place} has no room for the mirrors that it is to keep, {needed} of rows: {problem}"
            ) from problem
        if problem is not None:
            raise problem


def _log_no_effect(group: RankGroup, why: str) -> None:
    if group.rank == 0:
        logger.warning("mirror.to has no effect: %s", why)


def keepers(infos: Sequence[WorkerInfo]) -> list[list[int]] | None:
    """The ranks that may keep the mirror of each rank: the same place on the next node, in a ring.

    The second choice, if there are more than two nodes, is that on the node after the next. On a smaller
    node, several mirrors may go to one worker. None if all workers are on one node.

    Args:
        infos: of all workers, by rank; the ranks of a node are consecutive, in the order of local ranks.
    """
    nodes: list[list[int]] = []
    for rank, info in enumerate(infos):
        if info.local_rank == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    if len(nodes) == 1:
        return None
    found = []
    for number, node in enumerate(nodes):
        following = [nodes[(number + ahead) % len(nodes)] for ahead in range(1, min(len(nodes), 3))]
        found += [[each[place % len(each)] for each in following] for place in range(len(node))]
    return found


def _parts(shards: Sequence[ShardRows]) -> list[_Part]:
    """All rows, in parts of about `PASS_BYTES`."""
    parts = []
    for number, shard in enumerate(shards):
        step = shard.rows_within(PASS_BYTES)
        parts += [
            _Part(number, slice(begin, min(begin + step, shard.num_rows)))
            for begin in range(0, shard.num_rows, step)
        ]
    return parts


def _count(rows: slice | Tensor) -> int:
    return rows.numel() if isinstance(rows, Tensor) else int(rows.stop - rows.start)
