"""The README's tables, as data: what each row says and which stored result it says it from.

`result` is a format string over the result's figures, e.g. `{ratio:.2f} x`; a `/` in the format divides
first (`{peak_extra_bytes:.0f/1e6} MB`). Besides figures there are `{num_seeds}` and `{config[NAME]}`. A row
whose experiment is not finished is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: `what` was measured, with which `result`; both are format strings."""

    experiment: str
    what: str
    result: str


def _range(figure: str, more: str = "") -> str:
    """The format of a ratio with its extremes."""
    return f"**{{{figure}:.2f}} x** ({{{figure}_low:.2f}} to {{{figure}_high:.2f}}{more})"


SPEED: Final[Sequence[Row]] = [
    Row(
        experiment="throughput",
        what="training step, mixed precision, over TorchRec's best setting",
        result=_range("ratio_to_torchrec_best", " over {config[rounds]} rounds")
        + "; {samples_per_s:,.1f/1e3} thousand samples/s",
    ),
    Row(experiment="throughput", what="the same in fp32", result=_range("ratio_to_torchrec_fp32")),
    Row(
        experiment="precision",
        what="AUC of mixed precision minus fp32, {num_seeds} seeds",
        result="**{auc_bf16_minus_fp32:+.4f}**, 95 % interval ±{auc_bf16_minus_fp32_ci:.4f}",
    ),
    Row(
        experiment="preparation",
        what="preparing raw Criteo data, over TorchRec's conversion",
        result="**{ratio_to_torchrec:.1f} x**",
    ),
    Row(
        experiment="preparation",
        what="the same, over polars doing it in one go without checks",
        result="**{ratio_to_polars:.2f} x**; {rows_per_s:,.0f/1e3} thousand rows/s",
    ),
    Row(
        experiment="caching",
        what="second epoch from the cache, over slow storage",
        result="**{second_epoch_speedup:.1f} x** faster; the first takes {first_epoch_ratio:.2f} x the time",
    ),
    Row(
        experiment="memory_growth",
        what="growth of host memory in use in 1,000 steps, over {config[train.max_steps]:,} steps",
        result=(
            "**{growth_bytes_per_1000_steps:.1f/1e3} kB**, 95 % interval "
            "±{growth_bytes_per_1000_steps_ci:.1f/1e3} kB; of the resident set "
            "{rss_growth_bytes_per_1000_steps:.1f/1e6} ± {rss_growth_bytes_per_1000_steps_ci:.1f/1e6} MB"
        ),
    ),
]

SPLIT_MODELS: Final[Mapping[str, str]] = {
    "lr": "LR",
    "fm": "FM",
    "deepfm": "DeepFM",
    "dlrm": "DLRM",
    "dcn": "DCN-v2",
}
"""By their names in figures."""

SPLITTING: Final[Sequence[Row]] = [
    *(
        Row(
            experiment="splitting",
            what=f"bytes of a step that splitting saves on 4 workers, of {baseline}",
            result=", ".join(
                f"{name} **{{bytes_saved_{model}{ending}:.1%}}**" for model, name in SPLIT_MODELS.items()
            ),
        )
        for ending, baseline in (
            ("", "a parameter server's, multi-hot samples, ids left out as in the paper"),
            ("_with_ids", "a parameter server's, multi-hot samples, ids that we send counted"),
            ("_one_hot", "a parameter server's, one id a feature, ids left out"),
            ("_with_ids_one_hot", "a parameter server's, one id a feature, ids counted"),
            ("_a2a", "an all-to-all of embeddings, ids left out"),
        )
    ),
    Row(
        experiment="splitting",
        what="relative error of a split step whose partial results travel in bf16 and fp16, worst model",
        result=(
            "gradients **{wire_error_bf16:.2%}** and **{wire_error_fp16:.2%}**, "
            "logits {wire_error_bf16_logits:.2%} and {wire_error_fp16_logits:.2%}"
        ),
    ),
    Row(
        experiment="splitting",
        what="training step, operators split, over TorchRec's plan, best of all links and models",
        result=_range("best_throughput_ratio"),
    ),
    Row(
        experiment="splitting",
        what=(
            "choices of the planner that were the faster ones (ties: {ties_share:.0%}, left open by noise: "
            "{open_share:.0%})"
        ),
        result="**{planner_hits_share:.0%}**; throughput of `auto` over the better plan, worst cell: "
        + _range("auto_worst_ratio"),
    ),
]

