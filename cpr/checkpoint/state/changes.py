"""How a model may differ from the saved state that it loads, if the user says so.

A table may have grown, tables may be new or gone, and dense tensors whose shapes follow from them may start
anew. Whatever differs without having been allowed is refused, with the words that would allow it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, Self, get_args

from cpr.checkpoint.catalog.chain import State
from cpr.errors import MismatchError

ChangeKind = Literal["grow", "add", "remove", "reset"]
KINDS: Final[tuple[ChangeKind, ...]] = get_args(ChangeKind)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between a model and a saved state that may be allowed, or is asked for."""

    kind: ChangeKind
    name: str
    """As in a word that allows it."""
    text: str = ""
    """For a refusal; empty if it is asked for."""
    detail: str = ""
    """For the log, after the name."""
    fqn: str = ""
    """Fully qualified name of the table; empty for a dense tensor."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a model may have that differs from the saved state it loads; all else must be equal.

    Names of tables are their own, or fully qualified ones; those of dense tensors are names in `state_dict`.
    All may be patterns, such as `*` and `user_*`.
    """

    grow: tuple[str, ...] = ()
    """Tables that may have more rows than were saved. New rows, and their optimizer state, keep the values
    that the model was built with."""
    add: tuple[str, ...] = ()
    """Tables that may be new: they keep the values that the model was built with."""
    remove: tuple[str, ...] = ()
    """Saved tables that the model may lack."""
    reset: tuple[str, ...] = ()
    """Dense tensors that start anew, and so does their optimizer state. They may have another shape than was
    saved, be new or gone, and in a warm start also have the same shape. Registered states of exactly these
    names are not loaded."""

    @classmethod
    def of(cls, *words: str) -> Self:
        """Read words such as `grow:user` or `reset:top.0.weight`.

        Raises:
            ValueError: a word has another form.
        """
        names: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for word in words:
            kind, _, name = word.partition(":")
            if kind not in names or not name:
                raise ValueError(
                    f"{word!r} allows nothing: write grow:NAME, add:NAME, remove:NAME or reset:NAME"
                )
            names[kind].append(name)
        return cls(**{kind: tuple(each) for kind, each in names.items()})

    def check(self, found: Sequence[Difference], where: str) -> None:
        """Refuse differences that are not allowed.

        Raises:
            MismatchError: names all of them, and the words that would allow them.
        """
        refused = [each for each in found if not self._allows(each)]
        if refused:
            words = " ".join(f"{each.kind}:{each.name}" for each in refused)
            texts = "; ".join(each.text for each in refused)
            raise MismatchError(
                f"{where} is of another model. What to do: build the model with the options it was saved "
                f"with, or allow it to differ: {words} (dlrm.train: --allow; programs: cpr.Changes.of). What "
                f"differs: {texts}"
            )

    def unneeded(self, found: Sequence[Difference]) -> list[str]:
        """The words that allow none of the differences."""
        return [
            f"{kind}:{pattern}"
            for kind in KINDS
            for pattern in getattr(self, kind)
            if not any(each.kind == kind and _matches(each, pattern) for each in found)
        ]

    def resets(self, name: str) -> bool:
        """Whether a dense tensor is to start anew."""
        return any(fnmatchcase(name, pattern) for pattern in self.reset)

    def _allows(self, difference: Difference) -> bool:
        return any(_matches(difference, pattern) for pattern in getattr(self, difference.kind))


def _matches(difference: Difference, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (difference.name, difference.fqn) if name)


UNCHANGED: Final = Changes()


def table_differences(tables: Mapping[str, tuple[int, int]], state: State) -> Iterator[Difference]:
    """Tables that have grown, are new, or are gone.

    `tables` are rows and columns of those of all ranks, by fully qualified name. Other differences are left
    to `check_fit`.
    """
    saved = state.newest.tables
    own_names = Counter(fqn.rpartition(".")[2] for fqn in tables.keys() | saved.keys())

    def found(kind: ChangeKind, fqn: str, text: str, detail: str = "") -> Difference:
        own = fqn.rpartition(".")[2]
        name = own if own_names[own] == 1 else fqn
        return Difference(kind=kind, name=name, text=text, detail=detail, fqn=fqn)

    for fqn in sorted(tables.keys() | saved.keys()):
        if fqn not in saved:
            yield found("add", fqn, f"only the model has table {fqn}")
        elif fqn not in tables:
            yield found("remove", fqn, f"only the saved state has table {fqn}")
        elif saved[fqn].rows < tables[fqn][0] and saved[fqn].cols == tables[fqn][1]:
            here, there = tables[fqn][0], saved[fqn].rows
            text = f"table {fqn} has {here} rows in the model and {there} in the saved state"
            yield found("grow", fqn, text, f" ({there} to {here} rows)")


def described(found: Sequence[Difference]) -> str:
    """The allowed differences as a sentence for the log."""
    verbs = {
        "grow": "new rows keep their initial values in",
        "add": "new, with initial values, are",
        "remove": "dropped are",
        "reset": "started anew are",
    }
    parts = []
    for kind, verb in verbs.items():
        texts = [f"{each.name}{each.detail}" for each in found if each.kind == kind]
        if texts:
            parts.append(f"{verb} {', '.join(texts)}")
    return "; ".join(parts)
