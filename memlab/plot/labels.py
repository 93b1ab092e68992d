"""Place labels near their spans without overlap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memlab.plot.page import GAP


@dataclass(frozen=True)
class Span:
    """A named interval, in moments of a step or inches of a page."""

    name: str
    left: float
    right: float

    @property
    def width(self) -> float:
        """The distance from left to right."""
        return self.right - self.left


def place_names(spans: Sequence[Span], widths: Mapping[str, float], page: Span) -> list[Span]:
    """Return where to write the names of `spans` on `page`, all in the same unit, without overlap.

    Every name is written at its first span, shifted if necessary, and again at each later span
    with enough room.
    """
    first: dict[str, Span] = {}
    for span in spans:
        first.setdefault(span.name, span)
    placed = separate(list(first.values()), widths, page)
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


def separate(spans: Sequence[Span], widths: Mapping[str, float], page: Span) -> list[Span]:
    """Center a label on each span, then shift labels right and left until none overlap."""
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
