"""Texts side by side: each as near as it can be to what it names, and none on another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memlab.plot.page import GAP


@dataclass(frozen=True)
class Span:
    """A name and where it reaches from and to: in moments of a step, or in inches of a page."""

    name: str
    left: float
    right: float

    @property
    def width(self) -> float:
        """From left to right."""
        return self.right - self.left


def place_names(spans: Sequence[Span], widths: Mapping[str, float], page: Span) -> list[Span]:
    """Where to write the names of `spans` on `page`, in the same unit, none on another.

    Every name is written once, at the first span of its name, pushed aside if it must be; and
    again at each later span that has room for it.
    """
    first: dict[str, Span] = {}
    for span in spans:
        first.setdefault(span.name, span)
    placed = pushed_apart(list(first.values()), widths, page)
    for span in spans:
        text = centred(span, widths[span.name])
        if text.width < span.width and all(apart(text, other) for other in placed):
            placed.append(text)
    return placed


def centred(span: Span, width: float) -> Span:
    left = (span.left + span.right - width) / 2
    return Span(span.name, left, left + width)


def apart(one: Span, other: Span) -> bool:
    return one.right + GAP <= other.left or other.right + GAP <= one.left


def pushed_apart(spans: Sequence[Span], widths: Mapping[str, float], page: Span) -> list[Span]:
    """A text centred on each span, pushed right off the one before it, then left off the next."""
    texts, edge = [], page.left
    for span in spans:
        left = max(centred(span, widths[span.name]).left, edge)
        texts.append(Span(span.name, left, left + widths[span.name]))
        edge = texts[-1].right + GAP
    edge = page.right
    for index, text in reversed(list(enumerate(texts))):
        right = min(text.right, edge)
        texts[index] = Span(text.name, right - text.width, right)
        edge = texts[index].left - GAP
    return texts
