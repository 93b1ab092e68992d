"""Format and parse bytes; wrap sentences to 80 columns.

GB is 10⁹ bytes and GiB is 2³⁰: a card sold as "24 GB" has 24 GiB = 25.8 GB.
"""

import re
from fractions import Fraction
from textwrap import fill
from typing import Any

BINARY_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL_UNITS = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS = {
    unit.lower(): factor
    for unit, factor in ({"B": 1, "": 1} | BINARY_UNITS | DECIMAL_UNITS).items()
}
MOST_DIGITS = 40  # before a unit; limits the size of the integer
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*")


WIDTH = 80  # columns that every terminal has


def paragraph(sentence: str) -> str:
    """Wrap the sentence to WIDTH without breaking option names."""
    unbroken: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return fill(sentence, WIDTH, subsequent_indent="  ", **unbroken)


def format_bytes(count: int) -> str:
    """Format `count` in its largest binary unit with two decimals; below 1 KiB, in bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= BINARY_UNITS[unit]:
            return f"{count / BINARY_UNITS[unit]:.2f} {unit}"
    return f"{count} B"


def parse_bytes(quantity: int | str) -> int:
    """Parse an int, or a number with a unit such as `"6 MiB"` or `"24GB"`, in any letter case.

    A fraction of a unit is rounded to the nearest byte. Raise ValueError for anything else,
    including a fraction without a unit: "1.5" more likely lacks "GiB" than means bytes.
    """
    if isinstance(quantity, int) and not isinstance(quantity, bool) and quantity >= 0:
        return quantity
    match = _QUANTITY.fullmatch(quantity) if isinstance(quantity, str) else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if not match or not factor or len(match[1]) > MOST_DIGITS or (factor == 1 and "." in match[1]):
        raise ValueError(
            f"got {quantity!r} as a number of bytes; give a number and a unit, "
            f"such as '6 MiB' (6·2²⁰ bytes) or '24GB' (24·10⁹ bytes)"
        )
    return round(Fraction(match[1].replace("_", "")) * factor)


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Return a count with its noun, such as "1 step" and "2,000 steps"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"
