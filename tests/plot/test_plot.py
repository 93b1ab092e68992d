"""Plots of traces show exactly the traced bytes, and labels never overlap."""

import importlib.util
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from drawn import (
    Recorder,
    check_that_every_text_is_on_the_page,
    check_that_no_texts_overlap,
    image,
    lines_of_text,
    of,
    texts,
)
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.transforms import Bbox
from quick import quick

from memlab import plot
from memlab.plot import breakdown, save, timeline
from memlab.plot.labels import Span, place_names
from memlab.plot.page import GAP
from memlab.plot.phases import phase_spans
from memlab.plot.timelines import stack_columns
from memlab.trace import CATEGORIES, Trace
from memlab.units import format_bytes

MIB, GIB = 2**20, 2**30


# ------------------------------------------------------------------ traces to draw


def training_step(*, layers=6, unit=MIB, batch=4, scratch=()) -> Trace:
    """A first step: activations grow, then shrink as gradients grow; AdamW's state appears."""
    step = Recorder()
    for _ in range(layers):
        step.allocate(3 * unit, "parameters", "before")
    step.allocate(unit, "inputs", "before")
    for category in scratch:
        step.allocate(2 * unit, category, "forward")
    activations = []
    for _ in range(layers):
        temporary = step.allocate(2 * unit, "forward_temporaries", "forward")
        activations += [step.allocate(unit, "activations", "forward") for _ in range(batch)]
        step.free(temporary, "forward")
    gradients = []
    for _ in range(layers):
        temporary = step.allocate(2 * unit, "backward_temporaries", "backward")
        for _ in range(batch):
            step.free(activations.pop(), "backward")
        gradients.append(step.allocate(3 * unit, "gradients", "backward"))
        step.free(temporary, "backward")
    for gradient in gradients:
        step.allocate(6 * unit, "optimizer_state", "optimizer")
        temporary = step.allocate(3 * unit, "optimizer_temporaries", "optimizer")
        step.free(temporary, "optimizer")
        step.free(gradient, "optimizer")
    return step.trace()


def accumulation(*, micro_batches: int) -> Trace:
    """Alternating forward and backward passes, and a step of an optimizer without state."""
    run = Recorder()
    run.allocate(8 * MIB, "parameters", "before")
    for _ in range(micro_batches):
        activations = [run.allocate(MIB, "activations", "forward") for _ in range(8)]
        for activation in reversed(activations):
            run.free(activation, "backward")
    run.free(run.allocate(MIB, "optimizer_temporaries", "optimizer"), "optimizer")
    return run.trace()


def spiked(events: int, spike_at: int) -> Trace:
    """A long trace of small steps with one briefly allocated GiB."""
    run = Recorder()
    for index in range(events // 2):
        size = GIB if index == spike_at // 2 else 1000 + index % 7
        run.free(run.allocate(size, "forward_temporaries", "forward"), "forward")
    return run.trace()


EVERYTHING = ("buffers", "workspace", "rounding", "unattributed")
SAMPLES = {
    "a step": training_step(),
    "every category, GiB": training_step(unit=333 * MIB, scratch=EVERYTHING),
    "tiny": of(
        (100, "parameters", "before"),
        (50, "activations", "forward"),
        (-50, "activations", "backward"),
        (100, "gradients", "backward"),
        (-100, "gradients", "optimizer"),
    ),
    "one byte": of((1, "inputs", "forward")),
    "only memory from before": of((MIB, "parameters", "before"), (MIB, "buffers", "before")),
    "peak first": of(
        (GIB, "inputs", "before"),
        (-GIB, "inputs", "forward"),
        *[(MIB, "activations", "forward")] * 20,
        *[(-MIB, "activations", "backward")] * 20,
    ),
    "peak last": of(
        *[(MIB, "activations", "forward")] * 200,
        *[(-MIB, "activations", "backward")] * 200,
        (1023 * MIB, "optimizer_state", "optimizer"),
    ),
    "micro-batches": accumulation(micro_batches=3),
    "many micro-batches": accumulation(micro_batches=16),
    "very many micro-batches": accumulation(micro_batches=500),
}


@pytest.fixture(params=SAMPLES)
def sample(request) -> Trace:
    return SAMPLES[request.param]


# ------------------------------------------------------------------ reading a plot


def layers(figure: Figure) -> dict[str, np.ndarray]:
    """Return bytes by category in each column of a drawn timeline.

    Every layer reaches down to 0, the whole stack first, so differences give the categories.
    """
    steps = [patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch)]
    reach = [patch.get_data().values for patch in steps] + [0]
    shown = {patch.get_label(): reach[i] - reach[i + 1] for i, patch in enumerate(steps)}
    return {category: shown[category] for category in CATEGORIES if category in shown}


