"""Post-hoc EMA: track two averages of the weights, keep snapshots, choose a length afterwards.

Saves    the runs that a search for the best averaging length would take; on the device, all other
         averages: K of them take K·P·4 bytes for P weights, whatever number is made later.
Costs    these bytes; a pass over the averages an update; K·P·2 bytes of disk a snapshot in float16.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, sections 3.1 and 3.2.

    ema = PostHocEMA(model, folder, sigmas=(0.05, 0.10), every=10, snapshot_every=4096)
    for step in range(1, steps + 1):
        …                             forward, backward, optimizer.step()
        ema.update(step)
    ema.snapshot()                    the last

    synthesize(folder, 0.13, out=model)

**One clock.** `step` is the caller's: how many steps (or images, or tokens) the weights have seen
when `update` is called. The average knows how far apart two updates are by subtracting, so that
updates at every tenth step, or at uneven ones, have the width that was asked for:

    avg ← β·avg + (1 − β)·weights        β = (1 − Δ/t)^(γ+1), t the time now, Δ since the last

The first update has Δ = t, so β = 0: weights before training never count.

**What is averaged** are weights that are trained. All else that a state dict holds follows the live
model: buffers, of floats or of integers, and frozen weights, which are their own average. A weight
with two names is one.

**To resume** takes `save()` and `load()`, or `state_dict()` in the caller's own checkpoint: float32
averages, which go on to the bit. A snapshot is rounded, and no state.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import floor
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlab.ema import snapshots as files
from memlab.ema.averages import Average, begun, require_store
from memlab.ema.profiles import decay, gamma_from_sigma
from memlab.ema.snapshots import Encoding
from memlab.ema.tensor_files import TensorFile, written
from memlab.internals.chunks import CHUNK_SIZE_ON_ACCELERATOR
from memlab.internals.torch_internals import FakeTensor

STATE_FORMAT = "memlab ema state 1"
STATE_FILE = "state.safetensors"
NEARLY = 1e-6  # of an interval


class PostHocEMA:
    """Averages of a model's trained weights, and snapshots of them in `folder`.

    sigmas            relative widths of the averages; two are enough for most others
    every             an update each time that the clock passes a multiple of it
    snapshot_every    a snapshot likewise, at an update; None: only when `snapshot()` is called
    snapshot_dtype    of what is averaged: float16, bfloat16, float32, float64 or "int8"
    device            of the averages; None: each where its weight is
    clock             the unit of the steps, in words
    store             where the averages live, a memlab.offload store; None: in memory

    `averages` are float32 tensors (float64 of float64 weights) by sigma and by name; `step` is the
    time of the last update, 0 before the first.

    ValueError for settings that can't be; at the first update, for a folder that holds another run.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        sigmas: Sequence[float] = (0.05, 0.10),
        *,
        every: float = 1,
        snapshot_every: float | None = None,
        snapshot_dtype: Encoding = torch.float16,
        device: torch.device | str | None = None,
        clock: str = "steps",
        store: Any = None,
    ) -> None:
        self.sigmas = _checked_sigmas(sigmas)
        self.gammas = [gamma_from_sigma(sigma) for sigma in self.sigmas]
        self.every, self.snapshot_every = _checked_interval("every", every), snapshot_every
        if snapshot_every is not None:
            _checked_interval("snapshot_every", snapshot_every)
        self.snapshot_dtype = files.check_encoding(snapshot_dtype)
        self.model, self.folder, self.clock = model, Path(folder), clock
        self.run = os.urandom(6).hex()
        self.step: int | float = 0
        self._has_looked = False  # whether the folder's snapshots are known to be ours
        self._interrupted = False
        weights, self._tied = _named(model)
        trained = _averaged(weights)
        self._frozen = weights.keys() - trained.keys()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.fingerprint = files.fingerprint(shapes, self._frozen)
        if store is not None:
            require_store(store)
            store.claim("averages", self.fingerprint, self)
        self.averages: dict[float, Average] = {
            sigma: begun(trained, sigma, device=device, store=store) for sigma in self.sigmas
        }

    @property
    def nbytes(self) -> int:
        """Of the averages: K·P·4."""
        return sum(average.nbytes for average in self.averages.values())

    # -------------------------------------------------------------- while training

    @torch.no_grad()
    def update(self, step: int | float) -> bool:
        """Take in the weights as they are after `step`; whether this was an update.

        To be called after each optimizer step, or more seldom. ValueError if the clock stands still
        or goes back.
        """
        if self._interrupted:
            raise ValueError(
                "got an update after one that was interrupted, so that some averages have it and "
                "some have not; load() the last state"
            )
        step = _checked_step(step, self.step)
        before = self.step
        if not _passes(before, step, self.every):
            return False
        if not self._has_looked:
            self._require_own_folder()
        weights = self._trained()
        self._interrupted = True
        for gamma, average in zip(self.gammas, self.averages.values(), strict=True):
            share = 1 - decay(gamma, step - before, step)
            average.move_towards(weights, share)
        self._interrupted = False
        self.step = step
        if self.snapshot_every is not None and _passes(before, step, self.snapshot_every):
            self.snapshot()
        return True

    def snapshot(self) -> list[Path]:
        """Write each average, as it was at the last update, to a file of its own; their paths.

        A file is whole or not there. In a dry run none is written.
        """
        if self.step == 0:
            raise ValueError("got no update yet, so there is no average; call update(step) before")
        return [self._write_snapshot(sigma, average) for sigma, average in self.averages.items()]

    def _write_snapshot(self, sigma: float, average: Average) -> Path:
        path = self.folder / files.file_name(self.step, sigma)
        followed = self._followed()
        tensors = {name: (t.dtype, tuple(t.shape)) for name, t in followed.items()}
        for name, t in average.items():
            tensors |= files.parts(name, tuple(t.shape), self.snapshot_dtype)
        about = files.about_snapshot(
            run=self.run, clock=self.clock, step=self.step, sigma=sigma, model=self.fingerprint,
            followed=followed, tied=self._tied,
        )  # fmt: skip
        if self._is_dry():
            for _ in self._encoded(average):
                pass
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        with written(path, tensors, about) as file:
            for name, tensor in followed.items():
                file.write(name, 0, tensor.detach().reshape(-1))
            for name, start, numbers in self._encoded(average):
                file.write(name, start, numbers)
        return path

    def _encoded(self, average: Average) -> Iterator[tuple[str, int, Tensor]]:
        for name, tensor in average.one_by_one():
            yield from files.encode(name, tensor, self.snapshot_dtype)

    # -------------------------------------------------------------- to resume

    def state_dict(self) -> dict[str, Any]:
        """What another PostHocEMA of the same model goes on from, to the bit; the tensors are the
        averages themselves."""
        averages = [dict(average) for average in self.averages.values()]
        return {**self._identity(), "run": self.run, "step": self.step, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where that state was. Snapshots of later steps in the folder are of a future that
        did not happen: the next update removes them."""
        self._require_same(state)
        for average, numbers in zip(self.averages.values(), state["averages"], strict=True):
            for name, tensor in average.one_by_one():
                tensor.copy_(numbers[name].view(tensor.shape))
                average[name] = tensor
        self.run, self.step = state["run"], state["step"]
        self._has_looked = self._interrupted = False

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """The state as a file that is whole or not there: `state.safetensors` in the folder.

        ValueError in place of writing over another run's.
        """
        path = self.folder / STATE_FILE if path is None else Path(path)
        if path.exists() and (there := TensorFile(path).metadata.get("run")) != self.run:
            raise ValueError(
                f"{path} is of another run: got {there!r}, wanted {self.run!r}; load() it to go "
                f"on, or give another path"
            )
        kinds = {
            f"{number}/{name}": kind
            for number, average in enumerate(self.averages.values())
            for name, kind in average.kinds.items()
        }
        about = {key: json.dumps(value) for key, value in self._identity().items()}
        about |= {"format": STATE_FORMAT, "run": self.run, "step": json.dumps(self.step)}
        if self._is_dry():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path, kinds, about) as file:
            for name, tensor in self._numbered():
                flat = tensor.reshape(-1)
                for start in range(0, len(flat), CHUNK_SIZE_ON_ACCELERATOR):
                    file.write(name, start, flat[start : start + CHUNK_SIZE_ON_ACCELERATOR])
        return path

    def load(self, path: str | os.PathLike[str] | None = None, *, verify: bool = True) -> None:
        """Go on where `save` was called; see `load_state_dict`. A damaged file is a ValueError,
        unless `verify` is False."""
        file = TensorFile(self.folder / STATE_FILE if path is None else path, verify=verify)
        about = file.metadata
        if about.get("format") != STATE_FORMAT:
            raise ValueError(
                f"{file.path} is of format {about.get('format')!r}, wanted {STATE_FORMAT!r}; give "
                f"what save() has written: a snapshot is rounded, and training can't go on from it"
            )
        state = {key: json.loads(about[key]) for key in (*self._identity(), "step")}
        self._require_same(state)
        averages = [
            {name: file.tensor(f"{number}/{name}") for name in average}
            for number, average in enumerate(self.averages.values())
        ]
        self.load_state_dict({**state, "run": about["run"], "averages": averages})

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a run to go on."""
        return {"model": self.fingerprint, "sigmas": list(self.sigmas), "clock": self.clock}

    def _require_same(self, state: Mapping[str, Any]) -> None:
        for key, wanted in self._identity().items():
            if (got := state.get(key)) != wanted:
                raise ValueError(
                    f"got a state with {key} {got!r}, wanted {wanted!r}; make the model and the "
                    f"PostHocEMA as they were then"
                )

    def _numbered(self) -> Iterator[tuple[str, Tensor]]:
        for number, average in enumerate(self.averages.values()):
            for name, tensor in average.one_by_one():
                yield f"{number}/{name}", tensor

    def _require_own_folder(self) -> None:
        """Before the first update: the folder has snapshots of this run only, and of its past."""
        if self._is_dry():
            return
        there = files.find_snapshots(self.folder)
        for snapshot in there:
            if snapshot.run != self.run:
                raise ValueError(
                    f"{snapshot.path} is of another run: got {snapshot.run!r}, wanted "
                    f"{self.run!r}; load its state to go on, or give an empty folder"
                )
        for snapshot in there:
            if snapshot.step > self.step:
                snapshot.path.unlink()
        self._has_looked = True

    # -------------------------------------------------------------- the live model

    def _trained(self) -> dict[str, Tensor]:
        weights, _ = _named(self.model)
        first = next(iter(self.averages.values()))
        for name in self._frozen:
            if name in weights and _is_trained(weights[name]):
                raise ValueError(
                    f"got {name!r} to be trained, which was frozen when its averages would have "
                    f"begun; make the PostHocEMA while all weights that will be trained are"
                )
        missing = first.keys() - weights.keys()
        if missing:
            raise ValueError(f"the model has no {min(missing)!r} any more; make a new PostHocEMA")
        away = (n for n in first if weights[n].untyped_storage().nbytes() < weights[n].nbytes)
        if (name := next(away, None)) is not None:
            raise ValueError(
                f"got {name!r} without its numbers, as ZeRO's third stage leaves it between steps; "
                f"bring the weights before update()"
            )
        return {name: weights[name].detach() for name in first}

    def _followed(self) -> dict[str, Tensor]:
        weights, _ = _named(self.model)
        return {name: weights[name] for name in sorted(self._frozen)}

    def _is_dry(self) -> bool:
        return any(isinstance(tensor, FakeTensor) for tensor in self._trained().values())


# ------------------------------------------------------------------ a model's tensors


def _named(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a state dict by their first names, and what other names are names of."""
    first: dict[int, str] = {}
    tensors, tied = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, tied


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _averaged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trained = {name: tensor for name, tensor in tensors.items() if _is_trained(tensor)}
    if not trained:
        raise ValueError(
            "got a model without weights that are trained; there is nothing to average"
        )
    for name, tensor in trained.items():
        if not tensor.is_floating_point():
            raise TypeError(f"got {name!r} of {tensor.dtype}, wanted floats; use a real view of it")
    return trained


# ------------------------------------------------------------------ what is refused


def _checked_sigmas(sigmas: Sequence[float]) -> tuple[float, ...]:
    found = tuple(float(sigma) for sigma in ([sigmas] if isinstance(sigmas, Real) else sigmas))
    if len(found) < 2 or len(set(found)) < len(found):
        raise ValueError(
            f"got sigmas {found}, wanted two or more that differ: others are made of them; give "
            f"(0.05, 0.10)"
        )
    return found


def _checked_interval(name: str, interval: Any) -> Any:
    if isinstance(interval, bool) or not isinstance(interval, Real) or not interval > 0:
        raise ValueError(f"got {name}={interval!r}, wanted a number above 0; give 1 for each step")
    return interval


def _checked_step(step: Any, last: float) -> int | float:
    if isinstance(step, bool) or not isinstance(step, Real):
        raise TypeError(f"got {step!r} as a step, wanted a number; give the steps done so far")
    if not last < step < float("inf"):
        raise ValueError(
            f"got step {step}, wanted one above {last}, the last update's; give the steps done so "
            f"far, counted from 1, by one clock"
        )
    return int(step) if isinstance(step, Integral) else float(step)


def _passes(before: float, now: float, interval: float) -> bool:
    """Whether a multiple of the interval lies after `before`, up to `now`.

    Of fractions, 0.3 is three times 0.1, though its float is less.
    """
    if isinstance(now, int) and isinstance(interval, int):
        return now // interval > before // interval
    return floor(now / interval + NEARLY) > floor(before / interval + NEARLY)
