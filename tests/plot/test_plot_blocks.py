"""Plots of the allocator show every reserved byte once, and every peak at its height."""

import itertools
from collections import Counter

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
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.transforms import Bbox
from quick import quick

from memlab import plot
from memlab.allocator import Blocks, Segment, SegmentBlock, simulate
from memlab.plot.addresses import BAR, ROWS, bytes_by_use, lay_out
from memlab.plot.fragmentation import (
    highest_bytes,
    levels,
    limit_bytes,
    marks,
    moment_of,
    run_table,
    segments_table,
)
from memlab.plot.page import COLOURS, GAP, PALE, SWATCH, save
from memlab.trace import CATEGORIES, Event, Trace
from memlab.units import format_bytes

KIB, MIB, GIB = 2**10, 2**20, 2**30


# ------------------------------------------------------------------ runs to draw


def fragmented() -> Trace:
    """Every second activation is freed; then the gradients do not fit into the gaps."""
    run = Recorder()
    for _ in range(4):
        run.allocate(3 * MIB, "parameters", "before")
    run.allocate(1000, "inputs", "before")
    activations = [run.allocate(4 * MIB, "activations", "forward") for _ in range(8)]
    for activation in activations[::2]:
        run.free(activation, "backward")
    run.allocate(12 * MIB, "gradients", "backward")
    run.allocate(7 * MIB + 300, "gradients", "backward")
    for activation in activations[1::2]:
        run.free(activation, "optimizer")
    return run.trace()


def variable_lengths(steps: int) -> Trace:
    """Sequences of another length in each step, so that freed blocks never fit."""
    run = Recorder()
    for _ in range(12):
        run.allocate(7 * MIB, "parameters", "before")
    for step in range(steps):
        tokens = 300 + 677 * step % 1500
        activations = []
        for _ in range(8):
            scratch = run.allocate(30_000 * tokens, "forward_temporaries", "forward")
            activations += [run.allocate(6144 * tokens, "activations", "forward") for _ in "qkv"]
            activations.append(run.allocate(700 * tokens, "activations", "forward"))
            run.free(scratch, "forward")
        gradients = [run.allocate(7 * MIB, "gradients", "backward") for _ in range(12)]
        for activation in reversed(activations):
            run.free(activation, "backward")
        for gradient in gradients:
            run.free(gradient, "optimizer")
    return run.trace()


def many_segments(count: int) -> Trace:
    run = Recorder()
    for index in range(2 * count):  # two blocks fill a small segment
        run.allocate(MIB - index % 3 * 512, "activations", "forward")
    run.allocate(GIB, "gradients", "backward")
    return run.trace()


EVERY_CATEGORY = of(
    *[(1023 * MIB + 512, category, "forward") for category in CATEGORIES if category != "rounding"]
)
SAMPLES = {
    "fragmented": simulate(fragmented()),
    "out of memory": simulate(fragmented(), capacity_bytes=56 * MIB),
    "out of memory at the first event": simulate(fragmented(), capacity_bytes=MIB),
    "a limit far above": simulate(fragmented(), capacity_bytes=24 * GIB),
    "a limit near": simulate(fragmented(), capacity_bytes=100 * MIB),
    "one byte": simulate(of((1, "inputs", "before"))),
    "every category": simulate(EVERY_CATEGORY),
    "every category, out of memory": simulate(EVERY_CATEGORY, capacity_bytes=10 * GIB),
    "a request far too large": simulate(
        of((MIB, "inputs", "forward"), (900 * GIB, "activations", "forward")), capacity_bytes=GIB
    ),
    "variable lengths": simulate(variable_lengths(20)),
    "variable lengths, expandable": simulate(variable_lengths(20), expandable_segments=True),
    "variable lengths, out of memory": simulate(variable_lengths(20), capacity_bytes=500 * MIB),
    "many segments": simulate(many_segments(2000)),
}


@pytest.fixture(params=quick(list(SAMPLES)[::3], SAMPLES))
def sample(request) -> Blocks:
    return SAMPLES[request.param]


# ------------------------------------------------------------------ reading a plot


def drawn_levels(figure: Figure) -> dict[str, np.ndarray]:
    steps = [patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch)]
    shown = {patch.get_label(): patch.get_data().values for patch in steps}
    return {name: shown[name] for name in ("reserved", "allocated", "largest free block")}


def drawn_marks(figure: Figure) -> dict[str, tuple[float, float]]:
    """Return words and the (moment, bytes) of each arrow's tip."""
    lines = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    return {line.get_label(): tuple(line.get_xydata()[0]) for line in lines}