def bars(figure: Figure) -> list[dict[str, int]]:
    """Return bytes by category of each bar of a drawn breakdown, from the top."""
    rows: dict[float, dict[str, int]] = {}
    for patch in figure.axes[0].patches:
        row = rows.setdefault(patch.get_y(), {})
        assert patch.get_x() == sum(row.values()), "a part begins where the one before it ends"
        row[patch.get_label()] = patch.get_width()
    return [rows[y] for y in sorted(rows)]


def peak_table(figure: Figure) -> list[tuple[str, str]]:
    """Return (category, size) of the rows under "at the peak", from the top."""
    boxes = texts(figure)
    left = boxes["at the peak"][0].x0
    right = [(box, text) for text in boxes for box in boxes[text] if box.x0 >= left]
    right.sort(key=lambda pair: (-round(pair[0].y0 / 8), pair[0].x0))
    words = [text for _, text in right][2:]
    return list(zip(words[::2], words[1::2], strict=True))


# ------------------------------------------------------------------ timeline: stack


def test_the_stack_at_the_peak_is_the_trace_at_the_peak(sample):
    drawn = layers(timeline(sample))
    column = sum(drawn.values()).argmax()
    assert {c: drawn[c][column] for c in drawn if drawn[c][column]} == sample.at_peak


def test_the_drawn_maximum_is_the_peak(sample):
    assert sum(layers(timeline(sample)).values()).max() == sample.peak_bytes


def test_the_stack_is_in_the_order_of_categories_with_parameters_at_the_bottom():
    figure = timeline(SAMPLES["every category, GiB"])
    drawn_first_to_last = [patch.get_label() for patch in figure.axes[0].patches]
    assert drawn_first_to_last == list(reversed(CATEGORIES))


def test_each_layer_has_the_colour_of_its_category():
    for patch in timeline(SAMPLES["every category, GiB"]).axes[0].patches:
        assert patch.get_facecolor()[:3] == to_rgb(plot.COLOURS[patch.get_label()])


def test_a_short_trace_is_drawn_moment_by_moment():
    trace = SAMPLES["a step"]
    before = sum(event.phase == "before" for event in trace.events)
    drawn = layers(timeline(trace))
    for column, moment in enumerate(range(before, len(trace.events) + 1)):
        alive = Counter()
        for event in trace.events[:moment]:
            alive[event.category] += event.bytes
        assert {c: drawn[c][column] for c in drawn} == {c: alive[c] for c in drawn}


def test_a_timeline_begins_with_the_memory_alive_before_the_step():
    trace = of(
        (60, "parameters", "before"), (40, "parameters", "before"), (1, "activations", "forward")
    )
    assert layers(timeline(trace))["parameters"].tolist() == [100, 100]


def test_a_peak_before_the_step_is_drawn():
    trace = of(
        (60, "parameters", "before"), (-50, "parameters", "before"), (1, "activations", "forward")
    )
    assert layers(timeline(trace))["parameters"].tolist() == [60, 10, 10]


def test_the_axis_counts_the_allocations_and_frees_of_the_step():
    # the first of this trace's five events was alive before the step
    assert "4 allocations and frees, in order" in texts(timeline(SAMPLES["tiny"]))


@pytest.mark.parametrize("spike_at", quick([0, 77_778], [0, 2, 77_778, 123_456, 199_996, 199_998]))
def test_a_peak_of_one_event_among_200_000_is_drawn_in_full(spike_at):
    trace = spiked(200_000, spike_at)
    assert trace.peak_bytes == GIB
    assert sum(layers(timeline(trace)).values()).max() == GIB


