"""The update loop shared by all optimizers: one weight at a time, one chunk of it at a time.

    for each group, for each weight with a gradient:
        count the step; create the moments at the first step
        for each chunk of the weight:
            read weight, gradient and moments as float32     views if stored so
            update them in place                             the paper's algorithm
            write them back                                  rounded or encoded

A subclass defines only its moments (memlab.optim.moments) and the update of a chunk, a pure
function of float32 tensors. Because chunks are small, temporaries fit the processor's cache and
take a few MiB for any weight. Decoding a whole tensor of 8-bit moments would briefly need more
memory than storing them in float32.

A non-finite gradient makes its moments non-finite, as in torch's optimizers. In 8 bits it also
makes the scale of its block of 256 non-finite: the block's other elements take a normal step now,
and all of the block's moments are NaN from the next step on. Other blocks are unaffected. To skip
such steps, use `LossScaler` or `clip_grad_norm_(..., error_if_nonfinite=True)`.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from memlab.internals.chunks import chunk_size_on, chunk_starts
from memlab.internals.settings import number, require_bools, require_counts
from memlab.internals.shards import generator_of_replicas, is_dtensor, shard_of
from memlab.internals.torch_internals import tree_map_only
from memlab.optim.moments import Chunk, FloatMoment, Moment, State
from memlab.rounding import stochastic_round_


class Optimizer(torch.optim.Optimizer):
    """The base class of memlab's optimizers: torch.optim.Optimizer with this file's update loop.

    maximize      step up the gradient
    rounding      how updates reach bfloat16 weights: "nearest" loses updates below half the spacing
                  of bfloat16, "stochastic" keeps them on average; float32 weights don't need it
    moment_dtype  dtype of unquantized, unshared moments. None: at least float32. bfloat16 takes
                  half the memory, with stochastic rounding
    generator     for stochastic rounding; under DDP, seed it equally on all ranks
    chunk         elements stepped at a time: 2¹⁸ on a CPU, 2²² elsewhere. A non-contiguous weight
                  (channels_last, transposed) is copied as a whole, and back

    Weights may be DTensors, as `fully_shard` makes them: each rank steps its shard as it would step
    the whole, except for random numbers, which differ. Subclasses that step a matrix or a row as a
    whole raise TypeError for them.

    `foreach` and `fused` are accepted and ignored: they choose how torch computes the same step.
    `amsgrad`, `capturable` and `differentiable` need a different step, so True is refused.

    Raise ValueError for invalid settings and for a parameter given twice. Raise TypeError for a
    setting of the wrong type, integer or complex weights, stochastic rounding to float16, and a
    sparse gradient in step().
    """

    is_elementwise: ClassVar[bool] = True  # False: never; True: memlab.zero checks
    takes_dtensors: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        moment_dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        chunk: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        **unsupported: bool,
    ) -> None:
        if chunk is not None:
            require_counts(chunk=chunk)
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(f"got generator={generator!r}; give a torch.Generator or None")
        require_bools(maximize=maximize, foreach=foreach or False, fused=fused or False)
        require_off(type(self).__name__, unsupported)
        self.generator, self.chunk = generator, chunk
        base_settings = {"maximize": maximize, "rounding": rounding, "moment_dtype": moment_dtype}
        super().__init__(params, {**defaults, **base_settings})

    # -------------------------------------------------------------- defined by subclasses

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return the moments of a weight."""
        raise NotImplementedError

    def float_moment(self, name: str, group: dict[str, Any]) -> FloatMoment:
        """Return a moment with one value per element."""
        return FloatMoment(name, group["moment_dtype"], self.generator)

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """Update a flat chunk in place, in float32 or like a float64 weight; `step` starts at 1."""
        raise NotImplementedError

    def block_size(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Return how many neighboring elements share state; chunks are multiples of it."""
        return 1

    # -------------------------------------------------------------- the loop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every weight that has a gradient; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in map(_with_numbers, self.param_groups):
            for weight in group["params"]:
                if weight.grad is not None:
                    with self._random_numbers_of(weight, group):
                        self._step_weight(weight, group)
        return loss

    @contextmanager
    def _random_numbers_of(self, weight: Tensor, group: dict[str, Any]) -> Iterator[None]:
        """Round equally on all ranks that hold the same shard: their weights must stay equal."""
        generator = self.generator
        is_random = group["rounding"] == "stochastic" or group["moment_dtype"] == torch.bfloat16
        if is_random and is_dtensor(weight):
            self.generator = generator_of_replicas(weight, generator)
        try:
            yield
        finally:
            self.generator = generator

    def _step_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        dense = require_dense(weight.grad)
        moments, state = self.moments(weight, group), self.state[weight]
        shard, gradient = shard_of(weight), shard_of(dense, weight).reshape(-1)
        if not state:
            state.update(self._new_state(weight, group, self.state.values()))
        state["step"] += 1
        flat = shard.contiguous().view(-1)  # copies only non-contiguous weights
        for chunk in self.chunks(shard, group):
            self.step_chunk(
                flat[chunk.as_slice], gradient[chunk.as_slice], moments, chunk, state, group
            )
        if not shard.is_contiguous():
            shard.copy_(flat.view(shard.shape))
        if shard is not weight:
            increment_version(weight)  # a shard has a version of its own

    def step_chunk(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Moment],
        chunk: Chunk,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        precision = torch.promote_types(weight.dtype, torch.float32)
        float_weight = weight.to(precision)
        values = [moment.read(state, chunk).to(precision) for moment in moments]
        self.update_(
            float_weight,
            # Passed without a name, so that it is freed before the moments are encoded.
            (-gradient if group["maximize"] else gradient).to(precision),
            *values,
            step=state["step"],
            group=group,
        )
        for moment, value in zip(moments, values, strict=True):
            moment.write(state, chunk, value)
        if float_weight is not weight:
            self.write_weight(weight, float_weight, group)

    def write_weight(self, weight: Tensor, value: Tensor, group: dict[str, Any]) -> None:
        """Round the value of a weight, or of a chunk, into it."""
        if group["rounding"] == "stochastic":
            stochastic_round_(weight, value, generator=self.generator)
        else:
            weight.copy_(value)

    def chunks(self, weight: Tensor, group: dict[str, Any]) -> Iterable[Chunk]:
        """Split a weight into chunks of whole blocks."""
        count, block_size = weight.numel(), self.block_size(weight, group)
        wanted = self.chunk or chunk_size_on(weight.device)
        size = max(1, wanted // block_size) * block_size
        return (Chunk(start, min(start + size, count)) for start in chunk_starts(weight, size))

    # -------------------------------------------------------------- groups and states

    def require_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError or TypeError for settings or weights this optimizer does not support."""
        require_settings(**{name: group[name] for name in _SETTINGS if name in group})
        require_bools(maximize=group.get("maximize", False))
        _require_each_once(group)
        if group["rounding"] not in ("nearest", "stochastic"):
            raise ValueError(f"got rounding={group['rounding']!r}; give 'nearest' or 'stochastic'")
        if group["moment_dtype"] not in _MOMENT_DTYPES:
            raise ValueError(
                f"got moment_dtype={group['moment_dtype']}; give torch.bfloat16, torch.float32, "
                f"torch.float64 or None: float16 squares of small gradients underflow"
            )
        for weight in group["params"]:
            _require_floats(weight, group["rounding"])
            if is_dtensor(weight) and not self.takes_dtensors:
                raise TypeError(
                    f"got a DTensor of shape {tuple(weight.shape)}, of which each rank holds a "
                    f"part; {type(self).__name__} steps matrices or rows as a whole: use AdamW, "
                    f"Adam8bit, Lion, Lion8bit or MomentumSGD with fully_shard"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch.optim.Optimizer, after checking it."""
        with warnings.catch_warnings():  # torch's warning is an error in require_group
            warnings.filterwarnings("ignore", message=".*contains a parameter group with duplicate")
            super().add_param_group(param_group)
        try:
            self.require_group(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, copied to each weight's device, in the dtype this optimizer stores it in.

        torch's own method casts every state tensor to its weight's dtype: codes would become
        floats, and float32 moments of bfloat16 weights would be rounded. Settings missing from the
        state keep their value. Raise ValueError, with nothing changed, for a state of other weights
        or another optimizer.
        """
        hook: Any = type(self)._key_states_by_weight
        with self.register_load_state_dict_pre_hook(hook):
            super().load_state_dict(state_dict)

    def _key_states_by_weight(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict keyed by weights, after the user's own hooks.

        torch casts states only if the key is a parameter index, so these pass unchanged.
        """
        saved = state_dict["param_groups"]
        _require_as_many_weights(saved, self.param_groups)
        groups = [
            {**current, **loaded} for current, loaded in zip(self.param_groups, saved, strict=True)
        ]
        states: dict[Tensor, dict[str, Any]] = {}
        for group, current in zip(groups, self.param_groups, strict=True):
            self.require_group({**group, "params": current["params"]})
            for index, weight in zip(group["params"], current["params"], strict=True):
                if state := state_dict["state"].get(index):
                    states[weight] = self._copy_state(state, weight, group, states.values())
        return {"state": states, "param_groups": groups}

    def _copy_state(
        self, state: dict[str, Any], weight: Tensor, group: dict[str, Any], others: Iterable[State]
    ) -> State:
        copy = self._new_state(weight, group, others)
        wanted, got = _shapes(copy), _shapes(state)
        if got != wanted:
            raise ValueError(
                f"got a state of {_format_shapes(got)} for a weight of shape "
                f"{tuple(weight.shape)}, whose state has {_format_shapes(wanted)}; give the state "
                f"of {type(self).__name__} on the same weights in the same order"
            )
        for name, tensor in copy.items():
            copy[name] = (
                tensor.copy_(state[name]) if isinstance(tensor, Tensor) else int(state[name])
            )
        return copy

    def _new_state(self, weight: Tensor, group: dict[str, Any], others: Iterable[State]) -> State:
        state: State = {"step": 0}
        for moment in self.moments(weight, group):
            state.update(moment.new(weight, others))
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Add this class's attributes to torch's, for copies and pickles."""
        return {**super().__getstate__(), "generator": self.generator, "chunk": self.chunk}


def require_dense(gradient: Tensor | None) -> Tensor:
    """Return the gradient; raise TypeError if it is sparse."""
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise TypeError(
            "got a sparse gradient; give the layer sparse=False, or its weights to "
            "torch.optim.SparseAdam"
        )
    return gradient


def _require_floats(weight: Tensor, rounding: str) -> None:
    if not weight.is_floating_point():
        raise TypeError(f"got weights of {weight.dtype}; give floating-point weights")
    if rounding == "stochastic" and weight.dtype == torch.float16:
        raise TypeError(
            "got weights of torch.float16 to round stochastically; give bfloat16 weights, or "
            "rounding='nearest'"
        )


def _require_as_many_weights(
    saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]
) -> None:
    got, wanted = ([len(group["params"]) for group in found] for found in (saved, groups))
    if got != wanted:
        raise ValueError(
            f"got a state with groups of {got} weights for groups of {wanted}; give a state "
            f"with the same groups"
        )


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}


def _format_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" if shape else name for name, shape in shapes.items())


_MOMENT_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)
_SETTINGS = ("lr", "betas", "weight_decay", "eps", "momentum")