def drawn_boxes(figure: Figure) -> tuple[list[Bbox], list[str]]:
    """Return the boxes of the parts of segments, in inches, and their colours."""
    found = [artist for artist in figure.artists if isinstance(artist, PolyCollection)]
    parts = found[0]  # the rest is in the legend
    boxes = [Bbox([path.vertices.min(0), path.vertices.max(0)]) for path in parts.get_paths()]
    return boxes, [to_hex(colour) for colour in parts.get_facecolors()]


# ------------------------------------------------------------------ the run


def test_a_short_run_is_drawn_moment_by_moment():
    run = SAMPLES["fragmented"]
    shown = drawn_levels(plot.blocks(run))
    assert shown["reserved"].tolist() == [0, *run.reserved]
    assert shown["allocated"].tolist() == [0, *run.allocated]
    assert shown["largest free block"].tolist() == [0, *run.largest_free]


def test_the_moment_at_which_memory_ran_out_is_drawn_last():
    run = SAMPLES["variable lengths, out of memory"]
    refused = run.out_of_memory
    drawn = levels(run, columns=10**6)
    assert drawn.edges[-1] == len(run.reserved) + 2  # the start, each event, and the refusal
    assert drawn.reserved[-1] == refused.reserved_bytes
    assert drawn.allocated[-1] == refused.allocated_bytes
    assert drawn.largest_free[-1] == refused.free_block_bytes[0]


def test_the_drawn_peaks_are_the_peaks(sample):
    shown = drawn_levels(plot.blocks(sample))
    assert shown["reserved"].max() == sample.reserved_bytes
    assert shown["allocated"].max() == sample.allocated_bytes


@pytest.mark.parametrize("spike_at", [0, 777, 12_345, 19_998])
def test_a_peak_of_one_event_among_20_000_is_drawn_in_full(spike_at):
    run = Recorder()
    for index in range(0, 20_000, 2):
        size = GIB if index == spike_at // 2 * 2 else 1000
        run.free(run.allocate(size, "forward_temporaries", "forward"), "forward")
    drawn = levels(simulate(run.trace()), columns=100)
    assert len(drawn.allocated) == 100
    assert drawn.allocated.max() == GIB


def test_a_column_of_a_long_run_is_the_maximum_of_its_events():
    run = SAMPLES["variable lengths"]
    drawn = levels(run, columns=37)
    assert (drawn.edges[0], drawn.edges[-1]) == (0, len(run.reserved) + 1)
    for level, shown in (
        (run.reserved, drawn.reserved),
        (run.allocated, drawn.allocated),
        (run.largest_free, drawn.largest_free),
    ):
        moments = [0, *level]
        wanted = [max(moments[p:q]) for p, q in itertools.pairwise(drawn.edges)]
        assert shown.tolist() == wanted


def test_after_a_history_the_plot_begins_with_the_step():
    run = Recorder()
    kept = [run.allocate(size * MIB, "parameters", "before") for size in (30, 2)]
    run.free(run.allocate(4 * MIB, "activations", "forward"), "forward")
    trace = run.trace()
    earlier = tuple(event._replace(phase="forward") for event in trace.events[: len(kept)])
    after_it = simulate(Trace(trace.events, history=earlier))
    [axes, *_] = plot.blocks(after_it).axes
    assert axes.get_xlim()[0] == 2
    [reserved, _] = marks(after_it)
    assert (reserved.words, reserved.position) == ("reserved 50.00 MiB", 2)
    fresh = simulate(trace)
    [axes, *_] = plot.blocks(fresh).axes
    assert axes.get_xlim()[0] == 0


def test_phases_too_short_for_names_have_a_legend():
    phases = ("forward", "backward", "optimizer")
    events = [
        Event(MIB * sign, 3 * step + place, "activations", "", "", phase, "uint8", ())
        for step in range(9)
        for place, phase in enumerate(phases)
        for sign in (1, -1)
    ]
    found = texts(plot.blocks(simulate(events)))
    lefts = [found[phase][0].x0 for phase in phases]
    assert [len(found[phase]) for phase in phases] == [1, 1, 1]
    [axes, *_] = plot.blocks(simulate(events)).axes
    assert lefts == sorted(lefts)
    assert lefts[0] - axes.get_window_extent().x0 == pytest.approx(100 * (SWATCH + GAP), abs=2)


