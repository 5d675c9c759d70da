"""The configuration of a run: one frozen dataclass per section, validated on creation.

`dlrm.config.recipe` reads them from TOML. Mistakes that show without a look at machine or data are refused
here, before a process group exists. `dlrm/CONFIG.md` is generated from the docstrings.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from cpr.fields import check_fields
from cpr.humanize import parse_duration
from cpr.mirror.config import MirrorConfig
from dlrm.comm.config import DENSE, CommConfig
from dlrm.config.goal import BUILT_IN, Goal
from dlrm.config.stream import StreamConfig, check_stream
from dlrm.config.table_optimizers import ROW_OPTIMIZERS

DenseOptimizer = Literal["sgd", "adagrad", "adam", "lars", "lamb"]
RowPriority = Literal["none", "mfu", "ssu", "scar", "random", "mru", "touched", "round_robin", "never"]
SplitStrategy = Literal["torchrec", "des", "auto"]
CompensationName = Literal["none", "spike", "velocity", "weights", "spike+velocity", "spike+weights"]
MODELS: Final = ("dlrm", "dcnv2", "deepfm", "fm", "lr")
"""Built-in models (`dlrm.models.build`)."""
DENSE_OPTIMIZERS: Final = get_args(DenseOptimizer)
LARGE_BATCH_OPTIMIZERS: Final = ("lars", "lamb")
STRATEGIES: Final = get_args(SplitStrategy)
SHARDING_KINDS: Final = {
    "cpu": ("table_wise", "column_wise", "row_wise"),
    "cuda": (
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ),
}
"""Sharding kinds available on each device; data_parallel always is. Row-wise on the CPU is
`RowSplitSharder`."""
COMPUTE_KERNELS: Final = {"cpu": ("fused",), "cuda": ("fused", "fused_uvm", "fused_uvm_caching")}
"""Values of `sharding.kernels` on each device."""

LONGEST_WAIT_S: Final = 30 * 86_400.0
"""Upper limit of configurable waits, because clocks and timers overflow."""

BEST: Final = "best"
"""Folder of the best state, in the run folder or in `checkpoint.uri`."""

COLUMN_STEP: Final = 4
"""FBGEMM requires the width of tables, and of pieces of tables, to be a multiple of this."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    _check(value in known, f"{name} is {value!r}; choose one of {', '.join(known)}")


def _check_least(config: Any, where: str, **least: float) -> None:
    for name, limit in least.items():
        value = getattr(config, name)
        _check(value >= limit, f"{where}{name} must be at least {limit}, not {value}")


def _check_rate(name: str, rate: float) -> None:
    _check(rate > 0, f"{name} must be positive, not {rate}")


