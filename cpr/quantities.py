"""Numbers as people read them."""


def size_text(num_bytes: float) -> str:
    """Bytes with a decimal unit.

    >>> size_text(2_640_000_000)
    '2.64 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{_rounded(num_bytes)} TB"


def count_text(number: int, what: str) -> str:
    """So many of something.

    >>> count_text(1, "rank"), count_text(2000, "rank")
    ('1 rank', '2,000 ranks')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def age_text(seconds: float) -> str:
    """A span of time, roughly.

    >>> age_text(9000)
    '2.5 h'
    """
    for limit, unit, unit_s in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{_rounded(max(0.0, seconds) / unit_s)} {unit}"
    return f"{_rounded(seconds / 86_400)} days"


def share_text(share: float) -> str:
    """A share as a percentage with three digits.

    >>> share_text(0.0845), share_text(0.00529), share_text(0)
    ('8.45%', '0.529%', '0%')
    """
    return f"{100 * share:.3g}%"


def _rounded(value: float) -> str:
    return f"{value:.2g}" if value < 9.95 else f"{value:,.0f}"
