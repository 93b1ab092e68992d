"""Dynamic loss scaling: keep float16 gradients from becoming zero.

Saves    nothing itself: it makes float16 gradients, half the bytes of float32, usable.
Costs    a check of every gradient, and a skipped step now and then.
Source   Micikevicius et al. 2018, arXiv 1710.03740, section 3.2; decisions and state as in
         torch.amp.GradScaler.

memlab.reference.loss_scaling is the short version. This file adds scale(), unscale_(), step(),
update() and the state as in torch.amp.GradScaler, several optimizers, sparse gradients, DTensors
(all ranks skip a step together), and a floor below which the scale raises an error.

The smallest positive float16 is 6e-8. Gradients of large models are often smaller and become zero.
Multiplying the loss by a scale multiplies all gradients by it. Before the step, the gradients are
divided by the scale in float32. The scale is kept as large as possible:

    some gradient is inf or nan     skip the step, scale × 0.5
    2000 finite steps in a row      scale × 2

    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)      # only if you use gradients before the step, as in clipping
    scaler.step(optimizer)          # skips the step after an overflow
    scaler.update()                 # once, after all optimizers

bfloat16 has float32's range and needs no loss scaling.
"""

from ctypes import c_float
from enum import Enum, auto
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from memlab.internals.settings import number, require_counts
from memlab.internals.shards import is_true_on_any_rank, shard_of
from memlab.precision.master import MasterWeights


class Stage(Enum):
    """What was done with an optimizer since the last update."""

    READY = auto()
    UNSCALED = auto()
    STEPPED = auto()


