"""A checkpointer whose storage is as slow, and fails as often, as a test says."""

from types import SimpleNamespace

from cpr.checkpoint.collectives import Alone
from cpr.checkpoint.save.writer_thread import Save
from cpr.errors import SaveFailedError


class FakeCheckpointer:
    """Saves are over when some process waits for them, or after some steps.

    Args:
        progress: of the run.
        takes_steps: after how many steps a save is over.
        by_step: whether the saves below are named by their step; if not, by their number, from 1 on.
        unable: saves that cannot begin.
        failing: saves that fail in the background.
        breaking: saves that are committed, but then found to be damaged.
        skipping: saves that are skipped.
        busy: steps after which no save can begin at once.
    """

    def __init__(
        self,
        progress,
        takes_steps=30,
        *,
        by_step=False,
        unable=(),
        failing=(),
        breaking=(),
        skipping=(),
        busy=(),
    ):
        self.progress, self.takes_steps, self.by_step = progress, takes_steps, by_step
        self.unable, self.failing, self.breaking = unable, failing, breaking
        self.skipping, self.busy = skipping, busy
        self.has_base, self.newest_step, self.saved_moment = False, None, None
        self.asked, self.log, self.under_way, self.agreement = 0, [], None, Alone()

    def step(self):
        if self.under_way is not None and self.progress.steps_done >= self.under_way.step + self.takes_steps:
            self.wait()

    def wait(self, timeout_s=None):
        save, self.under_way = self.under_way, None
        if save is None:
            return True
        name, error = save.step if self.by_step else self.asked, None
        if name in self.failing:
            error = SaveFailedError(f"save {name}")
        else:
            save.commit(SimpleNamespace(num_bytes=100), 0.5)
            self.newest_step, self.has_base = save.step, True
        if name in self.breaking:
            error, self.has_base = SaveFailedError("damaged"), False
        save.finish(error)
        if error and not save.is_excused:
            raise error
        return True

    def wait_until_idle(self, deadline=None):
        return self.wait()

    def is_free(self):
        return self.progress.steps_done not in self.busy and self.wait()

    def save(self, moment, timeout_s=None):
        return self._begin("base", moment)

    def save_rows(self, rows, *, began=None):
        assert self.has_base
        return self._begin("rows", "rolling")

    def _begin(self, kind, moment):
        self.wait()
        self.asked += 1
        name = self.progress.steps_done if self.by_step else self.asked
        if name in self.unable:
            raise SaveFailedError(f"save {name}")
        if name in self.skipping:
            return None
        self.log.append((kind, self.progress.steps_done))
        self.under_way = Save(kind, moment, "exact")
        self.under_way.step = self.progress.steps_done
        return self.under_way

    def finish(self):
        pass

    def close(self):
        self.wait()
