"""Day 2: reading the meter."""

import dis
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.allocator import Allocator
from memlab.course.bill import plain
from memlab.course.exercises import Bill, Day, equal, require
from memlab.course.properties import differences, furthest, require_none_wrong, unchanged
from memlab.course.solutions import checked, solution
from memlab.metering import measure
from memlab.reference.caching_allocator import MIB, AllocatorBlock, allocate, free_block, sizes
from memlab.trace import Event, Trace
from memlab.units import format_bytes

# ------------------------------------------------------------------ 2.1: two sizes

Sizes = Callable[[int], tuple[int, int]]

# In this order, two mistakes rarely fail first at the same request.
_REQUESTS = (
    *(1, 512, 513, 1_300, MIB, MIB + 1, 3 * MIB),
    *(6_025 * MIB, 15 * MIB, 10 * MIB, 10 * MIB - 1, 10 * MIB + 1, 10 * MIB - 512),
)


def _check_sizes(answer: Sizes) -> str:
    drawn = random.Random(2).choices(range(1, 64 * MIB), k=200)
    for requested in (*_REQUESTS, *drawn):
        got, wanted = answer(requested), sizes(requested)
        require(
            isinstance(got, tuple) and [type(size) for size in got] == [int, int],
            f"sizes({requested:,}) gave {got!r}; wanted two integers, the bytes of the block and "
            f"of the segment.{' Is there a return?' if got is None else ''}",
        )
        require(
            got == wanted,
            f"sizes({requested:,}) gave a block of {got[0]:,} and a segment of {got[1]:,} bytes; "
            f"wanted {wanted[0]:,} and {wanted[1]:,}.",
        )
    return f"{len(_REQUESTS)} requests at the limits, {len(drawn)} in between"


# ------------------------------------------------------------------ 2.2 and 2.3: the pool

Pool = list[AllocatorBlock]
Allocate = Callable[[Pool, int], int | None]
FreeBlock = Callable[[Pool, int], Any]
FREE, USED = True, False


def _pool(*segments: Sequence[tuple[int, bool]]) -> Pool:
    """Return segments of (bytes, free) blocks at consecutive addresses. Segment numbers decrease,
    so that only addresses order the list."""
    pool: Pool = []
    address = 0
    for number, parts in enumerate(segments):
        for size, free in parts:
            pool.append(AllocatorBlock(len(segments) - number, address, size, free))
            address += size
    return pool


def _in_words(pool: Any) -> str:
    """Address, bytes and state: "[0: 512 allocated, 512: 1,024 free] [1,536: 512 free]"."""
    facts = _facts(pool)
    if facts is None:
        return "something other than a list of blocks"
    text, before = "", None
    for segment, address, size, free in facts:
        block = f"{address:,}: {size:,} {'free' if free else 'allocated'}"
        text += f", {block}" if segment == before else f"{']' if text else ''} [{block}"
        before = segment
    return f"{text}]".strip()


def _facts(pool: Any) -> list[tuple[int, int, int, bool]] | None:
    """Return the attributes of the blocks (the notebook's class), or None if one is missing."""
    try:
        return [(int(b.segment), int(b.address), int(b.bytes), bool(b.free)) for b in pool]
    except (AttributeError, TypeError, ValueError):
        return None


def _copy(pool: Pool) -> Pool:
    return [replace(block) for block in pool]


