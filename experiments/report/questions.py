"""The five questions that a reader has first, and their answers from the stored results.

An answer is a format string over the figures of several results, e.g. `{recovery[seconds_2]:.1f} s`, with the
formats of `readme_tables`.
"""

from collections.abc import Mapping
from string import Formatter
from typing import Final

from experiments.report.readme import Figure
from experiments.report.results import Result, finished_only
from experiments.report.tables import Table

QUESTIONS: Final[Mapping[str, str]] = {
    "Does a failure lose anything?": (
        "A worker that dies loses nothing: its tables stay in shared memory. A node that dies with its "
        "memory loses what its own rows learned since they were saved last. In "
        "{recovery_soak[soak_minutes]:.0f} minutes with {recovery_soak[soak_failures]:.0f} failures on two "
        "nodes that share a machine, that was a portion of lost samples (PLS) of "
        "**{recovery_soak[soak_pls]:.4f}**; the AUC ended **{recovery_soak[soak_auc_delta]:+.2f/1e-4}e-4** "
        "from that of the run without failures. Of {recovery_soak[soak_rows_checked]:,.0f} rows compared "
        "with an independent log, **{recovery_soak[soak_rows_wrong]:.0f}** were wrong. That is one run, and "
        "dense parameters are only compared in tests."
    ),
    "How fast is recovery, against torchrun and a reload with torch.distributed.checkpoint (DCP)?": (
        "From `kill -9` of one of 2 workers to the next step of all, **{recovery[seconds_2]:.1f} s** "
        "against {recovery[rival_seconds_2]:.1f} s (**{recovery[time_ratio_2]:.2f} x**, "
        "{recovery[time_ratio_2_low]:.2f} to {recovery[time_ratio_2_high]:.2f}); of one of 4, "
        "**{recovery[seconds_4]:.1f} s** against {recovery[rival_seconds_4]:.1f} s. Most of the difference "
        "is imports and building the model, which forked processes and resident tables skip; reading the "
        "checkpoint is under a second here, since DCP's files are in the page cache."
    ),
    "What does saving cost?": (
        "For a rolling save of everything, training waits **{checkpointing[blocked_ratio_rolling]:.2f} x** "
        "as long as for DCP's synchronous save, and "
        "**{checkpointing[blocked_ratio_rolling_to_dcp_async]:.1f} x** as long as for DCP's `async_save`. "
        "That is worth it: the rolling save takes {checkpointing[peak_extra_bytes]:.1f/1e9} GB of extra "
        "memory and `async_save` {checkpointing[peak_extra_bytes_dcp_async]:.1f/1e9} GB, and until the "
        "commit, slower steps included, training loses **{checkpointing[lost_ratio_to_dcp_async]:.2f} x** "
        "({checkpointing[lost_ratio_to_dcp_async_low]:.2f} to "
        "{checkpointing[lost_ratio_to_dcp_async_high]:.2f}) of what it loses to `async_save`. In the "
        "paper's job that accounts for {overhead[overhead_cpr_background]:.2%} of training time, and for "
        "**{overhead[overhead_cpr_background_tracked]:.1%}** with slower steps and MFU's counting."
    ),
    "What does accuracy pay?": (
        "In an emulated job with 2 failures, AUC minus that without failures, in 1e-4: the most frequently "
        "used rows saved first (MFU) **{overhead[auc_delta_mfu]:+.1f/1e-4} ± "
        "{overhead[auc_delta_mfu_ci]:.1f/1e-4}**, all rows alike {overhead[auc_delta_vanilla]:+.1f/1e-4} ± "
        "{overhead[auc_delta_vanilla_ci]:.1f/1e-4}. Not worse by more than 2, the margin fixed in advance, "
        "is shown for DLRM and DCN-v2 with row-wise Adagrad, and not with SGD "
        "({overhead[auc_delta_mfu_sgd]:+.1f/1e-4} ± {overhead[auc_delta_mfu_sgd_ci]:.1f/1e-4}). Where each "
        "failure takes 4 of 8 nodes, the two are {sensitivity[auc_delta_mfu_nodes_4]:+.1f/1e-4} ± "
        "{sensitivity[auc_delta_mfu_nodes_4_ci]:.1f/1e-4} and "
        "{sensitivity[auc_delta_vanilla_nodes_4]:+.1f/1e-4} ± "
        "{sensitivity[auc_delta_vanilla_nodes_4_ci]:.1f/1e-4}. The data are synthetic."
    ),
    "How fast is training, against TorchRec?": (
        "**{throughput[ratio_to_torchrec_best]:.2f} x** ({throughput[ratio_to_torchrec_best_low]:.2f} to "
        "{throughput[ratio_to_torchrec_best_high]:.2f}) TorchRec's best setting as TorchRec comes, and "
        "**{throughput[ratio_to_torchrec_keeping_memory]:.2f} x** "
        "({throughput[ratio_to_torchrec_keeping_memory_low]:.2f} to "
        "{throughput[ratio_to_torchrec_keeping_memory_high]:.2f}) once TorchRec has our memory settings; in "
        "fp32 {throughput[ratio_to_torchrec_fp32]:.2f} x. On two CPU cores; the goal was 2 x. No GPU was at "
        "hand."
    ),
}


def answers(results: Mapping[str, Result]) -> Table:
    """Every question with its answer, or with the experiment that has to be run first.

    Raises:
        ValueError: an answer names a figure that its finished result does not have.
    """
    finished = finished_only(results)
    figures = {
        name: {figure: Figure(value) for figure, value in result.figures.items()}
        for name, result in finished.items()
    }
    rows = []
    for question, answer in QUESTIONS.items():
        needed = {field.partition("[")[0] for _, field, _, _ in Formatter().parse(answer) if field}
        if missing := sorted(needed - finished.keys()):
            rows.append((question, f"Not measured yet: needs the stored results of {', '.join(missing)}."))
            continue
        try:
            rows.append((question, answer.format_map(figures)))
        except KeyError as error:
            raise ValueError(f"{question!r} needs the figure {error}, which no result has") from error
    return Table(("question", "answer"), rows)
