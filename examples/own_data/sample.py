"""Writes a small generated table in the format of a known log, to try its schema without a download.

    python -m examples.own_data.sample movielens ratings.csv movies.csv
    python -m examples.own_data.sample avazu train.csv
    python -m examples.own_data.sample log log.parquet

Users and items have a hidden taste, so that a model has something to learn.
"""

import argparse
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

NUM_ROWS: Final = 60_000
NUM_USERS: Final = 300
NUM_ITEMS: Final = 200
NUM_TASTES: Final = 3
GENRES: Final = ("Action", "Comedy", "Drama", "Film-Noir")
START: Final = datetime(2014, 10, 21)
NUM_DAYS: Final = 5
LIST_LENGTH: Final = 4

Floats = NDArray[np.float64]
Random = np.random.Generator


def impressions(random: Random) -> tuple[pl.DataFrame, Floats]:
    """Columns `user`, `item` and `at`, in order of time, and how much each user likes the item."""
    users = random.normal(size=(NUM_USERS, NUM_TASTES))
    items = random.normal(size=(NUM_ITEMS, NUM_TASTES))
    user = random.integers(NUM_USERS, size=NUM_ROWS)
    item = (NUM_ITEMS * random.random(NUM_ROWS) ** 2).astype(np.int64)  # some items are seen more often
    seconds = np.sort(random.integers(NUM_DAYS * 86_400, size=NUM_ROWS)).tolist()
    rows = {"user": user, "item": item, "at": [START + timedelta(seconds=each) for each in seconds]}
    return pl.DataFrame(rows), (users[user] * items[item]).sum(1) + random.normal(size=NUM_ROWS)


def movielens(random: Random, ratings: Path, movies: Path) -> None:
    """`userId,movieId,rating,timestamp`, and `movieId,title,genres`."""
    rows, liking = impressions(random)
    stars = np.clip(np.round(2 * (3.5 + liking)), 1, 10) / 2
    rows.select(
        userId=pl.col("user") + 1,
        movieId=pl.col("item") + 1,
        rating=stars,
        timestamp=pl.col("at").dt.epoch("s"),
    ).write_csv(ratings)
    genres = ["|".join(random.permutation(GENRES)[: random.integers(4)]) for _ in range(NUM_ITEMS)]
    pl.DataFrame(
        {
            "movieId": range(1, NUM_ITEMS + 1),
            "title": [f"Film {number}, The (1999)" for number in range(NUM_ITEMS)],
            "genres": [each or "(no genres listed)" for each in genres],
        }
    ).write_csv(movies)


def avazu(random: Random, train: Path) -> None:
    """`id,click,hour` and 21 categories; a site's id is the item, a device's the user."""
    rows, liking = impressions(random)

    def of_item(values: int) -> pl.Expr:
        return pl.col("item") % values

    def text(number: pl.Expr) -> pl.Expr:
        return (number.cast(pl.UInt32) * 2_654_435_761 % 2**32).map_elements("{:08x}".format, pl.String)

    rows.select(
        id=pl.int_range(NUM_ROWS, dtype=pl.UInt64) + 10**18,
        click=pl.Series(liking > 1.0).cast(pl.Int8),
        hour=pl.col("at").dt.strftime("%y%m%d%H"),
        C1=of_item(2) + 1005,
        banner_pos=of_item(3),
        site_id=text(pl.col("item")),
        site_domain=text(of_item(90)),
        site_category=text(of_item(20)),
        app_id=text(of_item(11)),
        app_domain=text(of_item(7)),
        app_category=text(of_item(5)),
        device_id=text(pl.col("user")),
        device_ip=text(pl.col("user") * 7),
        device_model=text(pl.col("user") % 40),
        device_type=pl.col("user") % 2,
        device_conn_type=pl.col("user") % 3,
        **{f"C{number}": of_item(number) + 100 for number in range(14, 22)},
    ).write_csv(train)


def own_log(random: Random, out: Path) -> None:
    """Missing prices and ages, and a list of up to four items with the share of attention that each got."""
    rows, liking = impressions(random)

    def holey(values: NDArray[Any]) -> pl.Series:
        return pl.Series([None if gone else value for gone, value in zip(missing, values, strict=True)])

    missing = random.random(NUM_ROWS) < 0.02
    lengths = random.integers(LIST_LENGTH + 1, size=NUM_ROWS)
    seen = random.integers(NUM_ITEMS, size=(NUM_ROWS, LIST_LENGTH))
    share = random.random(seen.shape, dtype=np.float32)
    rows.select(
        purchased=pl.Series(liking > 1.0),
        shown_at=pl.col("at"),
        user=pl.format("user-{}", "user"),
        item=pl.col("item"),
        country=(pl.col("user") % 3).replace_strict({0: "de", 1: "jp", 2: "us"}),
        price=holey(random.gamma(2.0, 20.0, size=NUM_ROWS)),
        age=holey(random.integers(16, 90, size=NUM_ROWS)),
        seen=pl.Series([row[:length] for row, length in zip(seen.tolist(), lengths, strict=True)]),
        share=pl.Series([row[:length] for row, length in zip(share.tolist(), lengths, strict=True)]),
    ).write_parquet(out)


TABLES: Final[dict[str, Callable[..., None]]] = {"movielens": movielens, "avazu": avazu, "log": own_log}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("files", nargs="+", type=Path, help="files to write, in the order above")
    flags = parser.parse_args()
    TABLES[flags.table](np.random.default_rng(0), *flags.files)


if __name__ == "__main__":
    main()
