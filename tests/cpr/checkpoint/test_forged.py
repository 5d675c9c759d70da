"""Forged files with valid digests: an older state is loaded, with one message."""

import json
from contextlib import suppress
from datetime import UTC, datetime

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.checkpoint.catalog.describe import describe
from cpr.checkpoint.catalog.verify import verify
from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.format.manifest import digest, save_folder
from cpr.errors import CheckpointError, CorruptFileError
from tests.cpr.checkpoint.runs import Run, assert_same
from tests.cpr.checkpoint.saves import MemoryStorage, manifest_path

SAVES = 4
EPOCH = 1
ZEROS = "0" * 32
DEEP = "nested deeply"
STRANGE = [
    *(-1, 0, 1, 3, 7, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -(2**70), 10**400),
    *(0.5, -0.5, 1e300, float("nan"), float("inf"), None, True, False),
    *("", "..", ".", "/etc/passwd", "../00000000/state.arrow", "a/../b", "state.arrow/x", "\0", "\ud800"),
    *("x" * 300, "int8", "float16", "bool", "base", "rows", "2026-01-01", "9999-12-31T23:59:59-23:59", ZEROS),
    *([], {}, [[]], [1, 2, 3], {"a": 1}, DEEP),
]
"""What some value is replaced by."""


class Saved:
    """A directory, the model that wrote it, and what it was like at each save."""

    def __init__(self, run, files, values):
        self.run, self.files, self.values = run, files, values

    def storage(self):
        storage = MemoryStorage()
        storage.files = dict(self.files)
        return storage


@pytest.fixture(scope="module")
def saved(world_of_one):
    """A base, a row save on it, and the same again."""
    run, storage, values = Run("unused"), MemoryStorage(), {}
    checkpointer = run.checkpointer = open_on(run, storage)
    for sequence in range(SAVES):
        run.train(1)
        if sequence % 2:
            rows = {shard.name: torch.arange(shard.num_rows) for shard in checkpointer.shards}
            checkpointer.save_rows(rows)
        else:
            checkpointer.save("consistent")
        checkpointer.wait_until_idle()
        values[sequence] = run.values()
    checkpointer.close()
    return Saved(run, storage.files, values)


def open_on(run, storage):
    checkpointer = Checkpointer(run.model, CheckpointConfig(uri="unused"), storage=storage)
    checkpointer.register("optimizer", run.optimizer)
    return checkpointer


def body_of(storage, sequence):
    return json.loads(storage.files[manifest_path(sequence, EPOCH)])


def put_body(storage, sequence, body):
    """Store a manifest with its digest, and correct those of the saves that build on it."""
    text = json.dumps({**body, "digest": ZEROS}).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).encode()
    text = text.replace(ZEROS.encode(), digest(text).encode(), 1)
    storage.files[manifest_path(sequence, EPOCH)] = text
    for later in range(sequence + 1, SAVES):
        child = body_of(storage, later)
        if child["parent"] and child["parent"]["sequence"] == sequence:
            put_body(storage, later, {**child, "parent": {"sequence": sequence, "digest": digest(text)}})


