import csv

import pytest

from cpr.estimator.failures.log import FailureLog, Stretch, log_of_runs, read_log
from tests.cpr.estimator.histories import make_failure, make_history

HOUR = 3600.0


def write(tmp_path, text):
    path = tmp_path / "failures.csv"
    path.write_text(text)
    return path


def test_log_with_start_and_end_times(tmp_path):
    log = read_log(
        write(
            tmp_path,
            "began,ended,failed,who\n"
            "2026-03-01T08:00,2026-03-01T21:30,yes,a\n"
            "2026-03-01 21:40, 2026-03-02 00:40, No ,b\n"
            "2026-03-02T09:00+01:00,2026-03-02T10:00+00:00,TRUE,a\n",
        )
    )
    assert log.stretches == (Stretch((13.5 * HOUR,), 3 * HOUR), Stretch((2 * HOUR,)))
    assert (log.num_failures, log.exposure_s) == (2, 18.5 * HOUR)
    assert log.unfinished_s == [3 * HOUR]


def test_log_with_durations(tmp_path):
    log = read_log(write(tmp_path, "\ufefffailed,lasted\nyes,1h30m\n1,90s\n,2d\n"))
    assert log.stretches == (Stretch((5400.0, 90.0), 172_800.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the columns are \(none\)"),
        ("began,failed\n", "the columns are began, failed; a log of failures has began, ended and failed"),
        ("lasted,failed\n", "no lines"),
        ("lasted,failed\n1h,yes\n2,yes\n", "line 3: '2' is not a span of time"),
        ("lasted,failed\n1h,perhaps\n", "line 2: failed is 'perhaps'"),
        (f"lasted,failed\n1h,yes\n{'9' * 400}h,yes\n", "line 3: the job was at work for inf s"),
        ("began,ended,failed\nyesterday,today,yes\n", "line 2: .*yesterday"),
        ("began,ended,failed\n2026-03-02,2026-03-01,yes\n", "line 2: the job was at work for -86400 s"),
        ("began,ended,failed\n2026-03-01T00:00Z,2026-03-02,no\n", "line 2: .* both need a time zone|both"),
        ("began,ended,failed\n2026-03-01,,no\n", "line 2: ended is missing; .* when the log was written"),
        ("lasted,failed\n5h\n", "line 2: failed is missing"),
        (
            "lasted,failed\n1h,yes\n" + "x" * 200_000 + ",yes\n",
            "cannot be read as a CSV file.*: field larger than field limit",
        ),
        (
            "began,ended,failed\n2026-03-01T00Z,2026-03-02T00Z,yes\n2026-03-02T00+05:00,2026-03-03T00Z,yes\n",
            "line 3: it began at 2026-03-02 .*count twice",
        ),
    ],
)
def test_invalid_lines_are_refused_with_file_and_line(text, message, tmp_path):
    csv.field_size_limit(131_072)  # Python's default, which data.convert raises
    with pytest.raises(ValueError, match=message) as refused:
        read_log(write(tmp_path, text))
    assert "failures.csv" in str(refused.value)


def test_a_binary_file_is_refused(tmp_path):
    path = write(tmp_path, "")
    path.write_bytes(b"lasted,failed\n\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"failures\.csv cannot be read as a CSV file in UTF-8"):
        read_log(path)


def test_log_of_run_histories():
    def run(*times):
        return make_history(elapsed_s=100.0, failures=[make_failure(time) for time in times])

    log = log_of_runs([run(10.0, 40.0), run(), run(100.0)])
    assert log.stretches == (Stretch((10.0, 30.0), 60.0), Stretch((), 100.0), Stretch((100.0,)))
    assert (log.num_failures, log.exposure_s) == (3, 300.0)
    assert log_of_runs([run(10.0, 10.0)]).gaps_s == [10.0, 1.0]  # the second came before the run went on


def test_gap_of_zero_and_an_empty_log_are_refused():
    with pytest.raises(ValueError, match="one failure of several nodes"):
        Stretch((3.0, 0.0))
    with pytest.raises(ValueError, match="there is nothing in this log"):
        FailureLog(())
