"""Recurrent layers on CUDA: one call of cuDNN for all layers, directions and steps.

What it keeps for backward, the reserve, only cuDNN can say, and it does not document it. The two
sizes in pytorch's issue 2895 (T × B = 25,000, H = 320, four layers, float32: 736,000,000 bytes of
an LSTM, 864,000,000 of a GRU) are, for each step and hidden unit, five numbers a layer (the gates
and the cell) or six, and one between every two layers. Of a plain RNN it is taken to be one.

All gradients of weights come in one buffer. Where cuDNN does not take the dtype (bfloat16), steps
are taken one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memlab.torch_internals import get_mkldnn_enabled, set_mkldnn_enabled

aten = torch.ops.aten

IN_WORDS = "recurrent layers by cuDNN"
RESERVE_NOTE = (
    "what cuDNN keeps of a recurrent layer for backward is reckoned from two sizes that it once "
    "reported (pytorch's issue 2895), and not confirmed by a GPU"
)
_DTYPES = (torch.float16, torch.float32, torch.float64)  # that cuDNN takes
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}  # by cuDNN's number of the mode: relu, tanh, LSTM, GRU
_LSTM = 2


def reserve_bytes(
    cells: int, hidden_size: int, layers: int, directions: int, mode: int, itemsize: int
) -> int:
    """The reserve of so many cells: steps times sequences."""
    numbers = _KEPT[mode] * layers + layers - 1
    return cells * hidden_size * directions * numbers * itemsize


# ------------------------------------------------------------------ the call


def substitutes(on_use: Callable[[], None]) -> dict[Any, Callable[..., Any]]:
    """What CUDA calls in the place of each composition; `on_use` is called where it does."""
    modes = {
        aten.rnn_relu.input: 0, aten.rnn_tanh.input: 1, aten.lstm.input: _LSTM, aten.gru.input: 3
    }  # fmt: skip
    return {
        composition: _in_one_call(composition, mode, on_use) for composition, mode in modes.items()
    }


def _in_one_call(composition: Any, mode: int, on_use: Callable[[], None]) -> Callable[..., Any]:
    def run(
        input: torch.Tensor,
        hidden: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        if input.dtype not in _DTYPES:
            with _without_onednn():
                return composition.decompose(input, hidden, params, *options)
        on_use()
        h, c = hidden if mode == _LSTM else (hidden, None)
        hidden_size = h.shape[2] if c is None else c.shape[2]
        projected = h.shape[2] if hidden_size != h.shape[2] else 0
        weights = (4 if has_biases else 2) + bool(projected)
        flat = params[0].new_empty(0)  # the weights are views of one buffer, which is no new one
        output, h, c, *_ = aten._cudnn_rnn(
            input, params, weights, flat, h, c, mode, hidden_size, projected, num_layers,
            batch_first, dropout, train, bidirectional, [], None,
        )  # fmt: skip
        return (output, h, c) if mode == _LSTM else (output, h)

    return run


@contextmanager
def _without_onednn() -> Iterator[None]:
    was_enabled = get_mkldnn_enabled()
    set_mkldnn_enabled(False)
    try:
        yield
    finally:
        set_mkldnn_enabled(was_enabled)


# ------------------------------------------------------------------ what it makes


def _forward(input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    output, h, c, _, flat = aten._cudnn_rnn.default(input, *args)
    _, _, _, _, _, mode, hidden_size, _, layers, _, _, train, bidirectional, _, _ = args
    cells = output.shape[0] * output.shape[1]
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
    *_, needed = args  # of input, hx, cx, weight
    states = (torch.empty_like(hx), cx if cx is None else torch.empty_like(cx))
    gradients = _views_of_one_buffer(weight) if needed[3] else []
    return torch.empty_like(input), *states, gradients


def _views_of_one_buffer(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    counts = [weight.numel() for weight in weights]
    pieces = weights[0].new_empty(sum(counts)).split(counts)
    return [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _forward,
    aten._cudnn_rnn_backward.default: _backward,
}
