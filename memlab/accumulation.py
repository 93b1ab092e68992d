"""Gradient accumulation: compute the gradient of a large batch from several micro-batches.

Saves    the activations of all micro-batches except the current one.
Costs    no memory in float32: autograd adds to `.grad` anyway. bf16 and fp16 weights get a float32
         buffer, 4 bytes per weight: accumulating 256 gradients in bf16 is 1.4 % off. Smaller
         batches may leave the device partly idle.
Source   common practice. transformers #34191 and torchtune #1875 (2024) document the widespread
         averaging error below.

The loss of a batch is a mean over tokens. Micro-batches differ in their number of tokens because
padding and prompts are masked. The mean of their means is therefore wrong: a token in a micro-batch
with few tokens counts more. The correct loss is

    loss = Σ over the window's tokens / N        gradient = Σ ∂(loss of a token) / N

The number of tokens N is known only at the end of the window. So each micro-batch backpropagates
the *sum* of its losses, and the gradients are divided once, after the last. Clip them after that.

    for window in windows(micro_batches, 8):  # the last may be shorter and is still correct
        optimizer.zero_grad()
        loss, tokens = accumulate(window, sum_of_losses, model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

Accumulation is not equivalent for layers (BatchNorm) and losses (contrastive) that depend on the
whole batch.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

LOW_PRECISION = (torch.bfloat16, torch.float16)

Batch = TypeVar("Batch")


class Accumulated(NamedTuple):
    """The mean loss over a window's tokens, without a graph, and the number of tokens.

    During the window, `loss` is the sum.
    """

    loss: Tensor
    tokens: float | Tensor


def accumulate(
    micro_batches: Iterable[Batch],
    sum_of_losses: Callable[[Batch], tuple[Tensor, float | Tensor]],
    parameters: Iterable[nn.Parameter],
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Accumulated:
    """Compute the gradient of the mean loss over all tokens of all micro-batches in `.grad`.

    Args:
        sum_of_losses: returns the sum of a micro-batch's token losses, such as
            `F.cross_entropy(logits, targets, reduction="sum")`, and the number of tokens in it. If
            a scaled sum would overflow float16, divide both by the same number. Fully masked
            micro-batches contribute nothing; if all are masked, gradients and loss are zero.
        no_sync: DistributedDataParallel's; all micro-batches except the last run inside.

    Raises:
        ValueError: without a micro-batch, if gradients exist before, or if none is computed.
    """
    parameters = list(dict.fromkeys(parameters))
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError(
            "some parameters already have a gradient, which would be divided by the number of "
            "tokens too; call optimizer.zero_grad() before accumulate"
        )
    window: Accumulated | None = None
    with _Float32Sums(parameters) as sums:
        for micro_batch, around in _with_context(micro_batches, no_sync):
            with around:
                window = _add_micro_batch(window, *sum_of_losses(micro_batch))
        if window is None:
            raise ValueError("got no micro-batch to accumulate; give at least one")
        loss, tokens = window
        divisor = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)
        _divide((p.grad for p in parameters if p.grad is not None), divisor)
        sums.write_gradients(divisor)
    if all(parameter.grad is None for parameter in parameters):
        raise ValueError(
            "no parameter has a gradient after backward; pass the parameters of the model that "
            "computes the loss, and no optimizer that steps inside backward and frees gradients"
        )
    return Accumulated(loss / divisor, tokens)


def windows(micro_batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield lists of `size` consecutive micro-batches; the last may be shorter."""
    if size < 1:
        raise ValueError(f"got windows of {size} micro-batches; give at least 1")
    remaining = iter(micro_batches)
    while window := list(islice(remaining, size)):
        yield window


def split(batch: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """Split a batch into micro-batches of `size` sequences, as views; the last may be smaller."""
    if size < 1:
        raise ValueError(f"got micro-batches of {size} sequences; give at least 1")
    return list(zip(*(tensor.split(size) for tensor in batch), strict=True))


def _add_micro_batch(
    window: Accumulated | None, loss: Tensor, tokens: float | Tensor
) -> Accumulated:
    """Run backward and add this micro-batch's loss and tokens to the window."""
    loss.backward()
    with torch.no_grad():
        if window is None:
            return Accumulated(loss.clone(), tokens)
        return Accumulated(window.loss.add_(loss), window.tokens + tokens)


def _with_context(
    micro_batches: Iterable[Batch], no_sync: Callable[[], AbstractContextManager[Any]] | None
) -> Iterator[tuple[Batch, AbstractContextManager[Any]]]:
    """Yield each micro-batch with its context manager.

    Finding the last micro-batch needs a lookahead of one, so with `no_sync` two are in memory.
    """
    if no_sync is None:
        yield from ((micro_batch, nullcontext()) for micro_batch in micro_batches)
        return
    remaining = iter(micro_batches)
    for current in remaining:
        for following in remaining:
            yield current, no_sync()
            current = following
        yield current, nullcontext()


@torch.no_grad()
def _divide(gradients: Iterable[Tensor], divisor: float | Tensor) -> None:
    for gradient in gradients:
        gradient.div_(divisor)


class _Float32Sums:
    """Float32 sums of bf16 and fp16 gradients.

    Each gradient is added to its sum and freed as soon as backward computes it, so at most one
    low-precision gradient is alive.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.dtype in LOW_PRECISION and p.requires_grad]
        self._sums: dict[nn.Parameter, Tensor] = {}

    def __enter__(self) -> "_Float32Sums":
        self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p in self._parameters]
        return self

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.float()

    def write_gradients(self, divisor: float | Tensor) -> None:
        """Set each parameter's gradient to its sum, divided and then rounded."""
        while self._sums:
            parameter, total = self._sums.popitem()
            _divide([total], divisor)
            parameter.grad = total.to(parameter.dtype)
