"""Operators of which torch's fake version refuses what the real one does, or leaves something out.

Grouped products (`_grouped_mm`, a mixture of experts in one call): the fake one takes bfloat16
alone. The real one takes float16 and float32 as well, and gives rows that are multiples of 16
bytes. Its result is as large for every routing, so how many tokens an expert gets does not matter.

An LSTM's layer on the CPU (`mkldnn_rnn_layer`): the fake one has an empty workspace. oneDNN's has
seven parts, each a multiple of 4096 bytes, by its layout of an LSTM (common/rnn in oneDNN's
sources); sizes that torch returned, with four kinds of instructions, agree with it to the byte.

CTC's loss (`_ctc_loss`): the fake one refuses lengths whose values are known, too.

Layer norm's backward: the real one gives a contiguous gradient, the fake one a permuted gradient if
that of the output is permuted; the next matmul would then copy it.
"""

from collections.abc import Callable
from typing import Any

import torch

from memlab.dry_runs import known_values
from memlab.metering.frames import user_line

aten = torch.ops.aten

_PAGE_BYTES = 4096
_LINE_BYTES = 64
_ALIGNMENT_BYTES = 16


# ------------------------------------------------------------------ grouped products


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    for name, matrix in (("first", mat_a), ("second", mat_b)):
        _check_rows(name, matrix)
    if 3 in (mat_a.dim(), mat_b.dim()) and mat_a.shape[-1] != mat_b.shape[-2]:
        raise ValueError(
            f"{user_line()}: a grouped product of {tuple(mat_a.shape)} and {tuple(mat_b.shape)}; "
            f"the first matrix has as many columns as the second has rows"
        )
    shape = _shape_of_grouped(mat_a, mat_b, offs)
    dtype = out_dtype or mat_a.dtype
    row = _round_up(shape[-1], _ALIGNMENT_BYTES // dtype.itemsize)
    strides = (shape[1] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=mat_a.device)


def _shape_of_grouped(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None
) -> tuple[int, ...]:
    """Groups are parts of the dimension that both matrices share, of either's other one, or
    matrices of a batch."""
    M, N = mat_a.shape[-2], mat_b.shape[-1]
    if mat_a.dim() != mat_b.dim():
        return M, N
    return (mat_a.shape[0] if offs is None else offs.shape[0]), M, N


def _check_rows(name: str, matrix: torch.Tensor) -> None:
    """Raises ValueError where the real operator refuses the matrix."""
    if matrix.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{user_line()}: the {name} matrix of a grouped product is {matrix.dtype}; "
            f"torch takes float32, float16 and bfloat16"
        )
    step = _row_step(matrix)
    if step is None:
        raise ValueError(
            f"{user_line()}: the {name} matrix of a grouped product has strides "
            f"{matrix.stride()}; torch wants rows or columns that lie one behind the other"
        )
    if step * matrix.element_size() % _ALIGNMENT_BYTES:
        raise ValueError(
            f"{user_line()}: the rows of the {name} matrix of a grouped product are "
            f"{step * matrix.element_size()} bytes apart; torch wants a multiple of 16"
        )


def _row_step(matrix: torch.Tensor) -> int | None:
    """Elements from a row (or column) to the next; None where neither lies without gaps."""
    (rows, columns), (row_step, column_step) = matrix.shape[-2:], matrix.stride()[-2:]
    if row_step == 1 and column_step >= max(1, rows):
        return column_step
    return row_step if column_step == 1 and row_step >= max(1, columns) else None


# ------------------------------------------------------------------ LSTM


def _mkldnn_rnn_layer(input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    output, hidden, cell, empty = aten.mkldnn_rnn_layer.default(input, *args, **kwargs)
    if not torch.is_grad_enabled():
        return output, hidden, cell, empty
    count = lstm_workspace_bytes(*input.shape, output.shape[-1], input.element_size())
    return output, hidden, cell, torch.empty(count, dtype=torch.uint8, device=input.device)


def lstm_workspace_bytes(T: int, B: int, input_size: int, hidden_size: int, itemsize: int) -> int:
    """What oneDNN keeps of one layer and direction of an LSTM: T steps, a batch of B.

    Of each step the gates and the outputs, of each step and the start the states and what
    gradients of states will need, of this layer and below it.
    """
    cells, states = T * B, 2 * (T + 1) * B
    widest = max(input_size, hidden_size)
    parts = (
        cells * _leading_bytes(4 * hidden_size, itemsize),
        cells * _leading_bytes(hidden_size, itemsize),
        states * _leading_bytes(widest, itemsize),
        states * hidden_size * itemsize,
        states * hidden_size * 4,  # cell states are float32, and so are all gradients
        *2 * (states * _leading_bytes(widest, 4),),
    )
    return sum(_round_up(part, _PAGE_BYTES) for part in parts)


def _leading_bytes(width: int, itemsize: int) -> int:
    """A row: a multiple of 64 bytes, but no multiple of 256 elements, which caches dislike."""
    row = _round_up(width, _LINE_BYTES // itemsize)
    return row * itemsize + (0 if row % 256 else _LINE_BYTES)


# ------------------------------------------------------------------ CTC, layer norm


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, lengths: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss for each of B sequences, and T times the logarithms of 2 × S + 1 probabilities, where
    S is the length of the longest target."""
    if isinstance(lengths, torch.Tensor):
        if not known_values.is_known(lengths):
            return aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, *options)
        lengths = known_values.as_list(lengths)
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    T, B = batched.shape[:2]
    return log_probs.new_empty(B), log_probs.new_empty((B, T, 2 * max(lengths) + 1))


def _ctc_loss_backward(
    grad: torch.Tensor, log_probs: torch.Tensor, *others: Any, **options: Any
) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _native_layer_norm_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient to the input is contiguous; the fake one has the order of the output's."""
    to_input, *others = aten.native_layer_norm_backward.default(*args, **kwargs)
    if to_input is not None and not to_input.is_contiguous():
        to_input = torch.empty_like(to_input, memory_format=torch.contiguous_format)
    return to_input, *others


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._grouped_mm.default: _grouped_mm,
    aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
    aten.native_layer_norm_backward.default: _native_layer_norm_backward,
}