class LossScaler:
    """Scale losses, unscale gradients, skip steps that overflowed, and adjust the scale.

    Raise an error below `floor`. torch's scaler keeps halving down to 0.0 after 200 overflows and
    then trains nothing, silently. With `enabled=False`, step() steps the optimizer and the other
    methods do nothing.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        floor: float = 2.0**-14,
        enabled: bool = True,
    ) -> None:
        self._floor, self._enabled = number("floor", floor), enabled
        self._set(scale, growth_factor, backoff_factor, growth_interval)
        self._stages: dict[int, Stage] = {}  # by optimizer
        self._overflowed: dict[int, bool] = {}

    def get_scale(self) -> float:
        """Return the factor that losses are multiplied by."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return self._enabled

    def scale(self, loss: Any) -> Any:
        """Return a loss, or each of a list or tuple, times the scale. A float16 scalar becomes
        float32."""
        if not self._enabled:
            return loss
        if isinstance(loss, (list, tuple)):
            return type(loss)(map(self.scale, loss))
        if not isinstance(loss, Tensor):
            raise TypeError(f"got {type(loss).__name__}; give a tensor, or a list or tuple of them")
        # float32, because float16 ends at 65,504: neither a float16 loss nor a sum of losses, whose
        # gradient is 1 per token, can be scaled by 2¹⁶.
        return loss * torch.tensor(self._scale, dtype=torch.float32, device=loss.device)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place, and record any inf or nan.

        MasterWeights gathers its gradients first. Raise ValueError if there are no gradients, or
        float16 gradients, which would underflow again. Raise RuntimeError if they are already
        unscaled.
        """
        if not self._enabled:
            return
        self._require(optimizer, Stage.READY, "unscale_() was called already")
        if isinstance(optimizer, MasterWeights):
            optimizer.gather_gradients()
        gradients = _gradients(optimizer)
        if not gradients:
            raise ValueError(
                "no weight of the optimizer has a gradient to unscale; call it after backward, "
                "without an optimizer that steps inside backward: it would use scaled gradients"
            )
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError(
                "got float16 gradients, whose unscaled values underflow; keep the weights in "
                "float32 under autocast, or step float32 copies of them (MasterWeights)"
            )
        overflowed = not all(map(_is_finite, map(shard_of, gradients)))
        self._overflowed[id(optimizer)] = is_true_on_any_rank(overflowed, gradients)
        inverse = _float32(1 / self._scale)
        for gradient in gradients:
            gradient.mul_(inverse)
        self._stages[id(optimizer)] = Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless a gradient is inf or nan. Return its result.

        Raise RuntimeError for a closure, whose gradients would be scaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if any(map(callable, (*args, kwargs.get("closure")))):
            raise RuntimeError(
                "got a closure, whose backward pass would give the optimizer scaled gradients; "
                "call backward before step(optimizer), or use bfloat16, which needs no scale"
            )
        if self._stages.get(id(optimizer), Stage.READY) is Stage.READY:
            self.unscale_(optimizer)
        self._require(optimizer, Stage.UNSCALED, "step() was called already")
        self._stages[id(optimizer)] = Stage.STEPPED
        return None if self._overflowed[id(optimizer)] else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Adjust the scale by the overflows since the last update, across all optimizers.

        Raise RuntimeError if nothing was unscaled, and OverflowError below the floor.
        """
        if not self._enabled:
            return
        if not self._overflowed:
            raise RuntimeError("nothing was unscaled since the last update; call step(optimizer)")
        overflowed = any(self._overflowed.values())
        self._stages.clear()
        self._overflowed.clear()
        if overflowed:
            self._back_off()
        else:
            self._finite_steps += 1
            if self._finite_steps == self._growth_interval:
                self._grow()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch.amp.GradScaler's format, empty if it is not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._finite_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of this class or of torch.amp.GradScaler.

        Raise ValueError for one whose scale is below the floor, as torch's may be.
        """
        if not self._enabled:
            return
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(
                f"got a state without {', '.join(sorted(missing))}; give the state_dict() of a "
                f"LossScaler or an enabled torch.amp.GradScaler"
            )
        self._set(**{name.removeprefix("_"): state[name] for name in self.state_dict()})

    # -------------------------------------------------------------- the scale

    def _set(
        self,
        scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        growth_tracker: int = 0,
    ) -> None:
        require_counts(growth_interval=growth_interval)
        if type(growth_tracker) is not int or growth_tracker < 0:
            raise ValueError(f"got growth_tracker={growth_tracker!r}; give an integer from 0")
        scale, growth = number("scale", scale), number("growth_factor", growth_factor)
        backoff = number("backoff_factor", backoff_factor)
        if not inf > growth > 1 > backoff > 0:
            raise ValueError(
                f"got growth_factor={growth} and backoff_factor={backoff}; give a finite number "
                f"above 1, and one between 0 and 1"
            )
        if not inf > _float32(scale) >= self._floor >= 0:
            raise ValueError(
                f"got scale={scale} and floor={self._floor:g}; give a finite scale of at least "
                f"floor"
            )
        self._scale, self._growth_factor, self._backoff_factor = _float32(scale), growth, backoff
        self._growth_interval = growth_interval
        self._finite_steps = growth_tracker  # in a row, since the scale last changed

    def _back_off(self) -> None:
        scale = _float32(self._scale * self._backoff_factor)
        if scale < self._floor:
            raise OverflowError(
                f"the gradients still overflow at a scale of {self._scale:g}, and {scale:g} would "
                f"be below the floor of {self._floor:g}: look for inf or nan in the loss itself, "
                f"lower the learning rate, or train in bfloat16, which needs no scale"
            )
        self._scale, self._finite_steps = scale, 0

    def _grow(self) -> None:
        scale = _float32(self._scale * self._growth_factor)
        self._scale = scale if isfinite(scale) else self._scale
        self._finite_steps = 0

    def _require(self, optimizer: torch.optim.Optimizer, stage: Stage, otherwise: str) -> None:
        if self._stages.get(id(optimizer), Stage.READY) is not stage:
            raise RuntimeError(f"{otherwise} for this optimizer since the last update()")


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients; of a sparse one its values, after it has been coalesced."""
    gradients = []
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if weight.grad is None:
            continue
        if weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()  # the sums of a row's values may overflow
        is_strided = weight.grad.layout is torch.strided
        gradients.append(weight.grad if is_strided else weight.grad.values())
    return gradients


def _is_finite(gradient: Tensor) -> bool:
    """Check in one pass without a temporary: min and max reveal inf, and both are nan for nan."""
    # `vector_norm(inf)` is 20 × slower on a CPU: with it, this scaler took 15 × the time of torch's
    # GradScaler, with `aminmax` 1.5 × (benchmarks/precision.py).
    return not gradient.numel() or all(isfinite(n.item()) for n in torch.aminmax(gradient))


def _float32(number: float) -> float:
    """Round to float32, the dtype of torch's scale."""
    return c_float(number).value
