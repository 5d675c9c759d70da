"""What a run is: one frozen dataclass per owner, read from a recipe, validated once.

A recipe is a TOML file (`dlrm/recipes/NAME.toml`, or any path) with one section a dataclass below;
`--set section.key=value` changes single values. Everything a user can get wrong is refused here,
before a process group exists. The resolved configuration is dumped into the run folder.
"""

import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

RECIPES: Final = Path(__file__).parent / "recipes"
SPARSE_OPTIMIZERS: Final = ("sgd", "adagrad", "rowwise_adagrad")
DENSE_OPTIMIZERS: Final = ("sgd", "adagrad", "adam")
MODELS: Final = ("dlrm", "dcnv2", "deepfm")
PRECISIONS: Final = ("fp32", "bf16")
SHARDING_KINDS: Final = {
    "cpu": ("table_wise", "column_wise"),
    "cuda": ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise"),
}
"""Sharding kinds that TorchRec and FBGEMM offer on each device; data_parallel is always there."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the samples come from and in which order."""

    uri: str = "datasets/tiny"
    """Prepared data set (`python -m data.prepare` or `data.synthetic`): a folder or a pyarrow URI."""
    train_days: tuple[int, ...] = ()
    """Days to train on, in time order; empty: all but the test days."""
    test_days: tuple[int, ...] = ()
    """Days to evaluate on; empty: the last day."""
    global_batch_size: int = 2048
    """Samples in one step, over all ranks; the world size must divide it."""
    shuffle: bool = True
    """Shuffle within a window; false keeps the order of the log exactly."""
    window_batches: int = 64
    """Shuffle window, in batches of one rank."""
    prefetch_batches: int = 4
    """Batches that the background thread keeps ready on each rank."""
    cache_folder: str = ""
    """Local folder for decoded row groups of remote data; empty: no cache."""
    cache_disk_gb: float = 50.0
    """Most that the cache may hold on disk, in GB (1e9 bytes)."""
    cache_memory_gb: float = 4.0
    """Most that the cache may hold in memory, shared by the workers of a node, in GB (1e9 bytes)."""

    def __post_init__(self) -> None:
        _check(self.global_batch_size > 0, "data.global_batch_size must be positive")
        _check(
            self.window_batches > 0, "data.window_batches must be positive (1: no shuffling across batches)"
        )
        _check(self.prefetch_batches > 0, "data.prefetch_batches must be positive")
        overlap = sorted(set(self.train_days) & set(self.test_days))
        _check(not overlap, f"days {overlap} are both in data.train_days and in data.test_days")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network around the tables."""

    kind: str = "dlrm"
    """`dlrm` (dot interaction), `dcnv2` (low-rank cross network) or `deepfm`."""
    embedding_dim: int = 16
    """Columns of every table; a multiple of 4 (an FBGEMM limit)."""
    bottom_mlp: tuple[int, ...] = (512, 256, 64, 16)
    """Widths of the layers over the dense features; the last equals embedding_dim. Unused by deepfm."""
    top_mlp: tuple[int, ...] = (512, 256, 1)
    """Widths of the layers over the interaction (deepfm: of the deep part); the last is 1."""
    cross_layers: int = 3
    """dcnv2: number of cross layers."""
    cross_rank: int = 512
    """dcnv2: rank of a cross layer's weight."""

    def __post_init__(self) -> None:
        _check(self.kind in MODELS, f"model.kind is {self.kind!r}; choose one of {', '.join(MODELS)}")
        _check(
            self.embedding_dim > 0 and self.embedding_dim % 4 == 0,
            f"model.embedding_dim is {self.embedding_dim}; FBGEMM wants a positive multiple of 4",
        )
        _check(all(width > 0 for width in (*self.bottom_mlp, *self.top_mlp)), "layer widths must be positive")
        _check(
            bool(self.top_mlp) and self.top_mlp[-1] == 1,
            "the last width of model.top_mlp must be 1 (the logit)",
        )
        if self.kind != "deepfm":
            _check(
                bool(self.bottom_mlp) and self.bottom_mlp[-1] == self.embedding_dim,
                f"the last width of model.bottom_mlp must equal model.embedding_dim ({self.embedding_dim}): "
                "the dense features enter the interaction as one more embedding",
            )
        if self.kind == "dcnv2":
            _check(self.cross_layers > 0, "model.cross_layers must be positive")
            _check(self.cross_rank > 0, "model.cross_rank must be positive")


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """The embedding tables and their optimizer, which runs inside the backward pass."""

    optimizer: str = "rowwise_adagrad"
    """`sgd`, `adagrad` or `rowwise_adagrad`."""
    learning_rate: float = 0.02
    """Base learning rate of the tables."""
    eps: float = 1e-8
    """Added to the root of Adagrad's accumulator."""
    max_rows: int = 0
    """Refuse data whose tables have more rows than this; 0: no limit."""

    def __post_init__(self) -> None:
        _check(
            self.optimizer in SPARSE_OPTIMIZERS,
            f"tables.optimizer is {self.optimizer!r}; choose one of {', '.join(SPARSE_OPTIMIZERS)}",
        )
        _check(self.learning_rate > 0, "tables.learning_rate must be positive")
        _check(self.eps >= 0, "tables.eps must not be negative")


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """The optimizer of everything that is not a table."""

    optimizer: str = "adagrad"
    """`sgd`, `adagrad` or `adam`."""
    learning_rate: float = 0.02
    """Base learning rate of the dense parameters."""

    def __post_init__(self) -> None:
        _check(
            self.optimizer in DENSE_OPTIMIZERS,
            f"dense.optimizer is {self.optimizer!r}; choose one of {', '.join(DENSE_OPTIMIZERS)}",
        )
        _check(self.learning_rate > 0, "dense.learning_rate must be positive")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over time: linear warm-up, constant, polynomial decay; for tables and dense alike."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_start_step: int = 0
    """Step at which the decay begins (0 with decay_steps 0: no decay)."""
    decay_steps: int = 0
    """Steps over which the learning rate falls to 0 as (1 - progress) ** power."""
    power: float = 2.0
    """Exponent of the decay; facebookresearch/dlrm uses 2."""

    def __post_init__(self) -> None:
        _check(self.warmup_steps >= 0 and self.decay_steps >= 0, "schedule steps must not be negative")
        _check(
            self.decay_steps == 0 or self.decay_start_step >= self.warmup_steps,
            "schedule.decay_start_step must not lie before the end of the warm-up",
        )
        _check(self.power > 0, "schedule.power must be positive")


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How tables are laid over the ranks."""

    kinds: tuple[str, ...] = ("table_wise", "column_wise")
    """Kinds that TorchRec's planner may choose from for tables that are not replicated."""
    data_parallel_rows: int = 1000
    """Tables with at most this many rows are replicated on every rank (with more than one rank)."""
    min_column_dim: int = 16
    """column_wise: columns a piece has at least."""

    def __post_init__(self) -> None:
        known = sorted(set(SHARDING_KINDS["cpu"]) | set(SHARDING_KINDS["cuda"]))
        for kind in self.kinds:
            _check(kind in known, f"sharding.kinds holds {kind!r}; known kinds are {', '.join(known)}")
        _check(bool(self.kinds), "sharding.kinds is empty; name at least table_wise")

    def check_device(self, device: str) -> None:
        """Refuse sharding kinds that `device` ("cpu" or "cuda") does not have.

        Raises:
            ValueError: names the kinds to leave out.
        """
        missing = [kind for kind in self.kinds if kind not in SHARDING_KINDS[device]]
        _check(
            not missing,
            f"on {device}, TorchRec does not offer {', '.join(missing)} sharding; "
            f"set sharding.kinds to some of {', '.join(SHARDING_KINDS[device])}",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how precise, and what is said on the way."""

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    precision: str = "bf16"
    """Of arithmetic and embedding exchange: `bf16` (with fp32 master weights and tables) or `fp32`."""
    epochs: int = 1
    """Passes over the training days."""
    max_steps: int = 0
    """Stop after this many steps; 0: run all epochs."""
    seed: int = 0
    """Of the initial weights and of the shuffling."""
    evaluate_every_steps: int = 0
    """Evaluate on the test days this often; 0: only at the end."""
    log_every_steps: int = 100
    """Write metrics this often."""
    run_folder: str = "runs"
    """Folder in which each run makes a folder of its own."""

    def __post_init__(self) -> None:
        _check(
            self.device in {"auto", "cpu", "cuda"},
            f"train.device is {self.device!r}; choose auto, cpu or cuda",
        )
        _check(
            self.precision in PRECISIONS,
            f"train.precision is {self.precision!r}; choose one of {', '.join(PRECISIONS)}",
        )
        _check(self.epochs > 0, "train.epochs must be positive")
        _check(self.max_steps >= 0, "train.max_steps must not be negative")
        _check(self.evaluate_every_steps >= 0, "train.evaluate_every_steps must not be negative")
        _check(self.log_every_steps > 0, "train.log_every_steps must be positive")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON-able values."""
        return asdict(self)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply `section.key=value` overrides.

    Args:
        recipe: a name of `recipe_names()` or the path of a TOML file.
        overrides: values are TOML (`64`, `true`, `[512, 256, 1]`); what is not TOML is taken as a string.

    Raises:
        ValueError: unknown recipe, section or key, a value of the wrong type or an impossible combination.
    """
    path = Path(recipe) if recipe.endswith(".toml") else RECIPES / f"{recipe}.toml"
    if not path.is_file():
        raise ValueError(
            f"there is no recipe {recipe!r}; choose {', '.join(recipe_names())}, or give a .toml file"
        )
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        name, separator, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not separator or not dot or not section or not key:
            raise ValueError(f"--set wants section.key=value, not {override!r}")
        raw.setdefault(section, {})[key] = _parse_value(value.strip())
    config: Config = _build(Config, raw, where="")
    return config


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(cls: type[Any], raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{where or 'the recipe'} must be a section of key = value lines")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{where}{key}"
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {where}{close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"unknown configuration key {name}; {hint}")
        hint_type = hints[key]
        nested = isinstance(hint_type, type) and hasattr(hint_type, "__dataclass_fields__")
        values[key] = _build(hint_type, value, f"{name}.") if nested else _convert(name, value, hint_type)
    return cls(**values)


def _convert(name: str, value: Any, wanted: Any) -> Any:
    if isinstance(wanted, types.GenericAlias):  # tuple[X, ...]
        item = typing.get_args(wanted)[0]
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, e.g. {name}=[...], not {value!r}")
        return tuple(_convert(f"{name}[{i}]", entry, item) for i, entry in enumerate(value))
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{name} must be of type {wanted.__name__}, not {value!r}")
    return value
