"""An optimizer whose state is in a store; it steps one sub-group of weights at a time.

Saves    the state of all but two sub-groups: 8 bytes a weight for AdamW. With `weights`, also the
         float32 copies of low-precision weights; with `gradients`, also the gradients.
Costs    moving the state both ways in every step: 8 bytes a weight read and 8 written, or 12 and 12
         with float32 weights. A step on the host moves 2 bytes of gradient down and 2 of weight up
         in 16 bits, but the host computes more slowly.
Source   Ren et al. 2021 (ZeRO-Offload), arXiv 2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity),
         arXiv 2104.07857, section 5.

Adds to memlab.reference.offloaded_optimizer: any optimizer, sub-groups of any size, weights and
gradients in the store, stores on disk with prefetching, steps on the host, and commits that survive
a kill.

    store = DiskStore("run/state")
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), store, weights=True)
    for step in range(optimizer.resume(), steps):       # 0, or the step of the last commit
        torch.manual_seed(step)                         # makes random numbers depend on the step
        loss_of(model, batches[step]).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()                                # ends with a commit
        optimizer.zero_grad()

One step, for sub-groups 0, 1, 2, …:

    device     step 0            step 1            step 2
    store      read 1            write 0, read 2   write 1, read 3

So at most two sub-groups of state are on the device. The inner optimizer steps its own tensors: any
optimizer of torch or memlab.optim that steps weights separately works, with identical results.
Step counters, one per weight, stay in memory.

With `weights`, the store holds master weights in at least float32. The optimizer steps these, and
the model's weights are rounded copies. For a float32 model, both have the same values; this is
useful for a DiskStore, which then contains the whole training. Every `commit_every` steps end with
a commit: weights, state, group settings (such as a scheduler's learning rate) and the step count
are saved to disk together. Without `weights`, the store has only the state. Load the model's
weights from your own checkpoint of the step that `resume()` returns.

`on="device"` moves the state to the weights. `on="host"` moves gradients to the state and the
stepped weights back; this is ZeRO-Offload, and requires `weights`.

With `gradients`, each gradient moves to the store as soon as backward has computed it, and is added
to the stored one. `.grad` is None after backward, so `torch.nn.utils.clip_grad_norm_` and
GradScaler find no gradients. Use `optimizer.clip_grad_norm_`: it uses norms recorded as the
gradients arrived, and the step applies the factor.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memlab.internals.closures import require_no_closure
from memlab.internals.shards import require_no_dtensors
from memlab.internals.torch_internals import FakeTensor
from memlab.offload.gradients import StoredGradients, precise_dtype
from memlab.offload.layers import is_offloaded, stream_of
from memlab.offload.stores import Store, StoreError
from memlab.offload.sub_groups import WEIGHT, State, SubGroup, WeightIndex, sub_groups

SUB_GROUP = 2**24  # elements: their two float32 moments are 128 MiB


class OffloadedOptimizer(torch.optim.Optimizer):
    """Wrap `optimizer` and keep its state in `store`.

    sub_group      maximum elements stepped at once; a larger weight is a sub-group alone
    gradients      whether gradients move to the store; then `.grad` is None, and gradients must be
                   clipped by this class's clip_grad_norm_
    weights        whether the store holds the master weights
    on             where the step runs: "device", with the weights, or "host"
    commit_every   steps between commits, if the store is persistent

    Schedulers and scalers can use it like any Optimizer; it shares the groups of `optimizer`.
    Raises TypeError for an optimizer that does not step weights separately, or whose state has
    other objects than numbers and tensors; ValueError for incompatible settings; StoreError for a
    store of another training.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Store,
        *,
        sub_group: int = SUB_GROUP,
        gradients: bool = False,
        weights: bool = False,
        on: Literal["device", "host"] = "device",
        commit_every: int = 1,
    ) -> None:
        _require_store(store)
        _require_steps_by_weight(optimizer)
        _require_settings(sub_group, weights, on, commit_every)
        self.optimizer, self.store, self.on = optimizer, store, on
        self.offloads_gradients, self.offloads_weights = gradients, weights
        self.commit_every, self.steps = commit_every, 0
        self.__setstate__({"defaults": optimizer.defaults})  # sets up hooks, as in torch's init
        sizes = [[w.numel() for w in group["params"]] for group in self.param_groups]
        self._sub_groups = [
            SubGroup(f"optimizer/{number}", run, [self._weight(place) for place in run])
            for number, run in enumerate(sub_groups(sizes, sub_group))
        ]
        self._broken = ""  # why it cannot step
        self._gradients = StoredGradients(store, borrows=self._borrows, precise=weights)
        store.claim("optimizer", self._fingerprint(sub_group), self)
        if gradients:
            for group in self._sub_groups:
                self._gradients.watch(group.places, group.weights)
        if store.step is not None:
            self._broken = (
                f"the store holds step {store.step} of this training; call resume() to continue "
                f"from it, or pass an empty store"
            )
        else:
            self._store_weights()

    # -------------------------------------------------------------- the Optimizer interface

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param_groups of the inner optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state on the device; empty between steps."""
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the sub-groups are fixed."""
        raise ValueError(
            "an offloaded optimizer cannot add groups; pass all groups to the optimizer before"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those in the store."""
        self.optimizer.zero_grad(set_to_none)
        self._gradients.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every weight that has a gradient, and commit; return the closure's result.

        If a step fails, only some weights have been stepped. It then refuses to step until
        `resume()` or `load_state_dict()`.
        """
        if self._broken:
            raise StoreError(self._broken)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._store_gradients()
        stepped = [group for group in self._sub_groups if self._has_gradient(group)]
        try:
            self._step_all(stepped)
            if not self._is_dry(stepped):
                self.steps += 1
                if self.steps % self.commit_every == 0:
                    self.commit()
        except BaseException as error:
            self._broken = (
                f"a step failed ({type(error).__name__}) after stepping some weights; call "
                f"resume(), or load_state_dict() with the weights of the same step"
            )
            raise
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip all gradients to norm `max_norm`; return the norm before clipping."""
        if not self.offloads_gradients:
            weights = [w for group in self.param_groups for w in group["params"]]
            return torch.nn.utils.clip_grad_norm_(weights, max_norm)
        self._store_gradients()
        return self._gradients.clip_norm_(max_norm)

    # -------------------------------------------------------------- save and restore

    def commit(self) -> None:
        """Commit this step, if the store is persistent."""
        settings = [_plain_settings({k: v for k, v in group.items() if k != "params"})
                    for group in self.param_groups]  # fmt: skip
        self.store.commit(self.steps, {"groups": settings})

    @torch.no_grad()
    def resume(self) -> int:
        """Return to the store's last commit; return its number of steps.

        Restores state, settings and, with `weights`, the model's weights. Without any commit, does
        nothing and returns 0; raises ValueError if steps were taken.
        """
        store = self.store
        if store.step is None:
            if self._broken or self.steps:
                raise ValueError("there is no commit to return to; make a new model and optimizer")
            return 0
        store.rollback()
        try:
            self._restore()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._broken = (
                f"the last commit is not a state of this optimizer ({error}); restore a copy of "
                f"its folder, or start in an empty one"
            )
            raise StoreError(self._broken) from error
        self.steps, self._broken = store.step, ""
        self._gradients.clear()
        return self.steps

    def _restore(self) -> None:
        """Read settings, state and, with `weights`, the model's weights from the last commit."""
        store = self.store
        for group, kept in zip(self.param_groups, store.notes["groups"], strict=True):
            group.update({k: _like(group.get(k), v) for k, v in kept.items()})
        for sub_group in self._sub_groups:
            sub_group.restore(store.about(sub_group.key) if sub_group.key in store else None)
            if self.offloads_weights:
                states = self._load_states(sub_group)
                self._update_model(sub_group, [state[WEIGHT] for state in states])

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict, on the host; it can load it without offloading.

        With `weights`, "masters" has the master weights, in the order of the groups.
        """
        packed = {"state": {}, "param_groups": self.optimizer.state_dict()["param_groups"]}
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        masters = []
        for sub_group in self._sub_groups:
            for place, state in zip(
                sub_group.places, self._load_states(sub_group, "cpu"), strict=True
            ):
                masters += [state.pop(WEIGHT)] if self.offloads_weights else []
                if state:
                    packed["state"][numbers[place.number]] = {
                        name: kept.clone() if isinstance(kept, Tensor) and kept.dim() == 0 else kept
                        for name, kept in state.items()
                    }
        return {**packed, "masters": masters} if self.offloads_weights else packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the inner optimizer, one sub-group at a time.

        A state without master weights uses the model's weights.
        """
        saved = state_dict["param_groups"]
        got, wanted = ([len(group["params"]) for group in g] for g in (saved, self.param_groups))
        if got != wanted:
            raise ValueError(
                f"got a state of groups of {got} weights for groups of {wanted}; pass the state of "
                f"an optimizer with the same groups"
            )
        numbers = [number for group in saved for number in group["params"]]
        masters = state_dict.get("masters")
        settings: list[dict[str, Any]] = [{} for _ in saved]
        for sub_group in self._sub_groups:
            params = sub_group.weights
            if self.offloads_weights:
                given = [masters[p.number] for p in sub_group.places] if masters else params
                params = [nn.Parameter(copy) for copy in self._master_copies(sub_group, given)]
            states = (state_dict["state"].get(numbers[p.number]) for p in sub_group.places)
            state = {n: state for n, state in enumerate(states) if state is not None}
            number = sub_group.places[0].group
            group = {**saved[number], "params": list(range(len(params)))}
            with self._only(sub_group, params):
                self.optimizer.load_state_dict({"state": state, "param_groups": [group]})
                settings[number] = self.optimizer.param_groups[0]
                self._evict(sub_group, params)
            if self.offloads_weights:
                self._update_model(sub_group, [param.detach() for param in params])
        for group, loaded in zip(self.param_groups, settings, strict=True):
            group.update({k: v for k, v in loaded.items() if k not in ("params", "param_names")})
        self._gradients.clear()
        self._broken = ""

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: two optimizers cannot share one store."""
        raise TypeError(
            "an offloaded optimizer cannot be copied or pickled, because its state lies in its "
            "store; copy its state_dict(), or make another optimizer with its own store"
        )

    def remove(self) -> None:
        """Leave gradients in `.grad` again; the store keeps its contents."""
        self._gradients.remove()

    # -------------------------------------------------------------- one step

    def _step_all(self, stepped: list[SubGroup]) -> None:
        for first in stepped[:1]:
            self._prefetch(first)
        for group, following in zip_longest(stepped, stepped[1:]):
            self._step_group(group, following)
        self._gradients.clear()

    def _step_group(self, sub_group: SubGroup, following: SubGroup | None) -> None:
        """Step one sub-group while the following one is prefetched, and store its state."""
        states = self._load_states(sub_group)
        if following is not None:
            self._prefetch(following)
        params = sub_group.weights
        if self.offloads_weights:
            params = [nn.Parameter(state.pop(WEIGHT)) for state in states]
        with self._only(sub_group, params):
            for weight, param, place in zip(
                sub_group.weights, params, sub_group.places, strict=True
            ):
                if (gradient := self._gradient(weight, param, place)) is not None:
                    param.grad = gradient
                    del gradient
            # Set the state after a dry run's hooks, which would keep it alive.
            with self.optimizer.register_step_pre_hook(partial(_set_state, params, states)):
                self.optimizer.step()
            del states
            if self.offloads_weights or self.offloads_gradients:
                for param in params:
                    param.grad = None
            self._evict(sub_group, params)
        if self.offloads_weights:
            self._update_model(sub_group, [param.detach() for param in params])

    def _gradient(self, weight: Tensor, param: Tensor, place: WeightIndex) -> Tensor | None:
        """Return the gradient in the dtype and on the device of the step."""
        if self.offloads_gradients:
            return self._gradients.get(place, param)
        if weight.grad is None or weight is param:
            return weight.grad
        if self._borrows:
            self.store.traffic.written += weight.grad.nbytes
        return weight.grad.to(param.device).to(param.dtype)

    def _update_model(self, sub_group: SubGroup, masters: list[Tensor]) -> None:
        """Write the stepped weights to the model, rounded to its dtype."""
        for weight, master in zip(sub_group.weights, masters, strict=True):
            rounded = master.to(weight.dtype)
            if self._borrows:
                self.store.traffic.read += weight.nbytes
            if (stream := stream_of(weight)) is not None and is_offloaded(weight):
                stream.replace(weight, rounded)
            else:
                weight.copy_(rounded)

    def _master_copies(self, sub_group: SubGroup, weights: list[Tensor]) -> list[Tensor]:
        """Return master weights for these weights."""
        device, models = self._device(sub_group), sub_group.weights
        copies = []
        for weight, model in zip(weights, models, strict=True):
            stream = stream_of(weight) if is_offloaded(weight) else None
            values = weight.detach() if stream is None else stream.read_weight(weight)
            copies.append(values.to(device, precise_dtype(model), copy=stream is None))
        return copies

    # -------------------------------------------------------------- move state

    @property
    def _borrows(self) -> bool:
        """Whether the step uses the store's own tensors, without moving them."""
        return self.on == "host" and self.store.is_memory

    def _store_weights(self) -> None:
        """Put master weights into the store."""
        for sub_group in self._sub_groups:
            weights = sub_group.weights
            sub_group.small = [{} for _ in weights]
            if self.offloads_weights:
                copies = self._master_copies(sub_group, weights)
                self._evict(sub_group, copies)

    def _prefetch(self, sub_group: SubGroup) -> None:
        if self._borrows:
            return
        if sub_group.layout:
            self.store.prefetch(sub_group.key, device=self._device(sub_group))
        for place in sub_group.places:
            self._gradients.prefetch(place, self._device(sub_group))

    def _load_states(self, sub_group: SubGroup, device: Any = None) -> list[State]:
        """Load the state of each weight of a sub-group."""
        if not sub_group.layout:
            return sub_group.unpack([])
        if self._borrows:
            return sub_group.unpack(self.store.lend(sub_group.key))
        where = device or self._device(sub_group)
        return sub_group.unpack(self.store.get(sub_group.key, device=where))

    def _evict(self, sub_group: SubGroup, params: list[Tensor]) -> None:
        """Move the state of these weights from the optimizer to the store."""
        states = [self.optimizer.state.pop(param, {}) for param in params]
        if self.offloads_weights:
            pairs = zip(params, states, strict=True)
            states = [{WEIGHT: param.detach(), **state} for param, state in pairs]
        tensors = sub_group.pack(states, type(self.optimizer).__name__)
        if not tensors:
            return
        if self._borrows:
            self.store.keep(sub_group.key, tensors)
        else:
            self.store.put(sub_group.key, tensors, lasting=True, about=sub_group.to_json())

    @contextmanager
    def _only(self, sub_group: SubGroup, params: list[Tensor]) -> Iterator[None]:
        """Temporarily give the optimizer only these weights, without state."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        whole = groups[sub_group.places[0].group]
        group = {**whole, "params": list(params)}
        if names := whole.get("param_names"):
            group["param_names"] = [names[place.position] for place in sub_group.places]
        before = dict(group)
        optimizer.param_groups = [group]
        optimizer.state = defaultdict(dict)
        try:
            yield
        finally:
            optimizer.param_groups, optimizer.state = groups, defaultdict(dict)
        if changed := [name for name in group if group[name] is not before.get(name)]:
            raise TypeError(
                f"got {type(optimizer).__name__}, whose step changes its group's "
                f"{', '.join(changed)} for all weights at once; use it without offloading"
            )

    def _store_gradients(self) -> None:
        """Store gradients that were set without a backward pass."""
        if self.offloads_gradients:
            for sub_group in self._sub_groups:
                for place, weight in zip(sub_group.places, sub_group.weights, strict=True):
                    self._gradients.store_gradient(place, weight)

    def _has_gradient(self, sub_group: SubGroup) -> bool:
        if self.offloads_gradients:
            return any(place in self._gradients for place in sub_group.places)
        return any(weight.grad is not None for weight in sub_group.weights)

    # -------------------------------------------------------------- the weights

    def _weight(self, place: WeightIndex) -> Tensor:
        return self.param_groups[place.group]["params"][place.position]

    def _device(self, sub_group: SubGroup) -> torch.device:
        """Return the device of the sub-group's step."""
        weight = sub_group.weights[0]
        return torch.device("cpu") if self.on == "host" else weight.device

    def _is_dry(self, stepped: list[SubGroup]) -> bool:
        weights = (weight for group in stepped for weight in group.weights)
        return any(isinstance(t, FakeTensor) for w in weights for t in (w, w.grad))

    def _fingerprint(self, sub_group: int) -> str:
        """Describe everything that must match for a stored state to fit."""
        shapes = [
            [[list(weight.shape), str(weight.dtype)] for weight in group["params"]]
            for group in self.param_groups
        ]
        numbers = sum(w.numel() for group in self.param_groups for w in group["params"])
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
        return (
            f"{type(self.optimizer).__name__} of {numbers:,} weights in shapes {digest}, "
            f"sub_group={sub_group}, weights={self.offloads_weights}"
        )


def _set_state(params: list[Tensor], states: list[dict[Any, Any]], optimizer: Any, *_: Any) -> None:
    """Set the optimizer's state for these weights."""
    optimizer.state.update({w: state for w, state in zip(params, states, strict=True) if state})


# ------------------------------------------------------------------ settings as plain data


def _plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the plain-data settings; tensors and functions cannot be committed."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    return {name: value for name, value in settings.items() if is_plain(value)}


def _like(now: Any, kept: Any) -> Any:
    return tuple(kept) if isinstance(now, tuple) else kept


# ------------------------------------------------------------------ argument checks


def _require_settings(sub_group: int, weights: bool, on: str, commit_every: int) -> None:
    if sub_group < 1:
        raise ValueError(f"got sub-groups of {sub_group} elements; pass at least 1")
    if commit_every < 1:
        raise ValueError(f"got commit_every={commit_every}; pass at least 1")
    if on not in ("device", "host"):
        raise ValueError(f"got on={on!r}; pass 'device' or 'host'")
    if on == "host" and not weights:
        raise ValueError(
            "got on='host' without weights=True: a step on the host needs weights there; pass "
            "weights=True, or on='device'"
        )


def _require_store(store: Any) -> None:
    if not isinstance(store, Store):
        raise TypeError(
            f"got {store!r} as the store; pass a memlab.offload.DiskStore(folder), or a HostStore()"
        )


def _require_steps_by_weight(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got {type(optimizer).__name__}, which is not a torch.optim.Optimizer; for a model in "
            f"low precision pass an optimizer of its own weights, and weights=True"
        )
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    require_no_dtensors("an offloaded optimizer", weights)
    if optimizer.state:
        raise ValueError(
            f"got {type(optimizer).__name__} that has stepped already; offload it before its first "
            f"step, and load its state with load_state_dict"
        )
    require_no_closure(optimizer)
