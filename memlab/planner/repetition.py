"""Extrapolate the trace of a deep model from the traces of two shallow ones.

Saves    time: 32 blocks take eight times as long as 4; extrapolation takes a second.
Costs    two shallow runs. It only works if all blocks are treated alike.

Equal blocks do equal things. So the trace of a model with one block more has a few additional
sections: the new block's weights when the model is built, and its part of forward, backward and the
optimizer step.

    fewer   h AAA  f BBB  t          h, f, t once;  A and B for each block
    more    h AAAA f BBBB t

`insertions` finds these sections. Repeating them gives the deep model's events, but each free must
still name the right storage. One of three rules gives the block copy that the storage belongs to.
The first or last copy may have a rule of its own, because its neighbor is not a copy:

    in step     copy i frees a storage of copy i + c         a block's own temporaries
    mirrored    copy i frees a storage of copy n - i + c     backward frees forward's activations
    fixed       all copies free storages of one copy, counted from the first or from the last

Each rule is inferred from both traces. If an event follows none, `NotRepeating` is raised. It is
also raised if the result would free a storage twice, or would leave more storages alive than the
shallow runs do. Otherwise the result is exact, including the order of events, which determines the
allocator's fragmentation.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memlab.allocator import simulate
from memlab.internals.cycles import no_cycle_collection
from memlab.trace import DeviceMemory, Event, Trace

Numbers = NDArray[np.int64]

_NONE = -1  # marks an event without a storage or without a block
_MARK = 0  # the token at the start of the measured step
_MAX_EDGE_COPIES = 2  # copies at both ends together that may have rules of their own
_BLOCK = re.compile(r"(?<=\.)\d+(?=\.|$)")


# Segments of √L and ZeRO's flat buckets in stages 0 to 2 change with the depth
# (test_segments_that_change_with_the_depth_are_refused).
class NotRepeating(ValueError):  # noqa: N818 - describes the traces
    """The two traces differ by more than copies of the same sections."""


def extrapolate(
    fewer: Trace, more: Trace, blocks_more: int, blocks: int, *, unit: int = 1
) -> Trace:
    """Return the trace of a model with `blocks` blocks.

    `more` has `blocks_more` equal blocks, and `fewer` has `unit` blocks less. Storages get new
    numbers. Raises NotRepeating if the traces establish no rule, and ValueError if whole units do
    not add up to `blocks`.
    """
    added, rest = divmod(blocks - blocks_more, unit)
    if rest or added < 0:
        raise ValueError(
            f"got {blocks} blocks; these traces give {blocks_more} blocks plus a multiple of {unit}"
        )
    if (fewer.device, fewer.dry, fewer.notes) != (more.device, more.dry, more.notes):
        raise NotRepeating("the two traces have different devices or notes")
    grown = _first_growth(fewer, more)
    # The loader's buffer grows with the depth, but does not repeat.
    fewer = _with_size(fewer, grown, 0)
    try:
        made = _extrapolate(fewer, more, added + 1, unit)
    except NotRepeating:
        # Two complete runs differ as well, in the order of simultaneous frees
        # (test_sorting_frees_by_age_does_not_change_the_allocators_blocks).
        made = _extrapolate(sort_frees_by_age(fewer), sort_frees_by_age(more), added + 1, unit)
    return _simulated(_with_size(made, grown, added), more)


class _Growth(NamedTuple):
    """A buffer allocated and freed at once, in the size of the whole model."""

    position: int  # of its allocation in the history, before all blocks
    bytes: int  # in the longer trace
    growth: int  # bytes per added unit
    itemsize: int  # bytes per element


def _first_growth(fewer: Trace, more: Trace) -> _Growth | None:
    """Return such a buffer if it is the first difference of the histories: transformers' loader
    allocates the bytes of all weights once, so that the allocator has them."""
    pairs = zip(fewer.history, more.history, strict=False)
    for position, (short, long) in enumerate(pairs):
        if short[2:7] != long[2:7]:
            return None
        if short.bytes == long.bytes:
            continue
        freed = [trace.history[position + 1 : position + 2] for trace in (fewer, more)]
        sizes = [event.bytes for events in freed for event in events]
        if sizes != [-short.bytes, -long.bytes] or len(long.shape) != 1:
            return None
        itemsize = long.bytes // long.shape[0]
        return _Growth(position, long.bytes, long.bytes - short.bytes, itemsize)
    return None


def _with_size(trace: Trace, grown: _Growth | None, added: int) -> Trace:
    """Give the buffer its size in the longer trace plus the added units' size."""
    if grown is None:
        return trace
    size, history = grown.bytes + added * grown.growth, list(trace.history)
    for position, signed in ((grown.position, size), (grown.position + 1, -size)):
        shape = (size // grown.itemsize,)
        history[position] = history[position]._replace(bytes=signed, shape=shape)
    return replace(trace, history=tuple(history))


def sort_frees_by_age(trace: Trace) -> Trace:
    """Sort consecutive frees by the age of their storages.

    Autocast frees its casts in the order of a hash table of addresses, which differs from run to
    run. The order of such frees makes no difference to the allocator's blocks afterwards.
    """
    history, events = (tuple(_frees_by_age(part)) for part in (trace.history, trace.events))
    return replace(trace, history=history, events=events)


def _frees_by_age(events: Iterable[Event]) -> Iterable[Event]:
    held: dict[int, int] = {}
    born: dict[int, int] = {}
    frees: list[tuple[int, list[Event]]] = []  # birth position, then the free and its rounding
    for position, event in enumerate(events):
        size, storage, category, *_, phase = event[:6]
        if frees and category == "rounding":
            frees[-1][1].append(event)
            continue
        held[storage] = left = held.get(storage, 0) + size
        birth = born.setdefault(storage, position)
        is_free = storage > 0 and left == 0
        if frees and not (is_free and phase == frees[0][1][0].phase):
            yield from _sorted(frees)
            frees = []
        if is_free:
            frees.append((birth, [event]))
        else:
            yield event
    yield from _sorted(frees)


def _sorted(frees: list[tuple[int, list[Event]]]) -> Iterable[Event]:
    return (event for _, events in sorted(frees) for event in events)


def _extrapolate(fewer: Trace, more: Trace, added: int, unit: int) -> Trace:
    tokens = _Tokens()
    short, long = tokens.read(fewer), tokens.read(more)
    repeats = _Repeats(insertions(short.tokens, long.tokens), long.tokens)
    made = _extrapolated(short, long, repeats, added, unit)
    _check(made, short, long, repeats, added)
    return _trace(more, made)


def _extrapolated(
    short: "_Sequence", long: "_Sequence", repeats: "_Repeats", added: int, unit: int
) -> "_Sequence":
    layout = repeats.layout(added)
    few, more = repeats.layout(0).places(short.births), repeats.layout(1).places(long.births)
    births = layout.positions(repeats.extrapolated(few, more, added))
    has_block, block = repeats.extrapolated(
        _block_places(short.blocks), _block_places(long.blocks), added, unit
    )
    blocks = np.where(has_block, block, _NONE)
    sources = repeats.layout(1).first_positions[layout.templates()]
    events = _events(long, sources, births, blocks)
    return _Sequence(long.tokens[sources], births, blocks, long.bytes[sources], events)


def _block_places(blocks: Numbers) -> Numbers:
    """Encode whether each event has a block, and which one, in the form of places."""
    return np.stack((blocks != _NONE, blocks.clip(min=0)))


# ------------------------------------------------------------------ events as tokens


class _Sequence(NamedTuple):
    """All events of a process, with a mark where the measured step begins."""

    tokens: Numbers  # equal for events that differ only in storage and block
    births: Numbers  # the position at which the event's storage was created
    blocks: Numbers
    bytes: Numbers
    events: Sequence[Any]  # Event; None is the mark


class _Tokens:
    """Numbers equal events equally in all traces."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {None: _MARK}
        self._modules: dict[str, tuple[str, int]] = {}

    def read(self, trace: Trace) -> _Sequence:
        events = [*trace.history, None, *trace.events]
        tokens, births, blocks = [], [], []
        born: dict[int, int] = {}
        for position, event in enumerate(events):
            if event is None:
                tokens.append(_MARK)
                births.append(_NONE)
                blocks.append(_NONE)
                continue
            size, storage, category, operator, module, *others = event
            module, block = self._split(module)
            special = min(storage, 1)  # 0 and below: no storage, only reported by the device
            token = (size, special, category, operator, module, *others)
            tokens.append(self._numbers.setdefault(token, len(self._numbers)))
            births.append(_NONE if storage <= 0 else born.setdefault(storage, position))
            blocks.append(block)
        sizes = [event.bytes if event else 0 for event in events]
        return _Sequence(
            _numbers(tokens), _numbers(births), _numbers(blocks), _numbers(sizes), events
        )

    def _split(self, module: str) -> tuple[str, int]:
        """Return a module's name with its block's number replaced by *, and the number."""
        if module not in self._modules:
            found = _BLOCK.search(module)
            block = int(found[0]) if found else _NONE
            self._modules[module] = _BLOCK.sub("*", module, count=1), block
        return self._modules[module]


def _numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, dtype=np.int64)


# ------------------------------------------------------------------ finding inserted copies


class Insertion(NamedTuple):
    """A section that the longer sequence repeats once more, after its last copy in the shorter."""

    position: int  # in the shorter sequence
    length: int


def insertions(short: Numbers, long: Numbers) -> list[Insertion]:
    """Find the sections that turn `short` into `long`, each a repetition of the one before it."""
    found: list[Insertion] = []
    position = shift = 0
    while True:
        position += _common(short[position:], long[position + shift :])
        if position == len(short) and position + shift == len(long):
            return found
        floor = found[-1].position + shift if found else 0
        length = _inserted(short, long, position, shift, floor)
        found.append(Insertion(position, length))
        shift += length


def _inserted(short: Numbers, long: Numbers, position: int, shift: int, floor: int) -> int:
    """Return the length of a repetition after which the sequences agree the longest."""
    here = position + shift
    longest = min(len(long) - len(short) - shift, here - floor)
    lengths = np.arange(1, longest + 1)
    lengths = lengths[long[here - lengths] == long[here]] if here < len(long) else lengths[:0]
    lengths = lengths[long[here + lengths - 1] == long[here - 1]]
    if position < len(short):
        behind = here + lengths
        lengths = lengths[
            (behind < len(long)) & (long[behind.clip(max=len(long) - 1)] == short[position])
        ]
    equal = [
        (_common_with_end(short[position:], long[here + length :]), -length)
        for length in lengths.tolist()
        if np.array_equal(long[here - length : here], long[here : here + length])
    ]
    if not equal:
        raise NotRepeating(f"event {position} of the shorter trace differs without a repetition")
    return -max(equal)[1]


def _common_with_end(one: Numbers, other: Numbers) -> int:
    """Return the length of the common beginning, plus one if the sequences are equal."""
    common = _common(one, other)
    return common + (common == len(one) == len(other))


def _common(one: Numbers, other: Numbers) -> int:
    """Return the length of the common beginning."""
    length = min(len(one), len(other))
    done = 0
    while done < length:
        until = min(length, 2 * done + 64)
        different = one[done:until] != other[done:until]
        if different.any():
            return done + int(different.argmax())
        done = until
    return length


# ------------------------------------------------------------------ sections and their copies


class _Layout:
    """A sequence cut into sections: single parts, and groups of copies between them.

    A place in it is a template (an event of a section) and a copy.
    """

    def __init__(self, lengths: Numbers, copies: Numbers) -> None:
        self.lengths, self.copies = lengths, copies  # the length of one copy
        self.starts = np.concatenate(([0], np.cumsum(lengths * copies)))
        self.first_templates = np.concatenate(([0], np.cumsum(lengths)))
        section = np.repeat(np.arange(len(lengths)), lengths)  # per template
        offset = np.arange(len(section)) - self.first_templates[section]
        self.first_positions = self.starts[section] + offset  # per template
        self._strides, self._copies = lengths[section], copies[section]

    def places(self, positions: Numbers) -> Numbers:
        """Return template and copy of each position, shape (2, positions)."""
        section = np.searchsorted(self.starts[:-1], positions, side="right") - 1
        within = positions - self.starts[section]
        copy, offset = np.divmod(within, self.lengths[section].clip(min=1))
        place = np.stack((self.first_templates[section] + offset, copy))
        return np.where(positions == _NONE, _NOWHERE, place)

    def positions(self, places: Numbers) -> Numbers:
        """The inverse of `places`."""
        template, copy = places
        exists = template != _NONE
        if np.any(exists & ((copy < 0) | (copy >= self._copies[template]))):
            raise NotRepeating("an event would belong to a block that does not exist")
        found = self.first_positions[template] + copy * self._strides[template]
        return np.where(exists, found, _NONE)

    def templates(self) -> Numbers:
        """Return the template at each position."""
        return self.places(np.arange(self.starts[-1]))[0]

    def cut(self, places: Numbers) -> list[Numbers]:
        """Split places by section, each with shape (2, copies, length)."""
        shapes = zip(self.copies.tolist(), self.lengths.tolist(), strict=True)
        parts = np.split(places, self.starts[1:-1], axis=1)
        return [part.reshape(2, *shape) for part, shape in zip(parts, shapes, strict=True)]


_NOWHERE = np.array([[_NONE], [0]])


class _Repeats:
    """The sections of two traces; the longer one has one more copy of each group."""

    def __init__(self, found: Sequence[Insertion], long: Numbers) -> None:
        lengths, copies = [], []
        end = shift = 0
        for position, length in found:
            start = last = position + shift
            while start - length >= end and np.array_equal(
                long[start - length : start], long[last : last + length]
            ):
                start -= length
            lengths += [start - end, length]
            copies += [1, (last - start) // length]
            shift += length
            end = position + shift
        self._lengths = _numbers([*lengths, len(long) - end])
        self._copies = _numbers([*copies, 1])
        self._grows = _numbers([*[0, 1] * len(found), 0])

    def layout(self, added: int) -> _Layout:
        """Return the layout with `added` more copies of each group than the shorter trace has."""
        return _Layout(self._lengths, self._copies + added * self._grows)

    def extrapolated(self, short: Numbers, long: Numbers, added: int, step: int = 1) -> Numbers:
        """Extrapolate the places at each position from the places in the two traces."""
        parts = zip(self.layout(0).cut(short), self.layout(1).cut(long), strict=True)
        wanted = [_extended(few, more, added, step) for few, more in parts]
        return np.concatenate([part.reshape(2, -1) for part in wanted], axis=1)


# ------------------------------------------------------------------ rules


def _extended(few: Numbers, more: Numbers, added: int, step: int) -> Numbers:
    """Return the places of a section's events with `added` more copies than in `few`.

    The shape is (2, copies, length). An event's rule is the one that needs the fewest copies with
    rules of their own at the edges. It is an error if two such rules disagree.
    """
    copies, length = few.shape[1:]
    if copies == more.shape[1]:
        return _by_rule(few, more, copies, 0, added, step)[1]
    extended = np.zeros((2, copies + added, length), dtype=np.int64)
    unmatched = np.arange(length)
    for edges in range(min(_MAX_EDGE_COPIES, copies - 1) + 1):
        fitting = np.zeros(len(unmatched), dtype=bool)
        for head in range(edges + 1):
            parts = few[:, :, unmatched], more[:, :, unmatched]
            fits, made = _by_rule(*parts, head, edges - head, added, step)
            known = extended[:, :, unmatched]
            if np.any(fits & fitting & (made != known).any(axis=(0, 1))):
                raise NotRepeating("two rules fit an event but give different storages")
            extended[:, :, unmatched] = np.where(fits, made, known)
            fitting |= fits
        unmatched = unmatched[~fitting]
        if not len(unmatched):
            return extended
    raise NotRepeating(f"{len(unmatched)} events of a block follow no rule")


def _by_rule(
    few: Numbers, more: Numbers, head: int, tail: int, added: int, step: int
) -> tuple[Numbers, Numbers]:
    """Return the events that fit one rule, except for copies at the edges, and the rule's places.

    In the middle, copy i of a trace with `a` copies added belongs to copy c + slope·i + growth·a
    of one template. The slope is -step, 0 or step, and the growth 0 or step.
    """
    ends = [
        (few[:, :head], more[:, :head]),
        (few[:, few.shape[1] - tail :], more[:, more.shape[1] - tail :]),
    ]
    fits = np.ones(few.shape[2], dtype=bool)
    made = []
    for one, other in ends:
        growth = other[1] - one[1]
        fits &= ((one[0] == other[0]) & ((growth == 0) | (growth == step))).all(axis=0)
        made.append(np.stack((one[0], one[1] + added * growth)))
    middle = few[:, head : few.shape[1] - tail], more[:, head : more.shape[1] - tail]
    if middle[0].shape[1]:
        good, between = _affine(*middle, added, step)
        fits &= good
        made.insert(1, between)
    if not fits.all() and few.shape[1] == more.shape[1]:
        raise NotRepeating(f"{(~fits).sum()} events outside the blocks follow no rule")
    return fits, np.concatenate(made, axis=1)


def _affine(few: Numbers, more: Numbers, added: int, step: int) -> tuple[Numbers, Numbers]:
    """Return the events of equal copies that fit an affine rule, and the rule's places."""
    template, first = more[0, 0], few[1, 0]
    slope, growth = more[1, 1] - more[1, 0], more[1, 0] - first

    def rule(added: int) -> Numbers:
        copies = np.arange(few.shape[1] + added)[:, None]
        copy = first + growth * added + slope * copies
        return np.stack((np.broadcast_to(template, copy.shape), copy))

    fits = (rule(0) == few).all(axis=(0, 1)) & (rule(1) == more).all(axis=(0, 1))
    fits &= ((slope == 0) | (abs(slope) == step)) & ((growth == 0) | (growth == step))
    return fits, rule(added)


# ------------------------------------------------------------------ checking the result


def _check(
    made: _Sequence, short: _Sequence, long: _Sequence, repeats: _Repeats, added: int
) -> None:
    """Check that each event leaves its storage as many bytes as in the shallow traces.

    A free leaves none, so no storage is freed twice, and each block leaves as much alive.
    """
    positions, births = np.arange(len(made.births)), made.births[made.births != _NONE]
    if np.any(made.births > positions) or np.any(made.births[births] != births):
        raise NotRepeating("an event would belong to a storage that does not exist yet")
    if np.any(made.blocks[births] != made.blocks[made.births != _NONE]):
        raise NotRepeating("an event and its storage would belong to different blocks")
    few, more, many = (repeats.layout(count).templates() for count in (0, 1, added))
    templates, levels = np.concatenate((few, more)), np.concatenate((_levels(short), _levels(long)))
    low, high = (np.full(templates.max() + 1, end) for end in (levels.max(), levels.min()))
    np.minimum.at(low, templates, levels)
    np.maximum.at(high, templates, levels)
    made_levels = _levels(made)
    if np.any((made_levels < low[many]) | (made_levels > high[many])):
        raise NotRepeating("a storage would have other bytes than in the shallow traces")


def _levels(sequence: _Sequence) -> Numbers:
    """Return the bytes that each event leaves in its storage."""
    births, sizes = sequence.births, sequence.bytes
    in_step = np.arange(len(births)) > np.flatnonzero(sequence.tokens == _MARK)
    key = 2 * births + in_step  # the step repeats what its history left alive
    order = np.argsort(key, kind="stable")
    key, sizes = key[order], sizes[order]
    first = np.concatenate(([True], key[1:] != key[:-1]))
    running = np.cumsum(sizes)
    before = (running - sizes)[first]  # per storage
    levels = np.empty_like(sizes)
    levels[order] = np.where(key < 0, 0, running - before[np.cumsum(first) - 1])
    return levels


# ------------------------------------------------------------------ the result


def _trace(more: Trace, made: _Sequence) -> Trace:
    with no_cycle_collection():
        mark = made.events.index(None)
        events, history = tuple(made.events[mark + 1 :]), tuple(made.events[:mark])
        return replace(more, events=events, history=history, memory=DeviceMemory())


def _simulated(trace: Trace, more: Trace) -> Trace:
    """Add the reserved memory, if the shallow traces have it."""
    if more.reserved_bytes is None:
        return trace
    with no_cycle_collection():
        blocks = simulate(trace)
    memory = DeviceMemory(blocks.allocated_bytes, blocks.reserved_bytes)
    if (most := more.memory.reserved_most_bytes) is not None:
        # Largest workspaces are freed at once, so further blocks add nothing to them.
        memory = replace(
            memory, reserved_most_bytes=blocks.reserved_bytes + most - more.reserved_bytes
        )
    return replace(trace, memory=memory)


def _events(long: _Sequence, sources: Numbers, births: Numbers, blocks: Numbers) -> list[Any]:
    """Build the events from those at the positions `sources`, with storages created at `births` and
    modules of the given blocks."""
    known = [event or _NO_EVENT for event in long.events]
    columns = [_objects(column)[sources].tolist() for column in zip(*known, strict=True)]
    numbers = np.cumsum(births == np.arange(len(births)))[births]
    own = _numbers([event.storage for event in known])[sources]
    columns[_STORAGE] = np.where(births == _NONE, own, numbers).tolist()
    columns[_MODULE] = _modules([event.module for event in known], sources, blocks)
    events: list[Event | None] = list(
        map(partial(tuple.__new__, Event), zip(*columns, strict=True))
    )
    [mark] = np.flatnonzero(long.tokens[sources] == _MARK)
    events[mark] = None
    return events


def _modules(names: Sequence[str], sources: Numbers, blocks: Numbers) -> list[str]:
    """Return the module names at the positions `sources` with new block numbers."""
    distinct = {name: number for number, name in enumerate(dict.fromkeys(names))}
    table = [
        [name, *(_BLOCK.sub(str(block), name, count=1) for block in range(blocks.max() + 1))]
        for name in distinct
    ]
    name_index = _numbers([distinct[name] for name in names])
    return np.array(table, dtype=object)[name_index[sources], blocks + 1].tolist()


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """Build a 1-D object array, even if the values are sequences."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


_NO_EVENT = Event(0, 0, "", "", "", "", "", ())
_STORAGE, _MODULE = Event._fields.index("storage"), Event._fields.index("module")