TRAINERS: Final[Mapping[str, str]] = {
    "auto": "`auto`",
    "ddp_fp16": "DDP in fp16",
    "power_sgd": "PowerSGD",
    "all_gather_0_01": "1 % by all-gather",
}
"""By their names in figures, those that trained."""
SENDERS: Final[Mapping[str, str]] = {
    "ddp_fp16": "DDP in fp16",
    "ring_int8": "int8",
    "power_sgd": "PowerSGD",
    "all_gather_0_01": "1 % by all-gather",
    "star_0_01": "AR-Topk 1 %",
}
"""The same, of those whose bytes were counted."""

COMMUNICATION: Final[Sequence[Row]] = [
    Row(
        experiment="communication",
        what="share of a step that the dense exchange takes, 2 workers, links of 1 Gb/s",
        result="`tiny` **{dense_share_tiny_2_workers_1gbps:.0%}**, "
        "`terabyte` **{dense_share_terabyte_2_workers_1gbps:.0%}**, "
        "52 million dense parameters by themselves **{dense_share_wide_2_workers_1gbps:.0%}**",
    ),
    Row(
        experiment="communication",
        what="`comm.exchange=auto` over DDP, 52 million dense parameters, 1 Gb/s, worst layout",
        result=_range("wide_1gbps_speedup"),
    ),
    Row(
        experiment="communication",
        what="bytes of a step there over DDP's, 2 workers",
        result=", ".join(
            f"{name} **{{bytes_share_{contender}:.1%}}**" for contender, name in SENDERS.items()
        ),
    ),
    Row(
        experiment="communication",
        what="`auto` over the best comparable exchange, worst of all models, links and layouts",
        result=_range("auto_worst_ratio")
        + "; nothing clearly better in {auto_best_share:.0%} of them; all values sent, in fp32, in "
        "{auto_lossless_share:.0%}",
    ),
    Row(
        experiment="communication",
        what="`auto` over the best of all, a thousandth of the values and PowerSGD among them",
        result=_range("auto_worst_ratio_whole_table"),
    ),
    Row(
        experiment="communication",
        what="AUC minus DDP's after equal samples, {num_seeds} seeds, 2 workers, links of 1 Gb/s, in 1e-4",
        result=", ".join(
            f"{name} **{{auc_delta_{contender}:+.1f/1e-4}} ± {{auc_delta_{contender}_ci:.1f/1e-4}}**"
            for contender, name in TRAINERS.items()
        ),
    ),
    Row(
        experiment="communication",
        what="time to the AUC that DDP has after 3/4 of the samples: how many times sooner",
        result=", ".join(
            f"{name} **{{time_to_auc_speedup_{contender}:.2f}} ± {{time_to_auc_speedup_{contender}_ci:.2f}}**"
            for contender, name in TRAINERS.items()
        )
        + "; `auto` had decided by step {auto_decided_at_step:.0f}",
    ),
    Row(
        experiment="communication",
        what="winners of 36 that the cost formulas name, as a paper measured them",
        result="**{table_vi_hits:.0f}**",
    ),
    Row(
        experiment="mstopk",
        what="choosing the largest of 10 and of 100 million values (MSTopK), over `torch.topk`, worst case",
        result=_range("mstopk_speedup_10m")
        + " and "
        + _range("mstopk_speedup_100m")
        + "; energy kept, of the exact choice's: **{mstopk_energy:.4f}**",
    ),
]

