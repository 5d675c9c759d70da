"""Failure injection by rank, step, time, rate and seed; off by default.

A `Plan` has schedules (`AtStep`, `AtTime`, `AtRate`, `Trace`) of kinds (`Raise`, `Abort`, `KillWorker`,
`KillAgent`, `LoseNode`, `PauseNode`, `Partition`, `Hang`, `Slow`, `DamageFile`, `StorageError`,
`StorageDelay`, `StorageOutage`). Two drivers inject them: an `Injector` in each worker, and a `Killer`
outside of the run for what a worker cannot do to itself. Both act only on the run's own processes (and on
links between nodes that the user gives them), log a warning before each failure, and keep a record of it.

From inside, CPR_FAULTS names a JSON file (`cpr.faults.injector`; README has an example).
From outside, a failure about once a minute until the run ends, the same for the same seed:

    kinds = (KillWorker(), KillAgent(), LoseNode(), Hang(duration_s=20.0))
    plan = Plan(schedules=(AtRate(mean_s=60.0, seed=7, kinds=kinds),))
    run = subprocess.Popen(["cpr", "run", "--", "torchrun", "--nproc-per-node", "2", "train.py"], env=env)
    with Killer(plan, nodes=[Node(pid=run.pid, memory=Path(env["CPR_RESIDENT_ROOT"]))]) as killer:
        run.wait()
    print(killer.deeds)

For failures from both drivers at once, give each a plan of its own.
"""

from cpr.faults.injector import Injector, Plan
from cpr.faults.killer import Deed, Killer
from cpr.faults.kinds import (
    Abort,
    DamageFile,
    Hang,
    InjectedError,
    KillAgent,
    KillWorker,
    Kind,
    LoseNode,
    Partition,
    PauseNode,
    Raise,
    Slow,
    StorageDelay,
    StorageError,
    StorageOutage,
)
from cpr.faults.schedules import AtRate, AtStep, AtTime, Event, Trace
from cpr.faults.storages import FaultyStorage
from cpr.faults.strikes import NetworkLink, Node

__all__ = [
    "Abort",
    "AtRate",
    "AtStep",
    "AtTime",
    "DamageFile",
    "Deed",
    "Event",
    "FaultyStorage",
    "Hang",
    "InjectedError",
    "Injector",
    "KillAgent",
    "KillWorker",
    "Killer",
    "Kind",
    "LoseNode",
    "NetworkLink",
    "Node",
    "Partition",
    "PauseNode",
    "Plan",
    "Raise",
    "Slow",
    "StorageDelay",
    "StorageError",
    "StorageOutage",
    "Trace",
]
