"""Lists the rows of `experiments.communication`, and has its workers measure each."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from typing import Final

from experiments.communication.contenders import TRAINED, stepped
from experiments.communication.figures import NodeLayout
from experiments.communication.models import MODELS
from experiments.harness.network import Network
from experiments.harness.record import Row
from experiments.harness.turns import Effort
from experiments.harness.workers import Measurements, Workers
from experiments.splitting.figures import link_name

TRAINED_LAYOUT: Final = NodeLayout(workers=2)
TRAINED_GBIT_PER_S: Final = 1.0
SHARE: Final = Effort(full_rounds=1, least_rounds=8, most_rounds=100, seconds=6.0, reach=0.005)
SMALL: Final = Effort(full_rounds=2, least_rounds=12, most_rounds=1000, seconds=60.0, reach=0.01)
LARGE: Final = Effort(full_rounds=1, least_rounds=12, most_rounds=200, seconds=80.0, reach=0.01)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Models, layouts, speeds and trainings to measure."""

    layouts: tuple[NodeLayout, ...] = (
        NodeLayout(workers=2),
        NodeLayout(workers=4),
        NodeLayout(workers=4, per_node=2),
    )
    links_gbit_per_s: tuple[float | None, ...] = (None, 25.0, 10.0, 5.0, 1.0)
    """None: not limited."""
    models: tuple[str, ...] = tuple(MODELS)
    shared: tuple[str, ...] = ("tiny", "terabyte")
    """Recipes for the dense exchange's share of a step."""
    share: Effort = SHARE
    small: Effort = SMALL
    large: Effort = LARGE
    """Effort for models so large that few contenders fit in memory."""
    trained: tuple[str, ...] = TRAINED
    seeds: tuple[int, ...] = (0, 1, 2)
    trainings: dict[str, int] = field(
        default_factory=lambda: {"steps": 768, "evaluations": 4, "test_batches": 48}
    )

    def links(self, model: str, layout: NodeLayout) -> list[float | None]:
        """Link speeds of the cells of a model."""
        few = MODELS[model].links_gbit_per_s
        if few is None:
            return list(self.links_gbit_per_s)
        return [
            link for link in self.links_gbit_per_s if link in few.get((layout.workers, layout.per_node), ())
        ]


QUICK: Final = Scope(
    layouts=(NodeLayout(workers=2),),
    links_gbit_per_s=(None, 1.0),
    models=("tiny",),
    shared=("tiny",),
    share=Effort(full_rounds=1, least_rounds=4, most_rounds=4, seconds=0, reach=0),
    small=Effort(full_rounds=2, least_rounds=4, most_rounds=4, seconds=0, reach=0),
    trained=("ddp", "auto", "power_sgd"),
    seeds=(0, 1),
    trainings={"steps": 14, "evaluations": 2, "test_batches": 4},
)


def measurements(scope: Scope, layout: NodeLayout) -> Measurements:
    """All rows of a layout, in the order in which they are measured: shares, trainings, steps."""
    found: dict[str, Callable[[Workers, Network], Row]] = {}
    if layout.per_node == 1:
        for recipe in scope.shared:
            for link in scope.links_gbit_per_s:
                request = {"do": "share", "recipe": recipe, "effort": asdict(scope.share)}
                fields = {"share_of": recipe, "workers": layout.workers, "gbit_per_s": link}
                found[f"share {recipe} {layout} {link_name(link)}"] = partial(_ask, request, link, fields)
    if layout == TRAINED_LAYOUT:
        for seed in scope.seeds:
            # a random order, so that no contender is always the first or the last
            for name in Random(seed).sample(scope.trained, len(scope.trained)):
                fields = {"contender": name, "seed": seed}
                found[f"train {name} seed {seed}"] = partial(
                    _ask, {"do": "train", **fields}, TRAINED_GBIT_PER_S, fields
                )
    for model in scope.models:
        for link in scope.links(model, layout):
            found[f"steps {model} {layout} {link_name(link)}"] = partial(
                _time_steps, scope, model, layout, link
            )
    return found


def _ask(request: Row, gbit_per_s: float | None, fields: Row, workers: Workers, network: Network) -> Row:
    network.limit(gbit_per_s)
    return fields | workers.ask(**request)


def _time_steps(
    scope: Scope, model: str, layout: NodeLayout, gbit_per_s: float | None, workers: Workers, network: Network
) -> Row:
    is_large = MODELS[model].is_large
    names = stepped(is_large=is_large, num_workers=layout.workers, per_node=layout.per_node)
    network.limit(None)
    workers.ask(do="build", model=model, contenders=names)
    network.limit(gbit_per_s)
    row = {"model": model, **asdict(layout), "gbit_per_s": gbit_per_s, **workers.ask(do="choose")}
    return row | workers.ask(do="time", effort=asdict(scope.large if is_large else scope.small))
