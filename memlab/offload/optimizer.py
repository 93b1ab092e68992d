"""An optimizer whose state lives in a store: a sub-group of weights is stepped at a time.

Saves    the state, but for two sub-groups of it: 8 bytes a weight of AdamW's. With `weights`, the
         float32 copies of low-precision weights too; with `gradients`, those.
Costs    the state there and back in every step: 8 bytes a weight read and 8 written, or, with
         float32 weights beside two moments, 12 and 12. Stepped on the host: 2 bytes of gradient
         down and 2 of weight up, in 16 bits; and the host is slower at arithmetic.
Source   Ren et al. 2021 (ZeRO-Offload), arXiv 2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity),
         arXiv 2104.07857, section 5.

Adds to memlab.reference.offloaded_optimizer: any optimizer, sub-groups of any size, the weights and
the gradients in the store too, stores on disk with prefetch, steps on the host, and commits that
survive a kill.

    store = DiskStore("run/state")
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), store, weights=True)
    for step in range(optimizer.resume(), steps):       # 0, or where the last process ended
        torch.manual_seed(step)                         # all that is drawn follows from the number
        loss_of(model, batches[step]).backward()        # … and so does the data
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()                                # ends with a commit
        optimizer.zero_grad()

One step, for the sub-groups 0, 1, 2, …:

    device     step 0            step 1            step 2
    store      read 1            write 0, read 2   write 1, read 3

so at most two sub-groups of state are on the device. The steps are the optimizer's own, on its own
tensors: any of torch's or of memlab.optim that steps weight by weight, with the same numbers to the
bit. Counts of steps, a number a weight, stay where they are.

With `weights`, the store holds the weights by which is stepped, in float32 at least, and the
model's are copies, rounded to its dtype. Of a float32 model they are the same twice: that is for a
DiskStore, which then holds all of the training. Each `commit_every`-th step ends with a commit:
weights, state, the settings of the groups (a scheduler's learning rate among them) and the number
of steps are on the disk together, or those of the commit before are. Without `weights` the
store has the state alone, and the model's weights have to come from a checkpoint of yours, made
after the same number of steps: `resume()` says of how many.

Where it steps: `on="device"` brings the state to the weights, `on="host"` the gradients to the
state, and the stepped weights back. That is ZeRO-Offload, and wants `weights`.

With `gradients`, each goes to the store as soon as backward has made it, and is added there if
there is one already: `.grad` is None after backward. So `torch.nn.utils.clip_grad_norm_` would find
nothing to clip, and a GradScaler nothing to look at; `optimizer.clip_grad_norm_` knows the norms,
which were taken as the gradients came, and the factor waits for the step.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memlab.internals.closures import require_no_closure
from memlab.internals.torch_internals import FakeTensor
from memlab.offload.gradients import StoredGradients, precise_dtype
from memlab.offload.layers import away, stream_of
from memlab.offload.stores import Store, StoreError
from memlab.offload.sub_groups import WEIGHT, Place, State, SubGroup, sub_groups

SUB_GROUP = 2**24  # numbers: AdamW's two float32 moments of them are 128 MiB


class OffloadedOptimizer(torch.optim.Optimizer):
    """`optimizer`, its state in `store`.

    sub_group      numbers of the weights that are stepped at once, at most, unless one is larger
    gradients      whether gradients go to the store as they come; `.grad` is None then, and torch's
                   clip_grad_norm_ clips nothing: use this one's
    weights        whether the store holds the weights by which is stepped
    on             where the step is computed: "device", where the weights are, or "host"
    commit_every   steps from one commit to the next, where the store lasts

    It is an Optimizer to schedulers and scalers; its groups are those of `optimizer`. Raises
    TypeError for what doesn't step weight by weight, and for a state that is not numbers and
    tensors; ValueError for settings that don't go together; StoreError for a store of another
    training.
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
        self.__setstate__({"defaults": optimizer.defaults})  # hooks, as torch's have
        sizes = [[w.numel() for w in group["params"]] for group in self.param_groups]
        self._sub_groups = [
            SubGroup(f"optimizer/{number}", run, [self._weight(place) for place in run])
            for number, run in enumerate(sub_groups(sizes, sub_group))
        ]
        self._broken = ""  # why it can't go on
        self._gradients = StoredGradients(store, borrows=self._borrows, precise=weights)
        store.claim("optimizer", self._fingerprint(sub_group), self)
        if gradients:
            for group in self._sub_groups:
                self._gradients.watch(group.places, group.weights)
        if store.step is not None:
            self._broken = (
                f"the store holds step {store.step} of this training; call resume() to go on from "
                f"it, or give an empty store"
            )
        else:
            self._take_over()

    # -------------------------------------------------------------- as other optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's own, live."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """What of the state is on the device: between steps, nothing."""
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the sub-groups are settled."""
        raise ValueError(
            "an offloaded optimizer takes no more groups; give all of them to the optimizer before"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those in the store too."""
        self.optimizer.zero_grad(set_to_none)
        self._gradients.forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every weight that has a gradient, and commit; returns what the closure returns.

        If it breaks off, some weights have been stepped and others not: it won't step again before
        `resume()` or `load_state_dict()`.
        """
        if self._broken:
            raise StoreError(self._broken)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_gradients()
        stepped = [group for group in self._sub_groups if self._with_gradient(group)]
        try:
            self._step_all(stepped)
            if not self._is_dry(stepped):
                self.steps += 1
                if self.steps % self.commit_every == 0:
                    self.commit()
        except BaseException as error:
            self._broken = (
                f"a step broke off ({type(error).__name__}), after some of the weights; call "
                f"resume(), or load_state_dict() with the weights of the same step"
            )
            raise
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; their norm before."""
        if not self.offloads_gradients:
            weights = [w for group in self.param_groups for w in group["params"]]
            return torch.nn.utils.clip_grad_norm_(weights, max_norm)
        self._take_gradients()
        return self._gradients.clip_norm_(max_norm)

    # -------------------------------------------------------------- from one process to the next

    def commit(self) -> None:
        """Let the store keep this step, where it lasts."""
        settings = [_plain({k: v for k, v in group.items() if k != "params"})
                    for group in self.param_groups]  # fmt: skip
        self.store.commit(self.steps, {"groups": settings})

    @torch.no_grad()
    def resume(self) -> int:
        """Go back to the store's last commit; the number of steps that were taken until then.

        State, settings and, with `weights`, the model's weights are as they were then. 0, and
        nothing happens, if nothing was ever committed; ValueError if steps were taken since.
        """
        store = self.store
        if store.step is None:
            if self._broken or self.steps:
                raise ValueError(
                    "there is no commit to go back to; build the model and the optimizer anew"
                )
            return 0
        store.rollback()
        for group, kept in zip(self.param_groups, store.notes["groups"], strict=True):
            group.update({k: _like(group.get(k), v) for k, v in kept.items()})
        for sub_group in self._sub_groups:
            sub_group.know(store.about(sub_group.key) if sub_group.key in store else None)
            if self.offloads_weights:
                states = self._brought(sub_group)
                self._hand_over(sub_group, [state[WEIGHT] for state in states])
        self.steps, self._broken = store.step, ""
        self._gradients.forget()
        return self.steps

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's own, its tensors on the host: it may be loaded without offloading.

        With `weights`, those by which is stepped are in it, in the order of the groups.
        """
        packed = {"state": {}, "param_groups": self.optimizer.state_dict()["param_groups"]}
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        masters = []
        for sub_group in self._sub_groups:
            for place, state in zip(sub_group.places, self._brought(sub_group, "cpu"), strict=True):
                masters += [state.pop(WEIGHT)] if self.offloads_weights else []
                if state:
                    packed["state"][numbers[place.number]] = {
                        name: kept.clone() if isinstance(kept, Tensor) and kept.dim() == 0 else kept
                        for name, kept in state.items()
                    }
        return {**packed, "masters": masters} if self.offloads_weights else packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, of this or of the optimizer itself; a sub-group at a time.

        Without the weights by which is stepped, those of the model are taken.
        """
        saved = state_dict["param_groups"]
        got, wanted = ([len(group["params"]) for group in g] for g in (saved, self.param_groups))
        if got != wanted:
            raise ValueError(
                f"got a state of groups of {got} weights for groups of {wanted}; give the state of "
                f"an optimizer of the same groups"
            )
        numbers = [number for group in saved for number in group["params"]]
        masters = state_dict.get("masters")
        settings = [{} for _ in saved]
        for sub_group in self._sub_groups:
            works = sub_group.weights
            if self.offloads_weights:
                given = [masters[p.number] for p in sub_group.places] if masters else works
                works = [nn.Parameter(copy) for copy in self._copies(sub_group, given)]
            states = (state_dict["state"].get(numbers[p.number]) for p in sub_group.places)
            state = {n: state for n, state in enumerate(states) if state is not None}
            number = sub_group.places[0].group
            group = {**saved[number], "params": list(range(len(works)))}
            with self._alone(sub_group, works):
                self.optimizer.load_state_dict({"state": state, "param_groups": [group]})
                settings[number] = self.optimizer.param_groups[0]
                self._evict(sub_group, works)
            if self.offloads_weights:
                self._hand_over(sub_group, [work.detach() for work in works])
        for group, loaded in zip(self.param_groups, settings, strict=True):
            group.update({k: v for k, v in loaded.items() if k not in ("params", "param_names")})
        self._gradients.forget()
        self._broken = ""

    def __getstate__(self) -> dict[str, Any]:
        """Refused: two optimizers cannot share one store."""
        raise TypeError(
            "an offloaded optimizer cannot be copied or pickled, because its state lies in its "
            "store; copy its state_dict(), or give the copy a store of its own"
        )

    def remove(self) -> None:
        """Let gradients stay with the weights again; what is in the store stays there."""
        self._gradients.remove()

    # -------------------------------------------------------------- one step

    def _step_all(self, stepped: list[SubGroup]) -> None:
        for group in stepped[:1]:
            self._ask_for(group)
        for group, following in pairwise((*stepped, None)):
            assert group is not None
            self._step_group(group, following)
        self._gradients.forget()

    def _step_group(self, sub_group: SubGroup, following: SubGroup | None) -> None:
        """Step the weights of one sub-group, and send its state away again; that of the following
        is on its way meanwhile."""
        states = self._brought(sub_group)
        if following is not None:
            self._ask_for(following)
        works = sub_group.weights
        if self.offloads_weights:
            works = [nn.Parameter(state.pop(WEIGHT)) for state in states]
        with self._alone(sub_group, works):
            for weight, work, place in zip(sub_group.weights, works, sub_group.places, strict=True):
                if (gradient := self._gradient(weight, work, place)) is not None:
                    work.grad = gradient
                    del gradient
            # After the hooks of a dry run, which would remember a state for as long as that lasts.
            with self.optimizer.register_step_pre_hook(partial(_place, works, states)):
                self.optimizer.step()
            del states
            if self.offloads_weights or self.offloads_gradients:
                for work in works:
                    work.grad = None
            self._evict(sub_group, works)
        if self.offloads_weights:
            self._hand_over(sub_group, [work.detach() for work in works])

    def _gradient(self, weight: Tensor, work: Tensor, place: Place) -> Tensor | None:
        """In the dtype and on the device in which is stepped."""
        if self.offloads_gradients:
            return self._gradients.get(place, work)
        if weight.grad is None or weight is work:
            return weight.grad
        if self._borrows:
            self.store.traffic.written += weight.grad.nbytes
        return weight.grad.to(work.device).to(work.dtype)

    def _hand_over(self, sub_group: SubGroup, masters: list[Tensor]) -> None:
        """Give the model the stepped weights, rounded to its dtype."""
        for weight, master in zip(sub_group.weights, masters, strict=True):
            rounded = master.to(weight.dtype)
            if self._borrows:
                self.store.traffic.read += weight.nbytes
            if (stream := stream_of(weight)) is not None and away(weight):
                stream.replace(weight, rounded)
            else:
                weight.copy_(rounded)

    def _copies(self, sub_group: SubGroup, weights: list[Tensor]) -> list[Tensor]:
        """Weights by which is stepped."""
        device, models = self._device(sub_group), sub_group.weights
        copies = []
        for weight, model in zip(weights, models, strict=True):
            stream = stream_of(weight) if away(weight) else None
            numbers = weight.detach() if stream is None else stream.numbers_of(weight)
            copies.append(numbers.to(device, precise_dtype(model), copy=stream is None))
        return copies

    # -------------------------------------------------------------- state, there and back

    @property
    def _borrows(self) -> bool:
        """Whether the step is computed with the store's own tensors, which then don't move."""
        return self.on == "host" and self.store.is_memory

    def _take_over(self) -> None:
        """Put the weights into the store, in float32 at least."""
        for sub_group in self._sub_groups:
            weights = sub_group.weights
            sub_group.small = [{} for _ in weights]
            if self.offloads_weights:
                copies = self._copies(sub_group, weights)
                self._evict(sub_group, copies)

    def _ask_for(self, sub_group: SubGroup) -> None:
        if self._borrows:
            return
        if sub_group.layout:
            self.store.prefetch(sub_group.key, device=self._device(sub_group))
        for place in sub_group.places:
            self._gradients.ask_for(place, self._device(sub_group))

    def _brought(self, sub_group: SubGroup, device: Any = None) -> list[State]:
        """The state of each weight of a sub-group."""
        if not sub_group.layout:
            return sub_group.unpack([])
        if self._borrows:
            return sub_group.unpack(self.store.lend(sub_group.key))
        where = device or self._device(sub_group)
        return sub_group.unpack(self.store.get(sub_group.key, device=where))

    def _evict(self, sub_group: SubGroup, works: list[Tensor]) -> None:
        """Send what the optimizer holds of these weights to the store, and let go of it."""
        states = [self.optimizer.state.pop(work, {}) for work in works]
        if self.offloads_weights:
            pairs = zip(works, states, strict=True)
            states = [{WEIGHT: work.detach(), **state} for work, state in pairs]
        tensors = sub_group.pack(states, type(self.optimizer).__name__)
        if not tensors:
            return
        if self._borrows:
            self.store.keep(sub_group.key, tensors)
        else:
            self.store.put(sub_group.key, tensors, lasting=True, about=sub_group.to_json())

    @contextmanager
    def _alone(self, sub_group: SubGroup, works: list[Tensor]) -> Iterator[None]:
        """The optimizer with these weights for its only ones, and no state."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        whole = groups[sub_group.places[0].group]
        group = {**whole, "params": list(works)}
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
                f"{', '.join(changed)}, once for all of its weights; use it without offloading"
            )

    def _take_gradients(self) -> None:
        """Those that no backward pass made, but somebody by hand."""
        if self.offloads_gradients:
            for sub_group in self._sub_groups:
                for place, weight in zip(sub_group.places, sub_group.weights, strict=True):
                    self._gradients.take(place, weight)

    def _with_gradient(self, sub_group: SubGroup) -> list[Place]:
        if self.offloads_gradients:
            return [place for place in sub_group.places if place in self._gradients]
        pairs = zip(sub_group.places, sub_group.weights, strict=True)
        return [place for place, weight in pairs if weight.grad is not None]

    # -------------------------------------------------------------- the weights

    def _weight(self, place: Place) -> Tensor:
        return self.param_groups[place.group]["params"][place.position]

    def _device(self, sub_group: SubGroup) -> torch.device:
        """Where the sub-group is stepped."""
        weight = sub_group.weights[0]
        return torch.device("cpu") if self.on == "host" else weight.device

    def _is_dry(self, stepped: list[SubGroup]) -> bool:
        weights = (weight for group in stepped for weight in group.weights)
        return any(isinstance(t, FakeTensor) for w in weights for t in (w, w.grad))

    def _fingerprint(self, sub_group: int) -> str:
        """What has to be the same for a state to fit."""
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


def _place(works: list[Tensor], states: list[dict[Any, Any]], optimizer: Any, *_: Any) -> None:
    """Give an optimizer the state of its weights."""
    optimizer.state.update({w: state for w, state in zip(works, states, strict=True) if state})


# ------------------------------------------------------------------ numbers, as plain data


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Those that are plain data; whoever gives tensors or functions gives them again."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    return {name: value for name, value in settings.items() if is_plain(value)}


def _like(now: Any, kept: Any) -> Any:
    return tuple(kept) if isinstance(now, tuple) else kept


# ------------------------------------------------------------------ what is refused


def _require_settings(sub_group: int, weights: bool, on: str, commit_every: int) -> None:
    if sub_group < 1:
        raise ValueError(f"got sub-groups of {sub_group} numbers; give at least 1")
    if commit_every < 1:
        raise ValueError(f"got commit_every={commit_every}; give at least 1")
    if on not in ("device", "host"):
        raise ValueError(f"got on={on!r}; give 'device' or 'host'")
    if on == "host" and not weights:
        raise ValueError(
            "got on='host' without weights=True: a step on the host needs weights there; give "
            "weights=True, or on='device'"
        )


def _require_store(store: Any) -> None:
    if not isinstance(store, Store):
        raise TypeError(
            f"got {store!r} as the store; give a memlab.offload.DiskStore(folder), or a HostStore()"
        )


def _require_steps_by_weight(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got {type(optimizer).__name__}, which is no torch.optim.Optimizer; for a model in "
            f"low precision give one of its own weights, and weights=True"
        )
    if optimizer.state:
        raise ValueError(
            f"got {type(optimizer).__name__} that has stepped already; offload it before its first "
            f"step, and give it its state by load_state_dict"
        )
    require_no_closure(optimizer)
