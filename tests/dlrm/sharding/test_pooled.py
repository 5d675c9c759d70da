"""Names of tables, whatever the columns of people's data are called."""

from urllib.parse import unquote

from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from dlrm.sharding.pooled import PREFIXES, table_name

PREFIX_OF_ALL = ("", *PREFIXES, "cross_down_0_")
NAMES = st.text(min_size=1) | st.sampled_from(
    [
        "type",
        "items",
        "user.id",
        "a/b",
        "..",
        "linear_x",
        "%74ype",
        "first_",
        "x\n",
        "名前",
        "training",
        "cat_0",
    ]
)


@given(st.sets(NAMES, min_size=1, max_size=6))
@example({"x", "linear_x", "linear_linear_x"})
@example({"a.b", "a%2Eb", "a__b"})
def test_tables_of_any_features_have_names_of_their_own_that_modules_and_folders_take(features):
    names = {
        (prefix, feature): table_name(prefix, feature) for prefix in PREFIX_OF_ALL for feature in features
    }
    assert len({*names.values()}) >= len(features) * 4, "different, but for those of a single prefix"
    of_three = {name for (prefix, _), name in names.items() if prefix in ("", "linear_", "first_")}
    assert len(of_three) == 3 * len(features)
    modules = nn.ModuleDict()
    for (prefix, feature), name in names.items():
        assert unquote(name) == prefix + feature
        assert "/" not in name
        assert name.isprintable()
        modules[name] = nn.Identity()


def test_plain_names_stay_as_they_are():
    assert table_name("", "cat_0") == "cat_0"
    assert table_name("linear_", "item id") == "linear_item id"
