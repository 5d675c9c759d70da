from dataclasses import replace

import pytest

from cpr.estimator.failures.log import FailureLog, Stretch
from cpr.estimator.planning.estimator_inputs import FLAGS, gather
from tests.cpr.estimator.histories import make_failure, make_history, make_save

GIVEN = dict.fromkeys(FLAGS) | {"T_total": 1000.0, "T_fail": 500.0, "O_save": 10.0, "N_emb": 4}
NOTHING = dict.fromkeys(FLAGS)


def make_run(failures=(40.0,), saves=1, **fields):
    return make_history(
        saves=[make_save(step, seconds=12.0) for step in range(saves)],
        failures=[make_failure(at, nodes_lost=0.5, restart=3.0, restore=2.0) for at in failures],
        **fields,
    )


def test_given_values():
    inputs = gather(GIVEN)
    assert (inputs.job.T_total, inputs.job.T_fail, inputs.job.O_save, inputs.job.N_emb) == (1000, 500, 10, 4)
    assert inputs.job.delay == 0
    assert (inputs.job.O_load, inputs.job.nodes_lost) == (0, 1)
    assert "taken as 0" in inputs.sources["O_load"]
    assert "T_fail         8.33 min  given" in str(inputs)
    assert inputs.to_json()["N_emb"] == {"value": 4, "source": "given"}


def test_measured_values():
    inputs = gather(NOTHING, [make_run(), make_run(failures=[30.0, 80.0], saves=2)])
    job = inputs.job
    assert job.T_total == pytest.approx(1000.0)
    assert job.T_fail == pytest.approx(300 / 3)
    assert (job.O_save, job.blocked_save) == (12.0, 0.5)
    assert (job.O_load, job.O_res, job.nodes_lost, job.N_emb) == (2.0, 3.0, 0.5, 2)
    assert inputs.sources["O_save"] == "measured in 2 runs, 3 saves"
    assert inputs.sources["T_total"] == "measured in the newest run: the steps for all samples"
    assert inputs.sources["T_fail"] == "3 failures in 5 min, seen in 2 runs"
    assert "nodes_lost" in inputs.sources


def test_measured_row_saves_are_costs_of_partial_recovery():
    """A base takes 12 s, a save of an eighth of the rows 1 s; training loses 0.5 and 0.1 s."""
    row_save = make_save(9, kind="rows", seconds=1.0, blocked_s=0.04, share=0.125, slowed_s=0.06)
    run = make_run()
    inputs = gather(NOTHING, [replace(run, saves=[*run.saves, row_save])])
    job = inputs.job
    assert (job.O_save, job.blocked_save) == (12.0, 0.5)
    assert (job.O_rows, job.blocked_rows, job.row_share) == (1.0, pytest.approx(0.1), 0.125)
    assert "row_share         0.125  measured in 1 run" in str(inputs)
    assert inputs.to_json()["O_rows"]["value"] == 1.0
    given = gather(NOTHING | {"blocked_save": 0.2}, [replace(run, saves=[*run.saves, row_save])])
    assert given.job.O_rows is None  # the cost of a row save is then unknown
    assert gather(NOTHING, [run]).job.O_rows is None


def test_save_that_costs_more_than_it_takes_is_accepted():
    dear = make_save(9, seconds=1.0, blocked_s=0.1, slowed_s=2.0)
    job = gather(NOTHING, [replace(make_run(), saves=[dear])]).job
    assert (job.O_save, job.O_blocked, job.delay) == (2.1, 2.1, 0.0)


def test_flag_takes_precedence_over_log_and_log_over_run():
    log = FailureLog((Stretch((700.0,)),))
    assert gather(NOTHING, [make_run()], log).job.T_fail == 700.0
    assert gather(NOTHING | {"T_fail": 900.0}, [make_run()], log).job.T_fail == 900.0


def test_measured_waiting_is_not_used_with_a_given_save_time():
    assert gather(NOTHING | {"O_save": 5.0}, [make_run()]).job.blocked_save is None
    assert gather(NOTHING | {"blocked_save": 0.1}, [make_run()]).job.delay == pytest.approx(11.9)


@pytest.mark.parametrize(
    ("given", "runs", "message"),
    [
        (
            NOTHING,
            [],
            r"missing: --total \(T_total\), --fail \(T_fail\), --save \(O_save\), --nodes \(N_emb\)",
        ),
        (GIVEN | {"T_fail": None}, [], r"missing: --fail \(T_fail\)"),
        (NOTHING, [make_run(failures=())], "no failure in 2.5 min: how often the job fails is not known"),
        (NOTHING, [make_run(samples_total=None)], r"missing: --total \(T_total\)"),
        (NOTHING, [make_run(saves=0)], r"missing: --save \(O_save\)"),
        (NOTHING, [make_run(nodes=2), make_run(nodes=4)], "2 and 4 nodes"),
    ],
)
def test_missing_values_are_named_with_their_flags(given, runs, message):
    with pytest.raises(ValueError, match=message):
        gather(given, runs)