def test_a_long_trace_has_at_most_the_requested_columns():
    assert len(stack_columns(spiked(200_000, 0), columns=1000).totals) == 1000


def test_a_column_of_a_long_trace_is_the_maximum_of_its_events():
    trace = training_step(layers=40)
    stack = stack_columns(trace, columns=50)
    alive = np.cumsum([0, *(event.bytes for event in trace.events)])
    fullest = [max(alive[p:q]) for p, q in itertools.pairwise(stack.edges)]
    assert stack.totals.tolist() == fullest


def test_a_column_of_a_long_trace_shows_one_actual_moment():
    trace = training_step(layers=40)
    moments = {tuple(trace_at(trace, n).values()) for n in range(len(trace.events) + 1)}
    stack = stack_columns(trace, columns=50)
    for column in range(50):
        assert tuple(stack.heights.get(c, np.zeros(50))[column] for c in CATEGORIES) in moments


def trace_at(trace: Trace, moment: int) -> dict[str, int]:
    alive = Counter()
    for event in trace.events[:moment]:
        alive[event.category] += event.bytes
    return {category: alive[category] for category in CATEGORIES}


# ------------------------------------------------------------------ timeline: labels


def test_the_table_lists_the_peak_by_category(sample):
    rows = peak_table(timeline(sample))
    sizes = {words: size for words, size in rows if size != "0 B"}
    assert sizes == {c.replace("_", " "): format_bytes(n) for c, n in sample.at_peak.items()}


def test_the_table_lists_the_stack_from_top_to_bottom(sample):
    figure = timeline(sample)
    drawn = [category.replace("_", " ") for category in reversed(layers(figure))]
    assert [words for words, _ in peak_table(figure)] == drawn


def test_the_table_lists_no_category_without_bytes():
    assert peak_table(timeline(SAMPLES["tiny"])) == [
        ("activations", "0 B"),
        ("gradients", "100 B"),
        ("parameters", "100 B"),
    ]


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("before", "peak 3.00 MiB, before the step"),
        ("forward", "peak 3.00 MiB, in forward"),
        ("backward", "peak 3.00 MiB, in backward"),
        ("optimizer", "peak 3.00 MiB, in the optimizer step"),
    ],
)
def test_the_peak_is_labelled_with_its_size_and_phase(phase, words):
    trace = of((3 * MIB, "inputs", phase), (-MIB, "inputs", "optimizer"))
    assert words in texts(timeline(trace))


@pytest.mark.parametrize("name", ["peak first", "peak last", "a step"])
def test_the_label_is_above_the_peak_and_as_near_as_the_sides_allow(name):
    figure = timeline(SAMPLES[name])
    [[label]] = [boxes for text, boxes in texts(figure).items() if text.startswith("peak ")]
    axes = figure.axes[0]
    [[x], [y]] = axes.lines[0].get_data()
    x, y = axes.transData.transform((x, y))
    wanted = np.clip(x, axes.bbox.x0 + label.width / 2, axes.bbox.x1 - label.width / 2)
    assert (label.x0 + label.x1) / 2 == pytest.approx(wanted, abs=3)
    assert y < label.y0 < y + label.height


