"""Summaries of observers' errors."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from common import table

Off = int | str  # error in bytes, or why there is no figure

CLOSE = 0.0005  # "within 0.05 %"


@dataclass(frozen=True)
class Tally:
    """An observer's results over many kinds of step."""

    answers: int
    exact: int
    close: int  # within 0.05 %
    worst: float  # relative to the reference


def tally(figures: Iterable[tuple[Off, int]]) -> Tally:
    """Summarize (error, reference) pairs, in bytes."""
    shares = [figure / reference for figure, reference in figures if isinstance(figure, int)]
    return Tally(
        answers=len(shares),
        exact=sum(share == 0 for share in shares),
        close=sum(abs(share) <= CLOSE for share in shares),
        worst=max(shares, key=abs, default=0.0),
    )


def tallies(named: dict[str, Tally]) -> str:
    header = ("peak", "answers", "exact to the byte", "within 0.05 %", "worst")
    return table(
        header,
        [
            (name, str(t.answers), str(t.exact), str(t.close), percent(t.worst))
            for name, t in named.items()
        ],
    )


def at_worst(tally: Tally) -> str:
    return f" (worst {percent(tally.worst)})" if tally.worst else ""


def percent(share: float) -> str:
    return f"{share:+.3%}".replace("%", " %") if share else "0"


def in_words(figure: Off, reference_bytes: int, needs_resets: bool = False) -> str:
    """Return `exact`, a relative error, or why there is no figure."""
    if isinstance(figure, str):
        return f"refuses: {figure}"
    words = percent(figure / reference_bytes) if figure else "exact"
    return f"{words}, with resets" if needs_resets else words


def as_rows(rows: Iterable[Any]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows]}


def grouped(who: str, reasons: dict[str, str]) -> list[str]:
    """Return one line for each reason, with the kinds of step it applies to."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in reasons.items():
        kinds.setdefault(reason, []).append(kind)
    return [f"{who} on {', '.join(names)}: {reason}" for reason, names in kinds.items()]


def bullets(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)
