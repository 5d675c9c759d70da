"""Jobs for tests of the planning."""

# ruff: noqa: N806 - the paper's symbols

from dataclasses import replace

from hypothesis import strategies as st

from cpr.estimator.planning.formulas import Job

MINUTE, HOUR = 60.0, 3600.0
# Solved for from the paper's headline overheads in 56 h with 2 failures, 8 nodes and PLS 0.1, not quoted.
KAGGLE = Job(T_total=56 * HOUR, T_fail=28 * HOUR, O_save=5.6 * MINUTE, O_load=0, O_res=5.4 * MINUTE, N_emb=8)
TERABYTE = replace(KAGGLE, O_save=5.0 * MINUTE, O_res=8.3 * MINUTE)


@st.composite
def jobs(draw, background=False, rows=False):
    """Jobs that can be planned, with synchronous or background saves, and perhaps row saves."""
    T_fail = draw(st.floats(HOUR, 1000 * HOUR))
    O_save = T_fail * draw(st.floats(1e-5, 0.05))
    O_rows = O_save * draw(st.floats(0.01, 1)) if rows else None
    return Job(
        T_total=T_fail * draw(st.floats(2, 100)),
        T_fail=T_fail,
        O_save=O_save,
        O_load=draw(st.floats(0, HOUR)),
        O_res=draw(st.floats(0, HOUR)),
        N_emb=draw(st.integers(1, 10_000)),
        blocked_save=O_save * draw(st.floats(0.001, 1)) if background else None,
        O_rows=O_rows,
        blocked_rows=(O_rows or 0.0) * draw(st.floats(0.001, 1)),
        row_share=draw(st.floats(0.1, 1)),
        nodes_lost=draw(st.floats(0.01, 1)),
    )