@pytest.mark.parametrize(
    ("peak", "ticks"),
    [
        (3, ["0 B", "1 B", "2 B", "3 B"]),
        (600 * 2**10, ["0 KiB", "200 KiB", "400 KiB", "600 KiB"]),
        (2 * MIB, ["0 MiB", "0.5 MiB", "1 MiB", "1.5 MiB", "2 MiB"]),
        (90 * GIB, ["0 GiB", "20 GiB", "40 GiB", "60 GiB", "80 GiB"]),
    ],
)
def test_the_byte_axis_has_round_numbers_of_the_largest_fitting_unit(peak, ticks):
    axes = timeline(of((peak, "inputs", "forward"))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ticks


def test_the_ticks_of_the_byte_axis_are_at_their_bytes():
    axes = timeline(of((2 * MIB, "inputs", "forward"))).axes[0]
    assert axes.get_yticks().tolist() == [0, MIB / 2, MIB, 3 * MIB / 2, 2 * MIB]


# ------------------------------------------------------------------ timeline: phases


def test_a_phase_spans_the_moments_after_its_events():
    assert phase_spans(SAMPLES["tiny"]) == [
        Span("forward", 2, 3),
        Span("backward", 3, 5),
        Span("optimizer", 5, 6),
    ]


def test_a_short_phase_between_long_ones_keeps_its_own_span():
    trace = of(
        *[(1, "activations", "forward")] * 500,
        (1, "gradients", "backward"),
        *[(1, "optimizer_state", "optimizer")] * 500,
    )
    assert [span.name for span in phase_spans(trace)] == ["forward", "backward", "optimizer"]


def test_short_adjacent_phases_are_joined_under_both_names():
    trace = of(
        *[(1, "activations", "forward")] * 500,
        *[(1, "optimizer_state", "optimizer"), (1, "gradients", "backward")] * 250,
    )
    assert phase_spans(trace) == [Span("forward", 1, 501), Span("backward + optimizer", 501, 1001)]


def test_alternating_phases_are_named_once_if_there_is_no_room_for_more():
    boxes = texts(timeline(SAMPLES["many micro-batches"]))
    assert [len(boxes[phase]) for phase in ("forward", "backward", "optimizer")] == [1, 1, 1]


def test_alternating_phases_are_named_each_time_if_there_is_room():
    spans = [Span(name, i, i + 1) for i, name in enumerate(("forward", "backward") * 3)]
    placed = place_names(spans, {"forward": 0.5, "backward": 0.5}, Span("", 0, 6))
    assert {text.left: text.name for text in placed} == {
        span.left + 0.25: span.name for span in spans
    }


def test_alternating_phases_without_room_are_named_at_their_start():
    spans = [Span(name, i, i + 1) for i, name in enumerate(("forward", "backward") * 3)]
    placed = place_names(spans, {"forward": 1.2, "backward": 1.2}, Span("", 0, 6))
    assert [text.left for text in placed] == [0, 1.2 + GAP]


def test_alternating_phases_are_named_in_order_of_their_start():
    # forward comes back last, but its name stays before backward's
    spans = [Span("forward", 0, 1), Span("backward", 1, 2), Span("forward", 2, 3)]
    placed = place_names(spans, {"forward": 1.2, "backward": 1.2}, Span("", 0, 3))
    assert [text.name for text in placed] == ["forward", "backward"]
    assert placed[0].right < placed[1].left


def test_a_wide_phase_has_its_name_in_the_middle():
    spans = [Span("forward", 0, 4), Span("backward", 4, 10)]
    placed = place_names(spans, {"forward": 1, "backward": 2}, Span("", 0, 10))
    assert placed == [Span("forward", 1.5, 2.5), Span("backward", 6, 8)]


def test_a_name_at_the_end_of_the_page_shifts_left_and_shifts_the_previous_name():
    spans = [Span("backward", 7, 9.8), Span("optimizer", 9.8, 10)]
    placed = place_names(spans, {"backward": 2, "optimizer": 1}, Span("", 0, 10))
    assert placed == [Span("backward", 7 - GAP, 9 - GAP), Span("optimizer", 9, 10)]


NAMES = ("forward", "backward", "optimizer", "backward + optimizer")
WIDTHS = {"forward": 0.5, "backward": 0.7, "optimizer": 0.7, "backward + optimizer": 1.5}


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0.001, 3)), min_size=1, max_size=30))
def test_all_names_of_phases_are_on_the_page_without_overlap(runs):
    scale = 5 / sum(width for _, width in runs)
    edges = [0, *itertools.accumulate(width * scale for _, width in runs)]
    spans = [
        Span(name, left, right)
        for (name, _), (left, right) in zip(runs, itertools.pairwise(edges), strict=True)
    ]
    placed = sorted(place_names(spans, WIDTHS, Span("", 0, 5)), key=lambda text: text.left)
    assert {text.name for text in placed} == {span.name for span in spans}
    assert placed[0].left > -1e-9
    assert placed[-1].right < 5 + 1e-9
    assert all(a.right + GAP < b.left + 1e-9 for a, b in itertools.pairwise(placed))


# ------------------------------------------------------------------ breakdown


