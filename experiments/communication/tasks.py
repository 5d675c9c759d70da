"""Lists the rows of `experiments.communication`, and the requests to its workers for each row."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Final

from experiments.communication.contenders import TRAINED, stepped
from experiments.communication.figures import NodeLayout
from experiments.communication.models import MODELS
from experiments.communication.rounds import Effort
from experiments.splitting.figures import link_name

LINKS: Final = (None, 25.0, 10.0, 5.0, 1.0)
"""Link speeds in Gb/s; None: not limited."""
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
    links_gbit_per_s: tuple[float | None, ...] = LINKS
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row to measure."""

    key: str
    gbit_per_s: float | None
    requests: tuple[dict[str, Any], ...]
    """Requests to the workers, in order."""
    preparation: dict[str, Any] | None = None
    """A request before those, without a speed limit; its answer is dropped."""
    fields: dict[str, Any]
    """Other fields of the row."""


def tasks(scope: Scope, layout: NodeLayout) -> Iterator[Task]:
    """All rows of a layout, in the order in which they are measured: shares, trainings, steps."""
    if layout.per_node == 1:
        for recipe in scope.shared:
            for link in scope.links_gbit_per_s:
                yield Task(
                    key=f"share {recipe} {layout} {link_name(link)}",
                    gbit_per_s=link,
                    requests=({"do": "share", "recipe": recipe, "effort": asdict(scope.share)},),
                    fields={"share_of": recipe, "workers": layout.workers, "gbit_per_s": link},
                )
    if layout == TRAINED_LAYOUT:
        yield from _trainings(scope)
    for model in scope.models:
        is_large = MODELS[model].is_large
        effort = asdict(scope.large if is_large else scope.small)
        names = stepped(is_large=is_large, num_workers=layout.workers, per_node=layout.per_node)
        for link in scope.links(model, layout):
            yield Task(
                key=f"steps {model} {layout} {link_name(link)}",
                gbit_per_s=link,
                preparation={"do": "build", "model": model, "contenders": names},
                requests=({"do": "choose"}, {"do": "time", "effort": effort}),
                fields={"model": model, **asdict(layout), "gbit_per_s": link},
            )


def _trainings(scope: Scope) -> Iterator[Task]:
    """Seed by seed, in a random order, so that no contender is always the first or the last."""
    for seed in scope.seeds:
        for name in Random(seed).sample(scope.trained, len(scope.trained)):
            yield Task(
                key=f"train {name} seed {seed}",
                gbit_per_s=TRAINED_GBIT_PER_S,
                requests=({"do": "train", "contender": name, "seed": seed},),
                fields={"contender": name, "seed": seed},
            )
