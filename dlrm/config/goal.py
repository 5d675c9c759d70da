"""The metric by which evaluations are compared, and its direction."""

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:  # it imports torch, which a configuration does not need
    from dlrm.metrics import MetricValues

BUILT_IN: Final = {"auc": True, "log_loss": False, "normalized_entropy": False}
"""Metrics that can be compared, and whether higher values are better. Calibration is none of them: always
predicting the mean is calibrated perfectly."""


OWN: Final = {"max": True, "min": False}
"""Prefixes of metrics that an own model gives, and whether higher values are better."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A metric to improve."""

    name: str
    higher_is_better: bool
    is_own: bool = False
    """Whether it is one of the means of an own model's metrics."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `auc`, `log_loss`, `normalized_entropy`, or `max:NAME` or `min:NAME` of a model's own metric.

        Raises:
            ValueError: it is none of them.
        """
        if text in BUILT_IN:
            return cls(name=text, higher_is_better=BUILT_IN[text])
        direction, _, name = text.partition(":")
        if direction not in OWN or not name:
            raise ValueError(
                f"{text!r} is no metric to compare; choose {', '.join(BUILT_IN)}, or max:NAME or min:NAME "
                "of a metric that your own model gives"
            )
        return cls(name=name, higher_is_better=OWN[direction], is_own=True)

    @property
    def text(self) -> str:
        """What `parse` reads."""
        direction = "max:" if self.higher_is_better else "min:"
        return direction + self.name if self.is_own else self.name

    @property
    def label(self) -> str:
        """The metric's name in messages."""
        return self.name if self.is_own else {"auc": "AUC"}.get(self.name, self.name.replace("_", " "))

    def check(self, has_logits: bool, metrics: Collection[str]) -> None:
        """Refuse a model that does not give the metric; `metrics` are the names of its own.

        Raises:
            ValueError: lists what it gives.
        """
        if not (self.name in metrics if self.is_own else has_logits):
            found = [*(BUILT_IN if has_logits else ()), *(f"max:{name} or min:{name}" for name in metrics)]
            raise ValueError(
                f"train.keep_best is {self.text}, which evaluations of this model do not give; choose one of "
                f"{', '.join(found)}"
            )

    def value_in(self, values: "MetricValues") -> float | None:
        """The metric in an evaluation; None if it is not defined there, or not finite.

        Raises:
            ValueError: the model does not give this metric; lists what it gives.
        """
        self.check(values.is_of_clicks, values.means)
        value: float | None = values.means[self.name].value if self.is_own else getattr(values, self.name)
        return value if value is not None and isfinite(value) else None

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether `value` is better than another one by more than `by`."""
        gain = value - than if self.higher_is_better else than - value
        return gain > by
