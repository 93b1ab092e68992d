"""Helpers to build traces for plots and to read the drawn figures."""

import os
from itertools import combinations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from memlab.trace import Event, Trace


class Recorder:
    """Builds a trace by hand: allocations and frees in the order of the calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def allocate(self, size: int, category: str, phase: str) -> Event:
        event = Event(size, len(self.events), category, "", "", phase, "float32", (size // 4,))
        self.events.append(event)
        return event

    def free(self, event: Event, phase: str) -> None:
        self.events.append(event._replace(bytes=-event.bytes, phase=phase))

    def trace(self) -> Trace:
        return Trace(tuple(self.events))


def of(*changes: tuple[int, str, str]) -> Trace:
    """Build a trace from (bytes, category, phase); frees name the category that they reduce."""
    return Trace(
        tuple(
            Event(size, index, category, "", "", phase, "float32", ())
            for index, (size, category, phase) in enumerate(changes)
        )
    )


def texts(figure: Figure) -> dict[str, list[Bbox]]:
    """Return all texts of the figure with their boxes, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # places the texts beside an axis
    renderer = canvas.get_renderer()
    found = list(figure.texts)
    for axes in figure.axes:
        if axes.axison:
            found += [axes.xaxis.label, *axes.get_yticklabels()]
    boxes: dict[str, list[Bbox]] = {}
    for text in found:
        if text.get_text():
            boxes.setdefault(text.get_text(), []).append(text.get_window_extent(renderer))
    return boxes


def lines_of_text(figure: Figure) -> list[str]:
    """Join texts at the same height from left to right; return lines from top to bottom."""
    rows: dict[int, list[tuple[float, str]]] = {}
    for text, boxes in texts(figure).items():
        for box in boxes:
            rows.setdefault(round((box.y0 + box.y1) / 2 / 4), []).append((box.x0, text))
    return [" ".join(text for _, text in sorted(rows[y])) for y in sorted(rows, reverse=True)]


def image(figure: Figure, **how) -> np.ndarray:
    """Return the figure's pixels: (height, width, colour)."""
    canvas = FigureCanvasAgg(figure)
    canvas.print_figure(os.devnull, format="png", **how)
    return np.asarray(canvas.buffer_rgba())


def check_that_no_texts_overlap(figure: Figure) -> None:
    boxes = [(text, box) for text, found in texts(figure).items() for box in found]
    for (one, box), (other, box_of_other) in combinations(boxes, 2):
        assert not box.overlaps(box_of_other), f"{one!r} meets {other!r}"


def check_that_every_text_is_on_the_page(figure: Figure) -> None:
    page = figure.bbox
    for text, boxes in texts(figure).items():
        for box in boxes:
            assert page.x0 < box.x0 < box.x1 < page.x1, text
            assert page.y0 < box.y0 < box.y1 < page.y1, text
