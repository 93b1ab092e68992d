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

A gradient that is not finite passes into its moments, as in torch's optimizers, and stays there to
be seen. In 8 bits it takes the scale of its block of 256: at this step the others of the block are
stepped as ever, from the next on all their moments are NaN. No other block knows of it. To leave
such a step out, look before it: `LossScaler`, or `clip_grad_norm_(..., error_if_nonfinite=True)`.
"""

import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from memlab.internals.chunks import size_on, starts
from memlab.optim.moments import Float, Moment, Piece, State
from memlab.rounding import stochastic_round_


class StepKernel(Protocol):
    """A kernel that takes the place of torch's operators in the step of a piece."""

    def takes(self, weight: Tensor, moments: Sequence[Moment]) -> bool:
        """Return whether it can step this weight; torch's operators step the others."""

    def require_device(self, weight: Tensor) -> None:
        """Raise RuntimeError where the kernel cannot run."""

    def pieces(self, weight: Tensor) -> Iterable[Piece]:
        """Split a weight into pieces, one launch each."""

    def step_piece(
        self,
        optimizer: "Optimizer",
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Moment],
        piece: Piece,
        state: State,
        group: dict[str, Any],
    ) -> None:
        """Step a piece of a weight in place, with its moments."""


class Optimizer(torch.optim.Optimizer):
    """What every optimizer of memlab is: torch's, with the loop of this file.

    `maximize` steps up the gradient. `rounding` says how a step reaches a bfloat16 weight: to the
    nearest, which loses steps of less than half a step of bfloat16, or "stochastic", which keeps
    them in the mean; float32 weights don't need it. `moment_dtype` is for moments that are neither
    encoded nor shared: None is float32 at least; bfloat16 halves them, and they are rounded at
    random. `generator` draws for both. `piece` is how many numbers are stepped at a time: 2¹⁸ on a
    CPU, 2²² elsewhere. A weight that is no contiguous run of numbers (channels_last, transposed) is
    copied to one, whole, and back.

    torch's `foreach` and `fused` are accepted and change nothing: they choose how torch computes
    the same step, and this loop always steps one piece at a time. `amsgrad`, `capturable` and
    `differentiable` ask for another step, so True is refused.

    Raises ValueError for settings that nothing can step by and for a parameter given twice;
    TypeError for a setting of the wrong type, for weights of integers or complex numbers and for
    stochastic rounding to float16, and in step() for a sparse gradient.
    """

    kernel: ClassVar[StepKernel | None] = None  # memlab.kernels.optim has two

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        moment_dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        piece: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        **unsupported: bool,
    ) -> None:
        if piece is not None and piece < 1:
            raise ValueError(f"got pieces of {piece} numbers; give at least 1")
        require_bools(maximize=maximize, foreach=foreach or False, fused=fused or False)
        require_off(type(self).__name__, unsupported)
        self.generator, self.piece = generator, piece
        own = {"maximize": maximize, "rounding": rounding, "moment_dtype": moment_dtype}
        super().__init__(params, {**defaults, **own})

    # -------------------------------------------------------------- what each brings

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """What is kept of a weight between steps."""
        raise NotImplementedError

    def number(self, name: str, group: dict[str, Any]) -> Float:
        """The moment of that name, one number a weight."""
        return Float(name, group["moment_dtype"], self.generator)

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """One step of a piece, in place, `step` begins at 1: flat, and float32 or, of a float64
        weight, that."""
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
        kernel = self.kernel if self.kernel and self.kernel.takes(weight, moments) else None
        if kernel is not None:
            kernel.require_device(weight)  # before the step counts
        if not state:
            state.update(self._new_state(weight, group, self.state.values()))
        state["step"] += 1
        flat = weight.contiguous().view(-1)  # a copy only of channels_last and its like
        gradient = weight.grad.reshape(-1)
        step_piece = self.step_piece if kernel is None else partial(kernel.step_piece, self)
        for piece in self.pieces(weight, group, kernel):
            step_piece(flat[piece.span], gradient[piece.span], moments, piece, state, group)
        if not weight.is_contiguous():
            weight.copy_(flat.view(weight.shape))

    def step_piece(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Moment],
        piece: Piece,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        precision = torch.promote_types(weight.dtype, torch.float32)
        exact = weight.to(precision)
        values = [moment.read(state, piece).to(precision) for moment in moments]
        self.update_(
            exact,
            # No name for it: it is gone before the moments are encoded.
            (-gradient if group["maximize"] else gradient).to(precision),
            *values,
            step=state["step"],
            group=group,
        )
        for moment, value in zip(moments, values, strict=True):
            moment.write(state, piece, value)
        if exact is weight:
            return
        if group["rounding"] == "stochastic":
            stochastic_round_(weight, exact, generator=self.generator)
        else:
            weight.copy_(exact)

    def pieces(
        self, weight: Tensor, group: dict[str, Any], kernel: "StepKernel | None" = None
    ) -> Iterable[Piece]:
        """Split a weight into pieces of whole blocks: a kernel's own, unless `piece` was given."""
        if kernel is not None and self.piece is None:
            return kernel.pieces(weight)
        count, block = weight.numel(), self.block(weight, group)
        wanted = self.piece or size_on(weight.device)
        size = max(1, wanted // block) * block
        return (Piece(start, min(start + size, count)) for start in starts(weight, size))

    # -------------------------------------------------------------- groups and states

    def require_group(self, group: dict[str, Any]) -> None:
        """Raises for settings, or weights, that this optimizer cannot step by."""
        require_settings(**{name: group[name] for name in _SETTINGS if name in group})
        require_bools(maximize=group.get("maximize", False))
        _require_each_once(group)
        if group["rounding"] not in ("nearest", "stochastic"):
            raise ValueError(f"got rounding={group['rounding']!r}; give 'nearest' or 'stochastic'")
        if group["moment_dtype"] not in _MOMENT_DTYPES:
            raise ValueError(
                f"got moment_dtype={group['moment_dtype']}; give torch.bfloat16, torch.float32, "
                f"torch.float64 or None: in float16 squares of small gradients vanish"
            )
        for weight in group["params"]:
            _require_floats(weight, group["rounding"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for what can be stepped."""
        with (
            warnings.catch_warnings()
        ):  # torch warns of a parameter given twice; here it is refused
            warnings.filterwarnings("ignore", message=".*contains a parameter group with duplicate")
            super().add_param_group(param_group)
        try:
            self.require_group(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: copied to where each weight is now, in the dtype it is kept in.

        torch's own casts every tensor of a state to its weight's dtype: codes would become floats,
        and float32 moments of a bfloat16 weight would be rounded. A setting that the state has no
        word for stays. ValueError, and nothing has changed, for a state of other weights or of
        another optimizer.
        """
        with self.register_load_state_dict_pre_hook(type(self)._with_states_by_weight):
            super().load_state_dict(state_dict)

    def _with_states_by_weight(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict after the user's own hooks; torch leaves a state alone whose key is no
        weight's number, so here the keys are the weights themselves."""
        saved = state_dict["param_groups"]
        _require_as_many_weights(saved, self.param_groups)
        groups = [{**now, **then} for now, then in zip(self.param_groups, saved, strict=True)]
        states: dict[Tensor, dict[str, Any]] = {}
        for group, now in zip(groups, self.param_groups, strict=True):
            self.require_group({**group, "params": now["params"]})
            for index, weight in zip(group["params"], now["params"], strict=True):
                if state := state_dict["state"].get(index):
                    states[weight] = self._copied(state, weight, group, states.values())
        return {"state": states, "param_groups": groups}

    def _copied(
        self, state: dict[str, Any], weight: Tensor, group: dict[str, Any], others: Iterable[State]
    ) -> State:
        copy = self._new_state(weight, group, others)
        wanted, got = _shapes(copy), _shapes(state)
        if got != wanted:
            raise ValueError(
                f"got a state of {_listed(got)} for a weight of shape {tuple(weight.shape)}, whose "
                f"state has {_listed(wanted)}; give the state of {type(self).__name__} on the same "
                f"weights in the same order"
            )
        for name, kept in copy.items():
            copy[name] = kept.copy_(state[name]) if isinstance(kept, Tensor) else int(state[name])
        return copy

    def _new_state(self, weight: Tensor, group: dict[str, Any], others: Iterable[State]) -> State:
        state: State = {"step": 0}
        for moment in self.moments(weight, group):
            state.update(moment.new(weight, others))
        return state

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's, and what is ours."""
        return {**super().__getstate__(), "generator": self.generator, "piece": self.piece}


def _require_dense(gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise TypeError(
            "got a sparse gradient; give the layer sparse=False, or its weights to "
            "torch.optim.SparseAdam"
        )


def _require_floats(weight: Tensor, rounding: str) -> None:
    if not weight.is_floating_point():
        raise TypeError(f"got weights of {weight.dtype}; give floating-point numbers")
    if rounding == "stochastic" and weight.dtype == torch.float16:
        raise TypeError(
            "got weights of torch.float16 to round at random; give bfloat16 weights, or "
            "rounding='nearest'"
        )


def _require_as_many_weights(
    saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]
) -> None:
    got, wanted = ([len(group["params"]) for group in found] for found in (saved, groups))
    if got != wanted:
        raise ValueError(
            f"got a state of groups of {got} weights for groups of {wanted}; give the state of an "
            f"optimizer of the same groups"
        )


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" if shape else name for name, shape in shapes.items())


_MOMENT_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)
_SETTINGS = ("lr", "betas", "weight_decay", "eps")


def require_settings(
    lr: float | Tensor, weight_decay: float, betas: Any = (), eps: float = 0.0
) -> None:
    """ValueError or TypeError for settings that no optimizer can step by."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if not 0 <= _number(name, value) < math.inf:
            raise ValueError(f"got {name}={value}; give at least 0, and a finite number")
    if betas == ():
        return  # this optimizer has none
    if not isinstance(betas, Sequence) or isinstance(betas, str):
        raise TypeError(f"got betas={betas!r}; give two numbers, such as (0.9, 0.999)")
    if len(betas) != 2 or not all(0 <= _number("betas", beta) < 1 for beta in betas):
        raise ValueError(f"got betas={betas}; give two of at least 0 and less than 1")


def _number(name: str, value: Any) -> float:
    is_one_element = isinstance(value, Tensor) and value.numel() == 1
    if is_one_element or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        return float(value)
    raise TypeError(f"got {name}={value!r}; give a number, or a tensor of one element")


def require_bools(**settings: Any) -> None:
    """TypeError for a switch that is neither True nor False."""
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise TypeError(f"got {name}={value!r}; give True or False")


_UNSUPPORTED = {
    "amsgrad": "it keeps a third moment; use torch.optim.AdamW for it",
    "capturable": "a step here reads its count on the host, so a CUDA graph cannot record it",
    "differentiable": "a step here runs in place, without a graph",
}


def require_off(optimizer: str, settings: dict[str, Any]) -> None:
    """torch's switches may be passed as False; what they would change is refused."""
    for name, value in settings.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"{optimizer} got an unexpected argument {name!r}={value!r}")
        require_bools(**{name: value})
        if value:
            raise ValueError(f"{optimizer} got {name}=True: {_UNSUPPORTED[name]}; leave it out")


def _require_each_once(group: dict[str, Any]) -> None:
    """A parameter given twice would take two steps at once."""
    if len(set(group["params"])) == len(group["params"]):
        return
    names = group.get("param_names") or [f"parameter {at}" for at in range(len(group["params"]))]
    first: dict[Tensor, str] = {}
    for name, weight in zip(names, group["params"], strict=True):
        if weight in first:
            raise ValueError(
                f"got the parameter of shape {tuple(weight.shape)} twice, as {first[weight]} and "
                f"as {name}; give each once: model.parameters() does"
            )
        first[weight] = name