_SMALL = 2 * MIB  # bytes of a small segment
_ALLOCATE_CASES: dict[str, tuple[Pool, int]] = {
    "a free block of exactly this size": (
        _pool([(1024, USED), (1024, FREE), (_SMALL - 2048, USED)]),
        1024,
    ),
    "one free block of 2 MiB": (_pool([(_SMALL, FREE)]), 512),
    "no free block is large enough": (_pool([(512, FREE), (_SMALL - 512, USED)]), 1024),
    "1,024 bytes left": (_pool([(2048, FREE), (_SMALL - 2048, USED)]), 1024),
    "512 bytes left": (_pool([(1536, FREE), (_SMALL - 1536, USED)]), 1024),
    "three free blocks": (
        _pool([(4096, FREE), (512, USED), (2048, FREE), (512, USED), (8192, FREE)]),
        1024,
    ),
    "two free blocks of the same size": (_pool([(2048, FREE), (512, USED), (2048, FREE)]), 1024),
    "two segments": (_pool([(_SMALL, USED)], [(_SMALL, FREE)]), 2048),
    "a request of exactly 1 MiB": (_pool([(_SMALL, FREE)]), MIB),
    "20 MiB, all free": (_pool([(20 * MIB, FREE)]), 5 * MIB),
    "40 MiB, all free": (_pool([(40 * MIB, FREE)]), 30 * MIB),
    "large pool, half a MiB left": (
        _pool([(5 * MIB + MIB // 2, FREE), (14 * MIB + MIB // 2, USED)]),
        5 * MIB,
    ),
    "large pool, a free block of 1.5 MiB": (
        _pool([(MIB + MIB // 2, FREE), (18 * MIB + MIB // 2, USED)]),
        MIB + 512,
    ),
    "large pool, 1 MiB left": (_pool([(6 * MIB, FREE), (14 * MIB, USED)]), 5 * MIB),
    "large pool, 1 MiB and 512 bytes left": (
        _pool([(6 * MIB + 512, FREE), (14 * MIB - 512, USED)]),
        5 * MIB,
    ),
}


def _check_allocate(answer: Allocate) -> str:
    for name, (before, size) in _ALLOCATE_CASES.items():
        pool, wanted = _copy(before), _copy(before)
        wanted_address = allocate(wanted, size)
        got = answer(pool, size)
        require(
            _facts(pool) == _facts(wanted)
            and got == wanted_address
            and type(got) is type(wanted_address),
            f"allocate({_in_words(before)}, {size:,}), {name}, gave {_address(got)} and left "
            f"{_in_words(pool)} (address: bytes); wanted {_address(wanted_address)} and "
            f"{_in_words(wanted)}.",
        )
    return f"{len(_ALLOCATE_CASES)} cases by hand; {_against_cuda(answer, free_block)}"


def _address(got: Any) -> str:
    return f"{got:,}" if type(got) is int else repr(got)


_FREE_BLOCK_CASES: dict[str, tuple[Pool, int]] = {
    "between two allocated blocks": (_pool([(512, USED), (1024, USED), (2048, USED)]), 512),
    "between two free blocks": (
        _pool([(512, USED), (1024, FREE), (512, USED), (2048, FREE), (512, USED)]),
        1536,
    ),
    "below a free block": (_pool([(512, USED), (1024, USED), (2048, FREE), (512, USED)]), 512),
    "above a free block": (_pool([(512, USED), (1024, FREE), (2048, USED), (512, USED)]), 1536),
    "the first block, with a free one at the end": (
        _pool([(512, USED), (512, USED), (1024, FREE)]),
        0,
    ),
    "with a free block elsewhere": (
        _pool([(512, FREE), (1024, USED), (512, USED), (2048, USED)]),
        1536,
    ),
    "the last block of its segment": (_pool([(512, USED), (1536, USED)], [(2048, FREE)]), 512),
    "the first block of its segment": (_pool([(512, USED), (1536, FREE)], [(2048, USED)]), 2048),
}


def _check_free_block(answer: FreeBlock) -> str:
    for name, (before, address) in _FREE_BLOCK_CASES.items():
        pool, wanted = _copy(before), _copy(before)
        free_block(wanted, address)
        got = answer(pool, address)
        require(
            got is None, f"free_block gave {got!r}; wanted no result. Change the list in place."
        )
        require(
            _facts(pool) == _facts(wanted),
            f"free_block({_in_words(before)}, {address:,}), {name}, left {_in_words(pool)} "
            f"(address: bytes); wanted {_in_words(wanted)}."
            f"{' Your function assigns a new list to its argument.' if _rebinds(answer) else ''}",
        )
    return f"{len(_FREE_BLOCK_CASES)} cases by hand; {_against_cuda(allocate, answer)}"


def _rebinds(answer: FreeBlock) -> bool:
    """Whether a function assigns to its first parameter, which has no effect for the caller."""
    code: Any = getattr(answer, "__code__", None)
    stores = [s for s in dis.get_instructions(code) if "STORE" in s.opname] if code else []
    # Python 3.13 stores two names in one instruction.
    stored = {n for s in stores for n in (s.argval if isinstance(s.argval, tuple) else (s.argval,))}
    return bool(code) and not stored.isdisjoint(code.co_varnames[:1])


# ------------------------------------------------------------------ compared with CUDA's allocator

REQUESTS = 400


class _TwoPools:
    """The notebook's Cache with the answer."""

    def __init__(self, allocate: Allocate, free_block: FreeBlock) -> None:
        self.allocate, self.free_block = allocate, free_block
        self.pools: dict[bool, Pool] = {True: [], False: []}
        self.reserved_bytes = self.segments = 0

    def malloc(self, requested_bytes: int) -> int | None:
        size, segment_size = sizes(requested_bytes)
        pool = self.pools[size <= MIB]
        address = self.allocate(pool, size)
        if address is None:
            pool.append(AllocatorBlock(self.segments, self.reserved_bytes, segment_size, FREE))
            self.segments += 1
            self.reserved_bytes += segment_size
            address = self.allocate(pool, size)
        return address

    def free(self, address: int, requested_bytes: int) -> None:
        self.free_block(self.pools[sizes(requested_bytes)[0] <= MIB], address)

    @property
    def largest_free_bytes(self) -> int:
        blocks = (*self.pools[True], *self.pools[False])
        return max((block.bytes for block in blocks if block.free), default=0)


def _against_cuda(allocate: Allocate, free_block: FreeBlock) -> str:
    """Compare random requests: addresses, reserved bytes and the largest free block are equal."""
    cuda = Allocator(place=lambda size: cuda.reserved_bytes)  # one after another
    ours = _TwoPools(allocate, free_block)
    held: list[tuple[Any, int]] = []
    for number, requested in enumerate(_random_requests(), 1):
        if requested:
            block: Any = cuda.malloc(requested)
            held.append((block, requested))
            got = ours.malloc(requested)
            require(
                got == block.address,
                f"Compared with CUDA's allocator, call {number} (a request of {requested:,} bytes) "
                f"got address {_address(got)}; wanted {block.address:,}.",
            )
        else:
            block, requested = held.pop(number % len(held))
            ours.free(block.address, requested)
            cuda.free(block)
        case = f"Compared with CUDA's allocator, call {number}"
        equal(f"{case}: reserved", ours.reserved_bytes, cuda.reserved_bytes, "bytes")
        largest = cuda.largest_free_bytes()
        equal(f"{case}: the largest free block", ours.largest_free_bytes, largest, "bytes")
    return f"{number} calls match CUDA's allocator, {format_bytes(ours.reserved_bytes)} reserved"


def _random_requests() -> Iterator[int]:
    """Return the bytes to request, or 0 to free a block."""
    drawn, held = random.Random(0), 0
    for _ in range(REQUESTS):
        if held and drawn.random() < 0.45:
            held -= 1
            yield 0
        else:
            held += 1
            yield int(2 ** drawn.uniform(4, 24.5))


# ------------------------------------------------------------------ 2.4: the leak

Leaks = dict[str, int]
FindLeaks = Callable[[list[Trace]], Leaks]
leaks = solution("2.4")


EVER = 1_000  # epochs


class _Allocation(NamedTuple):
    """A tensor that some epochs allocate, and how many epochs later it is freed."""

    line: str
    bytes: int
    epochs: Sequence[int] = range(EVER)
    lives: int = EVER
    category: str = "activations"


def _traces(*allocations: _Allocation, epochs: int = 8) -> list[Trace]:
    """Return the trace of each epoch of a run."""
    allocations = (_Allocation("net.py:1 build", 4_000, (0,), category="parameters"), *allocations)
    births, traces = count(1), []
    held: dict[int, tuple[Event, int]] = {}  # by storage: the event, and the epoch that frees it
    for epoch in range(epochs):
        events = [event._replace(phase="before") for event, _ in held.values()]
        for line, size, when, lives, category in allocations:
            if epoch in when:
                birth, rest = next(births), ("aten.mul", "", "forward", "uint8", (), line)
                event = Event(size, birth, category, *rest)
                events.append(event)
                held[birth] = event, epoch + lives
        for storage in [storage for storage, (_, last) in held.items() if last <= epoch]:
            event, _ = held.pop(storage)
            events.append(event._replace(bytes=-event.bytes))
        traces.append(Trace(tuple(events)))
    return traces


_FORWARD = _Allocation("net.py:3 forward", 5_000, lives=0)
_TABLE = _Allocation("net.py:5 table", 700, range(3))
_NOTE = _Allocation("log.py:7 note", 50)
_WATCH = _Allocation("hook.py:2 watch", 3, category="optimizer_state")

_LEAK_CASES: dict[str, tuple[list[Trace], Leaks]] = {
    "a run that keeps two tensors of 50 bytes per epoch": (
        _traces(_NOTE, _NOTE, epochs=6),
        {"log.py:7 note": 100},
    ),
    "a run that keeps nothing": (_traces(_FORWARD), {}),
    "a run with new gradients in each epoch": (
        _traces(_Allocation("train.py:9 step", 300, lives=1, category="gradients")),
        {},
    ),
    "a run that makes Adam's state": (
        _traces(_FORWARD, _Allocation("train.py:10 step", 8_000, (0,), EVER, "optimizer_state")),
        {},
    ),
    "a run whose table is full after three epochs": (_traces(_FORWARD, _TABLE), {}),
    "a run with longer sequences in each epoch": (
        _traces(*(_FORWARD._replace(bytes=1_000 + 100 * n, epochs=(n,)) for n in range(8))),
        {},
    ),
    "a run that validates every second epoch": (
        _traces(_Allocation("valid.py:4 score", 64, (1, 3, 5)), epochs=6),
        {"valid.py:4 score": 32},
    ),
    "a run with two leaks and a table": (
        _traces(_FORWARD, _TABLE, _WATCH, _NOTE._replace(bytes=60), epochs=7),
        {"log.py:7 note": 60, "hook.py:2 watch": 3},
    ),
    "a run with a new line after the middle": (
        _traces(_Allocation("late.py:8 keep", 90, range(5, 8))),
        {"late.py:8 keep": 90},
    ),
    "a run that replaces a tensor by a longer one in each epoch": (
        _traces(*(_Allocation("cat.py:2 join", 1_000 + 100 * n, (n,), 1) for n in range(8))),
        {"cat.py:2 join": 100},
    ),
    "a run that frees as many bytes as it leaks": (
        _traces(_NOTE, *(_Allocation("data.py:6 load", 50, (0,), n) for n in range(9))),
        {"log.py:7 note": 50},
    ),
}


def _check_leaks(answer: FindLeaks) -> str:
    for name, (epochs, wanted) in _LEAK_CASES.items():
        passed = list(epochs)
        with unchanged(f"leaks of {name}", epochs=passed):
            got = answer(passed)
        equal(f"leaks of {name}", _as_integers(got) if isinstance(got, dict) else got, wanted)
    return f"{len(_LEAK_CASES)} runs, every line and byte correct"


def _as_integers(got: dict[Any, Any]) -> dict[Any, Any]:
    """Return 100.0 bytes as 100, because an answer may divide by /."""
    return {
        line: int(size) if isinstance(size, float) and size.is_integer() else size
        for line, size in got.items()
    }


# ------------------------------------------------------------------ 2.5: fix the leaks

Batch = tuple[Tensor, Tensor]
Notes = dict[str, Any]
TrainEpoch = Callable[
    [nn.Sequential, torch.optim.Optimizer, Sequence[Batch], Sequence[Batch], Notes], None
]
EPOCHS = 4
SCALARS_BYTES = 16  # that a batch may leave until its epoch's end: less than any tensor
FEW, MANY = 4, 7  # batches in an epoch, unlike the lesson's 2; one more is held out


def _new_training() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 256))
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def _new_notes() -> Notes:
    return {"losses": [], "scales": [], "soft": {}}


def _text(batches: int, seed: int) -> list[Batch]:
    """New batches in each epoch, as from a loader: the last one is shorter."""
    drawn = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (batches, 4, 17), generator=drawn)
    parts = [*text[:-1], text[-1, :1]]
    return [(part[:, :-1].clone(), part[:, 1:].clone()) for part in parts]


@dataclass(frozen=True)
class _EpochResults:
    """The state after a few epochs."""

    notes: Notes
    weights: list[Tensor]
    traces: list[Trace]
    hooks: int


def _trained(answer: TrainEpoch, epochs: int = EPOCHS, batches: int = FEW) -> _EpochResults:
    model, optimizer = _new_training()
    held_out, notes, traces = _text(batches + 1, seed=100), _new_notes(), []
    for epoch in range(epochs):
        training = _text(batches, seed=epoch)
        step = partial(answer, model, optimizer, training, held_out, notes)
        traces.append(measure(step, model=model, optimizer=optimizer))
    weights = [weight.detach().clone() for weight in model.parameters()]
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    return _EpochResults(notes, weights, traces, hooks)


@cache
def _wanted() -> _EpochResults:
    return _trained(solution("2.5"))


def _check_train_epoch(answer: TrainEpoch) -> str:
    got = _trained(answer)
    alive = [trace.live_bytes for trace in got.traces]
    require(
        len(set(alive[1:])) == 1,
        f"train_epoch leaves {', '.join(f'{size:,}' for size in alive)} bytes alive after epochs "
        f"1 to {EPOCHS}; wanted the same bytes from epoch 2 on. The largest growth in the "
        f"last epoch is {_largest_growth(got.traces)}.",
    )
    require(
        got.hooks == 0,
        f"train_epoch leaves {got.hooks} hooks on the model after {EPOCHS} epochs; wanted none.",
    )
    _require_same_results(got, _wanted())
    _require_all_else_unchanged(answer)
    _require_nothing_piles_up(answer)
    return f"{alive[-1]:,} bytes alive after each epoch · losses, scales and weights unchanged"


def _require_all_else_unchanged(answer: TrainEpoch) -> None:
    """The mode of each module, the optimizer's settings, and other hooks."""
    model, optimizer = _new_training()
    model[1].eval()
    for module in model:
        module.register_forward_hook(lambda module, args, output: None)
    text = _text(FEW, seed=7)
    trained: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with (
        unchanged("train_epoch", may_change=("values", "gradients", "state"), **trained),
        unchanged("train_epoch", text=text),
    ):
        answer(model, optimizer, text, text, _new_notes())


def _require_nothing_piles_up(answer: TrainEpoch) -> None:
    """Require that a longer epoch has a higher peak only by the bytes of its batches."""
    few, many = (_trained(answer, 2, batches).traces[-1] for batches in (FEW, MANY))
    higher = many.peak_bytes - few.peak_bytes
    inputs = _input_bytes(MANY) - _input_bytes(FEW)
    require(
        higher <= inputs + SCALARS_BYTES * (MANY - FEW),
        f"an epoch of {MANY} batches peaks {higher:,} bytes above an epoch of {FEW}; wanted only "
        f"the {inputs:,} bytes of its additional batches. Nothing may accumulate within an epoch. "
        f"The largest growth is {_largest_growth([_made_by_peak(few), _made_by_peak(many)])}.",
    )


def _largest_growth(traces: list[Trace]) -> str:
    """Return number, shape and operator of the tensors that only the last trace has."""
    for kind, number in traces[-2].diff(traces[-1]).rows:
        if number > 0:
            shape = "×".join(map(str, kind.shape)) or "scalar"
            return f"{number} × {shape} {kind.dtype}, made by {kind.operator}"
    return "none: the previous epoch left more"


def _made_by_peak(trace: Trace) -> Trace:
    """Return the tensors at the peak that operators allocated, without the text."""
    return Trace(tuple(event for event in trace.alive(trace.peak_position) if event.operator))


def _input_bytes(batches: int) -> int:
    """Return the bytes of an epoch's batches, training and held-out."""
    text = *_text(batches, 0), *_text(batches + 1, 0)
    return sum(tensor.nbytes for batch in text for tensor in batch)


def _require_same_results(got: _EpochResults, wanted: _EpochResults) -> None:
    """Require the notes and weights of the leaking loop."""
    for name in ("losses", "scales"):
        values, right = _floats(got.notes.get(name)), wanted.notes[name]
        require(
            values is not None and len(values) == len(right),
            f'notes["{name}"] has {_how_many(values)} after {EPOCHS} epochs; wanted {len(right)}, '
            f"from all epochs.",
        )
        mine, before = torch.tensor(values), torch.tensor(right)
        off = differences(mine, before) > 1e-5
        require_none_wrong(f'notes["{name}"], compared with the leaking loop', mine, before, off)
    pairs = zip(got.weights, wanted.weights, strict=True)
    difference = max(furthest(a, b) for a, b in pairs)
    require(
        difference <= 1e-5,
        f"the trained weights differ by {difference:.2g}; wanted the same as before the fix.",
    )


def _floats(noted: Any) -> list[float] | None:
    try:
        return [float(n.detach() if isinstance(n, Tensor) else n) for n in noted]
    except (TypeError, ValueError):
        return None


def _how_many(values: list[float] | None) -> str:
    if values is None:
        return "something other than numbers"
    return f"{len(values)} number{'s' if len(values) != 1 else ''}"


# ------------------------------------------------------------------ 2.6: an out-of-memory message


class Oom(NamedTuple):
    """The numbers of an out-of-memory message in bytes, as in the notebook."""

    requested: int
    total: int
    free: int
    process: int
    allocated: int
    unallocated: int


Diagnose = Callable[[Oom], str]


def diagnose(oom: Oom) -> str:
    """The reference: compare the need with the GPU, and with what other processes leave."""
    need = oom.process - oom.unallocated + oom.requested
    others = oom.total - oom.free - oom.process
    if need > 0.98 * oom.total:
        return "too much"
    return "another process" if need > 0.98 * (oom.total - others) else "fragmentation"


def _oom(
    *, requested: int, allocated: int, unallocated: int, context: int, others: int, total: int
) -> Oom:
    """Return a message from its parts, in MiB. The rest of the GPU is free."""
    process = context + allocated + unallocated
    sizes = (requested, total, total - others - process, process, allocated, unallocated)
    return Oom(*(MIB * size for size in sizes))


# In MiB: the request, allocated, unallocated, the context, other processes, the GPU.
_OOM_CASES: dict[str, tuple[Oom, str]] = {
    name: (
        _oom(
            requested=requested,
            allocated=allocated,
            unallocated=unallocated,
            context=context,
            others=others,
            total=total,
        ),
        wanted,
    )
    for name, requested, allocated, unallocated, context, others, total, wanted in (
        ("much unallocated", 1_000, 18_000, 5_000, 500, 0, 24_000, "fragmentation"),
        ("half not reserved, half unallocated", 512, 3_600, 390, 500, 0, 4_900, "fragmentation"),
        ("a full GPU", 700, 22_900, 100, 500, 0, 24_000, "too much"),
        ("a GPU full of tensors", 1, 23_000, 100, 800, 0, 24_000, "too much"),
        ("a large context", 300, 6_900, 150, 900, 0, 8_000, "too much"),
        ("a large context, enough memory", 200, 20_500, 1_900, 1_500, 0, 24_000, "fragmentation"),
        (
            "a request larger than the free memory",
            700,
            21_900,
            1_000,
            500,
            0,
            24_000,
            "fragmentation",
        ),
        ("a need above 98 % of the GPU", 600, 22_700, 300, 500, 0, 24_000, "too much"),
        ("a need of exactly 98 %", 400, 9_100, 250, 300, 0, 10_000, "fragmentation"),
        ("a large other process", 2_000, 13_000, 100, 500, 10_000, 24_000, "another process"),
        (
            "another process, a need above 98 % of what it leaves",
            500,
            14_800,
            300,
            500,
            8_000,
            24_000,
            "another process",
        ),
        (
            "another process, much unallocated",
            1_000,
            15_000,
            6_000,
            500,
            2_000,
            24_000,
            "fragmentation",
        ),
        (
            "another process, a need above 98 % of the GPU",
            3_000,
            21_000,
            100,
            500,
            2_000,
            24_000,
            "too much",
        ),
    )
}


def _check_diagnose(answer: Diagnose) -> str:
    for name, (oom, wanted) in _OOM_CASES.items():
        got = answer(oom)
        require(
            got == wanted,
            f"diagnose, {name} ({_oom_in_words(oom)}), gave {got!r}; wanted {wanted!r}.",
            evidence=f"{name}: {got!r}",
        )
    return f"{len(_OOM_CASES)} messages"


def _oom_in_words(oom: Oom) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in oom._asdict().items())


DAY = Day(
    exercises=(
        checked("2.1", _check_sizes, sizes),
        checked("2.2", _check_allocate, allocate),
        checked("2.3", _check_free_block, free_block),
        checked("2.4", _check_leaks, leaks),
        checked("2.5", _check_train_epoch),
        checked("2.6", _check_diagnose, diagnose),
    ),
    bill=Bill("day 2: measured, not changed", plain),  # the plain step: reading saves nothing
)
