"""Compares rows with the logs of `recovery_soak.witness`: after each recovery, and in the last save of a run.

- After each recovery (`check_recovery`), on every worker, of every row that lives there. A run that continues
  from memory must continue from the last finished step (or from the one before, where only some workers
  finished the last one; or, with rows of a mirror, from one of the few before), its rows as they were after
  it. Rows of a batch that the recovery calls interrupted are left out, as they may be from before or after
  it. A row that differs must be as it was at the step of the save, or of the mirror, that the recovery names,
  which must not be newer than the step; and no more rows of a table may differ than the recovery says were
  lost, or came from mirrors. A run that returns to a save must have all rows as they were then, bit for bit.
- At the end (`check_save`): the newest save is of the last step, its rows as they were after it.

Not covered: dense parameters, and rows of saves that are never loaded. Saves must be "consistent" ones, of
one moment, which is the trainer's default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.load.shard_loader import load_shards
from cpr.checkpoint.storage.base import open_storage
from cpr.mirror.undo import UNDO_STEPS
from cpr.shards.shard import TableShard
from experiments.recovery_soak.witness import History, ShardKey, row_digests


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a recovery reports about itself."""

    kind: str
    """See `cpr.recovery.run.report.Kind`."""
    step: int
    save_step: int | None
    mirror_step: int | None
    interrupted: bool
    """Whether rows may hold a part of the batch after the step."""
    lost: Mapping[str, int]
    """Rows that were restored from the save while others stayed in memory, by table, over all ranks."""
    mirrored: Mapping[str, int]
    """The same of rows that came from mirrors."""


@dataclass(kw_only=True)
class Counts:
    """How many rows of one worker were compared, and with which outcome."""

    rows: int = 0
    rows_restored: int = 0
    """Equal to the save or the mirror, and not to their last values."""
    rows_interrupted: int = 0
    """Changed and part of the batch that was interrupted: not checked."""
    rows_unknown: int = 0
    """No log has their values at that step: not checked."""
    rows_wrong: int = 0
    problem: str = ""
    """What is wrong with the first wrong row."""

    def blame(self, num_rows: int, problem: str) -> None:
        """Count wrong rows, and keep the first problem."""
        if num_rows:
            self.rows_wrong += num_rows
            self.problem = self.problem or problem


def check_recovery(history: History, claim: Claim, shards: Sequence[TableShard]) -> Counts:
    """Compare the rows of a worker that is about to continue with the logs.

    Args:
        history: the logs of earlier generations of workers.
        claim: what the recovery reports.
        shards: of this worker.
    """
    counts = Counts(rows=sum(shard.num_rows for shard in shards))
    if not history.logs:
        return counts
    lives = claim.kind in {"process", "mirror", "partial"}
    base = claim.step if lives else claim.save_step or 0
    done_by_all, done_by_some = history.last_steps
    earliest = done_by_all - (UNDO_STEPS if claim.kind == "mirror" else 1)
    if lives and not earliest <= claim.step <= done_by_some:
        counts.blame(counts.rows, f"continues from step {claim.step}, and step {done_by_all} was finished")
    elif claim.save_step is not None and claim.save_step > claim.step:
        counts.blame(counts.rows, f"rows of step {claim.save_step} in a run that continues at {claim.step}")
    elif base != claim.step:
        counts.blame(counts.rows, f"continues from step {claim.step}, from a save of step {base}")
    else:
        for shard in shards:
            _check_shard(history, claim, shard, lives, counts)
    return counts


def _check_shard(history: History, claim: Claim, shard: TableShard, lives: bool, counts: Counts) -> None:
    key, now = ShardKey.of(shard), row_digests(shard)
    before = history.digests(key.name, claim.step)
    saved = None if claim.save_step is None else history.digests(key.name, claim.save_step)
    # The worker was killed between the end of a step and its log of that step: none of its rows was lost, but
    # no log has their values after that step.
    is_unlogged = before is None and lives and not claim.lost.get(key.table_fqn)
    if is_unlogged or (before is None and saved is None):
        counts.rows_unknown += key.num_rows
        return
    differs = np.ones(key.num_rows, bool) if before is None else now != before
    if lives:
        mirrored = None if claim.mirror_step is None else history.digests(key.name, claim.mirror_step)
        older = (saved, claim.lost, "the save"), (mirrored, claim.mirrored, "a mirror")
        if claim.interrupted:
            ids = history.batch(key, claim.step + 1).astype(np.int64) - key.row_offset
            interrupted = np.zeros(key.num_rows, bool)
            interrupted[ids[(ids >= 0) & (ids < key.num_rows)]] = True
            for values, _, _ in older:
                if values is not None:
                    interrupted &= now != values
            counts.rows_interrupted += int((differs & interrupted).sum())
            differs &= ~interrupted
        for values, told, what in older:
            if values is not None:
                restored = int((differs & (now == values)).sum())
                counts.rows_restored += restored
                differs &= now != values
                excess = restored - told.get(key.table_fqn, 0)
                counts.blame(max(0, excess), f"{key.name}: {restored} rows of {what}, more than were lost")
    else:
        counts.rows_restored += int((~differs).sum())
    counts.blame(int(differs.sum()), f"{key.name}: {int(differs.sum())} rows of neither moment")


def check_save(history: History, uri: str, step: int) -> Counts:
    """Compare the newest save in the checkpoint directory `uri` with the rows after the run's last step.

    Raises:
        CheckpointError: there is no save that can be read.
    """
    storage = open_storage(uri)
    states, _ = find_states(storage)
    keys = history.shards.values()
    counts = Counts(rows=sum(key.num_rows for key in keys))
    if not states or states[0].step != step:
        found = f"the newest save is of step {states[0].step}" if states else "there is no save"
        counts.blame(counts.rows, f"{found}, and step {step} was the last")
        return counts
    for key in keys:
        shard = key.empty(tuple(states[0].newest.tables[key.table_fqn].counters))
        load_shards(storage, states[0], [shard])
        expected = history.digests(key.name, step)
        if expected is None:
            counts.rows_unknown += key.num_rows
        else:
            wrong = int((row_digests(shard) != expected).sum())
            counts.blame(wrong, f"{key.name}: {wrong} rows of the last save")
    return counts
