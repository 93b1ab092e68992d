"""Day 21: tokens that train nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memlab.course.checks.day16 import everything_elsewhere
from memlab.course.exercises import Bill, Day, Exercise, equal, require
from memlab.course.properties import (
    as_little_memory,
    elements,
    gradients,
    is_tensor,
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
from memlab.course.solutions import body, mistakes, solution
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


_SORTED = "sorted(range(len(lengths)), key=lambda number: -lengths[number])"
_FITTING = "[row for row, left in enumerate(free) if left >= lengths[number]]"

_PACK = Exercise(
    id="21.1",
    title="First-fit decreasing",
    minutes=10,
    difficulty=2,
    hints=(
        "Sort the documents' indices by length, longest first. Besides the rows, keep a list of "
        "how many tokens are still free in each row.",
        "sorted(range(len(lengths)), key=lambda number: -lengths[number]) sorts them, and equally "
        "long documents keep their order. Find the first row with free >= length.",
        "For each index `number`: fitting = [row for row, left in enumerate(free) if left >= "
        "lengths[number]]. If it is empty, what do you append to rows, and what to free? What "
        "changes for the row fitting[0]?",
    ),
    reference=pack,
    check=_check_pack,
    rebuilds=_LIBRARIES,
    wrong_answers=mistakes(
        "21.1",
        (
            "You took the documents in the given order. Take the longest first.",
            (_SORTED, "range(len(lengths))"),
        ),
        (
            "You took the shortest document first. Sort in decreasing order.",
            ("-lengths[number])", "lengths[number])"),
        ),
        (
            "You tried only the last row. A document may fit into an earlier one.",
            (_FITTING, "[row for row, left in enumerate(free) if left >= lengths[number]][-1:]"),
            ("left >= lengths[number]", "left >= lengths[number] and row == len(free) - 1"),
        ),
        (
            "You took the last row with room. Take the first.",
            ("fitting[0]", "fitting[-1]"),
        ),
        (
            "You took the row with the least room (best fit). Take the first row with room.",
            (_FITTING, f"sorted({_FITTING}, key=lambda row: free[row])"),
        ),
        (
            "You took the row with the most room (worst fit). Take the first row with room.",
            (_FITTING, f"sorted({_FITTING}, key=lambda row: -free[row])"),
        ),
        (
            "A document that fills the row exactly also fits: >=, not >.",
            ("left >= lengths", "left > lengths"),
        ),
        (
            "Your rows list lengths. List the documents' indices.",
            (".append(number)", ".append(lengths[number])"),
        ),
        (
            "Equally long documents keep their order.",
            ("-lengths[number])", "(-lengths[number], -number))"),
        ),
        (
            "Your rows never get full. Compare a length with a row's free tokens, and subtract it.",
            ("free[fitting[0]] -= lengths[number]", "pass"),
        ),
    ),
)

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
        require(
            isinstance(got, tuple) and len(got) == len(_PARTS),
            f"{call} gave {type(got).__name__}; wanted a tuple of {', '.join(_PARTS)}."
            f"{' Is there a return?' if got is None else ''}",
        )
        for name, mine, wanted in zip(_PARTS, got, join(documents), strict=True):
            is_tensor(f"{call}: {name}", mine, dtype=wanted.dtype, shape=tuple(wanted.shape))
            equal(f"{call}: {name}", mine.tolist(), wanted.tolist())
    return f"{len(_ROWS) + 1} rows · no target across a boundary · int32 boundaries"


_TARGETS = "targets[boundaries[1:] - 1] = IGNORED"
_POSITIONS = "torch.arange(len(tokens), dtype=torch.int64) - starts"

_JOIN = Exercise(
    id="21.2",
    title="Join documents",
    minutes=10,
    difficulty=2,
    hints=(
        "torch.cat joins the tokens. The boundaries are a 0 and the cumulative sum of the lengths. "
        "Compute targets and positions from these two.",
        "tokens.roll(-1) is a new tensor with the next token in each place. The last token of a "
        "document is at boundaries[1:] - 1. A document's start, for each of its tokens, is "
        "boundaries[:-1].repeat_interleave(lengths).",
        "boundaries = F.pad(lengths.cumsum(0), (1, 0)); targets = tokens.roll(-1); starts = "
        "boundaries[:-1].repeat_interleave(lengths). Which targets become -100? What do you "
        "subtract from torch.arange(len(tokens))? The returned boundaries are int32.",
    ),
    reference=join,
    check=_check_join,
    rebuilds=_LIBRARIES,
    wrong_answers=mistakes(
        "21.2",
        (
            "The last token of a document predicts the first token of the next document. Set its "
            "target to −100.",
            (_TARGETS, "targets[-1] = IGNORED"),
        ),
        (
            "The last target is the row's first token, because roll wraps around. The last "
            "document's last target is −100, too.",
            (_TARGETS, "targets[boundaries[1:-1] - 1] = IGNORED"),
        ),
        (
            "You removed the target of each document's first token. Only the last token has none.",
            (_TARGETS, "targets[boundaries[:-1]] = IGNORED"),
        ),
        (
            "A target is the next token, not the token itself.",
            ("tokens.roll(-1)", "tokens.clone()"),
        ),
        (
            "You took the previous token. A target is the next one.",
            ("tokens.roll(-1)", "tokens.roll(1)"),
        ),
        (
            "Your positions run through the whole row. Restart at 0 in each document.",
            (_POSITIONS, "torch.arange(len(tokens), dtype=torch.int64)"),
        ),
        (
            "Positions start at 0, not at 1.",
            (_POSITIONS, f"{_POSITIONS} + 1"),
        ),
        (
            "Return int32 boundaries: variable-length kernels require int32.",
            ("boundaries.int()", "boundaries"),
        ),
        (
            "You returned lengths. Boundaries are their cumulative sum.",
            ("boundaries.int()", "F.pad(lengths, (1, 0)).int()"),
        ),
        (
            "Your boundaries lack the 0 at the start.",
            ("boundaries.int()", "boundaries[1:].int()"),
        ),
        (
            "Your boundaries lack the last document's end.",
            ("boundaries.int()", "boundaries[:-1].int()"),
        ),
    ),
)

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


_OF_DOCUMENT = "(x[:, :, start:end] for x in (q, k, v))"
_MASKED = """
number = torch.arange(len(boundaries) - 1).repeat_interleave(boundaries.diff().long())
mask = (number[:, None] == number).tril()
return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
"""

_PADDED = """
parts = [slice(start, end) for start, end in pairwise(boundaries.tolist())]
longest = max(part.stop - part.start for part in parts)
padded = [
    torch.cat([F.pad(x[:, :, p], (0, 0, 0, longest - (p.stop - p.start))) for p in parts])
    for x in (q, k, v)
]
outputs = F.scaled_dot_product_attention(*padded, is_causal=True)
of_parts = zip(outputs, parts, strict=True)
return torch.cat([out[:, : p.stop - p.start] for out, p in of_parts], 1)[None]
"""

_ATTEND = Exercise(
    id="21.3",
    title="Attention within documents",
    minutes=15,
    difficulty=3,
    hints=(
        "Each document is a slice of q, k and v, from one boundary to the next. Compute attention "
        "for each slice alone.",
        "pairwise(boundaries.tolist()) gives start and end of each document. Its attention is the "
        "causal attention of a short row, q[:, :, start:end] with the same slices of k and v.",
        "In a loop: F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], "
        "is_causal=True) for a, b in pairwise(boundaries.tolist()). Along which dimension do you "
        "join the outputs?",
    ),
    reference=attend_within,
    check=_check_attend,
    rebuilds=_LIBRARIES,
    wrong_answers=mistakes(
        "21.3",
        (
            "You ignored the boundaries, so every token attends to all earlier documents.",
            body(
                "attend_within",
                "return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
            ),
        ),
        (
            "A token attends to later tokens of its document. Pass is_causal=True.",
            ("is_causal=True", "is_causal=False"),
        ),
        (
            "You padded all documents to the longest. Attend to each slice alone.",
            body("attend_within", _PADDED),
        ),
        (
            "The values are right, but memory has a T × T tensor. Attend document by document.",
            body("attend_within", _MASKED),
        ),
        (
            "You sliced keys and values from the start of the row. Start at the document's start.",
            (_OF_DOCUMENT, "(q[:, :, start:end], k[:, :, : end - start], v[:, :, : end - start])"),
        ),
        (
            "You scaled the scores twice. scaled_dot_product_attention already divides by √D.",
            ("is_causal=True", "is_causal=True, scale=1 / q.shape[-1]"),
        ),
        (
            "Your result has no graph, as after detach or under no_grad.",
            (_OF_DOCUMENT, "(x[:, :, start:end].detach() for x in (q, k, v))"),
        ),
    ),
)

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


_KEPT = "tokens if window is None else min(tokens, window - 1)"

_CACHE = Exercise(
    id="21.4",
    title="The bytes of a KV cache",
    minutes=10,
    difficulty=1,
    hints=(
        "Per token, a layer keeps a key and a value for each of its key/value heads. How many "
        "tokens does each layer keep?",
        "A layer without a window keeps all tokens. A layer with a window keeps at most "
        "window - 1 of them.",
        "kept = sum(tokens if window is None else min(tokens, window - 1) for window in windows). "
        "A kept token has a key and a value, each with kv_heads * head_dim elements. Which two "
        "factors are left?",
    ),
    reference=cache_bytes,
    check=_check_cache,
    wrong_answers=mistakes(
        "21.4",
        ("A layer keeps keys and values: multiply by 2.", ("2 * kept", "kept")),
        (
            "A layer with a window keeps one token less than the window.",
            ("window - 1", "window"),
        ),
        (
            "If there are fewer tokens than window - 1, a layer keeps all of them.",
            ("min(tokens, window - 1)", "window - 1"),
        ),
        ("You ignored the windows. A layer with a window keeps fewer tokens.", (_KEPT, "tokens")),
        (
            "A window limits only its own layer. Layers without a window keep all tokens.",
            (
                f"sum({_KEPT} for window in windows)",
                "len(windows) * min([tokens] + [w - 1 for w in windows if w])",
            ),
        ),
        ("Each sequence of the batch has its own cache.", (" * batch", "")),
        ("You counted elements. Multiply by the bytes per element.", (" * element_bytes", "")),
        ("Each key/value head has its own keys and values.", (" * kv_heads", "")),
    ),
)

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


_SPLIT = "zip(hidden.split(chunk), targets.split(chunk), strict=True)"
_CALL = "recompute(of_rows, rows, weight, wanted)"

_LOG_PROBS = Exercise(
    id="21.5",
    title="One log-probability per token",
    minutes=15,
    difficulty=3,
    hints=(
        "Rows are independent: call of_rows on a few rows at a time. How many rows are in the last "
        "part, if N is not a multiple of chunk? Which tensors does autograd save for each part?",
        "Zip hidden.split(chunk) and targets.split(chunk). The last part may be shorter. "
        "recompute(of_rows, rows, weight, wanted) keeps only its inputs.",
        "recompute(of_rows, rows, weight, wanted) gives the values of a chunk, for each pair of "
        "zip(hidden.split(chunk), targets.split(chunk)). How do you join the chunks' values?",
    ),
    reference=log_probs,
    check=_check_log_probs,
    rebuilds=_LIBRARIES,
    wrong_answers=mistakes(
        "21.5",
        (
            "You keep every chunk's logits for backward. Recompute them.",
            (_CALL, "of_rows(rows, weight, wanted)"),
        ),
        (
            "You used one chunk for all rows, so backward recomputes all logits at once.",
            (_SPLIT, "[(hidden, targets)]"),
        ),
        (
            "You forgot the rows after the last full chunk.",
            (_SPLIT, f"list({_SPLIT})[: max(1, len(hidden) // chunk)]"),
        ),
        (
            "Your result has no graph, as under no_grad: autograd saves nothing, but hidden and "
            "weight get no gradients either.",
            (_CALL, "torch.no_grad()(of_rows)(rows, weight, wanted)"),
        ),
        (
            "You returned the loss, −log p. Return log p.",
            (_CALL, f"-{_CALL}"),
        ),
        (
            "Return float32, whatever the dtype of hidden.",
            ("torch.cat(parts)", "torch.cat(parts).to(hidden.dtype)"),
        ),
        (
            "You returned the sum. Return one value per token.",
            ("torch.cat(parts)", "torch.cat(parts).sum()"),
        ),
    ),
)

# ------------------------------------------------------------------ the bill

DAY = Day(
    exercises=(_PACK, _JOIN, _ATTEND, _CACHE, _LOG_PROBS),
    bill=Bill("day 21: packed sequences, no padding here", everything_elsewhere),
)
