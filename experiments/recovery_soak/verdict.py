"""What a witness's logs (`recovery_soak.witness`) say of a recovery, and of the last save of a run.

- After each recovery (`check_recovery`), on every worker, of every row that lives there. A run that goes on
  from memory must go on from the last finished step (or from the one before, where the last one was finished
  by some workers only), its rows as they were after it; rows of the batch that was interrupted are left out,
  as they may be of either side of it. A row that is different must be as it was at the step of the save that
  the recovery names, which must not be newer than the step; and no more of them in a table than the recovery
  says were lost. A run that goes back to a save must have all rows as they were then, bit for bit.
- At the end (`check_save`): the newest save is of the last step, its rows as they were after it.

What this does not cover: dense parameters, and rows of saves that nobody ever loads. Saves must be
"consistent" ones, of one moment, which is the trainer's default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.load.loader import load_shards
from cpr.checkpoint.storage.base import open_storage
from cpr.shards.shard import TableShard
from experiments.recovery_soak.witness import History, ShardKey, row_digests


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a recovery says of itself."""

    kind: str
    """See `cpr.recovery.run.report.Kind`."""
    step: int
    save_step: int | None
    lost: Mapping[str, int]
    """Rows that come from the save while others live on, by table, over all ranks."""


@dataclass(kw_only=True)
class Counts:
    """Rows of one worker."""

    rows: int = 0
    rows_restored: int = 0
    """As they were in the save, and not as they were last."""
    rows_interrupted: int = 0
    """Changed, of the batch that was interrupted: not checked."""
    rows_unknown: int = 0
    """Nobody has written down what they were."""
    rows_wrong: int = 0
    problem: str = ""
    """What is wrong with the first of them."""

    def blame(self, num_rows: int, problem: str) -> None:
        """So many rows are wrong."""
        if num_rows:
            self.rows_wrong += num_rows
            self.problem = self.problem or problem


def check_recovery(history: History, claim: Claim, shards: Sequence[TableShard]) -> Counts:
    """Compare the rows of a worker that is about to go on with what was written down.

    Args:
        history: without what this generation of workers writes.
        claim: how they go on.
        shards: that live here.
    """
    counts = Counts(rows=sum(shard.num_rows for shard in shards))
    if not history.logs:
        return counts
    lives = claim.kind in {"process", "partial"}
    base = claim.step if lives else claim.save_step or 0
    done_by_all, done_by_some = history.last_steps
    if lives and not done_by_all - 1 <= claim.step <= done_by_some:
        counts.blame(counts.rows, f"goes on from step {claim.step}, and step {done_by_all} was finished")
    elif claim.save_step is not None and claim.save_step > claim.step:
        counts.blame(counts.rows, f"rows of step {claim.save_step} in a run that goes on at {claim.step}")
    elif base != claim.step:
        counts.blame(counts.rows, f"goes on from step {claim.step}, from a save of step {base}")
    else:
        for shard in shards:
            _check_shard(history, claim, shard, lives, counts)
    return counts


def _check_shard(history: History, claim: Claim, shard: TableShard, lives: bool, counts: Counts) -> None:
    key, now = ShardKey.of(shard), row_digests(shard)
    before = history.digests(key.name, claim.step)
    saved = None if claim.save_step is None else history.digests(key.name, claim.save_step)
    # A worker that was killed between the end of a step and its record of it: none of its rows has been lost,
    # and what they were after that step nobody knows.
    is_untold = before is None and lives and not claim.lost.get(key.table_fqn)
    if is_untold or (before is None and saved is None):
        counts.rows_unknown += key.num_rows
        return
    differs = np.ones(key.num_rows, bool) if before is None else now != before
    if lives:
        ids = history.batch(key, claim.step + 1).astype(np.int64) - key.row_offset
        interrupted = np.zeros(key.num_rows, bool)
        interrupted[ids[(ids >= 0) & (ids < key.num_rows)]] = True
        if saved is not None:
            interrupted &= now != saved
        counts.rows_interrupted += int((differs & interrupted).sum())
        differs &= ~interrupted
        if saved is not None:
            restored = int((differs & (now == saved)).sum())
            counts.rows_restored += restored
            differs &= now != saved
            excess = restored - claim.lost.get(key.table_fqn, 0)
            counts.blame(max(0, excess), f"{key.name}: {restored} rows of the save, more than were lost")
    else:
        counts.rows_restored += int((~differs).sum())
    counts.blame(int(differs.sum()), f"{key.name}: {int(differs.sum())} rows of neither moment")


def check_save(history: History, uri: str, step: int) -> Counts:
    """Compare the newest save of a run that has ended with the rows as they were after its last step.

    Args:
        history: of the whole run.
        uri: its checkpoint directory.
        step: its last.

    Raises:
        CheckpointError: it has no save that can be read.
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
