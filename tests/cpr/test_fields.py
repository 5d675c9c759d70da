"""A configuration refuses values of a wrong type before anything compares or stores them."""

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Literal

import numpy as np
import pytest

from cpr.checkpoint.catalog.committer import Retention
from cpr.checkpoint.config import CheckpointConfig
from cpr.estimator.planning.interval import IntervalRule
from cpr.fields import check_fields
from cpr.priority.config import PriorityConfig
from cpr.recovery.decide.assessment import RecoveryPolicy
from cpr.saving.setup import SaveSettings

CONFIGS = {
    CheckpointConfig: {"uri": "runs/a"},
    IntervalRule: {},
    PriorityConfig: {},
    RecoveryPolicy: {},
    Retention: {},
    SaveSettings: {"every": 5, "moment": "rolling", "priority": None, "total_samples": None},
}


@dataclass(frozen=True, kw_only=True)
class _Some:
    count: int = 1
    rate: float = 0.5
    limit: float | None = None
    flag: bool = True
    name: str = ""
    days: tuple[int, ...] = ()
    how: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        check_fields(self, "some.")


def test_values_of_the_declared_types_are_accepted():
    _Some()
    _Some(count=np.int64(5), rate=2, limit=0.25, flag=False, name="x", days=(1, 2), how="b")
    _Some(rate=np.float32(0.5), limit=None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "1"}, r"some\.count must be a whole number, not '1'"),
        ({"count": True}, r"some\.count must be a whole number, not True"),
        ({"count": 1.0}, r"some\.count must be a whole number"),
        ({"count": 2**63}, r"some\.count must fit into 64 bits"),
        ({"count": -(2**63) - 1}, r"some\.count must fit into 64 bits"),
        ({"rate": "x"}, r"some\.rate must be a number, not 'x'"),
        ({"rate": None}, r"some\.rate must be a number, not None"),
        ({"rate": float("nan")}, r"some\.rate must be finite, not nan"),
        ({"rate": 10**400}, r"some\.rate must be finite"),
        ({"limit": float("-inf")}, r"some\.limit must be finite, not -inf"),
        ({"limit": "x"}, r"some\.limit must be a number"),
        ({"flag": 1}, r"some\.flag must be true or false"),
        ({"name": 1}, r"some\.name must be a \"text\""),
        ({"days": [1]}, r"some\.days must be a list, e\.g\. some\.days=\[\.\.\.\], not \[1\]"),
        ({"days": (1, "x")}, r"some\.days\[1\] must be a whole number, not 'x'"),
        ({"how": "c"}, r"some\.how is 'c'; choose one of a, b"),
        ({"how": ["a"]}, r"some\.how is \['a'\]; choose one of a, b"),
    ],
)
def test_other_values_are_refused_with_the_name_of_the_field(values, message):
    with pytest.raises(ValueError, match=message):
        _Some(**values)


@pytest.mark.parametrize(
    ("config", "field"), [(config, field.name) for config in CONFIGS for field in fields(config)]
)
def test_every_field_of_the_public_configurations_is_checked(config, field):
    with pytest.raises(ValueError, match=field):
        config(**{**CONFIGS[config], field: object()})


def test_timedelta_is_not_a_number():
    Retention(keep_every=timedelta(hours=1))
    with pytest.raises(ValueError, match="keep_every must be a timedelta, not 3600"):
        Retention(keep_every=3600)
