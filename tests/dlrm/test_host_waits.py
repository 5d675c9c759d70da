"""The code of a step does not wait for a GPU, where a number is read or copied there from ordinary memory."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = (
    *("data/batch.py", "data/loader/copy_ahead.py"),
    *("dlrm/training/trainer.py", "dlrm/training/evaluation.py"),
    *(f"dlrm/models/{name}.py" for name in ("contract", "dcn", "deepfm", "dlrm", "fm", "mlp")),
    *("dlrm/sharding/pooled.py", "dlrm/sharding/bounds.py"),
    *("dlrm/sharding/dynamic/columns.py", "dlrm/sharding/dynamic/translation.py"),
    *(
        f"dlrm/sharding/splitting/{name}.py"
        for name in ("head", "sharded", "exchange", "two_level", "operator_tables")
    ),
    *(f"dlrm/dense_sync/{name}.py" for name in ("base", "allreduce", "delayed", "p3", "selective")),
    *(f"dlrm/optim/{name}.py" for name in ("build", "delay", "layerwise", "norms")),
    *("dlrm/comm/controllers/selsync.py", "dlrm/comm/autotune/tuner.py", "dlrm/comm/feedback.py"),
    *("dlrm/comm/late.py", "dlrm/comm/consistency.py", "dlrm/comm/exchange.py", "dlrm/comm/stats.py"),
    *("dlrm/comm/p3/comm_thread.py", "dlrm/comm/p3/scheduler.py"),
    *("dlrm/metrics/click.py", "dlrm/metrics/means.py", "dlrm/metrics/running.py"),
    "dlrm/telemetry/recorder.py",
    *("cpr/session.py", "cpr/recovery/worker/memory.py", "cpr/resident/late_state.py"),
)
READS = {"item", "tolist", "numpy", "cpu", "nonzero", "synchronize", "new_tensor"}
NUMBERS = {"float", "bool"}
"""Of a tensor, these wait, too; looked for in folders where they are seldom called with anything else."""
KNOWN = {
    # once in a run, or once for each order of features
    "dlrm/sharding/pooled.py:_places",
    "dlrm/optim/layerwise.py:_on_device",
    "dlrm/optim/norms.py:_places",
    "dlrm/sharding/bounds.py:_check_late",
    "dlrm/comm/p3/scheduler.py:_agree",
    # after an error, at an evaluation or in logged steps
    "dlrm/training/trainer.py:_raise_diverged",
    "dlrm/training/trainer.py:check_parameters",
    "dlrm/training/trainer.py:_leave_if_any_rank_was_signalled",
    "dlrm/metrics/click.py:compute",
    "dlrm/metrics/click.py:_count_buffer",
    "dlrm/metrics/means.py:compute",
    "dlrm/metrics/running.py:value",
    "dlrm/comm/stats.py:take_seconds",  # in each step only while comm.exchange=auto tries exchanges out
    # once for each lookup of a module with dynamic tables, as their decisions are made on the host
    "dlrm/sharding/dynamic/translation.py:_read",
    # once in 100 steps, in 500 steps, and when replicas are averaged
    "dlrm/comm/feedback.py:energy",
    "dlrm/comm/autotune/tuner.py:observe",
    "dlrm/comm/controllers/selsync.py:_check_size",
    # of numbers on the host
    "dlrm/comm/feedback.py:needs_saving",
    "dlrm/comm/controllers/selsync.py:should_sync",
    # on the CPU alone
    "dlrm/sharding/dynamic/columns.py:__init__",
    "dlrm/sharding/dynamic/translation.py:_translated",
    "dlrm/sharding/bounds.py:_is_within",
    # in a recovery
    "cpr/recovery/worker/memory.py:share_tree",
    "cpr/recovery/worker/memory.py:counters_in",
    # for the step before
    "cpr/resident/late_state.py:give",
    "dlrm/comm/late.py:give",
    "dlrm/comm/late.py:take",
    "dlrm/comm/consistency.py:read",
    # exchanges of selected values, whose messages depend on what all ranks have
    "dlrm/comm/consistency.py:run_preflight",
    # P3 on the CPU, and while it measures
    "dlrm/comm/p3/comm_thread.py:give",
    "dlrm/comm/p3/comm_thread.py:background",
}


def waits(path):
    """Functions of a file that read from a device, or copy numbers to it."""
    for function in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(function, ast.FunctionDef):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                    reads = call.func.id in NUMBERS and not isinstance(call.args[0], ast.Constant)
                    if reads and path.startswith(("dlrm/comm", "dlrm/dense_sync")):
                        yield f"{path}:{function.name}"
                elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    copies = call.func.attr == "tensor" and any(
                        each.arg == "device" for each in call.keywords
                    )
                    if call.func.attr in READS or copies:
                        yield f"{path}:{function.name}"


def test_only_known_functions_of_a_step_wait_for_a_gpu():
    """One that is new here belongs out of the step, or behind `dlrm.comm.late.LateScalars`."""
    assert {found for path in STEP for found in waits(path)} == KNOWN