def test_the_peaks_are_marked_at_their_moment_and_height_with_their_bytes():
    # the twelfth allocation is the first that does not fit into a free block
    figure = plot.blocks(SAMPLES["fragmented"])
    run = SAMPLES["fragmented"]
    assert drawn_marks(figure) == {
        "reserved 82.00 MiB": (run.reserved.index(82 * MIB) + 1.5, 82 * MIB),
        f"allocated {format_bytes(run.allocated_bytes)}": (19.5, run.allocated_bytes),
    }


def test_a_refused_request_is_marked_at_the_height_it_needed():
    # 20 + 20 + 2 MiB are reserved, and 4 MiB need another segment of 20 MiB
    run = SAMPLES["out of memory"]
    assert drawn_marks(plot.blocks(run))["out of memory"] == (12 + 1.5, 62 * MIB)
    assert run_table(run, moment_of(run)).rows[-1].name == "requested"
    assert run_table(run, moment_of(run)).rows[-1].bytes == 4 * MIB


def test_marks_stay_inside_the_picture(sample):
    highest = highest_bytes(sample)
    assert all(height <= highest for _, height in drawn_marks(plot.blocks(sample)).values())
    assert highest >= sample.reserved_bytes


def test_a_run_with_only_a_refusal_extends_to_the_requested_bytes():
    run = SAMPLES["out of memory at the first event"]
    assert [mark.words for mark in marks(run)] == ["out of memory"]
    assert highest_bytes(run) == 20 * MIB


def test_a_limit_near_the_peak_is_a_line_at_its_height():
    run = SAMPLES["a limit near"]
    lines = plot.blocks(run).axes[0].lines
    assert [100 * MIB] * 2 in [list(line.get_ydata()) for line in lines]
    assert run_table(run, moment_of(run)).rows[-1].name == "limit"


def test_a_limit_far_above_the_peak_is_only_named():
    run = SAMPLES["a limit far above"]
    assert highest_bytes(run) == run.reserved_bytes
    assert len(plot.blocks(run).axes[0].lines) == 2  # the arrows on the two peaks
    last = run_table(run, moment_of(run)).rows[-1]
    assert (last.name, last.bytes) == ("limit, far above", 24 * GIB)


def test_the_limit_is_the_bytes_that_the_process_may_reserve():
    trace = of((MIB, "inputs", "forward"))
    occupied = simulate(trace, capacity_bytes=GIB, occupied_bytes=300 * MIB)
    fraction = simulate(trace, capacity_bytes=GIB, memory_fraction=0.5)
    assert limit_bytes(occupied) == 724 * MIB
    assert limit_bytes(fraction) == 512 * MIB
    assert limit_bytes(simulate(trace)) is None


# ------------------------------------------------------------------ legends


def test_the_legend_of_the_run_has_the_bytes_at_the_reserved_peak():
    run = SAMPLES["fragmented"]
    index = run.reserved.index(82 * MIB)
    table = run_table(run, moment_of(run))
    assert [(row.name, row.bytes) for row in table.rows] == [
        ("reserved", 82 * MIB),
        ("allocated", run.allocated[index]),
        ("largest free block", run.largest_free[index]),
    ]


def test_the_legend_of_the_segments_sums_to_the_reserved_bytes(sample):
    table = segments_table(moment_of(sample))
    assert sum(row.bytes for row in table.rows) == table.bytes == reserved_then(sample)


def reserved_then(run: Blocks) -> int:
    return run.reserved_bytes if run.fits else run.out_of_memory.reserved_bytes


def test_the_legend_has_bytes_by_category_plus_rounding_and_free(sample):
    refused = sample.out_of_memory
    position = refused.position if refused else sample.peak_position
    alive = Counter()
    for event in Trace(sample.events).alive(position):
        alive[event.category] += event.bytes
    allocated = refused.allocated_bytes if refused else sample.allocated[position - 1]
    alive["rounding"] = allocated - alive.total()
    alive["free"] = reserved_then(sample) - allocated
    assert bytes_by_use(moment_of(sample).segments) == {k: n for k, n in alive.items() if n}


def test_the_legend_counts_the_free_blocks():
    last = segments_table(moment_of(SAMPLES["fragmented"])).rows[-1]
    assert last.name == "free, in 7 blocks"
    only = segments_table(moment_of(SAMPLES["one byte"])).rows[-1]
    assert (only.name, only.bytes) == ("free, in 1 block", 2 * MIB - 512)


def test_the_legends_are_written_beside_the_plot():
    written = lines_of_text(plot.blocks(SAMPLES["one byte"]))
    for words in ("inputs 1 B", "rounding 511 B", "free, in 1 block 2.00 MiB"):
        assert any(line.endswith(words) for line in written), words


