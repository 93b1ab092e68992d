"""Recurrent layers on CUDA: one cuDNN call for all layers, directions and steps.

cuDNN saves a buffer for backward, the reserve, whose size is undocumented. cuDNN tells it
(cudnnGetRNNTempSpaceSizes), but only with a handle, which needs a driver. PyTorch issue 2895 has
two sizes (T × B = 25,000, H = 320, four layers, float32): 736,000,000 bytes for an LSTM and
864,000,000 for a GRU. They equal 5 elements (LSTM: gates and cell) or 6 (GRU) per layer, step and
hidden unit, plus 1 between two layers. A plain RNN is assumed to save 1 per layer.

All weight gradients share one buffer. For dtypes that cuDNN does not support (bfloat16), the steps
run one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memlab.internals.torch_internals import (
    call_composite,
    get_mkldnn_enabled,
    set_mkldnn_enabled,
    without_modes,
)

aten = torch.ops.aten

LABEL = "recurrent layers by cuDNN"
RESERVE_NOTE = (
    "cuDNN's reserve for recurrent layers is estimated from two reported sizes (PyTorch issue "
    "2895), and not confirmed by a GPU"
)
_DTYPES = (torch.float16, torch.float32, torch.float64)  # supported by cuDNN
_SAVED_ELEMENTS = {0: 1, 1: 1, 2: 5, 3: 6}  # elements by cuDNN mode: relu, tanh, LSTM, GRU
_LSTM = 2
_MODES = {aten.rnn_relu: 0, aten.rnn_tanh: 1, aten.lstm: _LSTM, aten.gru: 3}


def reserve_bytes(
    cells: int, hidden_size: int, layers: int, directions: int, mode: int, itemsize: int
) -> int:
    """Return the size of the reserve; `cells` is steps × sequences."""
    # Without cuDNN's workspace, which is unknown: on an H200, predictions of steps with LSTM and
    # GRU are 32 to 35 % too low.
    elements = _SAVED_ELEMENTS[mode] * layers + layers - 1
    return cells * hidden_size * directions * elements * itemsize


# ------------------------------------------------------------------ calling cuDNN


def substitutes(on_use: Callable[[], None]) -> dict[Any, Callable[..., Any]]:
    """Return CUDA's replacements of composite operators; `on_use` is called when cuDNN is used."""
    found: dict[Any, Callable[..., Any]] = {}
    for operator, mode in _MODES.items():
        found[operator.input] = partial(_padded, operator.input, mode, on_use)
        found[operator.data] = partial(_packed, operator.data, mode, on_use)
    return found


def _padded(
    composite: Any, mode: int, on_use: Callable[[], None], input: torch.Tensor, *args: Any
) -> Any:
    """Run on padded input: all sequences have the same number of steps."""
    if input.dtype not in _DTYPES:
        with _without_onednn():
            return call_composite(composite, input, *args)
    on_use()
    hidden, params, has_biases, layers, dropout, train, bidirectional, batch_first = args
    options = layers, batch_first, dropout, train, bidirectional
    return _call_cudnn(mode, input, hidden, params, has_biases, (*options, []))


def _packed(
    composite: Any,
    mode: int,
    on_use: Callable[[], None],
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    *args: Any,
) -> Any:
    """Run on packed input. `batch_sizes`, the sequences at each step, is real (readers.py)."""
    if data.dtype not in _DTYPES:
        return call_composite(composite, data, batch_sizes, *args)
    on_use()
    hidden, params, has_biases, layers, dropout, train, bidirectional = args
    with without_modes():
        sizes = batch_sizes.tolist()
    options = layers, False, dropout, train, bidirectional
    return _call_cudnn(mode, data, hidden, params, has_biases, (*options, sizes))


def _call_cudnn(
    mode: int,
    input: torch.Tensor,
    hidden: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    options: Sequence[Any],
) -> Any:
    h, c = hidden if mode == _LSTM else (hidden, None)
    hidden_size = h.shape[2] if c is None else c.shape[2]
    projected = h.shape[2] if hidden_size != h.shape[2] else 0
    weights = (4 if has_biases else 2) + bool(projected)
    flat = params[0].new_empty(0)  # the weights already share a buffer, so none is allocated
    sizes = mode, hidden_size, projected
    output, h, c, *_ = aten._cudnn_rnn(input, params, weights, flat, h, c, *sizes, *options, None)
    return (output, h, c) if mode == _LSTM else (output, h)


@contextmanager
def _without_onednn() -> Iterator[None]:
    was_enabled = get_mkldnn_enabled()
    set_mkldnn_enabled(False)
    try:
        yield
    finally:
        set_mkldnn_enabled(was_enabled)


# ------------------------------------------------------------------ fake cuDNN kernels


def _forward(input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    output, h, c, _, flat = aten._cudnn_rnn.default(input, *args)
    _, _, _, _, _, mode, hidden_size, _, layers, _, _, train, bidirectional, batch_sizes, _ = args
    steps, sequences = (len(batch_sizes), batch_sizes[0]) if batch_sizes else output.shape[:2]
    cells = steps * sequences  # padded: includes packed sequences that have ended
    size = (cells, hidden_size, layers, 1 + bidirectional, mode, input.element_size())
    reserve = input.new_empty(reserve_bytes(*size) if train else 0, dtype=torch.uint8)
    return output, h, c, reserve, flat


def _backward(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *args: Any,
) -> tuple[Any, ...]:
    *_, needed = args  # the output mask for input, hx, cx, weight
    states = (torch.empty_like(hx), cx if cx is None else torch.empty_like(cx))
    gradients = _views_of_one_buffer(weight) if needed[3] else []
    return torch.empty_like(input), *states, gradients


def _views_of_one_buffer(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    counts = [weight.numel() for weight in weights]
    chunks = weights[0].new_empty(sum(counts)).split(counts)
    return [chunk.view(weight.shape) for chunk, weight in zip(chunks, weights, strict=True)]


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _forward,
    aten._cudnn_rnn_backward.default: _backward,
}
