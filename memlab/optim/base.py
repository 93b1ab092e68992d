"""The loop that all optimizers here share: weight by weight, a piece of each at a time.

    for each group of weights, for each weight with a gradient:
        count the step; make the moments, if this is the first
        for each piece of the weight:
            the piece, its gradient and its moments, in float32      a view, where they are kept so
            update them in place                                     what the paper says
            put them back                                            rounded, or encoded

An optimizer says no more than what its moments are (memlab.optim.moments) and how a piece is
updated: a pure function of float32 tensors. Because a piece is small, what is made on the way fits
in the processor's cache, and takes a few MiB however large the weight: an optimizer that decoded a
whole tensor of 8-bit moments would need, for a moment, more than one that never encoded them.

Gradients that are not finite pass into the weight and its moments, as in torch's optimizers, and
stay there to be seen; a moment in 8 bits takes its block of 256 with it. To leave such a step out,
look before it: `LossScaler`, or `clip_grad_norm_(..., error_if_nonfinite=True)`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memlab.optim.moments import Moment, Piece
from memlab.rounding import stochastic_round_

PIECE = {"cpu": 2**18}  # numbers at a time: 1 MiB of float32
PIECE_ELSEWHERE = 2**24  # where it costs more to begin an operation than to run it


class Optimizer(torch.optim.Optimizer):
    """What every optimizer of memlab is: torch's, with the loop of this file.

    `maximize` steps up the gradient. `rounding` says how a step reaches a bfloat16 weight: to the
    nearest, which loses steps of less than half a step of bfloat16, or "stochastic", which keeps
    them in the mean; float32 weights don't need it. `generator` draws for that. `piece` is how many
    numbers are stepped at a time: 2¹⁸ on a CPU, 2²⁴ elsewhere.

    Raises TypeError for weights of integers or complex numbers, and for stochastic rounding to
    float16, and in step() for a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        generator: torch.Generator | None = None,
        piece: int | None = None,
    ) -> None:
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"got rounding={rounding!r}; give 'nearest' or 'stochastic'")
        if piece is not None and piece < 1:
            raise ValueError(f"got pieces of {piece} numbers; give at least 1")
        self.generator, self.piece = generator, piece
        super().__init__(params, {**defaults, "maximize": maximize, "rounding": rounding})

    # -------------------------------------------------------------- what each brings

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """What is kept of a weight between steps."""
        raise NotImplementedError

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """One step of a piece, in place; all are float32, `step` begins at 1."""
        raise NotImplementedError

    def block(self, weight: Tensor, group: dict[str, Any]) -> int:
        """How many neighbours in a weight share something: a piece is a multiple of it."""
        return 1

    # -------------------------------------------------------------- the loop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every weight that has a gradient; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_weight(weight, group)
        return loss

    def _step_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        _require_dense(weight.grad)
        moments, state = self.moments(weight, group), self.state[weight]
        if not state:
            state.update(self._new_state(weight, group))
        state["step"] += 1
        flat = weight.contiguous().view(-1)  # a copy only of channels_last and its like
        gradient = weight.grad.reshape(-1)
        for piece in self._pieces(weight, group):
            self._step_piece(flat[piece.span], gradient[piece.span], moments, piece, state, group)
        if not weight.is_contiguous():
            weight.copy_(flat.view(weight.shape))

    def _step_piece(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Moment],
        piece: Piece,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        precision = torch.promote_types(weight.dtype, torch.float32)
        exact, gradient = weight.to(precision), gradient.to(precision)
        if group["maximize"]:
            gradient = -gradient
        values = [moment.read(state, piece) for moment in moments]
        self.update_(exact, gradient, *values, step=state["step"], group=group)
        for moment, value in zip(moments, values, strict=True):
            moment.write(state, piece, value)
        if exact is weight:
            return
        if group["rounding"] == "stochastic":
            stochastic_round_(weight, exact, generator=self.generator)
        else:
            weight.copy_(exact)

    def _pieces(self, weight: Tensor, group: dict[str, Any]) -> Iterator[Piece]:
        count, block = weight.numel(), self.block(weight, group)
        wanted = self.piece or PIECE.get(weight.device.type, PIECE_ELSEWHERE)
        size = max(1, wanted // block) * block
        starts = range(0, count, size)
        if isinstance(weight, FakeTensor) and len(starts) > 2:
            starts = (starts[0], starts[-1])  # the others take the same bytes, one after another
        return (Piece(start, min(start + size, count)) for start in starts)

    # -------------------------------------------------------------- groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for weights that can be stepped."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for weight in group["params"]:
            if not weight.is_floating_point():
                raise TypeError(f"got weights of {weight.dtype}; give floating-point numbers")
            if group["rounding"] == "stochastic" and weight.dtype == torch.float16:
                raise TypeError(
                    "got weights of torch.float16 to round at random; give bfloat16 weights, or "
                    "rounding='nearest'"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, copied to where each weight is now, in the dtype it is kept in.

        torch's own casts every tensor of a state to its weight's dtype: codes would become floats,
        and float32 moments of a bfloat16 weight would be rounded. ValueError for a state of other
        weights, or of another optimizer.
        """
        super().load_state_dict({**state_dict, "state": {}})
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for index, (weight, group) in zip(indices, weights, strict=True):
            if index in state_dict["state"]:
                self.state[weight] = self._loaded(weight, group, state_dict["state"][index])

    def _loaded(
        self, weight: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> dict[str, Any]:
        wanted = self._new_state(weight.detach().to("meta"), group)
        shapes = {name: getattr(value, "shape", ()) for name, value in wanted.items()}
        got = {name: getattr(value, "shape", ()) for name, value in state.items()}
        if got != shapes:
            raise ValueError(
                f"got a state of {_listed(got)} for a weight of shape {tuple(weight.shape)}, whose "
                f"state has {_listed(shapes)}; give the state of {type(self).__name__} on the same "
                f"weights in the same order"
            )
        loaded = {"step": int(state["step"])}
        for name, like in wanted.items():
            if name != "step":
                loaded[name] = state[name].to(weight.device, like.dtype, copy=True)
        return loaded

    def _new_state(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        others = [state for state in self.state.values() if state]
        state: dict[str, Any] = {"step": 0}
        for moment in self.moments(weight, group):
            state.update(moment.new(weight, others))
        return state


def _require_dense(gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise TypeError(
            "got a sparse gradient; give the layer sparse=False, or its weights to "
            "torch.optim.SparseAdam"
        )


def _listed(shapes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" if shape else name for name, shape in shapes.items())


def require_settings(
    lr: float | Tensor, betas: Sequence[float], weight_decay: float, eps: float = 0.0
) -> None:
    """ValueError for settings that no optimizer can step by."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if not value >= 0:
            raise ValueError(f"got {name}={value}; give at least 0")
    for n, beta in enumerate(betas, start=1):
        if not 0 <= beta < 1:
            raise ValueError(f"got {beta} as beta {n}; give at least 0 and less than 1")
