"""What a run is: one frozen dataclass per owner, validated once.

`dlrm.config.recipe` reads them from TOML. What a user can get wrong without a look at machine or data is
refused here, before a process group exists. The resolved configuration is dumped into the run folder.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from cpr.fields import check_fields
from cpr.humanize import parse_duration
from dlrm.comm.config import CommConfig

SPARSE_OPTIMIZERS: Final = ("sgd", "adagrad", "rowwise_adagrad")
DENSE_OPTIMIZERS: Final = ("sgd", "adagrad", "adam", "lars", "lamb")
LARGE_BATCH_OPTIMIZERS: Final = ("lars", "lamb")
ORDERS: Final = ("stripes", "seldp")
MODELS: Final = ("dlrm", "dcnv2", "deepfm", "fm", "lr")
PRECISIONS: Final = ("fp32", "bf16")
STRATEGIES: Final = ("torchrec", "des", "auto")
WIRE_DTYPES: Final = ("fp32", "bf16", "fp16")
EXCHANGE_DTYPES: Final = ("fp32", "bf16", "fp16", "int8")
REPLICATED_GRADIENTS: Final = ("dense", "rows")
PRIORITIES: Final = ("none", "mfu", "ssu", "scar", "random", "mru", "touched", "round_robin", "never")
MOMENTS: Final = ("consistent", "rolling")
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
"""Sharding kinds of each device; data_parallel is always there. Row-wise on the CPU is our own."""

LONGEST_WAIT_S: Final = 30 * 86_400.0
"""That can be asked for; clocks and timers cannot count to any number."""

COLUMN_STEP: Final = 4
"""FBGEMM wants tables, and pieces of tables, as wide as a multiple of this."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_rate(name: str, rate: float) -> None:
    _check(rate > 0, f"{name} must be positive, not {rate}")


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
    order: str = "stripes"
    """Which samples a rank gets. `stripes`: all ranks go through the log side by side, in time order;
    `seldp`: each through a chunk of the log of its own, in the next epoch through the one after (SelSync),
    for data whose order in time does not matter. An epoch is one pass over all samples in both."""
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
        check_fields(self, "data.")
        _check(self.global_batch_size > 0, "data.global_batch_size must be positive")
        _check(self.order in ORDERS, f"data.order is {self.order!r}; choose one of {', '.join(ORDERS)}")
        _check(
            self.window_batches > 0, "data.window_batches must be positive (1: no shuffling across batches)"
        )
        _check(self.prefetch_batches > 0, "data.prefetch_batches must be positive")
        _check(
            self.cache_disk_gb >= 0 and self.cache_memory_gb >= 0,
            "data.cache_disk_gb and data.cache_memory_gb must not be negative",
        )
        usual = (DataConfig.cache_disk_gb, DataConfig.cache_memory_gb)
        _check(
            bool(self.cache_folder) or (self.cache_disk_gb, self.cache_memory_gb) == usual,
            "data.cache_disk_gb and data.cache_memory_gb are limits of a cache; set data.cache_folder",
        )
        overlap = sorted(set(self.train_days) & set(self.test_days))
        _check(not overlap, f"days {overlap} are both in data.train_days and in data.test_days")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network around the tables."""

    kind: str = "dlrm"
    """`dlrm` (dot interaction), `dcnv2` (low-rank cross network), `deepfm`, `fm` (factorization machine) or
    `lr` (logistic regression)."""
    embedding_dim: int = 16
    """Columns of every table; a multiple of 4 (an FBGEMM limit). Unused by lr, whose weights take 4."""
    bottom_mlp: tuple[int, ...] = (512, 256, 64, 16)
    """dlrm, dcnv2: widths of the layers over the dense features; the last equals embedding_dim."""
    top_mlp: tuple[int, ...] = (512, 256, 1)
    """Widths of the layers over the interaction (deepfm: of the deep part); the last is 1. Not of fm, lr."""
    cross_layers: int = 3
    """dcnv2: number of cross layers."""
    cross_rank: int = 512
    """dcnv2: rank of a cross layer's weight."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        _check(self.kind in MODELS, f"model.kind is {self.kind!r}; choose one of {', '.join(MODELS)}")
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
    dynamic: tuple[str, ...] = ()
    """Features whose tables are dynamic: rows are given to the ids that come, any 64-bit integers, and taken
    back from those that were not seen for longest when none is free. `*`: all features."""
    dynamic_rows: int = 1_000_000
    """Rows of each dynamic table."""
    admit_after: int = 1
    """Dynamic tables: an id gets its row when training sees it for the so-manieth time; before, it is as if
    it were not in the sample."""

    def __post_init__(self) -> None:
        check_fields(self, "tables.")
        _check(
            self.optimizer in SPARSE_OPTIMIZERS,
            f"tables.optimizer is {self.optimizer!r}; choose one of {', '.join(SPARSE_OPTIMIZERS)}",
        )
        _check_rate("tables.learning_rate", self.learning_rate)
        _check(
            self.eps > 0,
            "tables.eps must be positive: without it, a row whose gradients were all 0 becomes 0 / 0",
        )
        _check(self.max_rows >= 0, "tables.max_rows must not be negative")
        _check(
            0 < self.dynamic_rows < 2**31,
            f"tables.dynamic_rows is {self.dynamic_rows}; choose 1 to 2**31 - 1",
        )
        _check(self.admit_after > 0, "tables.admit_after must be positive (1: at once)")
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
    """The optimizer of everything that is not a table."""

    optimizer: str = "adagrad"
    """`sgd`, `adagrad` or `adam`; for large batches, `lars` (SGD with momentum) or `lamb` (Adam), with a rate
    for each layer."""
    learning_rate: float = 0.02
    """Base learning rate of the dense parameters."""
    weight_decay: float = 0.0
    """lars, lamb: share of a weight that is added to its gradient (lars) or step (lamb); not of biases."""
    trust_coefficient: float = 0.001
    """lars: share of its norm that a layer changes by in a step of rate 1; multiplies learning_rate."""
    clip_norm: float = 0.0
    """Shrink the gradient of all dense parameters together, as one vector, to at most this norm; 0: never."""

    def __post_init__(self) -> None:
        check_fields(self, "dense.")
        _check(
            self.optimizer in DENSE_OPTIMIZERS,
            f"dense.optimizer is {self.optimizer!r}; choose one of {', '.join(DENSE_OPTIMIZERS)}",
        )
        _check_rate("dense.learning_rate", self.learning_rate)
        _check(self.weight_decay >= 0, "dense.weight_decay must not be negative")
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
        _check(self.clip_norm >= 0, "dense.clip_norm must not be negative (0: never)")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over time: linear warm-up, constant, polynomial decay; for tables and dense alike."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_start_step: int = 0
    """Step at which the decay begins."""
    decay_steps: int = 0
    """Steps over which the learning rate falls to 0 as (1 - progress) ** power; 0: no decay."""
    power: float = 2.0
    """Exponent of the decay; facebookresearch/dlrm uses 2."""

    def __post_init__(self) -> None:
        check_fields(self, "schedule.")
        _check(
            min(self.warmup_steps, self.decay_start_step, self.decay_steps) >= 0,
            "schedule steps must not be negative",
        )
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
    """How tables are laid over the ranks."""

    kinds: tuple[str, ...] = ("table_wise", "column_wise")
    """Kinds that TorchRec's planner may choose from for tables that are not replicated."""
    data_parallel_rows: int = 200
    """Tables with at most this many rows are replicated on every rank (with more than one rank)."""
    min_column_dim: int = 16
    """Where kinds cut columns: those that a piece has at least."""
    strategy: str = "auto"
    """`torchrec`: its plan, embeddings are exchanged; `des`: operators over tables are split, and ranks send
    partial results instead; `auto`: for each operator, what takes less time on these links, found out by
    trying when a run begins. Strategies give the same results but for rounding; who wants the same bits on
    any machine names one."""
    wire_dtype: str = "fp32"
    """Partial results, of split operators and of row_wise tables on the CPU, travel in `bf16` or `fp16`; with
    `fp32`, as they are computed."""
    exchange_dtype: str = "fp32"
    """Pooled embeddings that TorchRec exchanges, and their gradients, travel in `bf16`, `fp16` or `int8`;
    with `fp32`, as they are computed, which under train.precision=bf16 is bf16 already: only `int8` is less
    then. In `int8` each embedding has a scale of its own, 8 bytes; those of fewer than 16 columns travel in
    fp16. Partial results have wire_dtype instead."""
    data_parallel_gradients: str = "dense"
    """Of replicated tables, ranks exchange the gradients of all rows (`dense`) or only of those that their
    samples touched, where that is less (`rows`). The latter pays off with a larger data_parallel_rows: it
    sends less where a batch touches fewer than about 2 / ranks of all rows."""

    def __post_init__(self) -> None:
        check_fields(self, "sharding.")
        _check(
            self.strategy in STRATEGIES,
            f"sharding.strategy is {self.strategy!r}; choose one of {', '.join(STRATEGIES)}",
        )
        _check(
            self.wire_dtype in WIRE_DTYPES,
            f"sharding.wire_dtype is {self.wire_dtype!r}; choose one of {', '.join(WIRE_DTYPES)}",
        )
        _check(
            self.wire_dtype == "fp32" or self.strategy != "torchrec" or "row_wise" in self.kinds,
            "sharding.wire_dtype is about partial results, of split operators or row_wise tables; "
            "set sharding.strategy to des or auto (train.precision=bf16 halves what TorchRec exchanges)",
        )
        _check(
            self.exchange_dtype in EXCHANGE_DTYPES,
            f"sharding.exchange_dtype is {self.exchange_dtype!r}; choose one of {', '.join(EXCHANGE_DTYPES)}",
        )
        _check(
            self.data_parallel_gradients in REPLICATED_GRADIENTS,
            f"sharding.data_parallel_gradients is {self.data_parallel_gradients!r}; "
            f"choose one of {', '.join(REPLICATED_GRADIENTS)}",
        )
        _check(
            self.data_parallel_gradients == "dense" or self.data_parallel_rows > 0,
            "sharding.data_parallel_gradients is about replicated tables; set sharding.data_parallel_rows",
        )
        known = sorted(set(SHARDING_KINDS["cpu"]) | set(SHARDING_KINDS["cuda"]))
        for kind in self.kinds:
            _check(kind in known, f"sharding.kinds holds {kind!r}; known kinds are {', '.join(known)}")
        _check(bool(self.kinds), "sharding.kinds is empty; name at least table_wise")
        _check(
            self.data_parallel_rows >= 0,
            "sharding.data_parallel_rows must not be negative (0: replicate none)",
        )
        _check(
            self.min_column_dim > 0 and self.min_column_dim % COLUMN_STEP == 0,
            f"sharding.min_column_dim is {self.min_column_dim}; FBGEMM wants a positive multiple of 4",
        )

    def check_device(self, device: str) -> None:
        """Refuse what `device` ("cpu" or "cuda") does not have.

        Raises:
            ValueError: names the kinds to leave out, or a dtype that nothing would read or nobody could sum.
        """
        missing = [kind for kind in self.kinds if kind not in SHARDING_KINDS[device]]
        _check(
            not missing,
            f"there is no {', '.join(missing)} sharding on {device}; "
            f"set sharding.kinds to some of {', '.join(SHARDING_KINDS[device])}",
        )
        _check(
            device == "cpu" or self.wire_dtype == "fp32" or self.strategy != "torchrec",
            f"on {device}, TorchRec itself sums row_wise tables, in no sharding.wire_dtype of ours; leave it "
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
    """What of a run survives its end; `--resume RUN_FOLDER` goes on from there."""

    every_steps: int = 0
    """Save everything this often, and at the end; 0: never, unless `target_pls` says so."""
    target_pls: float = 0.0
    """In place of `every_steps`: the largest portion of lost samples (CPR paper) that failures may
    cost the run. It saves as often as costs 0.1 % of training at most, or more often if this target asks for
    it, by what it measures on the way. 0: off. Like `priority`, it takes partial recovery."""
    mean_hours_to_failure: float = 0.0
    """Between losses of a node in the whole run, roughly: the time between failures over the nodes that one
    takes, which `cpr plan` tells. `target_pls` begins with it."""
    priority: str = "none"
    """Save the rows that deserve it most instead of everything: `mfu` (those looked up most often since they
    were saved), `ssu` (a sample of them), `scar` (those that have changed most), or, to compare with,
    `random`, `mru`, `touched`, `round_robin` or `never`. `none`: everything."""
    ratio: float = 0.125
    """With `priority`: share of a large table's rows in one save, which comes 1/ratio times as often."""
    uri: str = ""
    """Where to, a folder or a pyarrow URI such as s3://bucket/run; empty: `checkpoint` in the run folder.
    Every rank must reach it."""
    moment: str = "consistent"
    """`consistent`: all rows from one moment, so that a resumed run goes on bit for bit; `rolling`: a few
    rows after each step, so that training hardly waits, but a resumed run differs a little."""
    host_memory_mb: int = 512
    """Ceiling of the extra host memory of a worker, in MB (1e6 bytes). A consistent save waits less the more
    of the worker's shards fits."""
    keep_last: int = 2
    """States that are kept; at least 2."""
    give_up_after: str = ""
    """End the run when saves have failed for so long, such as 30m or 12h. Empty: never, as a run that ends
    saves nothing either. Failed saves are told, and tried again after pauses of 10 s to 10 min."""
    stop_within_s: float = 25.0
    """After SIGTERM, save before leaving if that can be done in this time (torchrun kills after 30 s); 0:
    never. Ctrl-C leaves at once."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint.")
        _check(self.every_steps >= 0, "checkpoint.every_steps must not be negative (0: no checkpoints)")
        _check(
            self.priority in PRIORITIES,
            f"checkpoint.priority is {self.priority!r}; choose one of {', '.join(PRIORITIES)}",
        )
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
            self.moment in MOMENTS,
            f"checkpoint.moment is {self.moment!r}; choose one of {', '.join(MOMENTS)}",
        )
        _check(self.host_memory_mb >= 128, "checkpoint.host_memory_mb must be at least 128")
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
        """Where a run with this folder saves."""
        return self.uri or str(folder / "checkpoint")

    @property
    def give_up_after_s(self) -> float | None:
        """The same in seconds; None: never."""
        try:
            return parse_duration(self.give_up_after) if self.give_up_after else None
        except ValueError as error:
            raise ValueError(f"checkpoint.give_up_after: {error}") from error

    @property
    def saves(self) -> bool:
        """Whether the run saves now and then."""
        return self.every_steps > 0 or self.target_pls > 0

    @property
    def needs_recovery(self) -> bool:
        """Whether it saves in a way that partial recovery alone offers."""
        return self.priority != "none" or self.target_pls > 0


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What happens when a worker or a node dies while torchrun, or `cpr run`, starts workers again.

    It takes checkpoints (`checkpoint.every_steps` or `target_pls`): what nobody holds any more comes from
    there.
    """

    enabled: bool = True
    """Whether survivors go on with what they hold; false: all go back to the newest checkpoint."""
    max_lost_share: float = 0.75
    """Largest share of the tables that may come from the checkpoint while the rest goes on; if more is lost,
    all go back to it."""
    max_pls: float = 1.0
    """Largest portion of lost samples of the whole run; a failure that would take it above is recovered
    fully, if that loses less. 1: no limit."""
    timeout_s: float = 120.0
    """Longest that a worker waits for the others in one exchange; then it gives up, and all start again.
    Without recovery, which would be the end, they wait as long as PyTorch does."""

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
    warm_start: str = ""
    """Checkpoint of another run, a folder or a pyarrow URI, whose model, optimizers and place in the schedule
    a new run begins with, at the beginning of its own data; `--warm-start RUN_FOLDER` sets it. Empty: random
    values."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
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
        _check(0 <= self.seed < 2**63, "train.seed must be a whole number from 0 to 2**63 - 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        equal_gradients = self.dense.optimizer not in LARGE_BATCH_OPTIMIZERS and not self.dense.clip_norm
        _check(
            equal_gradients or self.comm.exchange not in {"priority", "selsync"},
            f"comm.exchange={self.comm.exchange} has no whole mean gradient at any time, which "
            f"{' and '.join(LARGE_BATCH_OPTIMIZERS)} and dense.clip_norm take norms of; choose another one",
        )

        _check(
            not self.train.warm_start or self.train.warm_start != self.checkpoint.uri,
            f"train.warm_start and checkpoint.uri are both {self.checkpoint.uri}: a warm start only reads "
            "the other run's checkpoint; set checkpoint.uri to another place",
        )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON-able values."""
        return asdict(self)
