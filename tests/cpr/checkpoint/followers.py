"""A follower in the plainest way: tables as dictionaries, from full exports and increments in Parquet."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Tables = dict[str, dict[int, dict[str, Any]]]
"""Rows by table and key: by the id in dynamic tables, else by the number of the row."""
OF_ROWS = ("row", "candidate", "sightings")
"""Columns of a dynamic table that do not belong to the id of a row."""


def read(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder).to_pylist()


def full(folder: Path) -> Tables:
    """The tables of a full export, by the rule that `cpr/README.md` gives for dynamic tables."""
    return {each.name: _by_key(read(each)) for each in folder.iterdir() if each.is_dir()}


def _by_key(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    if "last_seen" not in rows[0]:
        return {row["row"]: row for row in rows}
    rows.sort(key=lambda row: (row["last_seen"], -row["row"]))
    by_id = {row["id"]: row for row in rows if row["last_seen"] > 0}
    return {key: {name: row[name] for name in row if name not in OF_ROWS} for key, row in by_id.items()}


def tombstones(folder: Path, fqn: str) -> list[int]:
    """Ids that an increment deletes from a table."""
    of_table = folder / "tombstones" / fqn
    return [row["id"] for row in read(of_table)] if of_table.exists() else []


def apply(folder: Path, tables: Tables) -> dict[str, Any]:
    """Apply an increment to tables; returns its manifest."""
    manifest = json.loads((folder / "cpr-increment.json").read_text())
    assert manifest["tables"].keys() == tables.keys()
    for fqn, told in manifest["tables"].items():
        for each in tombstones(folder, fqn):
            tables[fqn].pop(each, None)
        tables[fqn].update({row[told["key"]]: row for row in read(folder / "rows" / fqn)})
    return manifest