BASE = training_step()
SMALL = training_step(layers=3)
LARGE = training_step(layers=9)


def test_each_bar_is_its_trace_at_the_peak():
    figure = breakdown({"base": BASE, "small": SMALL, "large": LARGE})
    assert bars(figure) == [BASE.at_peak, SMALL.at_peak, LARGE.at_peak]


def test_the_longest_bar_fills_the_axes():
    assert breakdown({"base": BASE, "large": LARGE}).axes[0].get_xlim() == (0, LARGE.peak_bytes)


def test_each_part_of_a_bar_has_the_colour_of_its_category():
    for patch in breakdown({"all": SAMPLES["every category, GiB"]}).axes[0].patches:
        assert patch.get_facecolor()[:3] == to_rgb(plot.COLOURS[patch.get_label()])


def test_the_text_after_a_bar_gives_its_total_and_savings():
    half, double = of((GIB, "inputs", "forward")), of((4 * GIB, "inputs", "forward"))
    base = of((2 * GIB, "inputs", "forward"))
    figure = breakdown({"base": base, "half": half, "again": base, "twice": double})
    assert [line for line in lines_of_text(figure) if "GiB" in line] == [
        "base 2.00 GiB 2.00 GiB",
        "half 1.00 GiB 1.00 GiB 50.0% less",
        "again 2.00 GiB 2.00 GiB the same",
        "twice 4.00 GiB 4.00 GiB 100.0% more",
    ]


def test_the_legend_shows_only_categories_present_at_a_peak_in_stack_order():
    first = of((1, "activations", "forward"), (1, "buffers", "forward"))
    second = of(
        (1, "parameters", "before"), (-1, "parameters", "forward"), (2, "inputs", "forward")
    )
    key = lines_of_text(breakdown({"first": first, "second": second}))[1]
    assert key == "buffers inputs activations"


