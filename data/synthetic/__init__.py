"""Criteo-like click logs with a planted teacher, so that the best reachable AUC is known.

`python -m data.synthetic --out DIR` generates the data set of `make train`. In code, `generate` writes a data
set to disk, `ClickSource` yields blocks in memory, and `Popularity` draws skewed ids alone:

>>> from data.synthetic import ClickSource, SyntheticConfig
>>> block = ClickSource(SyntheticConfig(rows_per_day=100)).block(day=0, index=0)
>>> block.dense.shape, len(block.bags), block.bags[0].ids.shape
((100, 13), 26, (100,))
"""

from data.synthetic.build import generate, is_finished
from data.synthetic.config import SyntheticConfig
from data.synthetic.popularity import Popularity
from data.synthetic.source import Block, ClickSource
from data.synthetic.teacher import Bag

__all__ = ["Bag", "Block", "ClickSource", "Popularity", "SyntheticConfig", "generate", "is_finished"]