# ------------------------------------------------------------------ the segments


def test_a_run_that_fits_shows_the_segments_of_the_reserved_peak():
    run = SAMPLES["variable lengths"]
    assert moment_of(run).segments == run.at_peak
    assert moment_of(run).segments != run.at_end
    assert "segments at the reserved peak, in backward" in texts(plot.blocks(SAMPLES["fragmented"]))


def test_a_run_without_memory_shows_the_segments_of_that_moment():
    run = SAMPLES["out of memory"]
    assert moment_of(run).segments == run.at_end
    assert "segments when memory ran out, in forward" in texts(plot.blocks(run))


def test_the_drawn_lengths_are_the_bytes_to_one_scale(sample):
    parts = lay_out(moment_of(sample).segments).parts
    boxes, colours = drawn_boxes(plot.blocks(sample))
    widths = [box.width for box in boxes]
    scale = sum(widths) / max(1, sum(part.bytes for part in parts))
    assert widths == pytest.approx([scale * part.bytes for part in parts], abs=1e-9)
    assert colours == [COLOURS.get(part.what, PALE) for part in parts]
    assert all(box.height == pytest.approx(BAR) for box in boxes)


def test_only_free_blocks_are_striped():
    figure = plot.blocks(SAMPLES["fragmented"])
    boxes, colours = drawn_boxes(figure)
    free = [box for box, colour in zip(boxes, colours, strict=True) if colour == PALE]
    lines = next(a for a in figure.artists if isinstance(a, LineCollection))
    homes = [
        [index for index, box in enumerate(free) if box.padded(1e-9).contains(*stripe.mean(0))]
        for stripe in lines.get_segments()
    ]
    assert {index for [index] in homes} == set(range(7))


def test_adjacent_blocks_are_separated_by_a_line_if_both_are_wide_enough():
    figure = plot.blocks(SAMPLES["fragmented"])
    boxes, _ = drawn_boxes(figure)
    [_, seams, *_] = [a for a in figure.artists if isinstance(a, LineCollection)]
    # four parameters, a hole, an activation | five alternating | activation, gradient, hole; the
    # 212 B of rounding after the last gradient separate it from the hole
    assert len(seams.get_segments()) == 5 + 4 + 2
    for (x, bottom), (_, top) in seams.get_segments():
        assert any(np.allclose((box.x0, box.y0, box.y1), (x, bottom, top)) for box in boxes)


