"""Draw the phases of a run (forward, backward, optimizer) above their events."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

from matplotlib.axes import Axes

from memlab.plot.labels import Span, place_names
from memlab.plot.page import (
    GAP,
    GREY,
    LINE,
    SWATCH,
    draw_line,
    on_page,
    sides,
    text_width,
    write,
)
from memlab.trace import PHASES, Trace

WHEN = {
    "before": "before the step",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
}
PHASE_GREYS = {"forward": "#bdbdc4", "backward": "#85858d", "optimizer": "#45454a"}
NARROW = 0.01  # adjacent phases below this fraction of the run are drawn as one


def phase_spans(trace: Trace) -> list[Span]:
    """Return the step's phases from left to right. Adjacent phases too short to draw are joined."""
    first = first_moment(trace)
    spans, moment = [], 1
    for phase, run in groupby(event.phase for event in trace.events):
        after = moment + sum(1 for _ in run)
        if phase != "before":
            spans.append(Span(phase, moment, after))
        moment = after
    narrow = NARROW * (moment - first)
    groups = groupby(spans, key=lambda span: span.width < narrow)
    joined = [[_joined(list(group))] if short else list(group) for short, group in groups]
    return [span for group in joined for span in group]


def first_moment(trace: Trace) -> int:
    """Return the number of events before the step, at most the position of the peak."""
    phases = (event.phase for event in trace.events)
    before = next((index for index, phase in enumerate(phases) if phase != "before"), 0)
    return min(before, trace.peak_position)


def _joined(spans: Sequence[Span]) -> Span:
    names = {span.name for span in spans}
    return Span(
        " + ".join(phase for phase in PHASES if phase in names), spans[0].left, spans[-1].right
    )


def draw_phases(axes: Axes, spans: Sequence[Span]) -> None:
    """Draw a bar and a name above each phase, and lines at its ends if there is room."""
    figure, box = axes.figure, sides(axes)
    y = box.y1 + GAP / 2
    spans = [Span(s.name, on_page(axes, s.left)[0], on_page(axes, s.right)[0]) for s in spans]
    widths = {span.name: text_width(span.name) for span in spans}
    for span in spans:
        inset = min(0.01, span.width / 4)
        colour = PHASE_GREYS.get(span.name, GREY)
        draw_line(figure, (span.left + inset, span.right - inset), (y, y), colour, 3)
    for before, after in pairwise(spans):
        if before.width > widths[before.name] or after.width > widths[after.name]:
            draw_line(figure, (after.left, after.left), (box.y0, y), GREY, 0.5)
    names = place_names(spans, widths, Span("", box.x0, box.x1))
    if any(_is_displaced(names, span) for span in _first_of_each(spans)):
        _draw_key(axes, widths, y + LINE / 2)
        return
    for text in names:
        write(figure, text.left, y + LINE / 2, text.name, color=GREY)


def _first_of_each(spans: Sequence[Span]) -> list[Span]:
    return list({span.name: span for span in reversed(spans)}.values())


def _is_displaced(names: Sequence[Span], span: Span) -> bool:
    """Whether the first name of a span was shifted off its span."""
    text = next(name for name in names if name.name == span.name)
    return text.right < span.left or span.right < text.left


def _draw_key(axes: Axes, widths: Mapping[str, float], y: float) -> None:
    """Draw a legend of greys, for spans too short for names."""
    left = sides(axes).x0
    for name, width in widths.items():
        draw_line(axes.figure, (left, left + SWATCH), (y, y), PHASE_GREYS.get(name, GREY), 3)
        write(axes.figure, left + SWATCH + GAP, y, name, color=GREY)
        left += SWATCH + width + 4 * GAP
