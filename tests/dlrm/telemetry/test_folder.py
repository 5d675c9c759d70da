"""Run folders are new and named after time and recipe."""

from datetime import datetime

from dlrm.telemetry import make_run_folder

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_runs_of_the_same_second_get_different_folders(tmp_path):
    folders = [make_run_folder(tmp_path / "runs", "recipes/tiny.toml", NOW) for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "20260102-030405-tiny",
        "20260102-030405-tiny-2",
        "20260102-030405-tiny-3",
    ]
    assert all(folder.is_dir() for folder in folders)
