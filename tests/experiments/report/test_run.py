"""The command of the report: what it writes, what it calls stale, and that what is stored here is fresh."""

import pytest

from experiments.harness.record import Record
from experiments.report.run import main, staleness

README = """# A house

<!-- results: evidence -->
old
<!-- end -->

The end.
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "results"
    record = Record("caching", {}, seeds=[1], folder=folder)
    record.finish({"second_epoch_speedup": 7.31, "first_epoch_ratio": 0.93})
    return folder


@pytest.fixture
def readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README)
    return path


def test_it_writes_both_pages_and_the_readme(folder, readme):
    assert main([], folder, readme) == 0
    assert "| `second_epoch_speedup` | 7.31 |" in (folder / "README.md").read_text()
    assert "<code>second_epoch_speedup</code>" in (folder / "report.html").read_text()
    assert "**7.3 x** faster" in readme.read_text()
    assert readme.read_text().startswith("# A house\n")
    assert readme.read_text().endswith("<!-- end -->\n\nThe end.\n")


def test_what_was_just_written_is_fresh_and_stays_so(folder, readme):
    main([], folder, readme)
    before = {path: path.read_text() for path in [readme, *folder.iterdir()]}
    assert main(["--check"], folder, readme) == 0
    assert main([], folder, readme) == 0
    assert {path: path.read_text() for path in before} == before


@pytest.mark.parametrize("page", ["README.md", "report.html"])
def test_a_missing_page_is_stale(folder, readme, capsys, page):
    main([], folder, readme)
    (folder / page).unlink()
    assert main(["--check"], folder, readme) == 1
    assert f"{folder / page} is missing" in capsys.readouterr().err
    assert not (folder / page).exists()


def test_a_new_result_makes_everything_stale_and_the_message_says_what_to_do(folder, readme, capsys):
    main([], folder, readme)
    record = Record("caching", {}, seeds=[1], folder=folder)
    record.finish({"second_epoch_speedup": 5.02, "first_epoch_ratio": 0.93})
    before = readme.read_text()
    assert main(["--check"], folder, readme) == 1
    message = capsys.readouterr().err
    for path in (readme, folder / "README.md", folder / "report.html"):
        assert f"{path}, line" in message
    assert "**7.3 x** faster" in message
    assert "**5.0 x** faster" in message
    assert "write them again with `python -m experiments.report`" in message
    assert readme.read_text() == before


def test_a_number_changed_by_hand_is_stale(folder, readme, capsys):
    main([], folder, readme)
    readme.write_text(readme.read_text().replace("**7.3 x**", "**9.3 x**"))
    assert main(["--check"], folder, readme) == 1
    assert str(readme) in capsys.readouterr().err


def test_prose_around_the_tables_is_nobodys_business(folder, readme):
    main([], folder, readme)
    readme.write_text(readme.read_text().replace("The end.", "Another end."))
    assert main(["--check"], folder, readme) == 0


def test_without_results_nothing_is_written(tmp_path, readme, capsys):
    assert main([], tmp_path / "results", readme) == 1
    assert "no results" in capsys.readouterr().err
    assert readme.read_text() == README


def test_staleness_shows_the_first_line_that_differs(tmp_path):
    path = tmp_path / "page"
    path.write_text("a\nb\n")
    assert staleness(path, "a\nb\n") == ""
    assert "line 2, is stale:\n  it says     b\n  results say c" in staleness(path, "a\nc\n")
    assert "results say (nothing)" in staleness(path, "a\n")


def test_staleness_shows_where_a_long_line_differs(tmp_path):
    path = tmp_path / "page"
    path.write_text("x" * 5000 + "old" + "y" * 5000)
    message = staleness(path, "x" * 5000 + "new" + "y" * 5000)
    assert "xold" in message
    assert "xnew" in message
    assert len(message) < 500


def test_what_is_stored_here_is_fresh(capsys):
    """Stored results, their pages and the README's tables say the same."""
    assert main(["--check"]) == 0, capsys.readouterr().err
