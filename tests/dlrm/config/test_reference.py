"""The configuration reference: complete, current, and printed by `--help`."""

from dataclasses import fields

import pytest

from dlrm.config.reference import CONFIG_MD, as_markdown, describe, keys_of, sections
from dlrm.config.schema import Config
from dlrm.train import parse


def test_every_field_has_a_description():
    for section in fields(Config):
        assert [key.name for key in keys_of(section.name)] == [
            f"{section.name}.{field.name}" for field in fields(section.type)
        ]


def test_the_file_is_current():
    assert CONFIG_MD.read_text() == as_markdown(), "run python -m dlrm.config.reference"


def test_a_section_and_a_key_are_described():
    assert describe("train.epochs") == "train.epochs = 1  (integer)\n    Passes over the training days."
    assert all(key.name in describe("comm") for key in keys_of("comm"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("train.epoch", r"did you mean train\.epochs"), ("zzz", "sections are data, stream, model")],
)
def test_unknown_names_get_a_hint(name, hint):
    with pytest.raises(ValueError, match=hint):
        describe(name)


def test_help_lists_the_sections_and_describes_one(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {section}" in listed for section in sections())
    with pytest.raises(SystemExit):
        parse(["--recipe", "tiny", "--help", "schedule"])
    assert "schedule.warmup_steps = 0" in capsys.readouterr().out