def _check_plain(value: Any, name: str) -> None:
    """Refuse what JSON, in which runs keep their configuration, cannot hold."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_plain(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{name}[{index}]")
    else:
        _check(
            isinstance(value, bool | int | float | str),
            f"{name} is {value!r}; give a number, true or false, a list, a section or a text (in quotes)",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the samples come from, and in which order."""

    uri: str = "datasets/tiny"
    """Prepared data set (`python -m data.prepare` or `data.synthetic`): a folder or a pyarrow URI."""
    train_days: tuple[int, ...] = ()
    """Days to train on, in time order. Empty: all days but the test days."""
    test_days: tuple[int, ...] = ()
    """Days to evaluate on. Empty: the last day."""
    global_batch_size: int = 2048
    """Samples in one step, over all ranks; must be divisible by the number of ranks."""
    shuffle: bool = True
    """Shuffle within a window. `false` keeps the exact order of the log."""
    order: Literal["stripes", "seldp"] = "stripes"
    """Which samples a rank reads. `stripes`: all ranks read the log side by side, in time order. `seldp`:
    each rank reads its own chunk of the log and moves to the next chunk every epoch (SelSync), for data whose
    time order does not matter. In both, an epoch is one pass over all samples."""
    window_batches: int = 64
    """Size of the shuffle window, in batches of one rank."""
    prefetch_batches: int = 4
    """Batches that the background thread keeps ready on each rank."""
    cache_folder: str = ""
    """Local folder that caches decoded row groups of remote data. Empty: no cache."""
    cache_disk_gb: float = 50.0
    """Limit of the cache on disk, in GB (1e9 bytes)."""
    cache_memory_gb: float = 4.0
    """Limit of the cache in memory, shared by the workers of a node, in GB (1e9 bytes)."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        _check_least(self, "data.", global_batch_size=1, window_batches=1, prefetch_batches=1)
        _check_least(self, "data.", cache_disk_gb=0, cache_memory_gb=0)
        usual = (DataConfig.cache_disk_gb, DataConfig.cache_memory_gb)
        _check(
            bool(self.cache_folder) or (self.cache_disk_gb, self.cache_memory_gb) == usual,
            "data.cache_disk_gb and data.cache_memory_gb are limits of a cache; set data.cache_folder",
        )
        for name in ("train_days", "test_days"):
            days = getattr(self, name)
            repeated = sorted({day for day in days if days.count(day) > 1})
            _check(not repeated, f"data.{name} names days {repeated} more than once; name each day once")
        overlap = sorted(set(self.train_days) & set(self.test_days))
        _check(
            not overlap,
            f"days {overlap} are both in data.train_days and in data.test_days; give each day to one of "
            "them, or leave data.test_days out to test on the last day, trained or not",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The tables and the network around them."""

    kind: str = "dlrm"
    """`dlrm` (dot interaction), `dcnv2` (low-rank cross network), `deepfm`, `fm` (factorization machine),
    `lr` (logistic regression), or a class of yours, `package.module:Class` (dlrm/models/README.md)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What a class of yours is given, any TOML values: a section `[model.options]` of a recipe, or `--set
    model.options.NAME=VALUE`."""
    embedding_dim: int = 16
    """Columns of every table; a multiple of 4 (an FBGEMM limit). Ignored by `lr`, whose tables have 4
    columns."""
    bottom_mlp: tuple[int, ...] = (512, 256, 64, 16)
    """`dlrm` and `dcnv2`: layer widths of the MLP over the dense features; the last must equal
    `embedding_dim`."""
    top_mlp: tuple[int, ...] = (512, 256, 1)
    """Layer widths of the MLP over the interaction (`deepfm`: of the deep part); the last must be 1. Ignored
    by `fm` and `lr`."""
    cross_layers: int = 3
    """`dcnv2`: number of cross layers."""
    cross_rank: int = 512
    """`dcnv2`: rank of each cross layer's weight."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        _check(
            self.kind in MODELS or self.is_own,
            f"model.kind is {self.kind!r}; choose one of {', '.join(MODELS)}, or name a class of yours as "
            "package.module:Class",
        )
        _check_plain(self.options, "model.options")
        _check(
            self.is_own or not self.options,
            f"model.options are those of a class of yours, and model.kind is {self.kind}: leave out "
            f"{', '.join(f'model.options.{name}' for name in self.options)}",
        )
        unread = [name for name, value in self.of_built_in.items() if value != getattr(ModelConfig, name)]
        _check(
            not (self.is_own and unread),
            f"model.{', model.'.join(unread)}: only built-in models read this, and model.kind is "
            f"{self.kind}; leave it out, and give what the class needs in [model.options]",
        )
        _check(
            self.embedding_dim > 0 and self.embedding_dim % COLUMN_STEP == 0,
            f"model.embedding_dim is {self.embedding_dim}; FBGEMM wants a positive multiple of 4",
        )
        _check(all(width > 0 for width in (*self.bottom_mlp, *self.top_mlp)), "layer widths must be positive")
        _check(
            bool(self.top_mlp) and self.top_mlp[-1] == 1,
            "the last width of model.top_mlp must be 1 (the logit)",
        )
        if self.kind in {"dlrm", "dcnv2"}:
            _check(
                bool(self.bottom_mlp) and self.bottom_mlp[-1] == self.embedding_dim,
                f"the last width of model.bottom_mlp must equal model.embedding_dim ({self.embedding_dim}): "
                "the dense features enter the interaction as one more embedding",
            )
        if self.kind == "dcnv2":
            _check_least(self, "model.", cross_layers=1, cross_rank=1)

    @property
    def is_own(self) -> bool:
        """Whether `kind` has the form of a class of the user, `package.module:Class`."""
        module, colon, name = self.kind.partition(":")
        return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))

    @property
    def of_built_in(self) -> dict[str, Any]:
        """Values of the keys that only built-in models read, by name."""
        shared = {"kind", "options", "embedding_dim"}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in shared}


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
    """Refuse data whose tables have more rows than this. 0: no limit."""
    dynamic: tuple[str, ...] = ()
    """Features with dynamic tables, whose ids may be any 64-bit integers: ids get rows as they appear, and if
    no row is free, the least recently seen ids lose theirs. `*`: all features."""
    dynamic_rows: int = 1_000_000
    """Rows of each dynamic table."""
    admit_after: int = 1
    """Dynamic tables: number of times that training must see an id before it gets a row. Until then the id is
    ignored."""

    def __post_init__(self) -> None:
        check_fields(self, "tables.")
        _check_choice("tables.optimizer", self.optimizer, ROW_OPTIMIZERS)
        _check_rate("tables.learning_rate", self.learning_rate)
        _check(
            self.eps > 0,
            "tables.eps must be positive: without it, a row whose gradients were all 0 becomes 0 / 0",
        )
        _check_least(self, "tables.", max_rows=0, admit_after=1)
        _check(
            0 < self.dynamic_rows < 2**31,
            f"tables.dynamic_rows is {self.dynamic_rows}; choose 1 to 2**31 - 1",
        )
        of_dynamic = (self.dynamic_rows, self.admit_after)
        _check(
            bool(self.dynamic) or of_dynamic == (TablesConfig.dynamic_rows, TablesConfig.admit_after),
            "tables.dynamic_rows and tables.admit_after are about dynamic tables, and there are none: name "
            "their features in tables.dynamic (`*`: all), or leave them out",
        )

    def is_dynamic(self, feature: str) -> bool:
        """Whether the tables of this feature are dynamic."""
        return "*" in self.dynamic or feature in self.dynamic


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """The optimizer of all parameters outside the tables."""

    optimizer: DenseOptimizer = "adagrad"
    """`sgd`, `adagrad` or `adam`; for large batches `lars` (SGD with momentum) or `lamb` (Adam), which scale
    the rate per layer."""
    learning_rate: float = 0.02
    """Base learning rate of the dense parameters."""
    momentum: float = 0.0
    """`sgd`: share of the last update's velocity that is kept, from 0 (none) to below 1. `lars` keeps 0.9."""
    weight_decay: float = 0.0
    """`lars` and `lamb`: share of a weight that is added to its gradient (lars) or step (lamb); biases are
    excluded."""
    trust_coefficient: float = 0.001
    """`lars`: relative change of a layer's norm in a step at rate 1; multiplies `learning_rate`."""
    clip_norm: float = 0.0
    """Clip the norm of the gradient of all dense parameters together to this value. 0: no clipping."""

    def __post_init__(self) -> None:
        check_fields(self, "dense.")
        _check_rate("dense.learning_rate", self.learning_rate)
        _check_least(self, "dense.", momentum=0, weight_decay=0, clip_norm=0)
        _check(
            self.momentum < 1,
            f"dense.momentum is {self.momentum:g}; choose a share from 0 to below 1, such as 0.9",
        )
        _check(
            self.momentum == 0 or self.optimizer == "sgd",
            f"dense.momentum is for sgd; dense.optimizer is {self.optimizer}",
        )
        _check(
            self.weight_decay == 0 or self.optimizer in LARGE_BATCH_OPTIMIZERS,
            f"dense.weight_decay is for {' and '.join(LARGE_BATCH_OPTIMIZERS)}; dense.optimizer is "
            f"{self.optimizer}",
        )
        _check_rate("dense.trust_coefficient", self.trust_coefficient)
        _check(
            self.optimizer == "lars" or self.trust_coefficient == DenseConfig.trust_coefficient,
            f"dense.trust_coefficient is for lars; dense.optimizer is {self.optimizer}",
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over time for tables and dense parameters: linear warm-up, constant, polynomial decay."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_start_step: int = 0
    """Step at which the decay starts."""
    decay_steps: int = 0
    """Steps over which the learning rate falls to 0 as (1 - progress) ** power. 0: no decay."""
    power: float = 2.0
    """Exponent of the decay; facebookresearch/dlrm uses 2."""

    def __post_init__(self) -> None:
        check_fields(self, "schedule.")
        _check_least(self, "schedule.", warmup_steps=0, decay_start_step=0, decay_steps=0)
        _check(
            self.decay_steps > 0 or self.decay_start_step == 0,
            "schedule.decay_start_step needs schedule.decay_steps, or nothing decays",
        )
        _check(
            self.decay_steps == 0 or self.decay_start_step >= self.warmup_steps,
            "schedule.decay_start_step must not lie before the end of the warm-up",
        )
        _check(self.power > 0, "schedule.power must be positive")


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How the tables are sharded over the ranks."""

    kinds: tuple[str, ...] = ("table_wise", "column_wise")
    """Sharding kinds that TorchRec's planner may choose for tables that are not replicated. On the CPU:
    `table_wise`, `column_wise`, `row_wise`; on CUDA also `table_row_wise`, `table_column_wise`,
    `grid_shard`."""
    data_parallel_rows: int = 200
    """With several ranks, tables with at most this many rows are replicated on every rank."""
    kernels: tuple[str, ...] = ("fused",)
    """TorchRec's compute kernels that the planner may choose from for tables that are not replicated.
    `fused`: in the device's own memory. On CUDA also `fused_uvm` (in host memory, read over the bus) and
    `fused_uvm_caching` (likewise, with a fifth of the rows cached on the GPU), for tables that are larger
    than all GPUs together. Dynamic and split tables are always `fused`."""
    reserved_share: float = 0.15
    """Share of a rank's memory, its GPU's and its part of the host's, in which the planner puts no tables:
    for everything else."""
    min_column_dim: int = 16
    """Least number of columns of a piece where tables are cut by columns."""
    strategy: SplitStrategy = "auto"
    """`torchrec`: TorchRec's plan; pooled embeddings are exchanged. `des`: operators over the tables are
    split (DES), and ranks exchange partial results instead. `auto`: time both on the actual links at the
    start and keep the faster one for each operator. Results agree to rounding; name one for equal bits on any
    machine."""
    wire_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype in which partial results travel, of split operators and of row_wise tables on the CPU: `bf16`,
    `fp16`, or `fp32` for the dtype in which they were computed."""
    exchange_dtype: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """Dtype in which TorchRec exchanges pooled embeddings and their gradients: `bf16`, `fp16`, `int8`, or
    `fp32` for the dtype in which they were computed (bf16 under train.precision=bf16, where only `int8` is
    smaller). `int8` adds 8 bytes of scale per embedding; embeddings of fewer than 16 columns use fp16
    instead. For partial results see `wire_dtype`."""
    data_parallel_gradients: Literal["dense", "rows"] = "dense"
    """Gradients of replicated tables that ranks exchange: those of all rows (`dense`), or only of the rows
    that samples touched, if that is less (`rows`). `rows` pays off with a larger `data_parallel_rows`, where
    a batch touches fewer than about 2 / ranks of all rows."""

    def __post_init__(self) -> None:
        check_fields(self, "sharding.")
        _check(
            self.wire_dtype == "fp32" or self.strategy != "torchrec" or "row_wise" in self.kinds,
            "sharding.wire_dtype is about partial results, of split operators or row_wise tables; "
            "set sharding.strategy to des or auto (train.precision=bf16 halves what TorchRec exchanges)",
        )
        _check(
            self.data_parallel_gradients == "dense" or self.data_parallel_rows > 0,
            "sharding.data_parallel_gradients is about replicated tables; set sharding.data_parallel_rows",
        )
        known = sorted(SHARDING_KINDS["cuda"])
        for kind in self.kinds:
            _check(kind in known, f"sharding.kinds holds {kind!r}; known kinds are {', '.join(known)}")
        _check(bool(self.kinds), "sharding.kinds is empty; name at least table_wise")
        kernels = COMPUTE_KERNELS["cuda"]
        for each in self.kernels:
            _check(each in kernels, f"sharding.kernels holds {each!r}; known are {', '.join(kernels)}")
        _check(bool(self.kernels), "sharding.kernels is empty; name at least fused")
        _check(
            0 <= self.reserved_share < 1,
            f"sharding.reserved_share is {self.reserved_share}; choose a share from 0 to below 1",
        )
        _check_least(self, "sharding.", data_parallel_rows=0)
        _check(
            self.min_column_dim > 0 and self.min_column_dim % COLUMN_STEP == 0,
            f"sharding.min_column_dim is {self.min_column_dim}; FBGEMM wants a positive multiple of 4",
        )

    def check_device(self, device: str) -> None:
        """Refuse settings that `device` ("cpu" or "cuda") does not support.

        Raises:
            ValueError: names the sharding kinds, kernels or the dtype to change.
        """
        missing = [kind for kind in self.kinds if kind not in SHARDING_KINDS[device]]
        _check(
            not missing,
            f"there is no {', '.join(missing)} sharding on {device}; "
            f"set sharding.kinds to some of {', '.join(SHARDING_KINDS[device])}",
        )
        missing = [kernel for kernel in self.kernels if kernel not in COMPUTE_KERNELS[device]]
        _check(
            not missing,
            f"there is no {', '.join(missing)} on {device}, where sharding.kernels is "
            f"{', '.join(COMPUTE_KERNELS[device])}",
        )
        _check(
            device == "cpu" or self.wire_dtype == "fp32" or self.strategy != "torchrec",
            f"on {device}, TorchRec itself sums row_wise tables, without sharding.wire_dtype; leave it "
            "out, or set sharding.strategy to des or auto",
        )
        summed = [kind for kind in self.kinds if kind in {"row_wise", "table_row_wise", "grid_shard"}]
        _check(
            device == "cpu" or self.exchange_dtype != "int8" or not summed,
            f"on {device}, embeddings of {' and '.join(summed)} tables are summed on their way, which int8 "
            "cannot be; set sharding.exchange_dtype to bf16 or fp16, or take other sharding.kinds",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, when and where. `--resume RUN_FOLDER` continues from the newest save."""

    every_steps: int = 0
    """Steps between saves; the end of training is saved too. 0: never, unless `target_pls` is set."""
    target_pls: float = 0.0
    """Instead of `every_steps`: the portion of lost samples (PLS, CPR paper) that failures may cost the run.
    The interval follows from measured costs: as often as costs at most 0.1 % of training time, or more often
    if this target needs it. 0: off. Requires partial recovery."""
    mean_hours_to_failure: float = 0.0
    """With `target_pls`: rough mean time between losses of a node in the whole run, in hours, which is the
    time between failures divided by the nodes that one failure takes; `cpr plan` computes it. The first
    interval is based on it."""
    priority: RowPriority = "none"
    """Save only the most important rows, more often: `mfu` (most often looked up since their last save),
    `ssu` (a sample of those) or `scar` (most changed); for comparison `random`, `mru`, `touched`,
    `round_robin` or `never`. `none`: save all rows. Requires partial recovery."""
    ratio: float = 0.125
    """With `priority`: share of a large table's rows in one save; saves come 1/ratio times as often."""
    uri: str = ""
    """Checkpoint location that every rank can reach, a folder or a pyarrow URI such as s3://bucket/run.
    Empty: `checkpoint` in the run folder."""
    moment: Literal["consistent", "rolling"] = "consistent"
    """`consistent`: all rows from one step, so that a resumed run continues bit for bit. `rolling`: a few
    rows in each step, so that training hardly waits; a resumed run then differs slightly."""
    host_memory_mb: int = 384
    """Limit of the extra host memory of a worker for saving, in MB (1e6 bytes). A consistent save waits less
    if more of the worker's shards fit."""
    keep_last: int = 2
    """Number of saved states to keep; at least 2."""
    give_up_after: str = ""
    """End the run when saves have failed for this long, such as 30m or 12h. Empty: never. Failed saves are
    logged and retried after 10 s to 10 min. Workers that torchrun restarts after that count anew."""
    stop_within_s: float = 25.0
    """After SIGTERM, save before stopping if that takes at most this many seconds (torchrun kills workers
    after 30 s). 0: do not save. Ctrl-C stops at once."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint.")
        _check_least(self, "checkpoint.", every_steps=0, host_memory_mb=128, mean_hours_to_failure=0)
        _check(0 < self.ratio <= 1, "checkpoint.ratio is a share, above 0 and at most 1")
        _check(0 <= self.target_pls < 1, "checkpoint.target_pls is a portion, from 0 (off) to below 1")
        _check(
            not (self.target_pls and self.every_steps),
            "checkpoint.every_steps and checkpoint.target_pls both say how often to save; set one of them",
        )
        _check(
            (self.mean_hours_to_failure > 0) == (self.target_pls > 0),
            "checkpoint.target_pls and checkpoint.mean_hours_to_failure go together; set both, or none",
        )
        _check(
            self.priority == "none" or self.saves,
            "checkpoint.priority needs to know how often to save: set checkpoint.every_steps, or target_pls",
        )
        _check(
            self.keep_last >= 2,
            "checkpoint.keep_last must be at least 2: the newest state may turn out to be damaged",
        )
        limit_s = self.give_up_after_s
        _check(limit_s is None or limit_s > 0, "checkpoint.give_up_after must be positive (empty: never)")
        _check(
            0 <= self.stop_within_s <= LONGEST_WAIT_S,
            f"checkpoint.stop_within_s is {self.stop_within_s:g}; choose 0 (never) to {LONGEST_WAIT_S:g} s",
        )

    def directory(self, folder: Path) -> str:
        """Checkpoint location of a run with this folder."""
        return self.uri or str(folder / "checkpoint")

    def best_directory(self, folder: Path) -> str:
        """Location of the best state (`train.keep_best`) of a run with this folder."""
        if not self.uri:
            return str(folder / BEST)
        path, mark, options = self.uri.partition("?")
        return f"{path.rstrip('/')}/{BEST}{mark}{options}"

    @property
    def give_up_after_s(self) -> float | None:
        """`give_up_after` in seconds; None: never."""
        try:
            return parse_duration(self.give_up_after) if self.give_up_after else None
        except ValueError as error:
            raise ValueError(f"checkpoint.give_up_after: {error}") from error

    @property
    def saves(self) -> bool:
        """Whether the run saves periodically."""
        return self.every_steps > 0 or self.target_pls > 0

    @property
    def needs_recovery(self) -> bool:
        """Whether the run saves in a way that only partial recovery supports."""
        return self.priority != "none" or self.target_pls > 0


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Partial recovery after a worker or node died and torchrun or `cpr run` restarted the workers.

    Requires checkpoints (`checkpoint.every_steps` or `checkpoint.target_pls`) for the rows that are lost.
    """

    enabled: bool = True
    """Surviving workers keep their tables. `false`: all go back to the newest checkpoint; without
    `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` (which `cpr run` sets), workers that torchrun restarts then often
    fail to connect, as they find addresses of those before."""
    max_lost_share: float = 0.75
    """Largest share of the tables that may come from the checkpoint while the rest is kept. If more is lost,
    all workers go back to the checkpoint."""
    max_pls: float = 1.0
    """Largest portion of lost samples of the whole run. A failure that would exceed it is recovered fully, if
    that loses less. 1: no limit."""
    timeout_s: float = 120.0
    """Seconds that a worker waits for the others in one collective before it gives up and all are restarted.
    Without recovery PyTorch's default applies."""

    def __post_init__(self) -> None:
        check_fields(self, "recovery.")
        _check(0 <= self.max_lost_share <= 1, "recovery.max_lost_share is a share, from 0 to 1")
        _check(0 <= self.max_pls <= 1, "recovery.max_pls is a portion, from 0 to 1 (no limit)")
        _check(
            0 < self.timeout_s <= LONGEST_WAIT_S,
            f"recovery.timeout_s is {self.timeout_s:g}; choose more than 0 and at most {LONGEST_WAIT_S:g} s",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, with which precision, and what to log."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu`, `cuda`, or `auto`: cuda if available."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of arithmetic and embedding exchange: `bf16` (with fp32 master weights and tables) or
    `fp32`."""
    epochs: int = 1
    """Passes over the training days."""
    max_steps: int = 0
    """Stop after this many steps. 0: train all epochs."""
    seed: int = 0
    """Seed of initial weights and shuffling."""
    evaluate_every_steps: int = 0
    """Steps between evaluations on the test days. The end of training is evaluated, too. 0: only that."""
    evaluate_every_epochs: int = 0
    """Epochs between evaluations on the test days; for runs of many epochs. 0: none."""
    keep_best: str = ""
    """Keep the state whose evaluation is the best so far, by `auc`, `log_loss`, `normalized_entropy`, or
    `max:NAME` or `min:NAME` for a metric that an own model gives, as a checkpoint in the folder `best` of the
    run, or of `checkpoint.uri` if that is set. Each better state is written while training waits, and the one
    before it is kept, too. Empty: off."""
    patience: int = 0
    """Stop training after this many evaluations in a row without a better value of `keep_best`. 0: never."""
    min_improvement: float = 0.0
    """With `patience`: smaller improvements do not count."""
    pipeline: Literal["none", "ids", "prefetch", "auto", "waves", "delayed"] = "ids"
    """What ranks exchange while the model computes. `none`: nothing. `ids`: the next batch's ids. `prefetch`:
    the next batch's embeddings and the ids of the batch after it; rows that change meanwhile are sent again.
    The results of both are those of `none` to the last bit; one worker alone exchanges nothing. `auto`: time
    all three in turns on the first 195 batches, and keep the fastest. `waves`: a batch is computed in two
    halves, and one half's embeddings and their gradients travel while the other computes; the results are
    those of `none` to rounding, unless the loss compares the samples of a batch. `delayed`: the next batch's
    embeddings, without the last update of their rows, and the last batch's dense gradients, which are applied
    a step late."""
    wave_updates: Literal["sum", "tick_tock"] = "sum"
    """`waves`: one update with the gradients of both halves (`sum`); or each half batch is a wave of its own
    with a replica of the dense parameters, each gradient is used in its replica and, a wave later, in the
    other one, and tables are updated by each wave (`tick_tock`, Wavelet). Evaluation uses the first
    replica."""
    delay_steps: int = 1
    """`delayed`: steps by which gradients are late, 1 or 0 (plain training). The first step updates nothing
    that is late, and the gradient of the last one is saved with the state, and applied when it is resumed."""
    late_rows: Literal["stale", "predicted", "corrected"] = "stale"
    """`delayed`: embeddings without the last update of their rows (`stale`); or of `predicted` rows, which
    that update changes as the one before it did; or `corrected` as in `prefetch`, so that only dense
    gradients are late."""
    compensation: CompensationName = "none"
    """`delayed`: mitigation of late gradients for `dense.optimizer=sgd` with `dense.momentum` (arXiv
    2003.11666). `spike` compensation applies at once what a gradient has missed; prediction of the weights at
    which gradients are computed, from `velocity` or from the last change of the `weights`; or both."""
    batching: Literal["even", "dynamic"] = "even"
    """Samples of each rank in a step: as many on all (`even`); or by the measured speed of each (`dynamic`),
    which is followed during training, for workers that are not equally fast. All ranks together have
    `data.global_batch_size` samples in each step, and its result is that of one process with the same samples
    but for rounding; an epoch has each sample once. Which samples share a step depends on ranks and sizes."""
    log_every_steps: int = 100
    """Steps between lines of metrics; the last steps have a line, too, if they are fewer."""
    progressive_steps: int = 0
    """Steps of a window of progressive validation: AUC, log loss and calibration of the predictions that each
    sample got before it was trained, over all ranks. 0: off."""
    measure_scaling: bool = False
    """Measure what `cpr plan --workers` needs: the speed of the links at the start, the bytes that a step
    sends, and the gradient noise scale of the dense parameters over the newest half of the steps, at most
    1,000."""
    run_folder: str = "runs"
    """Folder in which each run creates its own run folder."""
    warm_start: str = ""
    """Checkpoint of another run, a folder or a pyarrow URI, from which a new run takes model, optimizers and
    schedule position, while its data starts at the beginning; `--warm-start RUN_FOLDER` sets it, also to
    the best state of that run: `--warm-start RUN_FOLDER/best`. Empty: random initial values."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        _check_least(self, "train.", epochs=1, max_steps=0, log_every_steps=1, patience=0)
        _check_least(self, "train.", progressive_steps=0)
        _check_least(self, "train.", evaluate_every_steps=0, evaluate_every_epochs=0, min_improvement=0)
        _check(0 <= self.seed < 2**63, "train.seed must be a whole number from 0 to 2**63 - 1")
        self._check_delay()
        self._check_goal()

    def _check_delay(self) -> None:
        _check(
            self.delay_steps in {0, 1},
            f"train.delay_steps is {self.delay_steps}; choose 1, as the exchange of one step runs "
            "under the next, or 0 (plain training)",
        )
        of_delayed = ("delay_steps", "late_rows", "compensation")
        given = [name for name in of_delayed if getattr(self, name) != getattr(TrainConfig, name)]
        _check(
            self.pipeline == "delayed" or not given,
            f"train.{' and train.'.join(given)}: about late gradients, and train.pipeline is "
            f"{self.pipeline}: leave them out, or set train.pipeline=delayed",
        )
        _check(
            self.pipeline == "waves" or self.wave_updates == TrainConfig.wave_updates,
            f"train.wave_updates is about halves of a batch, and train.pipeline is {self.pipeline}: leave it "
            "out, or set train.pipeline=waves",
        )
        _check(
            self.compensation == "none" or self.is_late,
            f"train.compensation={self.compensation} has nothing to compensate for, as train.delay_steps is "
            "0: leave it out, or set train.delay_steps=1",
        )

    @property
    def has_two_replicas(self) -> bool:
        """Whether there are two replicas of the dense parameters."""
        return self.pipeline == "waves" and self.wave_updates == "tick_tock"

    @property
    def is_late(self) -> bool:
        """Whether gradients are applied after the step that has computed them."""
        return self.pipeline == "delayed" and self.delay_steps > 0

    def _check_goal(self) -> None:
        goal = self.goal
        _check(
            goal is None or self.evaluate_every_steps > 0 or self.evaluate_every_epochs > 0,
            "train.keep_best compares evaluations: set train.evaluate_every_epochs=1 for one after each "
            "epoch, or train.evaluate_every_steps",
        )
        _check(goal is not None or not self.patience, "train.patience needs a metric: set train.keep_best")
        _check(
            self.patience > 0 or not self.min_improvement,
            "train.min_improvement says what train.patience waits for; set that, too",
        )

    @property
    def goal(self) -> Goal | None:
        """The metric of `keep_best`; None: off."""
        try:
            return Goal.parse(self.keep_best) if self.keep_best else None
        except ValueError as error:
            raise ValueError(f"train.keep_best: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    mirror: MirrorConfig = field(default_factory=MirrorConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        equal_gradients = self.dense.optimizer not in LARGE_BATCH_OPTIMIZERS and not self.dense.clip_norm
        _check(
            equal_gradients or self.comm.exchange not in {"priority", "selsync"},
            f"comm.exchange={self.comm.exchange} has no whole mean gradient at any time, which "
            f"{' and '.join(LARGE_BATCH_OPTIMIZERS)} and dense.clip_norm take norms of; choose another one",
        )
        self._check_pipeline()
        if self.stream.uri:
            check_stream(self)
        self._check_scaling()
        goal = self.train.goal
        _check(
            goal is None or not goal.is_own or self.model.is_own,
            f"train.keep_best is {self.train.keep_best}, a metric of an own model, and model.kind is "
            f"{self.model.kind}; choose one of {', '.join(BUILT_IN)}",
        )
        _check(
            not self.train.warm_start or self.train.warm_start != self.checkpoint.uri,
            f"train.warm_start and checkpoint.uri are both {self.checkpoint.uri}: a warm start only reads "
            "the other run's checkpoint; set checkpoint.uri to another place",
        )

    def _check_pipeline(self) -> None:
        exchange, train = self.comm.exchange, self.train
        if train.has_two_replicas:
            _check(
                exchange not in {"priority", "selsync"},
                f"comm.exchange={exchange} updates one replica of the dense parameters, and "
                "train.wave_updates=tick_tock has two: choose another exchange, or train.wave_updates=sum",
            )
            _check(
                self.dense.clip_norm == 0,
                "dense.clip_norm would take the gradients of two replicas for one: leave it out, or set "
                "train.wave_updates=sum",
            )
        if train.batching == "dynamic":
            unfit = {
                "priority": "waits for other ranks in a thread of its own, where it is not measured",
                "selsync": "averages parameters, where batches of different sizes have no weights",
            }
            _check(
                exchange not in unfit,
                f"comm.exchange={exchange} {unfit.get(exchange)}: choose another one, or train.batching=even",
            )
            _check(
                train.pipeline not in {"waves", "delayed"},
                f"train.pipeline={train.pipeline} is made for batches of one size: with "
                "train.batching=dynamic choose none, ids, prefetch or auto",
            )
        if not train.is_late:
            return
        why = {
            "priority": "overlaps with the next forward pass itself, without a delay",
            "selsync": "averages parameters, so that there is no gradient to be late",
        }.get(exchange, "runs in the thread that trains, which would wait for it all the same")
        _check(
            exchange == "dense",
            f"comm.exchange={exchange} {why}: with train.pipeline=delayed set comm.exchange=dense, or leave "
            "out train.pipeline",
        )
        _check(
            self.train.compensation == "none" or self.dense.momentum > 0,
            f"train.compensation={self.train.compensation} is derived from SGD's momentum, and "
            f"dense.optimizer is {self.dense.optimizer}, dense.momentum {self.dense.momentum:g}: set "
            "dense.optimizer=sgd and dense.momentum=0.9, or leave out train.compensation",
        )

    def _check_scaling(self) -> None:
        """Gradient noise takes norms of each rank's own gradient and of the exact mean of the same step."""
        if not self.train.measure_scaling:
            return
        exact = [name for name in DENSE if name != "priority"]
        _check(
            self.comm.exchange in exact and self.comm.codec == "fp32",
            "train.measure_scaling compares norms of own gradients with that of their exact mean, which "
            f"comm.exchange={self.comm.exchange} with comm.wire_dtype={self.comm.wire_dtype} does not have: "
            f"set comm.exchange to one of {', '.join(exact)}, with comm.wire_dtype=fp32",
        )
        _check(
            not self.train.is_late and not self.train.has_two_replicas,
            "train.measure_scaling needs own gradients and their mean in the same step, which "
            f"train.pipeline={self.train.pipeline} moves apart: choose none, ids, prefetch or auto, or waves "
            "with train.wave_updates=sum",
        )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON-able values."""
        return asdict(self)
