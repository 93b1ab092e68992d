"""How far observers are off, counted and in words."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from common import table

Off = int | str  # bytes above the truth, or why there is no figure

CLOSE = 0.0005  # "within 0.05 %"


@dataclass(frozen=True)
class Tally:
    """How an observer fares over many kinds of step."""

    answers: int
    exact: int
    close: int  # within 0.05 %
    worst: float  # share of the truth


def tally(figures: Iterable[tuple[Off, int]]) -> Tally:
    """Of (bytes off, the truth) for each kind of step."""
    shares = [figure / truth for figure, truth in figures if isinstance(figure, int)]
    return Tally(
        answers=len(shares),
        exact=sum(share == 0 for share in shares),
        close=sum(abs(share) <= CLOSE for share in shares),
        worst=max(shares, key=abs, default=0.0),
    )


def tallies(named: dict[str, Tally]) -> str:
    header = ("peak", "answers", "exact to the byte", "within 0.05 %", "at worst")
    return table(
        header,
        [
            (name, str(t.answers), str(t.exact), str(t.close), percent(t.worst))
            for name, t in named.items()
        ],
    )


def at_worst(tally: Tally) -> str:
    return f" (at worst {percent(tally.worst)})" if tally.worst else ""


def percent(share: float) -> str:
    return f"{share:+.3%}".replace("%", " %") if share else "0"


def in_words(figure: Off, truth_bytes: int, needs_resets: bool = False) -> str:
    """`exact`, `+4.008 %`, or why there is no figure."""
    if isinstance(figure, str):
        return f"refuses: {figure}"
    words = percent(figure / truth_bytes) if figure else "exact"
    return f"{words}, with resets" if needs_resets else words


def as_rows(rows: Iterable[Any]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows]}


def grouped(who: str, reasons: dict[str, str]) -> list[str]:
    """One line for each reason, with the kinds of step that it holds for."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in reasons.items():
        kinds.setdefault(reason, []).append(kind)
    return [f"{who} on {', '.join(names)}: {reason}" for reason, names in kinds.items()]


def bullets(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)
