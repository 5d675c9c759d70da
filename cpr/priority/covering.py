"""Which tables make up the bulk of the rows: a rule that gives the same answer on all ranks."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from cpr.shards.groups import tables_prefix, walk


def table_sizes(model: nn.Module) -> dict[str, int]:
    """Rows of each table of a model, also of those that this rank holds nothing of, by `table_fqn`."""
    found = {}
    for path, module in walk(model):
        prefix = tables_prefix(module)
        if prefix is not None:
            for name, config in _configs(module).items():
                found[f"{path}{prefix}.{name}"] = int(config.num_embeddings)
    return found


def largest_tables(sizes: Mapping[str, int], covering: float) -> frozenset[str]:
    """The fewest tables, largest first, that together hold at least the share `covering` of all rows.

    Args:
        sizes: rows of each table; of equal ones, that with the first name counts as the largest.
        covering: 0 to 1.

    >>> sorted(largest_tables({"users": 900, "items": 95, "days": 5}, 0.99))
    ['items', 'users']
    """
    wanted = covering * sum(sizes.values())
    chosen, held = set(), 0
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if held >= wanted:
            break
        chosen.add(name)
        held += sizes[name]
    return frozenset(chosen)


def _configs(collection: Any) -> dict[str, Any]:
    found: dict[str, Any] = collection._table_name_to_config
    return found