SAVING: Final[Sequence[Row]] = [
    Row(
        experiment="checkpointing",
        what="training waits for a full save, over `torch.distributed.checkpoint`'s save",
        result="rolling "
        + _range("blocked_ratio_rolling", " over {config[rounds]} rounds")
        + ", consistent **{blocked_ratio_consistent:.2f} x**",
    ),
    Row(
        experiment="checkpointing",
        what="training time lost to a save until its commit, over DCP's `async_save`",
        result="rolling "
        + _range("lost_ratio_to_dcp_async")
        + ", consistent **{lost_ratio_to_dcp_async_consistent:.2f} x**",
    ),
    Row(
        experiment="checkpointing",
        what="speed of saving, and of loading cold with every digest verified, over DCP",
        result=_range("save_ratio_to_dcp") + " and " + _range("load_ratio_to_dcp"),
    ),
    Row(
        experiment="checkpointing",
        what="extra host memory of a rolling save of 1.3 GB a worker",
        result=(
            "**{peak_extra_bytes:,.0f/1e6} MB** (DCP's `async_save`: {peak_extra_bytes_dcp_async:.1f/1e9} GB)"
        ),
    ),
    Row(
        experiment="checkpointing",
        what="a save of 1/8 of the rows, over a full one",
        result="the wait "
        + _range("row_save_blocked_share")
        + ", the bytes **{row_save_bytes_share:.2f} x**",
    ),
    Row(
        experiment="codecs",
        what=(
            "AUC when all rows pass a row save's codec and training goes on, minus exact, {num_seeds} seeds, "
            "in 1e-4"
        ),
        result=", ".join(
            f"{codec} **{{auc_{codec}_minus_exact:+.1f/1e-4}} ± {{auc_{codec}_minus_exact_ci:.1f/1e-4}}**"
            for codec in ("fp16", "int8", "int4")
        ),
    ),
]

FAILURES: Final[Sequence[Row]] = [
    Row(
        experiment="recovery",
        what="from `kill -9` of one of 2 workers to the next step of all, over torchrun and DCP's load",
        result=_range("time_ratio_2") + "; {seconds_2:.1f} s against {rival_seconds_2:.1f} s",
    ),
    Row(
        experiment="recovery",
        what="the same of one of 4",
        result=_range("time_ratio_4") + "; {seconds_4:.1f} s against {rival_seconds_4:.1f} s",
    ),
    Row(
        experiment="recovery",
        what="runs that went on by themselves after a kill, with the plain command",
        result="**{first_restart_success:.0%}** of {config[restarts]}",
    ),
    Row(
        experiment="recovery",
        what="not bit for bit as they should be after a kill: survivors' rows, restored rows, dense tensors",
        result="**{rows_kept_wrong:.0f}**, **{rows_restored_wrong:.0f}**, **{dense_wrong:.0f}**",
    ),
    Row(
        experiment="recovery",
        what="batches trained on twice, and left out though not interrupted",
        result="**{batches_twice:.0f}**, **{batches_left_out:.0f}**",
    ),
    Row(
        experiment="recovery_soak",
        what=(
            "{soak_minutes:.0f} minutes of training on two nodes with {soak_failures:.0f} failures of all "
            "kinds (workers, agents, a whole node, memory, hangs, damaged files, full disks; "
            "{soak_partitions:.0f} partitions, {soak_pauses:.0f} pauses of a node, {soak_outages:.0f} "
            "outages of storage), over the same run undisturbed"
        ),
        result=(
            "AUC **{soak_auc_delta:+.1e}** at a PLS of **{soak_pls:.4f}**; rows that were not what they had "
            "to be: {soak_rows_wrong:.0f}; processes, files and memory left behind: {soak_leftovers:.0f}"
        ),
    ),
]

SCHEMES: Final[Mapping[str, str]] = {
    "mfu": "MFU",
    "ssu": "SSU",
    "scar": "SCAR",
    "vanilla": "all rows alike",
    "random": "random rows",
    "never": "no large table",
}
"""What is saved first, by name of the scheme."""

