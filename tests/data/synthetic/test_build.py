import hashlib
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from data.dataset import MANIFEST_NAME, read_manifest
from data.jobs.folder import locked
from data.jobs.location import Location
from data.synthetic import ClickSource, SyntheticConfig, build, generate, is_finished

TINY = SyntheticConfig(days=2, rows_per_day=1_500, rows_per_block=500, rows_per_file=1_000, scale=1e-4)
NUM_FILES = 4


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made")
    generate(TINY, path)
    return path


@pytest.fixture
def interrupt_after(monkeypatch):
    """Let so many files be written; the next write is cut off in the middle."""

    def install(num_files, error=KeyboardInterrupt):
        written = []

        def write_blocks(file, config, blocks):
            if len(written) == num_files:
                file.write(b"half a fi")
                raise error
            whole(file, config, blocks)
            written.append(file)

        monkeypatch.setattr(build, "write_blocks", write_blocks)
        return written

    whole = build.write_blocks
    return install


def test_manifest_describes_the_files(made):
    manifest = read_manifest(str(made))
    assert {part.path for part in manifest.parts} | {"dataset.json"} == contents(made).keys()
    assert len(manifest.parts) == NUM_FILES
    assert [part.num_rows for part in manifest.parts] == [1_000, 500, 1_000, 500]
    assert tuple(feature.rows for feature in manifest.features) == TINY.table_rows
    for part in manifest.parts:
        content = (made / part.path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (part.num_bytes, part.sha256)
        metadata = pq.read_metadata(made / part.path)
        groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        assert groups == part.row_groups


def test_provenance_holds_the_best_scores_of_each_day_and_of_all(made):
    provenance = read_manifest(str(made)).provenance
    source = ClickSource(TINY)
    days = [[source.block(day, index) for index in range(3)] for day in range(2)]
    groups = [
        (provenance["days"]["0"], days[0]),
        (provenance["days"]["1"], days[1]),
        (provenance, [*days[0], *days[1]]),
    ]
    for figures, blocks in groups:
        labels = np.concatenate([block.labels for block in blocks])
        probabilities = np.concatenate([block.probabilities for block in blocks])
        assert figures["best_auc"] == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-4)
        assert figures["best_log_loss"] == pytest.approx(log_loss(labels, probabilities))
        assert figures["click_rate"] == pytest.approx(labels.mean())
    assert provenance["config"]["seed"] == TINY.seed


def test_finished_data_set_is_left_alone(made):
    before = contents(made)
    times = [file.stat().st_mtime_ns for file in sorted(made.rglob("*"))]
    assert is_finished(TINY, made)
    assert generate(TINY, made) == read_manifest(str(made)).provenance
    assert contents(made) == before
    assert [file.stat().st_mtime_ns for file in sorted(made.rglob("*"))] == times


@pytest.mark.parametrize("num_files", range(NUM_FILES))
def test_interrupted_data_set_is_unfinished_and_continues_to_the_same_bytes(
    tmp_path, made, interrupt_after, num_files
):
    interrupt_after(num_files)
    with pytest.raises(KeyboardInterrupt):
        generate(TINY, tmp_path)
    with pytest.raises(ValueError, match="not a finished data set"):
        read_manifest(str(tmp_path))
    assert not is_finished(TINY, tmp_path)
    finished = [path for path in contents(tmp_path) if path.endswith(".parquet")]
    assert len(finished) == num_files, "a half-written file is in no place of a data file"
    assert not list(tmp_path.rglob("*.tmp")), "and takes no room"
    rest = interrupt_after(NUM_FILES - num_files)
    generate(TINY, tmp_path)
    assert len(rest) == NUM_FILES - num_files, "finished files are not made again"
    assert contents(tmp_path) == contents(made)


def test_folder_of_another_configuration_is_refused(tmp_path, made, interrupt_after):
    other = replace(TINY, seed=5, drift=0.5)
    message = r"drift: there 0\.0, now 0\.5; seed: there 1, now 5"
    with pytest.raises(ValueError, match=message):
        generate(other, made)
    interrupt_after(1)
    with pytest.raises(KeyboardInterrupt):
        generate(TINY, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        generate(other, tmp_path)
    assert contents(tmp_path) == before


def test_a_data_set_from_before_the_skew_was_a_choice_has_the_usual_one(tmp_path):
    generate(TINY, tmp_path)
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    del manifest["provenance"]["config"]["top_coverage"]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert is_finished(TINY, tmp_path)
    with pytest.raises(ValueError, match=r"top_coverage: there 0\.75, now 0\.5"):
        generate(replace(TINY, top_coverage=0.5), tmp_path)


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds other files"):
        generate(TINY, tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps({"provenance": {}, "parts": []}))
    with pytest.raises(ValueError, match=r"data\.synthetic did not make"):
        generate(TINY, tmp_path)
    assert contents(tmp_path).keys() == {"thesis.tex", "dataset.json"}


def test_damaged_data_set_is_noticed(tmp_path):
    generate(TINY, tmp_path)
    part = tmp_path / "day=1" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part-00000\.parquet is missing or has changed"):
        generate(TINY, tmp_path)


def test_folder_that_another_process_writes_is_refused(tmp_path):
    with locked(Location.of(tmp_path)), pytest.raises(ValueError, match="in use by another live process"):
        generate(TINY, tmp_path)


def test_full_disk_is_explained_and_the_rest_is_made_later(tmp_path, made, no_file_longer_than):
    """A limit on the size of files stands in for a full disk: large files fail, small ones fit."""
    large = max(file.stat().st_size for file in made.rglob("*.parquet"))
    with (
        no_file_longer_than(large - 1_000),
        pytest.raises(OSError, match=r"no room to write .* same"),
    ):
        generate(TINY, tmp_path)
    assert not is_finished(TINY, tmp_path)
    generate(TINY, tmp_path)
    assert contents(tmp_path) == contents(made)


def test_manifest_of_raw_files_is_no_data_set(tmp_path):
    config = replace(TINY, format="tsv", compression="zst")
    provenance = generate(config, tmp_path)
    assert contents(tmp_path).keys() == {"day_0.zst", "day_1.zst", "synthetic.json"}
    assert json.loads((tmp_path / "synthetic.json").read_text())["provenance"] == provenance
    assert is_finished(config, tmp_path)
    with pytest.raises(ValueError, match="not a finished data set"):
        read_manifest(str(tmp_path))


@pytest.mark.system
@pytest.mark.timeout(60)
@pytest.mark.parametrize("processes", [2, 7])
def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path, made, processes):
    generate(TINY, tmp_path, processes)
    assert contents(tmp_path) == contents(made)
