"""The command of the report: what it writes, what it calls stale, and that what is stored here is fresh."""

import re

import pytest
from PIL import Image

from experiments.harness.record import RESULTS
from experiments.report.results import read_results
from experiments.report.run import READMES, main, shrink, staleness

README = """# A house

<!-- results: speed -->
old
<!-- end -->

The end.
"""


@pytest.fixture
def run(store, tmp_path, monkeypatch):
    """Runs the command on a result, which has no rows to draw, and a README."""
    monkeypatch.setattr("experiments.report.run.redraw", lambda result, folder: None)
    store("caching", {"second_epoch_speedup": 7.31, "first_epoch_ratio": 0.93})
    readme = tmp_path / "README.md"
    readme.write_text(README)

    def _run(*arguments):
        return main(["--out", str(tmp_path / "out"), *arguments], tmp_path, [readme])

    return _run


def test_it_fills_the_readme_whose_prose_is_free_and_writes_the_page_elsewhere(run, tmp_path):
    assert run() == 0
    readme = tmp_path / "README.md"
    text = readme.read_text()
    assert "**7.3 x** faster" in text
    assert text.startswith("# A house\n")
    assert text.endswith("<!-- end -->\n\nThe end.\n")
    assert "<code>second_epoch_speedup</code>" in (tmp_path / "out" / "report.html").read_text()
    readme.write_text(text.replace("The end.", "Another end."))
    assert run("--check") == 0


def test_a_new_result_makes_the_readme_stale_and_the_message_says_what_to_do(run, store, tmp_path, capsys):
    run()
    store("caching", {"second_epoch_speedup": 5.02, "first_epoch_ratio": 0.93})
    before = (tmp_path / "README.md").read_text()
    assert run("--check") == 1
    message = capsys.readouterr().err
    assert f"{tmp_path / 'README.md'}, line" in message
    assert "**7.3 x** faster" in message
    assert "**5.0 x** faster" in message
    assert "write them again with `python -m experiments.report`" in message
    assert (tmp_path / "README.md").read_text() == before


def test_without_results_nothing_is_written(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    assert main([], tmp_path / "results", [readme]) == 1
    assert "no results" in capsys.readouterr().err
    assert readme.read_text() == README


def test_staleness_shows_the_first_difference_even_in_a_long_line(tmp_path):
    path = tmp_path / "page"
    path.write_text("a\n" + "x" * 5000 + "old" + "y" * 5000)
    assert staleness(path, path.read_text()) == ""
    message = staleness(path, "a\n" + "x" * 5000 + "new" + "y" * 5000)
    assert "line 2, is stale" in message
    assert "xold" in message
    assert "xnew" in message
    assert len(message) < 500
    assert "results say (nothing)" in staleness(path, "a\n")


def test_a_picture_is_stored_with_few_colours_once(tmp_path):
    path = tmp_path / "a.png"
    Image.radial_gradient("L").convert("RGB").save(path)
    shrink(path)
    small = path.read_bytes()
    with Image.open(path) as image:
        assert image.mode == "P"
    shrink(path)
    assert path.read_bytes() == small


def test_every_stored_picture_has_a_function_that_draws_it():
    sources = {name: result.module.read_text() for name, result in read_results(RESULTS).items()}
    defines = re.compile(r"^def draw\(|import .*\bdraw\b", re.MULTILINE)
    drawn = {name for name, text in sources.items() if defines.search(text)}
    stored = {path.stem for path in RESULTS.glob("*.png")}
    assert stored - drawn == {"communication_training", "learning_curve"}  # of communication, of `make train`


def test_what_is_stored_here_is_fresh(capsys):
    """Stored results and the READMEs' tables say the same."""
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_no_table_shows_a_difference_rounded_to_nothing():
    for readme in READMES:
        assert not re.search(r"[+-]0(\.0+)?( %)?\*\*", readme.read_text()), readme
