"""Packing: train on rows filled with documents, without padding.

Saves    the padding's share of all activations and logits. In a batch padded to its longest
         document, often half of the tokens.
Costs    a sort before training, and 4 bytes per document. On a GPU, attention needs a kernel for
         variable lengths, or one call per document.
Source   memlab.reference.packing has it in a few lines: Johnson 1974 (first-fit decreasing); Krell
         et al. 2021, arXiv 2107.02027.

This file adds checks, a search for a row in log(rows) steps (a million documents take seconds, not
hours), and attention as an object that `GPT(config, attention=...)` takes:

    attention = DocumentAttention()
    model = GPT(config, attention=attention)
    for numbers in pack([len(d) for d in documents], capacity=4096):
        row = join([documents[n] for n in numbers])
        attention.boundaries = row.boundaries
        loss = model(row.tokens, row.targets)

A mask that hides other documents also gives the right values. It has T² elements, and torch's
memory-efficient attention converts a mask of bool to one of q's dtype, which each layer keeps for
backward. One kernel call for all documents takes `boundaries` instead:
`torch.nn.attention.varlen.varlen_attn`, or `flash_attn_varlen_func` of the package flash-attn.

Rotary positions need no reset: q·k depends on the distance of two tokens alone, and both are in the
same document. Learned positions do, which is what `positions` is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # cross-entropy's ignore_index


@dataclass(frozen=True)
class Row:
    """Documents, one after the other, and what training needs to keep them apart."""

    tokens: Tensor  # (1, T)
    targets: Tensor  # (1, T): the next token of the same document, or −100
    positions: Tensor  # (1, T): from 0 in each document
    boundaries: Tensor  # (documents + 1,), int32: 0, n₁, n₁ + n₂, …


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of document numbers, by first-fit decreasing: each document, longest first, goes
    into the first row with room for it.

    Raises ValueError for a document without tokens, or with more than `capacity`.
    """
    _check_lengths(lengths, capacity)
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    most_free = [capacity] * (2 * leaves)  # a heap: node n is the maximum of nodes 2n and 2n + 1
    rows: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        leaf = _first_fit(most_free, lengths[number])
        if leaf - leaves == len(rows):
            rows.append([])
        rows[leaf - leaves].append(number)
        _take(most_free, leaf, lengths[number])
    return rows


def _first_fit(most_free: list[int], length: int) -> int:
    """Return the leaf of the first row with room. There is one: each document could have its
    own."""
    node = 1
    while 2 * node < len(most_free):
        node = 2 * node if most_free[2 * node] >= length else 2 * node + 1
    return node


def _take(most_free: list[int], leaf: int, length: int) -> None:
    most_free[leaf] -= length
    node = leaf // 2
    while node:
        most_free[node] = max(most_free[2 * node], most_free[2 * node + 1])
        node //= 2


def _check_lengths(lengths: Sequence[int], capacity: int) -> None:
    for number, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"document {number} has no tokens; leave it out")
        if length > capacity:
            raise ValueError(
                f"document {number} has {length:,} tokens, and a row has room for {capacity:,}; "
                f"cut the document, or raise the capacity"
            )


def join(documents: Sequence[Tensor]) -> Row:
    """Join documents, 1-D tensors of integers, to a row.

    The last token of a document gets no target: the next token belongs to another document.
    """
    _check_documents(documents)
    tokens = torch.cat(list(documents))  # (T,)
    device = tokens.device
    counts = [len(document) for document in documents]
    lengths = torch.tensor(counts, dtype=torch.int64, device=device)
    boundaries = F.pad(lengths.cumsum(0), (1, 0))
    targets = tokens.roll(-1)
    targets[boundaries[1:] - 1] = IGNORED
    starts = boundaries[:-1].repeat_interleave(lengths)
    positions = torch.arange(len(tokens), dtype=torch.int64, device=device) - starts
    return Row(tokens[None], targets[None], positions[None], boundaries.int())


def _check_documents(documents: Sequence[Tensor]) -> None:
    if not documents:
        raise ValueError("got no documents; give at least one")
    for number, document in enumerate(documents):
        integers = not (document.is_floating_point() or document.dtype == torch.bool)
        if document.ndim != 1 or not len(document) or not integers or document.dtype.itemsize == 1:
            raise ValueError(
                f"got document {number} of shape {tuple(document.shape)} and {document.dtype}; "
                f"give a 1-D tensor of tokens in int64 or int32 (−100 has to fit)"
            )


class DocumentAttention:
    """Causal attention within each document of a row; an attention function for `GPT`.

    Set `boundaries` before each forward pass.
    """

    def __init__(self) -> None:
        self.boundaries: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """q is (1, H, T, D), k and v are (1, KV, T, D); returns (1, H, T, D)."""
        ends = self._checked(q)
        grouped = k.shape[1] < q.shape[1]
        outputs = [
            F.scaled_dot_product_attention(
                *(x[:, :, start:end] for x in (q, k, v)), is_causal=causal, enable_gqa=grouped
            )
            for start, end in pairwise(ends)
        ]
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]

    def _checked(self, q: Tensor) -> list[int]:
        if self.boundaries is None:
            raise ValueError("boundaries are not set; set them to the row's before each step")
        ends = [int(end) for end in self.boundaries.tolist()]
        if len(q) != 1 or ends[0] != 0 or ends[-1] != q.shape[2]:
            raise ValueError(
                f"got {len(q)} rows of {q.shape[2]} tokens, and boundaries from {ends[0]} to "
                f"{ends[-1]}; give one row, and the boundaries of its own documents"
            )
        return ends
