"""Packing: put several documents into one row, so that no memory goes to padding.

Saves    the padding's share of all activations: in a batch padded to its longest document, often
         half of the tokens or more.
Costs    a sort before training. Attention has to stay within each document.
Source   Johnson 1974 (first-fit decreasing, at most 11/9 of the fewest rows); Krell et al. 2021,
         arXiv 2107.02027 (packing for transformers).

A packed row is one long sequence. `boundaries` says where its documents begin and end, in the form
that kernels for variable lengths take (`cu_seqlens`): 0, n₁, n₁ + n₂, … On a GPU, one call of
`torch.nn.attention.varlen.varlen_attn` takes them; a mask has T² elements, and each layer keeps it.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the target of a token that has no next token


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of document numbers, by first-fit decreasing. No length exceeds `capacity`."""
    rows: list[list[int]] = []
    free: list[int] = []  # tokens left in each row
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fitting = [row for row, left in enumerate(free) if left >= lengths[number]]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            free.append(capacity)
        rows[fitting[0]].append(number)
        free[fitting[0]] -= lengths[number]
    return rows


def join(documents: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, targets and positions (T,), and boundaries (documents + 1,), int32."""
    tokens = torch.cat(list(documents))
    lengths = torch.tensor([len(document) for document in documents], dtype=torch.int64)
    boundaries = F.pad(lengths.cumsum(0), (1, 0))
    targets = tokens.roll(-1)
    targets[boundaries[1:] - 1] = IGNORED  # the next token is another document's
    starts = boundaries[:-1].repeat_interleave(lengths)
    return tokens, targets, torch.arange(len(tokens), dtype=torch.int64) - starts, boundaries.int()


def attend_within(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
    """Return causal attention within each document; q, k, v are (1, H, T, D)."""
    outputs = []
    for start, end in pairwise(boundaries.tolist()):
        of_document = (x[:, :, start:end] for x in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(*of_document, is_causal=True))
    return torch.cat(outputs, dim=2)