def test_a_size_inside_a_bar_stays_inside_its_part():
    figure = breakdown({"base": BASE, "small": SMALL, "large": LARGE})
    written = texts(figure)
    for patch in figure.axes[0].patches:
        part = patch.get_window_extent()
        for box in written.get(format_bytes(int(patch.get_width())), []):
            if part.contains((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2):
                assert part.x0 < box.x0
                assert box.x1 < part.x1


def test_the_names_are_left_of_the_bars():
    figure = breakdown({"base": BASE, "a longer name of two lines": SMALL})
    for name in ("base", "a longer name of two lines"):
        [box] = texts(figure)[name]
        assert box.x1 < figure.axes[0].bbox.x0


def test_a_long_name_leaves_the_bars_a_third_of_the_page():
    figure = breakdown({"a name that goes on and on " * 4: BASE, "small": SMALL})
    assert figure.axes[0].bbox.width > figure.bbox.width / 3


def test_a_single_trace_is_one_bar():
    assert bars(breakdown(BASE)) == [BASE.at_peak]


# ------------------------------------------------------------------ timeline and breakdown


def pictures():
    for name, trace in SAMPLES.items():
        yield pytest.param(lambda trace=trace: timeline(trace), id=name)
    long = "a name that says everything about a run: bf16, 8-bit AdamW, recomputation, no bias"
    sets = {
        "one": {"base": BASE},
        "nameless": {"": BASE},
        "three": {"base": BASE, "small": SMALL, "large": LARGE},
        "long names": {"base": BASE, long: SMALL, long + "!": LARGE},
        "every sample": SAMPLES,
        "very different sizes": {"giant": SAMPLES["every category, GiB"], "dwarf": SMALL},
    }
    for name, traces in sets.items():
        yield pytest.param(lambda traces=traces: breakdown(traces, title=long * 2), id=name)


@pytest.mark.few(7)
@pytest.mark.parametrize("draw", list(pictures()))
def test_no_texts_overlap(draw):
    check_that_no_texts_overlap(draw())


@pytest.mark.few(7)
@pytest.mark.parametrize("draw", list(pictures()))
def test_every_text_is_on_the_page(draw):
    check_that_every_text_is_on_the_page(draw())


@pytest.mark.parametrize("draw", [timeline, breakdown])
def test_a_title_is_not_parsed_as_math(draw):
    figure = draw(BASE, title="costs $5, not $6")
    [written] = [text for text in figure.texts if text.get_text() == "costs $5, not $6"]
    assert not written.get_parse_math()


@pytest.mark.parametrize("draw", [timeline, breakdown])
def test_a_picture_is_900_pixels_wide(draw):
    assert draw(BASE).bbox.width == 900


def test_every_category_has_a_colour():
    assert tuple(plot.COLOURS) == CATEGORIES


# Linear RGB as seen with full dichromacy: Machado, Oliveira & Fernandes 2009, table 1.
VISION = {
    "full": np.eye(3),
    "no long cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no medium cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no short cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ_OF_RGB = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]


def as_seen(colour: str, vision) -> np.ndarray:
    """Return CIE L*a*b* of a colour: equal distances look about equal, and 2 is just visible."""
    encoded = np.array(to_rgb(colour))
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(vision) @ linear, 0, 1)
    x, y, z = np.cbrt(np.asarray(XYZ_OF_RGB) @ seen / [0.95047, 1, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_any_two_colours_differ_for_every_kind_of_colour_vision(vision):
    seen = {category: as_seen(plot.COLOURS[category], VISION[vision]) for category in CATEGORIES}
    for one, other in itertools.combinations(CATEGORIES, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, f"{one} looks like {other}"


@pytest.mark.parametrize("vision", VISION)
def test_every_colour_differs_from_the_page(vision):
    page = as_seen("white", VISION[vision])
    for category, colour in plot.COLOURS.items():
        assert np.linalg.norm(as_seen(colour, VISION[vision]) - page) > 20, category


# ------------------------------------------------------------------ errors


EMPTY = {"no events": of(), "nothing but empty tensors": of((0, "inputs", "forward"))}


@pytest.mark.parametrize("trace", EMPTY.values(), ids=EMPTY)
def test_a_timeline_of_nothing_is_an_error_with_a_remedy(trace):
    with pytest.raises(ValueError, match=r"got a trace without any allocation; .* memlab\.measure"):
        timeline(trace)


@pytest.mark.parametrize("trace", EMPTY.values(), ids=EMPTY)
def test_a_breakdown_with_an_empty_trace_is_an_error_that_names_it(trace):
    with pytest.raises(
        ValueError, match=r"got the trace 'second' without any allocation; .* memlab\.measure"
    ):
        breakdown({"first": BASE, "second": trace})


def test_a_breakdown_of_no_traces_is_an_error():
    with pytest.raises(ValueError, match="got no traces; give at least one"):
        breakdown({})


# ------------------------------------------------------------------ files


def test_a_png_is_written(tmp_path):
    save(timeline(BASE), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_an_svg_is_written(tmp_path):
    save(timeline(BASE), tmp_path / "step.svg")
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("name", ["step.jpg", "step", "step.png.gz"])
def test_another_kind_of_file_is_an_error_that_lists_the_kinds(tmp_path, name):
    with pytest.raises(ValueError, match=rf"got '{name}' .* \.png or \.svg"):
        save(timeline(BASE), tmp_path / name)


@pytest.mark.parametrize("draw", [timeline, breakdown])
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_trace_gives_the_same_bytes(tmp_path, draw, kind):
    for name in "ab":
        save(draw(BASE), tmp_path / f"{name}.{kind}")
    assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_no_date_is_written(tmp_path):
    save(timeline(BASE), tmp_path / "step.svg")
    assert "date>" not in (tmp_path / "step.svg").read_text(encoding="utf-8")


def test_a_file_is_replaced_by_a_new_picture(tmp_path):
    path = tmp_path / "step.svg"
    save(timeline(BASE), path)
    save(timeline(SMALL), path)
    save(timeline(SMALL), tmp_path / "new.svg")
    assert path.read_bytes() == (tmp_path / "new.svg").read_bytes()


@pytest.fixture
def old(tmp_path) -> Path:
    path = tmp_path / "step.png"
    path.write_bytes(b"the old picture")
    return path


def test_a_failure_while_drawing_leaves_only_the_old_file(old, monkeypatch):
    def half_a_picture(figure, file, **how):
        file.write(b"half a picture")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", half_a_picture)
    with pytest.raises(OSError, match="no space left"):
        save(timeline(BASE), old)
    assert {path: path.read_bytes() for path in old.parent.iterdir()} == {old: b"the old picture"}


@pytest.mark.parametrize("method", ["write_bytes", "replace"])
def test_a_failure_while_writing_leaves_only_the_old_file(old, monkeypatch, method):
    def fail_after_a_part(self, *_):
        with self.open("wb") as file:
            file.write(b"half a picture")
        raise OSError("no space left")

    monkeypatch.setattr(Path, method, fail_after_a_part)
    with pytest.raises(OSError, match="no space left"):
        save(timeline(BASE), old)
    assert {path: path.read_bytes() for path in old.parent.iterdir()} == {old: b"the old picture"}


# ------------------------------------------------------------------ notebooks and global state


def test_a_notebook_gets_an_image_at_twice_the_size_it_shows():
    png, shown = timeline(BASE)._repr_png_()
    width = int.from_bytes(png[16:20])
    height = int.from_bytes(png[20:24])
    assert (width, height) == (2 * shown["width"], 2 * shown["height"])


def test_a_notebook_shows_our_image_even_if_pyplot_registers_a_printer():
    shells = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    capture_output = pytest.importorskip("IPython.utils.capture").capture_output
    formatter = shells.instance().display_formatter
    formatter.formatters["image/png"].for_type(Figure, lambda figure: b"pyplot's")
    try:
        with capture_output() as got:
            formatter.format(timeline(BASE))
    finally:
        shells.clear_instance()
    (shown,) = got.outputs
    assert shown.data["image/png"].startswith(b"\x89PNG")
    assert shown.metadata["image/png"]["width"] == 900


def test_plots_with_the_same_room_for_have_the_same_scale():
    traces = {"a": BASE, "a name of some length, and of two lines": LARGE}
    alone, both = breakdown({"a": BASE}, room_for=traces), breakdown(traces)
    assert scale(alone) == pytest.approx(scale(both))
    assert scale(breakdown({"a": BASE})) != pytest.approx(scale(both))


def scale(figure: Figure) -> float:
    """Dots a byte."""
    axes = figure.axes[0]
    (low, _), (high, _) = axes.transData.transform([(0, 0), (MIB, 0)])
    return (high - low) / MIB


@pytest.mark.parametrize("draw", [timeline, breakdown])
def test_a_cropped_figure_is_a_part_of_the_whole(draw):
    # Notebooks crop while drawing; anything placed in pixels would not move along.
    figure = draw(BASE)
    height = round(figure.bbox.height)
    inner = Bbox([[0.5, 0.5], [8.5, (height - 20) / 100]])
    whole, part = image(figure), image(figure, bbox_inches=inner)
    assert np.array_equal(part, whole[20 : height - 50, 50:850])


@pytest.mark.parametrize("draw", [timeline, breakdown])
def test_a_users_style_has_no_effect(tmp_path, draw):
    save(draw(BASE), tmp_path / "plain.png")
    with matplotlib.style.context(["dark_background", {"savefig.bbox": "tight", "font.size": 30}]):
        save(draw(BASE), tmp_path / "styled.png")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "styled.png").read_bytes()


def test_drawing_and_saving_do_not_change_the_users_settings(tmp_path):
    before = dict(matplotlib.rcParams)
    save(timeline(BASE), tmp_path / "step.svg")
    save(breakdown(BASE), tmp_path / "step.png")
    assert dict(matplotlib.rcParams) == before


def test_drawing_and_saving_never_import_pyplot(tmp_path):
    source = f"""
import sys
from memlab.plot import save, timeline
from memlab.trace import Event, Trace
trace = Trace((Event(1, 0, "inputs", "", "", "forward", "float32", ()),))
save(timeline(trace), {str(tmp_path / "step.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", source], check=True)


def test_importing_memlab_imports_no_matplotlib():
    program = "import sys, memlab; assert 'matplotlib' not in sys.modules; memlab.plot.blocks"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "memlab.plot")
    with pytest.raises(ModuleNotFoundError, match="not installed; run pip install matplotlib"):
        importlib.import_module("memlab.plot")
