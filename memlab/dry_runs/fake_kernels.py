"""Fake kernels for operators where torch's fake version differs from the real one.

Grouped matmul (`_grouped_mm`, a mixture of experts in one call): torch's fake version supports only
bfloat16. The real one also supports float16 and float32, and pads rows to a multiple of 16 bytes.
The result's size does not depend on the routing.

LSTM layer on the CPU (`mkldnn_rnn_layer`): torch's fake version has an empty workspace. oneDNN's
workspace has seven parts, each a multiple of 4096 bytes (common/rnn in oneDNN's sources). The sizes
here equal real ones on four CPU instruction sets.

CTC loss (`_ctc_loss`): torch's fake version rejects length tensors even if their values are known.

Layer norm's backward: the real gradient is contiguous. torch's fake gradient has the order of the
output's gradient, and the next matmul would copy a permuted one.

Histogram (`histc`): torch has no fake version, and its real one on the CPU takes no integers.
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


# ------------------------------------------------------------------ grouped matmul


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
            f"{user_line()}: got a grouped matmul of {tuple(mat_a.shape)} and "
            f"{tuple(mat_b.shape)}; the first matrix needs as many columns as the second has rows"
        )
    shape = _shape_of_grouped(mat_a, mat_b, offs)
    dtype = out_dtype or mat_a.dtype
    row = _round_up(shape[-1], _ALIGNMENT_BYTES // dtype.itemsize)
    strides = (shape[1] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=mat_a.device)


def _shape_of_grouped(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None
) -> tuple[int, ...]:
    """Return the result's shape. Groups split the inner dimension, rows, columns or the batch."""
    M, N = mat_a.shape[-2], mat_b.shape[-1]
    if mat_a.dim() != mat_b.dim():
        return M, N
    return (mat_a.shape[0] if offs is None else offs.shape[0]), M, N


def _check_rows(name: str, matrix: torch.Tensor) -> None:
    """Raise ValueError if the real operator rejects the matrix."""
    if matrix.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{user_line()}: the {name} matrix of a grouped matmul is {matrix.dtype}; "
            f"use float32, float16 or bfloat16"
        )
    step = _row_step(matrix)
    if step is None:
        raise ValueError(
            f"{user_line()}: the {name} matrix of a grouped matmul has strides "
            f"{matrix.stride()}; make its rows or columns contiguous"
        )
    if step * matrix.element_size() % _ALIGNMENT_BYTES:
        raise ValueError(
            f"{user_line()}: the rows of the {name} matrix of a grouped matmul are "
            f"{step * matrix.element_size()} bytes apart; use a multiple of 16"
        )


def _row_step(matrix: torch.Tensor) -> int | None:
    """Return the stride of contiguous rows (or columns), in elements; None if neither exist."""
    (rows, columns), (row_step, column_step) = matrix.shape[-2:], matrix.stride()[-2:]
    if row_step == 1 and column_step >= max(1, rows):
        return column_step
    return row_step if column_step == 1 and row_step >= max(1, columns) else None


# ------------------------------------------------------------------ LSTM


def _mkldnn_rnn_layer(input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    output, hidden, cell, empty = aten.mkldnn_rnn_layer.default(input, *args, **kwargs)
    if not torch.is_grad_enabled():
        return output, hidden, cell, empty
    sizes = (*input.shape, output.shape[-1], input.element_size())
    count = lstm_workspace_bytes(*sizes)
    return output, hidden, cell, torch.empty(count, dtype=torch.uint8, device=input.device)


def lstm_workspace_bytes(T: int, B: int, input_size: int, hidden_size: int, itemsize: int) -> int:
    """Return oneDNN's workspace for one layer and direction of an LSTM: T steps, batch size B.

    It has gates and outputs for each step, and states and their gradients for each step and the
    start.
    """
    cells, states = T * B, 2 * (T + 1) * B
    widest = max(input_size, hidden_size)
    parts = (
        cells * _leading_bytes(4 * hidden_size, itemsize),
        cells * _leading_bytes(hidden_size, itemsize),
        states * _leading_bytes(widest, itemsize),
        states * hidden_size * itemsize,
        states * hidden_size * 4,  # cell states and all gradients are float32
        *2 * (states * _leading_bytes(widest, 4),),
    )
    # 50 sizes agree to the byte, from SSE4.1 to AVX-512.
    return sum(_round_up(part, _PAGE_BYTES) for part in parts)


def _leading_bytes(width: int, itemsize: int) -> int:
    """Return a row's bytes: a multiple of 64, padded once more at multiples of 256 elements.

    The padding avoids cache conflicts.
    """
    row = _round_up(width, _LINE_BYTES // itemsize)
    return row * itemsize + (0 if row % 256 else _LINE_BYTES)


# ------------------------------------------------------------------ CTC, layer norm


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, lengths: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses (B) and log-probabilities (B, T, 2S + 1); S is the longest target's length."""
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
    """Make the input's gradient contiguous, as the real kernel does."""
    to_input, *others = aten.native_layer_norm_backward.default(*args, **kwargs)
    if to_input is not None and not to_input.is_contiguous():
        to_input = torch.empty_like(to_input, memory_format=torch.contiguous_format)
    return to_input, *others


def _histc(input: torch.Tensor, bins: int = 100, *limits: Any, **options: Any) -> torch.Tensor:
    return input.new_empty(bins)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._grouped_mm.default: _grouped_mm,
    aten.histc.default: _histc,
    aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
    aten.native_layer_norm_backward.default: _native_layer_norm_backward,
}