def segment(address: int, size: int, pool: str, stream: int = 0, cuts=()) -> Segment:
    """A segment with alternating free and allocated blocks between the cuts."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < size}), size]
    pieces = [
        SegmentBlock(
            address + p, q - p, 0 if index % 2 else q - p, "free" if index % 2 else "allocated"
        )
        for index, (p, q) in enumerate(itertools.pairwise(edges))
    ]
    return Segment(address, size, stream, pool, tuple(pieces))


SEGMENTS = st.lists(
    st.tuples(
        st.one_of(st.just(2 * MIB), st.integers(1, 2000).map(lambda n: n * 2 * MIB)),
        st.sampled_from(["small", "large"]),
        st.integers(0, 3),
        st.lists(st.integers(1, 4 * GIB).map(lambda n: n // 512 * 512), max_size=20),
    ),
    min_size=1,
    max_size=60,
).map(
    lambda found: [
        segment(index * 8 * GIB, size, pool, stream, cuts)
        for index, (size, pool, stream, cuts) in enumerate(found)
    ]
)


@given(SEGMENTS)
def test_every_byte_of_every_segment_is_laid_out_once_in_a_bounded_height(segments):
    layout = lay_out(segments)
    sums = Counter()
    rows: dict[int, list[tuple[int, int]]] = {}
    for part in layout.parts:
        sums[part.what] += part.bytes
        rows.setdefault(part.row, []).append((part.left, part.left + part.bytes))
    assert sums == bytes_by_use(segments)
    assert sorted(rows) == list(range(layout.rows))
    assert layout.rows <= ROWS
    for found in rows.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(found))
        assert found[-1][1] <= layout.row_bytes


@given(SEGMENTS)
def test_a_segment_that_fits_a_row_is_never_split(segments):
    layout = lay_out(segments)
    parts = iter(layout.parts)
    for segment_ in sorted(segments, key=lambda s: (s.pool, s.stream, s.address)):
        rows, left = set(), segment_.bytes
        while left:
            part = next(parts)
            rows.add(part.row)
            left -= part.bytes
        assert len(rows) == 1 or segment_.bytes > layout.row_bytes


def test_a_few_segments_have_a_row_as_long_as_the_longest():
    layout = lay_out([segment(0, 20 * MIB, "large"), segment(GIB, 16 * MIB, "large")])
    assert [(part.row, part.left, part.bytes) for part in layout.parts] == [
        (0, 0, 20 * MIB),
        (1, 0, 16 * MIB),
    ]


def test_a_long_segment_of_many_blocks_fills_whole_rows():
    layout = lay_out([segment(0, GIB, "large", cuts=range(0, GIB, 4 * MIB))])
    filled = Counter()
    for part in layout.parts:
        filled[part.row] += part.bytes
    assert list(filled.values())[:-1] == [layout.row_bytes] * (ROWS - 1)


def test_segments_in_a_row_have_gaps_and_their_blocks_do_not():
    segments = [segment(0, 64 * MIB, "large")] + [
        segment(GIB + n * GIB, 20 * MIB, "large", cuts=[8 * MIB]) for n in range(2)
    ]
    row = [part for part in lay_out(segments).parts if part.row == 1]
    gaps = [b.left - a.left - a.bytes for a, b in itertools.pairwise(row)]
    assert gaps[0] == gaps[2] == 0 < gaps[1] < 2 * MIB


def test_each_pool_begins_a_row_under_its_name():
    segments = [
        segment(0, 2 * MIB, "small", stream=7),
        segment(GIB, 20 * MIB, "large"),
        segment(2 * GIB, 2 * MIB, "small"),
        segment(3 * GIB, 10 * MIB, "large"),  # the small ones would fit beside it
    ]
    layout = lay_out(segments)
    assert layout.headings == {
        0: "large: 2 segments, 30.00 MiB",
        2: "small: 2 segments on 2 streams, 4.00 MiB",
    }
    assert [part.row for part in layout.parts] == [0, 1, 2, 2]


def test_wasted_bytes_are_at_the_end_of_a_block():
    piece = SegmentBlock(
        0, 2 * MIB, 2 * MIB - 512, "allocated", of((1, "inputs", "forward")).events[0]
    )
    layout = lay_out([Segment(0, 2 * MIB, 0, "large", (piece,))])
    assert [(part.what, part.left, part.bytes) for part in layout.parts] == [
        ("inputs", 0, 2 * MIB - 512),
        ("rounding", 2 * MIB - 512, 512),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [20, 200, 20_000])
def test_many_segments_fill_the_available_rows(count):
    layout = lay_out([segment(n * GIB, 20 * MIB, "large") for n in range(count)])
    assert ROWS - 4 <= layout.rows <= ROWS


def test_each_pool_has_one_heading():
    run = SAMPLES["many segments"]
    [small] = [words for words in texts(plot.blocks(run)) if words.startswith("small: ")]
    assert small == "small: 2,000 segments, 3.91 GiB"


# ------------------------------------------------------------------ legible and deterministic


def test_the_caption_is_the_runs_text(sample):
    written = " ".join(lines_of_text(plot.blocks(sample)))
    assert " ".join(str(sample).split()) in written


def test_no_texts_overlap(sample):
    check_that_no_texts_overlap(plot.blocks(sample, title="a long title " * 10))


def test_every_text_is_on_the_page(sample):
    check_that_every_text_is_on_the_page(plot.blocks(sample, title="a long title " * 10))


def test_no_text_overlaps_a_segment(sample):
    figure = plot.blocks(sample)
    boxes = [Bbox(box.get_points() * figure.dpi) for box in drawn_boxes(figure)[0]]
    for text, found in texts(figure).items():
        for box in found:
            assert box.count_overlaps(boxes) == 0, text


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_run_gives_the_same_bytes(tmp_path, kind):
    for name in "ab":
        save(plot.blocks(simulate(fragmented())), tmp_path / f"{name}.{kind}")
    assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_a_cropped_figure_is_a_part_of_the_whole():
    figure = plot.blocks(SAMPLES["fragmented"])
    height = round(figure.bbox.height)
    inner = Bbox([[0.5, 0.5], [8.5, (height - 20) / 100]])
    whole, part = image(figure), image(figure, bbox_inches=inner)
    assert np.array_equal(part, whole[20 : height - 50, 50:850])


@pytest.mark.parametrize("events", [(), ((0, "inputs", "forward"),)])
def test_a_run_of_nothing_is_an_error_with_a_remedy(events):
    with pytest.raises(ValueError, match=r"got a run without any allocation; .* simulate"):
        plot.blocks(simulate(of(*events)))