def places_in(node, path=()):
    """Paths to all values."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places_in(value, (*path, key))


def change(draw, tree):
    """Replace, remove or repeat some value; whether what remains may tell of fewer rows than were saved."""
    places = sorted(places_in(tree), key=str)
    *way, last = draw(st.sampled_from(places))
    parent = tree
    for key in way:
        parent = parent[key]
    how = draw(st.sampled_from(["strange", "strange", "other", "remove", "repeat"]))
    if how == "strange":
        parent[last] = draw(st.sampled_from(STRANGE))
    elif how == "other":  # of the same name
        *others, name = draw(st.sampled_from([place for place in places if place[-1] == last]))
        found = tree
        for key in others:
            found = found[key]
        parent[last] = json.loads(json.dumps(found[name]))
    elif how == "remove" or not isinstance(parent, list):
        del parent[last]
    else:
        parent.append(parent[last])
    return "rows" in (*way, last) and (how == "remove" or {"rows", "chunks"} & {last})


def load(saved, storage):
    """Sequence of the state that was loaded, if any, and what refused others."""
    checkpointer, errors = open_on(saved.run, storage), []
    attempt = checkpointer._loader.load

    def watched(storage, state):
        try:
            return attempt(storage, state)
        except Exception as error:
            errors.append(error)
            raise

    checkpointer._loader.load, saved.run.checkpointer = watched, checkpointer
    try:
        return checkpointer.load(), errors
    except CheckpointError as error:
        return None, [*errors, error]
    finally:
        checkpointer.close()


def check(saved, storage, *, is_exact):
    with suppress(CheckpointError):
        describe(storage, datetime.now(UTC))
    loaded, errors = load(saved, storage)
    found = verify(storage)
    if loaded is not None and is_exact:
        assert_same(saved.values[loaded.state.sequence], saved.run.values())
    if all(isinstance(error, CorruptFileError) for error in errors):  # and none for being of another model
        loads = [] if loaded is None else found.states[found.states.index(loaded.state) :]
        assert found.newest is None or found.newest in loads
        assert not (found.is_fine and (errors or loaded.rejected))


@given(data=st.data())
@settings(max_examples=100)
def test_forged_manifests_are_refused_or_harmless(saved, data):
    storage, sequence = saved.storage(), data.draw(st.integers(0, SAVES - 1))
    body = body_of(storage, sequence)
    loses_rows = change(data.draw, body)
    put_body(storage, sequence, body)
    check(saved, storage, is_exact=not loses_rows)


@given(data=st.data())
@settings(max_examples=100)
def test_forged_rows_with_valid_digests_are_refused(saved, data):
    """Bits of a chunk's head are flipped, which tells how to read the rest."""
    storage, sequence = saved.storage(), data.draw(st.integers(0, SAVES - 1))
    body = body_of(storage, sequence)
    entry = data.draw(st.sampled_from(body["rows"]))
    chunk = data.draw(st.sampled_from(entry["chunks"]))
    path = f"{save_folder(sequence, EPOCH)}/{entry['path']}"
    content = bytearray(storage.files[path])
    for _ in range(data.draw(st.integers(1, 4))):
        content[chunk["offset"] + data.draw(st.integers(0, 700)) % chunk["length"]] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    storage.files[path] = bytes(content)
    begin = chunk["offset"]
    chunk["digest"] = digest(bytes(content[begin : begin + chunk["length"]]))
    entry["digest"] = digest(bytes(content))
    put_body(storage, sequence, body)
    check(saved, storage, is_exact=False)


@given(data=st.data())
@settings(max_examples=100)
def test_forged_state_files_with_valid_digests_are_refused(saved, data):
    """The tree is changed, or any bits are."""
    storage, sequence = saved.storage(), data.draw(st.integers(0, SAVES - 1))
    body = body_of(storage, sequence)
    entry = data.draw(st.sampled_from(body["states"]))
    path = f"{save_folder(sequence, EPOCH)}/{entry['path']}"
    if data.draw(st.booleans()):
        content = changed_tree(data.draw, storage.files[path])
    else:
        content = bytearray(storage.files[path])
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    storage.files[path] = bytes(content)
    entry["digest"], entry["num_bytes"] = digest(bytes(content)), len(content)
    put_body(storage, sequence, body)
    check(saved, storage, is_exact=False)


def changed_tree(draw, data):
    with pa.ipc.open_file(data) as reader:
        schema, table = reader.schema, reader.read_all()
    holder = {"tree": json.loads(schema.metadata[b"tree"])}
    change(draw, holder)
    text = json.dumps(holder.get("tree")).replace(f'"{DEEP}"', "[" * 500 + "]" * 500)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema.with_metadata({**schema.metadata, b"tree": text})) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