def _with_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the group with Python numbers for tensors of one element, such as an lr."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return {**tree_map_only(Tensor, float, settings), "params": group["params"]}


def require_settings(
    lr: Any, weight_decay: Any, betas: Any = (), eps: Any = 0.0, momentum: Any = 0.0
) -> None:
    """Raise ValueError or TypeError for invalid settings."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if not 0 <= number(name, value) < math.inf:
            raise ValueError(f"got {name}={value}; give at least 0, and a finite number")
    if not 0 <= number("momentum", momentum) < 1:
        raise ValueError(f"got momentum={momentum}; give a number from 0 to below 1")
    if betas == ():
        return  # this optimizer has none
    if not isinstance(betas, Sequence) or isinstance(betas, str):
        raise TypeError(f"got betas={betas!r}; give two numbers, such as (0.9, 0.999)")
    if len(betas) != 2 or not all(0 <= number("betas", beta) < 1 for beta in betas):
        raise ValueError(f"got betas={betas}; give two of at least 0 and less than 1")


_UNSUPPORTED = {
    "amsgrad": "it keeps a third moment; use torch.optim.AdamW for it",
    "capturable": "a step here reads its count on the host, so a CUDA graph cannot record it",
    "differentiable": "a step here runs in place, without a graph",
}


def require_off(optimizer: str, settings: dict[str, Any]) -> None:
    """Accept torch's switches only as False."""
    for name, value in settings.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"{optimizer} got an unexpected argument {name!r}={value!r}")
        require_bools(**{name: value})
        if value:
            raise ValueError(f"{optimizer} got {name}=True: {_UNSUPPORTED[name]}; leave it out")


def _require_each_once(group: dict[str, Any]) -> None:
    """Raise ValueError for a parameter given twice, which would be stepped twice."""
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