BRAIN: Final[Sequence[Row]] = [
    Row(
        experiment="tracking",
        what="counting every row's accesses (MFU), of a training step",
        result="**{mfu_step_share:.2%}**, {mfu_bytes_per_row:.2f} bytes a row",
    ),
    Row(
        experiment="tracking",
        what="a bounded sample of them (SSU)",
        result="**{ssu_step_share:.2%}**, {ssu_bytes_per_row:.2f} bytes a row; both also take "
        "{backlog_bytes:.0f/1048576} MiB for each FBGEMM module",
    ),
    Row(
        experiment="overhead",
        what="overhead of failures and saves, 56 h, 2 failures, 8 nodes: full recovery, best interval",
        result="**{overhead_full:.2%}** of training time",
    ),
    Row(
        experiment="overhead",
        what="partial recovery at the same interval",
        result="**{overhead_partial_naive:.2%}**",
    ),
    Row(experiment="overhead", what="CPR at a PLS of 0.1", result="**{overhead_cpr:.2%}**"),
    Row(
        experiment="overhead",
        what="the same with saves in the background",
        result="**{overhead_cpr_background:.2%}**, of which waiting for saves "
        "**{overhead_cpr_background_save:.4%}**; with the slower steps beside them "
        "**{overhead_cpr_background_slowed:.2%}**",
    ),
    Row(
        experiment="overhead",
        what="AUC against no failure, {num_seeds} seeds, in 1e-4",
        result=", ".join(
            f"{name} **{{auc_delta_{scheme}:+.1f/1e-4}} ± {{auc_delta_{scheme}_ci:.1f/1e-4}}**"
            for scheme, name in SCHEMES.items()
        ),
    ),
    Row(
        experiment="sensitivity",
        what="the same where each failure takes 4 of the 8 nodes, {num_seeds} seeds",
        result=", ".join(
            f"{SCHEMES[scheme]} **{{{figure}:+.1f/1e-4}} ± {{{figure}_ci:.1f/1e-4}}**"
            for scheme in ("mfu", "ssu", "vanilla")
            for figure in [f"auc_delta_{scheme}_nodes_4"]
        ),
    ),
    Row(
        experiment="pls_auc",
        what="AUC lost for each 0.1 of PLS, 8 failures, {num_seeds} seeds, in 1e-4",
        result=", ".join(
            f"{name} **{{slope_{scheme}:.1f/1e-3}} ± {{slope_{scheme}_ci:.1f/1e-3}}**"
            for scheme, name in SCHEMES.items()
            if scheme != "never"  # which no interval changes
        ),
    ),
    Row(
        experiment="pls_auc",
        what="AUC lost there if no large table is saved, whatever the interval, in 1e-4",
        result="**{loss_never:.1f/1e-4} ± {loss_never_ci:.1f/1e-4}**",
    ),
    Row(
        experiment="pls_auc",
        what="what MFU loses there, of what random rows lose",
        result="**{loss_ratio_mfu_to_random:.2f} ± {loss_ratio_mfu_to_random_ci:.2f}**",
    ),
    Row(
        experiment="pls_auc",
        what="correlation of PLS and loss of AUC, all rows saved alike",
        result="; ".join(
            f"{name} **{{pls_auc_correlation{ending}:.2f}}** ({{pls_auc_correlation{ending}_low:.2f}} to "
            f"{{pls_auc_correlation{ending}_high:.2f}})"
            for ending, name in (("", "DLRM, row-wise Adagrad"), ("_sgd", "SGD"), ("_dcnv2", "DCN-v2"))
        ),
    ),
    Row(
        experiment="scaling",
        what="overhead on 8, 100 and 1,000 nodes that fail independently, simulated",
        result="full **{overhead_full_8:.1%}**, **{overhead_full_100:.0%}**, **{overhead_full_1000:.0%}**; "
        "partial **{overhead_partial_8:.1%}**, **{overhead_partial_100:.1%}**, "
        "**{overhead_partial_1000:.0%}**",
    ),
]

TABLES: Final[Mapping[str, Sequence[Row]]] = {
    "speed": SPEED,
    "splitting": SPLITTING,
    "communication": COMMUNICATION,
    "saving": SAVING,
    "failures": FAILURES,
    "brain": BRAIN,
}
