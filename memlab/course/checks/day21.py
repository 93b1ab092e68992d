"""Day 21: tokens that train nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memlab.course.bill_steps import everything_elsewhere
from memlab.course.exercises import Bill, Day, equal, require
from memlab.course.properties import (
    as_little_memory,
    elements,
    gradients,
    is_tensor,
    is_tuple,
    limited,
    new_bytes,
    peaks,
    rough,
    rounding,
    same_bytes,
    same_gradients,
    same_values,
    unchanged,
)
from memlab.course.solutions import checked, solution
from memlab.metering import measure
from memlab.reference.log_probs import log_probs, of_rows
from memlab.reference.packing import attend_within, join, pack

_LIBRARIES = ("memlab.losses", "trl", "flash_attn")

cache_bytes = solution("21.4")

# ------------------------------------------------------------------ 21.1: first-fit decreasing

Pack = Callable[[Sequence[int], int], list[list[int]]]

_DOCUMENTS: tuple[tuple[list[int], int], ...] = (
    ([], 8),
    ([5], 8),
    ([3, 5], 8),
    ([3, 6], 8),
    ([2, 5, 4], 8),
    ([6, 5, 3, 2], 8),
    ([4, 4, 4], 8),
    ([6, 4, 3, 2, 1], 8),
    ([8, 1, 7, 1], 8),
    ([5, 6, 10, 1, 4], 12),
    ([1, 6, 2, 5, 3, 4, 2], 10),
    ([7, 6, 3, 2, 2, 1], 10),
    ([3, 9, 5, 4, 1, 9, 2, 2, 6, 7, 1, 3], 12),
    ([700, 300, 1500, 200, 900, 40], 2048),
)


def _check_pack(answer: Pack) -> str:
    for lengths, capacity in _DOCUMENTS:
        call = f"pack({lengths}, {capacity})"
        mine = list(lengths)
        with unchanged(call, lengths=mine):
            got = answer(mine, capacity)
        equal(call, got, pack(lengths, capacity))
    return f"{len(_DOCUMENTS)} sets of documents match first-fit decreasing"


# ------------------------------------------------------------------ 21.2: join

Join = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor, Tensor, Tensor]]

_PARTS = ("tokens", "targets", "positions", "boundaries")
_ROWS = ([[5, 6, 7]], [[5, 6], [7, 8, 9]], [[4], [5, 6, 7], [8]], [[9, 8, 7, 6], [5, 4], [3, 2, 1]])
_LONG_ROW = [list(range(start, start + length)) for start, length in ((3, 700), (9, 1), (5, 1347))]


def _check_join(answer: Join) -> str:
    for texts in (*_ROWS, _LONG_ROW):
        shown = texts if texts in _ROWS else [f"{len(text):,} tokens" for text in texts]
        call = f"join of {', '.join(map(str, shown))}"
        documents = [torch.tensor(text) for text in texts]
        with unchanged(call, documents=documents):
            got = answer(documents)
        is_tuple(call, got, len(_PARTS), ", ".join(_PARTS))
        for name, mine, wanted in zip(_PARTS, got, join(documents), strict=True):
            is_tensor(f"{call}: {name}", mine, dtype=wanted.dtype, shape=tuple(wanted.shape))
            equal(f"{call}: {name}", mine.tolist(), wanted.tolist())
    return f"{len(_ROWS) + 1} rows · no target across a boundary · int32 boundaries"


# ------------------------------------------------------------------ 21.3: attention within

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_BOUNDARIES = ([0, 5], [0, 3, 5], [0, 1, 2, 7], [0, 4, 5, 11, 12])
_LONG = list(range(0, 513, 32))
_UNEQUAL = [0, 24, *range(26, 257, 2)]  # padded to the longest, they have 11 times the tokens


def _check_attend(answer: Attend) -> str:
    within = rounding(torch.float32)
    for ends in _BOUNDARIES:
        call = f"attend_within with boundaries {ends}"
        q, k, v, boundaries = _row(ends)
        with unchanged(call, q=q, k=k, v=v, boundaries=boundaries):
            got = gradients(partial(_of_row, answer, boundaries), q=q, k=k, v=v)
        require("output 0" in got, f"{call} gave no tensor. Is there a return?")
        same_values(call, got["output 0"], _by_mask(q, k, v, boundaries), within=within)
        wanted = gradients(partial(_of_row, _by_mask, boundaries), q=q, k=k, v=v)
        same_gradients(call, got, wanted, within=within)
    return _check_no_squares(answer)


def _of_row(attend: Attend, boundaries: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, boundaries)


def _row(ends: Sequence[int], head_dim: int = 4) -> tuple[Tensor, ...]:
    """Return q, k, v (1, 2, T, D) and the boundaries."""
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, ends[-1], head_dim, generator=random)
    return q, k, v, torch.tensor(ends, dtype=torch.int32)


def _by_mask(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
    """Compute the expected result: attention with all scores and a mask."""
    lengths = boundaries.diff().long()
    number = torch.arange(len(lengths)).repeat_interleave(lengths)
    mask = (number[:, None] == number).tril()
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def _check_no_squares(answer: Attend) -> str:
    for ends in (_UNEQUAL, _LONG):
        call = f"attend_within of {len(ends) - 1} documents, {ends[-1]} tokens"
        q, k, v, boundaries = _row(ends)
        given = *(x.requires_grad_() for x in (q, k, v)), boundaries
        runs = (partial(attend, *given) for attend in (answer, attend_within))
        room = ends[-1] ** 2 * 3 // 4  # less than a mask, with a byte per element
        got = as_little_memory(call, *runs, room=room, kept=room)
    return f"results and gradients match · at most {got.forward:,} bytes, no T × T tensor"


# ------------------------------------------------------------------ 21.4: the KV cache

CacheBytes = Callable[[Sequence[int | None], int, int, int, int, int], int]

_CACHES: tuple[tuple[list[int | None], int, int, int, int, int], ...] = (
    ([None], 1, 2, 3, 1, 4),
    ([None, None], 2, 8, 10, 1, 2),
    ([None] * 3, 2, 8, 10, 5, 2),
    ([4], 1, 8, 10, 1, 2),
    ([4], 1, 8, 3, 1, 2),
    ([4], 1, 8, 2, 1, 2),
    ([7, 7, None], 3, 16, 20, 2, 4),
    ([None] * 32, 32, 128, 4096, 8, 2),
    ([1024] * 5 + [None], 4, 256, 32_768, 2, 1),
)


def _check_cache(answer: CacheBytes) -> str:
    for case in _CACHES:
        windows, kv_heads, head_dim, tokens, batch, element_bytes = case
        mine = list(windows)
        listed = windows if len(windows) < 7 else f"{len(windows)} layers without a window"
        call = f"cache_bytes({listed}, {', '.join(map(str, case[1:]))})"
        with unchanged(call, windows=mine):
            got = answer(mine, kv_heads, head_dim, tokens, batch, element_bytes)
        one_token = 2 * kv_heads * head_dim * batch * element_bytes
        units = {"× one layer's keys and values per token": one_token}
        same_bytes(call, got, cache_bytes(windows, *case[1:]), units)
    return f"{len(_CACHES)} caches match to the byte"


# -------------------------------------------------------- 21.5: one log-probability per token

LogProbs = Callable[[Tensor, Tensor, Tensor, int], Tensor]

# Rows, width, vocabulary, chunk, dtype.
_SMALL = (
    (1, 3, 5, 4, torch.float32),
    (6, 3, 5, 2, torch.float32),
    (7, 4, 9, 3, torch.float32),
    (5, 4, 9, 2, torch.bfloat16),
)
_LARGE = (96, 8, 512, 8, torch.float32)


def _check_log_probs(answer: LogProbs) -> str:
    for case in _SMALL:
        rows, _, vocab, chunk, dtype = case
        call = f"log_probs with N = {rows}, V = {vocab}, chunk = {chunk}"
        call += "" if dtype == torch.float32 else ", in bfloat16"
        hidden, weight, targets = _inputs(*case)
        wanted = gradients(lambda h, w, t=targets: of_rows(h, w, t), h=hidden, w=weight)
        with unchanged(call, hidden=hidden, weight=weight, targets=targets):
            got = gradients(
                lambda h, w, t=targets, chunk=chunk: answer(h, w, t, chunk), h=hidden, w=weight
            )
        require("output 0" in got, f"{call} gave no tensor. Is there a return?")
        within = rounding(dtype) if dtype == torch.float32 else 2**-5
        same_gradients(call, got, wanted, within=within)
    return _check_chunks(answer)


def _inputs(
    rows: int, width: int, vocab: int, chunk: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = elements(rows, width), elements(vocab, width, seed=1)
    targets = torch.arange(rows) * 3 % vocab
    return hidden.clamp(-2, 2).to(dtype), weight.clamp(-2, 2).to(dtype), targets


def _check_chunks(answer: LogProbs) -> str:
    rows, _, vocab, chunk, _ = _LARGE
    call = f"log_probs with N = {rows}, V = {vocab}, chunk = {chunk}"
    hidden, weight, targets = _inputs(*_LARGE)
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = 4 * chunk * vocab  # of a chunk
    kept: list[Any] = []
    trace = measure(lambda: kept.append(answer(hidden, weight, targets, chunk)))
    # Beside the result, checkpointing keeps nothing as large as a chunk's logits.
    left = new_bytes(trace) - kept.pop().nbytes
    require(
        left < logits,
        f"{call} keeps {left:,} bytes for backward besides its result; wanted less than a chunk's "
        f"logits, {logits:,} bytes.",
        evidence=(call, "held", rough(left)),
    )
    most = peaks(lambda: log_probs(hidden, weight, targets, chunk))
    got = peaks(lambda: answer(hidden, weight, targets, chunk))
    limited(call, got, forward=most.forward + logits, backward=most.backward + logits)
    return (
        f"values and gradients match · {left:,} bytes kept for backward; all logits would be "
        f"{rows // chunk * logits:,}"
    )


# ------------------------------------------------------------------ the bill

DAY = Day(
    exercises=(
        checked("21.1", _check_pack, pack, rebuilds=_LIBRARIES),
        checked("21.2", _check_join, join, rebuilds=_LIBRARIES),
        checked("21.3", _check_attend, attend_within, rebuilds=_LIBRARIES),
        checked("21.4", _check_cache, cache_bytes),
        checked("21.5", _check_log_probs, log_probs, rebuilds=_LIBRARIES),
    ),
    bill=Bill("day 21: packed sequences, no padding here", everything_elsewhere),
)
