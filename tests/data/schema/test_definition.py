"""Schema files: what they say, and clear errors for what they cannot say."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from data.schema import Dense, Label, Schema, Sparse, Split, Time

GOOD = """
missing = ["", "NA"]
[label]
column = "rating"
at_least = 4
[[dense]]
column = "price"
log1p = true
[[sparse]]
column = "user.id"
name = "user"
[[sparse]]
column = "tags"
separator = "|"
[time]
column = "when"
unit = "s"
[split]
test = 0.1
"""


def test_a_schema_file_is_its_dataclasses_and_its_json(tmp_path):
    (tmp_path / "schema.toml").write_text(GOOD)
    schema = Schema.from_toml(tmp_path / "schema.toml")
    assert schema == Schema(
        missing=("", "NA"),
        label=Label(column="rating", at_least=4.0),
        dense=(Dense(column="price", log1p=True),),
        sparse=(Sparse(column="user.id", name="user"), Sparse(column="tags", separator="|")),
        time=Time(column="when", unit="s"),
        split=Split(test=0.1),
    )
    assert schema.columns == ("rating", "price", "user.id", "tags", "when")
    assert Schema.from_json(schema.to_json()) == schema
    assert schema.to_json()["sparse"] == [
        {"column": "user.id", "name": "user"},
        {"column": "tags", "separator": "|"},
    ]


@pytest.mark.parametrize(
    ("there", "instead", "message"),
    [
        ("[label]", "label]", "Expected|Invalid"),
        (
            "at_least = 4",
            "at_lest = 4",
            r"\[label\] has no key 'at_lest'; its keys are column, name, at_least",
        ),
        ("at_least = 4", 'at_least = "4"', r"\[label\]: at_least is a number, not '4'"),
        ("log1p = true", "log1p = 1", r"\[\[dense\]\] 1: log1p is true or false, not 1"),
        ('column = "user.id"', "", r"\[\[sparse\]\] 1 lacks the key 'column'"),
        ('name = "user"', "", r"'user\.id' cannot name a column.*give a `name`"),
        ('name = "user"', 'name = "price"', "two columns of the data set would be called 'price'"),
        ('name = "user"', 'name = "user"\nids = "hash"', r"user: ids = \"hash\" needs rows"),
        ('name = "user"', 'name = "user"\nrows = 5', r"ids = \"vocabulary\" reads no rows"),
        ('name = "user"', 'name = "user"\nids = "raw"', r"takes numbers; add type = \"integer\""),
        ('name = "user"', 'name = "user"\nids = "row"', "ids is one of vocabulary, hash"),
        ('name = "user"', 'name = "user"\ntype = "int"', "type is one of string"),
        ('name = "user"', 'name = "user"\nmin_count = 0', "min_count is between 1 and"),
        ('name = "user"', 'name = "user"\nweights = "w"', "weights belong to lists"),
        ("log1p = true", "mean = 0.5", "mean and std are given together"),
        ("log1p = true", "clip_min = 2\nclip_max = 1", "clip_min is above clip_max"),
        ("log1p = true", "clip_max = inf", "numbers are finite"),
        ('unit = "s"', 'unit = "h"', "unit is one of s, ms"),
        ("test = 0.1", "test = 1.5", "test is a share"),
        ("test = 0.1", "test = 0.1\nparts = 2", "give one of parts, test and column"),
        ("test = 0.1", 'column = "fold"', "column and days belong together"),
        ('missing = ["", "NA"]', "missing = 5", "the schema: missing is a list, not 5"),
    ],
)
def test_mistakes_are_named_with_what_to_change(tmp_path, there, instead, message):
    path = tmp_path / "schema.toml"
    path.write_text(GOOD.replace(there, instead, 1))
    with pytest.raises(ValueError, match=rf"schema\.toml: .*({message})"):
        Schema.from_toml(path)


def test_a_schema_without_inputs_or_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no inputs"):
        Schema(label=Label(column="y"))
    with pytest.raises(ValueError, match="cannot be read"):
        Schema.from_toml(tmp_path / "none.toml")


def test_every_key_is_on_the_page_about_schema_files():
    page = (Path(__file__).parents[3] / "data" / "convert" / "README.md").read_text()
    for section in (Label, Dense, Sparse, Time, Split, Schema):
        for item in fields(section):
            assert re.search(rf"[`|\[{{ ]{item.name}\b", page), f"{section.__name__}.{item.name}"
