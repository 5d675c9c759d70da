"""The AUC of the last training samples, and a warning when it stays at chance."""

from typing import Any, Final

import numpy as np
import torch

from dlrm.metrics.click import auc_of

WINDOW: Final = 2**16
"""Samples of a running AUC: its standard error is 0.003 at one click in four."""

PATIENCE: Final = 2**18
"""Samples after which an AUC that stays near 0.5 causes a warning."""

NEAR: Final = 0.01
"""Distance from 0.5 that counts as chance: three to four standard errors of a full window."""

LIKELY_CAUSES: Final = """Likely causes, the most frequent first:
  - the learning rate of the tables or of the dense layers is too high (try a tenth) or nearly zero, or its
    warm-up is longer than the run so far;
  - labels do not belong to their rows: shuffled, constant, or read from another column;
  - columns have other roles than they should: see label, dense columns and features in dataset.json;
  - ids are lost: all zero, all lists empty, or hashed or capped into very few rows (see the table sizes);
  - dense features are raw counts or prices, not log-transformed or standardized, and drown everything else.
The recipe `tiny` on data of `python -m data.synthetic` tells a fault of the data from one of the model."""

WORSE_THAN_MEAN: Final = """Likely causes, the most frequent first:
  - it was trained too long: the training loss is far below this one (fewer epochs, or a lower learning rate);
  - learning rates are too high, or initial values too large for the model: predictions are too sure;
  - the test days differ from the training days: other ids, other transforms, another share of clicks.
It may still rank well (see the AUC): then calibrate its predictions before they are used as probabilities."""


class RunningAuc:
    """The AUC of this rank's last `window` predictions, which stay on their device until `value` is called.

    Args:
        device: of the tensors given to `update`.
        window: number of samples.
    """

    def __init__(self, device: torch.device, window: int = WINDOW) -> None:
        self._ring = torch.zeros(2, window, dtype=torch.float32, device=device)
        self._window = window
        self._seen = 0

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: `logits` of any float type and `labels`, 0 or 1, both `[B]`."""
        logits, labels = logits.detach()[-self._window :], labels[-self._window :]
        start = self._seen % self._window
        first = min(len(logits), self._window - start)
        for row, new in zip(self._ring, (logits, labels), strict=True):
            row[start : start + first].copy_(new[:first])
            row[: len(new) - first].copy_(new[first:])
        self._seen += len(logits)

    def state_dict(self) -> dict[str, Any]:
        """The predictions in the window."""
        return {"ring": self._ring, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window."""
        self._ring.copy_(state["ring"])
        self._seen = state["seen"]

    def value(self) -> float | None:
        """Compute the AUC, ties counting one half; None while the window has labels of one class only."""
        scores, labels = self._ring[:, : min(self._seen, self._window)].cpu().numpy()
        clicks, others = scores[labels == 1], scores[labels != 1]
        if not len(clicks) or not len(others):
            return None
        return auc_of((clicks, np.ones(len(clicks))), (others, np.ones(len(others))))


class ChanceWatch:
    """Warns once, with likely causes, when the AUC has stayed near 0.5 for `patience` samples."""

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._since: int | None = None
        self._has_warned = False

    def state_dict(self) -> dict[str, Any]:
        """Since when the AUC has been near chance, and whether a warning was given."""
        return {"since": self._since, "said": self._has_warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._since, self._has_warned = state["since"], state["said"]

    def observe(self, samples: int, auc: float | None) -> str | None:
        """Return the warning if it is due, for an AUC after `samples` samples (None: only one label)."""
        if auc is not None and abs(auc - 0.5) > NEAR:
            self._since = None
            return None
        if self._since is None:
            self._since = samples
        if self._has_warned or samples - self._since < self._patience:
            return None
        self._has_warned = True
        if auc is None:
            return f"All labels of {samples - self._since} samples are the same: is it the right column?"
        return (
            f"AUC has stayed within {NEAR} of 0.5 for {samples - self._since} samples: the model predicts "
            f"no better than chance. {LIKELY_CAUSES}"
        )
