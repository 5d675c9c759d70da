"""The rows of the READMEs' tables, as data: what was measured, with which result, and what qualifies it.

`what`, `result` and `caveat` are format strings over the figures of one stored result, e.g. `{ratio:.2f} x`;
a `/` in the format divides first (`{peak_extra_bytes:.0f/1e6} MB`). Besides figures there are `{num_seeds}`
and `{config[NAME]}`. A row whose experiment is not finished is left out. The table `headline` repeats the
rows that say so, each with its caveat. What holds by construction has no row: a share of bytes that follows
from a dtype, or an overhead that follows from times that were worked back from the paper's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A line of a table; all texts are format strings."""

    experiment: str
    what: str
    result: str
    caveat: str = ""
    is_headline: bool = False


def _range(figure: str, more: str = "") -> str:
    """The format of a ratio with its extremes."""
    return f"**{{{figure}:.2f}} x** ({{{figure}_low:.2f}} to {{{figure}_high:.2f}}{more})"


def _delta(figure: str) -> str:
    """The format of a difference in AUC with its interval, in 1e-4."""
    return f"**{{{figure}:+.1f/1e-4}} ± {{{figure}_ci:.1f/1e-4}}**"


SPEED: Final[Sequence[TableRow]] = [
    TableRow(
        experiment="throughput",
        what="training step in mixed precision, over TorchRec's best setting",
        result=_range("ratio_to_torchrec_best", " over {config[rounds]} rounds")
        + "; {samples_per_s:,.1f/1e3} thousand samples/s",
        caveat="**{ratio_to_torchrec_keeping_memory:.2f} x** ({ratio_to_torchrec_keeping_memory_low:.2f} to "
        "{ratio_to_torchrec_keeping_memory_high:.2f}) once TorchRec has our memory settings (freed memory "
        "is kept, huge pages are asked for); two CPU cores, tables cut to {config[rows]:,} rows",
        is_headline=True,
    ),
    TableRow(
        experiment="throughput",
        what="training step in fp32, over TorchRec in fp32",
        result=_range("ratio_to_torchrec_fp32"),
        caveat="TorchRec without our memory settings",
    ),
    TableRow(
        experiment="precision",
        what="AUC of mixed precision minus fp32, {num_seeds} seeds, in 1e-4",
        result=_delta("auc_bf16_minus_fp32"),
        caveat="margin fixed in advance: 5; synthetic data",
        is_headline=True,
    ),
    TableRow(
        experiment="preparation",
        what="preparing raw Criteo data, over TorchRec's conversion",
        result="**{ratio_to_torchrec:.1f} x**",
        caveat="**{ratio_to_polars:.2f} x** the speed of polars, which checks and counts nothing; "
        "{rows_per_s:,.0f/1e3} thousand rows/s",
        is_headline=True,
    ),
    TableRow(
        experiment="caching",
        what="second epoch from the cache, over slow storage",
        result="**{second_epoch_speedup:.1f} x** faster",
        caveat="the first epoch takes {first_epoch_ratio:.2f} x the time; the storage's slowness is "
        "simulated",
    ),
    TableRow(
        experiment="memory_growth",
        what="growth of host memory in use in 1,000 steps, over {config[train.max_steps]:,} steps",
        result="**{growth_bytes_per_1000_steps:.1f/1e3} ± {growth_bytes_per_1000_steps_ci:.1f/1e3} kB**",
        caveat="more than none; the resident set grows by {rss_growth_bytes_per_1000_steps:.1f/1e6} ± "
        "{rss_growth_bytes_per_1000_steps_ci:.1f/1e6} MB",
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

SPLITTING: Final[Sequence[TableRow]] = [
    *(
        TableRow(
            experiment="splitting",
            what=f"bytes of a step that splitting saves on 4 workers, of {baseline}",
            result=", ".join(
                f"{name} **{{bytes_saved_{model}{ending}:.1%}}**" for model, name in SPLIT_MODELS.items()
            ),
            caveat=caveat,
        )
        for ending, baseline, caveat in (
            ("", "a parameter server's, multi-hot samples", "ids left out, as in the paper"),
            ("_with_ids", "a parameter server's, multi-hot samples", "ids that we send counted"),
            ("_one_hot", "a parameter server's, one id a feature", "ids left out; below 0: more bytes"),
            ("_with_ids_one_hot", "a parameter server's, one id a feature", "ids counted"),
            ("_a2a", "an all-to-all of embeddings", "ids left out"),
        )
    ),
    TableRow(
        experiment="splitting",
        what="relative error of a split step whose partial results travel in bf16 and fp16, worst model",
        result=(
            "gradients **{wire_error_bf16:.2%}** and **{wire_error_fp16:.2%}**, logits "
            "{wire_error_bf16_logits:.2%} and {wire_error_fp16_logits:.2%}"
        ),
    ),
    TableRow(
        experiment="splitting",
        what="training step with split operators, over TorchRec's plan, best of all links and models",
        result=_range("best_throughput_ratio"),
        caveat="the planner's choice is clearly the faster plan in {planner_firm_hits_share:.1%} of the "
        "cells ({planner_hits_share:.0%} if ties count as hits), and in the worst cell "
        "{auto_worst_ratio:.2f} x as fast as the better one; links of 1 Gb/s and more between processes on "
        "two cores",
        is_headline=True,
    ),
    TableRow(
        experiment="splitting",
        what="cells in which the planner's choice is clearly the faster plan",
        result="**{planner_firm_hits_share:.1%}**",
        caveat="{planner_hits_share:.1%} if ties count as hits; noise leaves {open_share:.1%} of the cells "
        "open",
    ),
    TableRow(
        experiment="splitting",
        what="throughput of `--sharding auto` over the better plan, worst cell",
        result=_range("auto_worst_ratio"),
    ),
]

TRAINERS: Final[Mapping[str, str]] = {
    "auto": "`auto`",
    "ddp_fp16": "DDP in fp16",
    "power_sgd": "PowerSGD",
    "all_gather_0_01": "1 % by all-gather",
}
"""By their names in figures, those that trained."""

COMMUNICATION: Final[Sequence[TableRow]] = [
    TableRow(
        experiment="communication",
        what="share of a step that the dense exchange takes, 2 workers, links of 1 Gb/s",
        result="`tiny` **{dense_share_tiny_2_workers_1gbps:.0%}**, `terabyte` "
        "**{dense_share_terabyte_2_workers_1gbps:.0%}**, 52 million dense parameters by themselves "
        "**{dense_share_wide_2_workers_1gbps:.0%}**",
    ),
    TableRow(
        experiment="communication",
        what="`comm.exchange=auto` over DDP, 52 million dense parameters, 1 Gb/s, worst layout",
        result=_range("wide_1gbps_speedup"),
        caveat="a model made for this: in `terabyte` the whole exchange is "
        "{dense_share_terabyte_2_workers_1gbps:.0%} of a step, in `tiny` "
        "{dense_share_tiny_2_workers_1gbps:.0%}; AUC minus DDP's {auc_delta_auto:+.0f/1e-4} ± "
        "{auc_delta_auto_ci:.0f/1e-4} in 1e-4, too wide to tell",
        is_headline=True,
    ),
    TableRow(
        experiment="communication",
        what="`auto` over the best comparable exchange, worst of all models, links and layouts",
        result=_range("auto_worst_ratio"),
        caveat="of exchanges that leave no more values behind than `auto` may; over the best of all, a "
        "thousandth of the values and PowerSGD included: {auto_worst_ratio_whole_table:.2f} x",
    ),
    TableRow(
        experiment="communication",
        what="AUC minus DDP's after equal samples, {num_seeds} seeds, 2 workers, links of 1 Gb/s, in 1e-4",
        result=", ".join(f"{name} {_delta(f'auc_delta_{trainer}')}" for trainer, name in TRAINERS.items()),
        caveat="intervals wider than any margin that would matter: neither equal nor worse is shown",
    ),
    TableRow(
        experiment="communication",
        what="time to the AUC that DDP has after 3/4 of the samples: how many times sooner",
        result=", ".join(
            f"{name} **{{time_to_auc_speedup_{trainer}:.2f}} ± {{time_to_auc_speedup_{trainer}_ci:.2f}}**"
            for trainer, name in TRAINERS.items()
        ),
        caveat="no interval excludes 1; `auto` had decided by step {auto_decided_at_step:.0f}",
    ),
    TableRow(
        experiment="mstopk",
        what="choosing the largest of 10 and of 100 million values (MSTopK), over `torch.topk`, worst case",
        result=_range("mstopk_speedup_10m") + " and " + _range("mstopk_speedup_100m"),
        caveat="energy kept, of the exact choice's: {mstopk_energy:.4f}",
    ),
]

SAVING: Final[Sequence[TableRow]] = [
    TableRow(
        experiment="checkpointing",
        what="training waits for a full rolling save, over `torch.distributed.checkpoint` (DCP)'s save",
        result=_range("blocked_ratio_rolling", " over {config[rounds]} rounds"),
        caveat="but **{blocked_ratio_rolling_to_dcp_async:.2f} x** as long as for DCP's `async_save`, which "
        "copies everything at once: it takes {peak_extra_bytes_dcp_async:.1f/1e9} GB of extra memory, the "
        "rolling save {peak_extra_bytes:.1f/1e9} GB, and until the commit costs training more (next row)",
        is_headline=True,
    ),
    TableRow(
        experiment="checkpointing",
        what="training time lost to a save until its commit (waiting and slower steps), over DCP's "
        "`async_save`",
        result="rolling "
        + _range("lost_ratio_to_dcp_async")
        + ", consistent **{lost_ratio_to_dcp_async_consistent:.2f} x**",
        caveat="two cores, which training shares with the writers; a consistent save takes "
        "{peak_extra_bytes_consistent:.1f/1e9} GB of extra memory",
        is_headline=True,
    ),
    TableRow(
        experiment="checkpointing",
        what="training waits for a full consistent save, over DCP's save",
        result=_range("blocked_ratio_consistent"),
        caveat="**{blocked_ratio_consistent_to_dcp_async:.2f} x** as long as for DCP's `async_save`",
    ),
    TableRow(
        experiment="checkpointing",
        what="speed of saving, over DCP",
        result=_range("save_ratio_to_dcp"),
    ),
    TableRow(
        experiment="checkpointing",
        what="speed of loading cold with every digest verified, over DCP",
        result=_range("load_ratio_to_dcp"),
        caveat="{load_ratio_to_dcp_warm:.2f} x where DCP's files are in the page cache",
    ),
    TableRow(
        experiment="checkpointing",
        what="training waits for a save of 1/8 of the rows, over a full one",
        result=_range("row_save_blocked_share"),
    ),
    TableRow(
        experiment="codecs",
        what="AUC when all rows pass a row save's codec and training continues, minus exact, {num_seeds} "
        "seeds, in 1e-4",
        result=", ".join(
            f"{codec} {_delta(f'auc_{codec}_minus_exact')}" for codec in ("fp16", "int8", "int4")
        ),
    ),
]

FAILURES: Final[Sequence[TableRow]] = [
    TableRow(
        experiment="recovery",
        what="from `kill -9` of one of 2 workers to the next step of all, over torchrun and DCP's load",
        result=_range("time_ratio_2") + "; {seconds_2:.1f} s against {rival_seconds_2:.1f} s",
        caveat="2.6 GB of tables on one machine, DCP's files in the page cache; most of it is gained by "
        "processes that are forked with everything imported and by tables that stay in memory",
        is_headline=True,
    ),
    TableRow(
        experiment="recovery",
        what="the same of one of 4",
        result=_range("time_ratio_4") + "; {seconds_4:.1f} s against {rival_seconds_4:.1f} s",
        caveat="4 workers on two cores",
    ),
    TableRow(
        experiment="recovery_soak",
        what=(
            "{soak_minutes:.0f} minutes of training on two nodes with {soak_failures:.0f} failures of all "
            "kinds (workers, agents, nodes, memory, hangs, damaged files, full disks; {soak_partitions:.0f} "
            "partitions, {soak_pauses:.0f} pauses of a node, {soak_outages:.0f} outages of storage), over "
            "the same run undisturbed"
        ),
        result=(
            "AUC **{soak_auc_delta:+.2f/1e-4}e-4** at a portion of lost samples (PLS) of "
            "**{soak_pls:.4f}**; wrong rows: **{soak_rows_wrong:.0f}** of {soak_rows_checked:,.0f} compared"
        ),
        caveat=(
            "one run; both nodes on one machine; {soak_rows_unchecked:,.0f} rows could not be compared, "
            "dense parameters are not; processes, files and memory left behind: {soak_leftovers:.0f}"
        ),
        is_headline=True,
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

QUALITY: Final[Sequence[TableRow]] = [
    TableRow(
        experiment="tracking",
        what="counting every row's accesses (MFU), of a training step",
        result="**{mfu_step_share:.2%}** ({mfu_step_share_low:.2%} to {mfu_step_share_high:.2%})",
        caveat="and {backlog_bytes:.0f/1048576} MiB for each FBGEMM module",
    ),
    TableRow(
        experiment="tracking",
        what="a bounded sample of the accesses (SSU)",
        result="**{ssu_step_share:.2%}** ({ssu_step_share_low:.2%} to {ssu_step_share_high:.2%})",
    ),
    TableRow(
        experiment="overhead",
        what="overhead of failures and of saves in the background, 56 h, 2 failures, 8 nodes, PLS 0.1",
        result="**{overhead_cpr_background:.2%}** of training time; "
        "**{overhead_cpr_background_tracked:.1%}** with slower steps and MFU's counting",
        caveat="accounted, not run: by the paper's formulas, with times of a save and a load worked back "
        "from the paper's percentages and with our measured waiting; slower steps alone make it "
        "{overhead_cpr_background_slowed:.2%}; the formulas give full recovery {overhead_full:.1%}",
        is_headline=True,
    ),
    TableRow(
        experiment="overhead",
        what="AUC against no failure in that job, {num_seeds} seeds, in 1e-4",
        result=", ".join(f"{name} {_delta(f'auc_delta_{scheme}')}" for scheme, name in SCHEMES.items()),
        caveat="margin fixed in advance: 2; with SGD MFU is {auc_delta_mfu_sgd:+.1f/1e-4} ± "
        "{auc_delta_mfu_sgd_ci:.1f/1e-4}, which does not show it; emulated in one process on synthetic "
        "data, where MFU fills only {budget_used_mfu:.0%} of its budget",
        is_headline=True,
    ),
    TableRow(
        experiment="sensitivity",
        what="the same where each failure takes 4 of the 8 nodes, {num_seeds} seeds",
        result=", ".join(
            f"{SCHEMES[scheme]} {_delta(f'auc_delta_{scheme}_nodes_4')}"
            for scheme in ("mfu", "ssu", "vanilla")
        ),
    ),
    TableRow(
        experiment="pls_auc",
        what="AUC lost for each 0.1 of PLS, 8 failures, {num_seeds} seeds, in 1e-4",
        result=", ".join(
            f"{name} **{{slope_{scheme}:.1f/1e-3}} ± {{slope_{scheme}_ci:.1f/1e-3}}**"
            for scheme, name in SCHEMES.items()
            if scheme != "never"  # which no interval changes
        ),
        caveat="MFU loses {loss_ratio_mfu_to_random:.2f} ± {loss_ratio_mfu_to_random_ci:.2f} of what random "
        "rows lose",
        is_headline=True,
    ),
    TableRow(
        experiment="pls_auc",
        what="AUC lost there if no large table is saved, whatever the interval, in 1e-4",
        result="**{loss_never:.1f/1e-4} ± {loss_never_ci:.1f/1e-4}**",
    ),
    TableRow(
        experiment="pls_auc",
        what="correlation of PLS and loss of AUC, all rows saved alike",
        result="; ".join(
            f"{name} **{{pls_auc_correlation{ending}:.2f}}** ({{pls_auc_correlation{ending}_low:.2f}} to "
            f"{{pls_auc_correlation{ending}_high:.2f}})"
            for ending, name in (("", "DLRM, row-wise Adagrad"), ("_sgd", "SGD"), ("_dcnv2", "DCN-v2"))
        ),
        caveat="{num_seeds} seeds: the first interval reaches below 0",
    ),
    TableRow(
        experiment="scaling",
        what="overhead on 8, 100 and 1,000 nodes that fail independently",
        result="full **{overhead_full_8:.1%}**, **{overhead_full_100:.0%}**, **{overhead_full_1000:.0%}**; "
        "partial **{overhead_partial_8:.1%}**, **{overhead_partial_100:.1%}**, "
        "**{overhead_partial_1000:.0%}**",
        caveat="simulated, saves not in the background",
    ),
]

TABLES: Final[Mapping[str, Sequence[TableRow]]] = {
    "failures": FAILURES,
    "saving": SAVING,
    "quality": QUALITY,
    "speed": SPEED,
    "splitting": SPLITTING,
    "communication": COMMUNICATION,
}
