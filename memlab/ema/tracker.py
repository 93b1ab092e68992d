"""Post-hoc EMA: track two averages, save snapshots, and choose an averaging length afterwards.

Saves    the training runs of a search for the best averaging length. On the device, K averages take
         K·P·4 bytes for P weights, however many lengths are synthesized later.
Costs    these bytes; a pass over the averages per update; K·P·2 bytes of disk per float16 snapshot.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, sections 3.1 and 3.2.

memlab.reference.post_hoc_ema is the short version. This file adds updates at any interval, buffers
and frozen weights, files, stores, and resuming.

    ema = PostHocEMA(model, folder, sigmas=(0.05, 0.10), every=10, snapshot_every=4096)
    for step in range(1, steps + 1):
        …                             forward, backward, optimizer.step()
        ema.update(step)
    ema.snapshot()                    the last

    synthesize(folder, 0.13, out=model)

**Clock.** `step` is the number of steps (or images, or tokens) trained when `update` is called. The
interval since the last update is the difference of two steps, so updates at every tenth step or at
irregular steps have the requested width:

    avg ← β·avg + (1 − β)·weights        β = (1 − Δ/t)^(γ+1), t the time now, Δ since the last

The first update has Δ = t, so β = 0: weights before training never count.

**Averaged tensors.** Trained weights are averaged. Other tensors of the state dict (buffers, frozen
weights) are copied from the live model. A tied weight counts once.

**A part of the model.** `only` tracks the tensors that it fits: `only="head"` needs K·4 bytes per
weight of the head, and its snapshots hold nothing else. Synthesis writes these tensors and leaves
the others of `out` as they are.

**Consistency.** Every average of a snapshot is of the same step. An update that was interrupted
between two tensors leaves averages of two steps; they cannot be updated, written or returned until
`load()` restores a whole state.

**Resuming.** Use `save()` and `load()`, or put `state_dict()` into your own checkpoint. Both keep
float32 averages, which continue to the bit. A snapshot is rounded and cannot resume a run.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import floor
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from memlab.ema import snapshots as files
from memlab.ema.averages import Average, move_towards, require_store, start_average
from memlab.ema.profiles import decay, gamma_from_sigma
from memlab.ema.selection import Only, chosen
from memlab.ema.snapshots import Encoding
from memlab.ema.tensor_files import TensorFile, create_file, is_number
from memlab.internals.chunks import CHUNK_SIZE_ON_ACCELERATOR
from memlab.internals.torch_internals import FakeTensor

STATE_FORMAT = "memlab ema state 1"
STATE_FILE = "state.safetensors"
NEARLY = 1e-6  # tolerance, as a fraction of the interval


class PostHocEMA:
    """Averages of a model's trained weights, and snapshots of them in `folder`.

    Args:
        sigmas: relative widths of the averages; two suffice for most others.
        every: update whenever the clock passes a multiple of this interval.
        snapshot_every: likewise for snapshots, at an update; None: only in `snapshot()`.
        snapshot_dtype: float16, bfloat16, float32, float64 or "int8".
        device: of the averages; None: the device of each weight.
        clock: the unit of the steps, for messages.
        store: a memlab.offload store for the averages; None: in memory.
        only: names or patterns of the tensors or modules to track, such as "head" or
            "blocks.*.norm", or a function of the name that returns True; None: all.

    Attributes:
        averages: float32 tensors (float64 for float64 weights) by sigma and name.
        step: the time of the last update; 0 before the first.

    Raises:
        ValueError: for invalid settings; at the first update, for a folder with another run.
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
        only: Only = None,
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
        self._folder_checked = False  # whether the folder's snapshots were checked
        self._interrupted = False
        weights, self._tied = _tracked(model, only)
        trained = _trainable(weights, only)
        self._frozen = weights.keys() - trained.keys()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.fingerprint = files.fingerprint(shapes, self._frozen)
        if store is not None:
            require_store(store)
            store.claim("averages", self.fingerprint, self)
        self.averages: dict[float, Average] = {
            sigma: start_average(trained, sigma, device=device, store=store)
            for sigma in self.sigmas
        }

    @property
    def nbytes(self) -> int:
        """The bytes of the averages: K·P·4."""
        return sum(average.nbytes for average in self.averages.values())

    # -------------------------------------------------------------- training

    @torch.no_grad()
    def update(self, step: int | float) -> bool:
        """Update the averages with the weights after `step`. Return whether an update was due.

        Call it after each optimizer step, or less often. Raise ValueError if the clock did not
        advance.
        """
        self._require_one_step("an update")
        step = _checked_step(step, self.step)
        before = self.step
        if not _passes(before, step, self.every):
            return False
        if not self._folder_checked:
            self._check_folder()
        weights = self._trained()
        # For the whole interval at once. ema-pytorch with `update_every=10` computes β for one
        # step, and its σ is 0.245 instead of 0.05
        # (test_with_updates_at_every_tenth_step_ema_pytorch_is_five_times_as_wide).
        shares = [1 - decay(gamma, step - before, step) for gamma in self.gammas]
        self._interrupted = True
        move_towards(list(self.averages.values()), weights, shares)
        self._interrupted = False
        self.step = step
        if self.snapshot_every is not None and _passes(before, step, self.snapshot_every):
            self.snapshot()
        return True

    def snapshot(self) -> list[Path]:
        """Write each average, as of the last update, to its own file. Return the paths.

        A file is either complete or absent. Dry runs write no files. Raise ValueError before the
        first update, and after an interrupted one.
        """
        self._require_one_step("a snapshot")
        if self.step == 0:
            raise ValueError("got no update yet, so there is no average; call update(step) first")
        return [self._write_snapshot(sigma, average) for sigma, average in self.averages.items()]

    def _write_snapshot(self, sigma: float, average: Average) -> Path:
        path = self.folder / files.file_name(self.step, sigma)
        followed = self._followed()
        tensors = {name: (t.dtype, tuple(t.shape)) for name, t in followed.items()}
        for name, t in average.items():
            tensors |= files.parts(name, tuple(t.shape), self.snapshot_dtype)
        about = files.snapshot_metadata(
            run=self.run, clock=self.clock, step=self.step, sigma=sigma, model=self.fingerprint,
            followed=followed, tied=self._tied,
        )  # fmt: skip
        if self._is_dry():
            for _ in self._encoded(average):
                pass
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        with create_file(path, tensors, about) as file:
            for name, tensor in followed.items():
                file.write(name, 0, tensor.detach().reshape(-1))
            for name, start, elements in self._encoded(average):
                file.write(name, start, elements)
        return path

    def _encoded(self, average: Average) -> Iterator[tuple[str, int, Tensor]]:
        for name, tensor in average.iter_tensors():
            yield from files.encode(name, tensor, self.snapshot_dtype)

    # -------------------------------------------------------------- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, to the bit. Its tensors are not copies.

        Raise ValueError after an interrupted update.
        """
        self._require_one_step("state_dict()")
        averages = [dict(average) for average in self.averages.values()]
        return {**self._identity(), "run": self.run, "step": self.step, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. The next update removes snapshots of later steps from the folder."""
        self._require_same(state)
        for average, elements in zip(self.averages.values(), state["averages"], strict=True):
            for name, tensor in average.iter_tensors():
                tensor.copy_(elements[name].view(tensor.shape))
                average[name] = tensor
        self.run, self.step = state["run"], state["step"]
        self._folder_checked = self._interrupted = False

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the state, by default to `state.safetensors` in the folder. Return the path.

        The file is either complete or absent. Raise ValueError rather than overwrite another
        run's state, and after an interrupted update.
        """
        self._require_one_step("save()")
        path = self.folder / STATE_FILE if path is None else Path(path)
        if path.exists() and (there := TensorFile(path).metadata.get("run")) != self.run:
            raise ValueError(
                f"{path} is of another run: got {there!r}, wanted {self.run!r}; load() it to "
                f"resume that run, or give another path"
            )
        about = {key: json.dumps(value) for key, value in self._identity().items()}
        about |= {"format": STATE_FORMAT, "run": self.run, "step": json.dumps(self.step)}
        if self._is_dry():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_file(path, self._stored_kinds(), about) as file:
            for name, tensor in self._numbered():
                flat = tensor.reshape(-1)
                for start in range(0, len(flat), CHUNK_SIZE_ON_ACCELERATOR):
                    file.write(name, start, flat[start : start + CHUNK_SIZE_ON_ACCELERATOR])
        return path

    def load(self, path: str | os.PathLike[str] | None = None, *, verify: bool = True) -> None:
        """Resume from a saved state; see `load_state_dict`.

        Raise ValueError for a damaged file unless `verify` is False.
        """
        file = TensorFile(self.folder / STATE_FILE if path is None else path, verify=verify)
        about = file.metadata
        if about.get("format") != STATE_FORMAT:
            raise ValueError(
                f"{file.path} is of format {about.get('format')!r}, wanted {STATE_FORMAT!r}; give "
                f"a file written by save(): a snapshot is rounded and cannot resume training"
            )
        state = {key: file.value(key, lambda _: True) for key in self._identity()}
        self._require_same(state)
        step = file.value("step", is_number)
        for name, (dtype, shape) in self._stored_kinds().items():
            place = file.places.get(name)
            if place is None or (place.dtype, place.shape) != (dtype, shape):
                raise ValueError(
                    f"{file.path} has {place and (place.dtype, place.shape)} as {name!r}, wanted "
                    f"{(dtype, shape)}; restore a copy of the file"
                )
        averages = [
            {name: file.tensor(f"{number}/{name}") for name in average}
            for number, average in enumerate(self.averages.values())
        ]
        run = about.get("run", "")
        self.load_state_dict({**state, "step": step, "run": run, "averages": averages})

    def _stored_kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each tensor of the state, by its name in a file."""
        return {
            f"{number}/{name}": kind
            for number, average in enumerate(self.averages.values())
            for name, kind in average.kinds.items()
        }

    def _identity(self) -> dict[str, Any]:
        """Return the properties that must match in order to resume."""
        return {"model": self.fingerprint, "sigmas": list(self.sigmas), "clock": self.clock}

    def _require_same(self, state: Mapping[str, Any]) -> None:
        for key, wanted in self._identity().items():
            if (got := state.get(key)) != wanted:
                raise ValueError(
                    f"got a state with {key} {got!r}, wanted {wanted!r}; create the model and the "
                    f"PostHocEMA with the same settings as the saved run"
                )

    def _require_one_step(self, what: str) -> None:
        """Raise ValueError if the averages are of two steps."""
        # `finally: ema.save()` once overwrote the last whole state with averages of two steps.
        # Every other tensor from step 40 and the rest from step 640 is one nat worse than either
        # step's model.
        if self._interrupted:
            raise ValueError(
                f"got {what} after an interrupted update, which changed only some of the averages; "
                f"load() the last state"
            )

    def _numbered(self) -> Iterator[tuple[str, Tensor]]:
        for number, average in enumerate(self.averages.values()):
            for name, tensor in average.iter_tensors():
                yield f"{number}/{name}", tensor

    def _check_folder(self) -> None:
        """Check that the folder has only this run's snapshots, and remove later ones."""
        if self._is_dry():
            return
        there = files.find_snapshots(self.folder)
        for snapshot in there:
            if snapshot.run != self.run:
                raise ValueError(
                    f"{snapshot.path} is of another run: got {snapshot.run!r}, wanted "
                    f"{self.run!r}; load its state to resume, or give an empty folder"
                )
        for snapshot in there:
            if snapshot.step > self.step:
                snapshot.path.unlink()
        self._folder_checked = True

    # -------------------------------------------------------------- the live model

    def _trained(self) -> dict[str, Tensor]:
        weights, _ = _named(self.model)
        first = next(iter(self.averages.values()))
        for name in self._frozen:
            if name in weights and _is_trained(weights[name]):
                raise ValueError(
                    f"got {name!r}, which is trained now but was frozen when the PostHocEMA was "
                    f"created; create it after unfreezing all weights to be trained"
                )
        missing = first.keys() - weights.keys()
        if missing:
            raise ValueError(f"the model has no {min(missing)!r} any more; make a new PostHocEMA")
        away = (n for n in first if weights[n].untyped_storage().nbytes() < weights[n].nbytes)
        if (lacking := next(away, None)) is not None:
            raise ValueError(
                f"got {lacking!r} without its elements, as ZeRO stage 3 leaves it between steps; "
                f"gather the weights before update()"
            )
        return {name: weights[name].detach() for name in first}

    def _followed(self) -> dict[str, Tensor]:
        weights, _ = _named(self.model)
        return {name: weights[name] for name in sorted(self._frozen)}

    def _is_dry(self) -> bool:
        return any(isinstance(tensor, FakeTensor) for tensor in self._trained().values())


# ------------------------------------------------------------------ a model's tensors


def _named(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a state dict's tensors by their first names, and a map from tied to first names."""
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


def _tracked(model: nn.Module, only: Only) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors that `only` fits, and the tied names of these; see `_named`."""
    tensors, tied = _named(model)
    names = dict.fromkeys(chosen(tensors, only, tied=tied))
    return (
        {name: tensors[name] for name in names},
        {name: first for name, first in tied.items() if first in names},
    )


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _trainable(tensors: Mapping[str, Tensor], only: Only) -> dict[str, Tensor]:
    trained = {name: tensor for name, tensor in tensors.items() if _is_trained(tensor)}
    if not trained and only is not None:
        raise ValueError(
            f"got only={only!r}, which fits no trainable weight; give a name of one, or a pattern"
        )
    if not trained:
        raise ValueError("got a model without trainable weights; there is nothing to average")
    for name, tensor in trained.items():
        if not tensor.is_floating_point():
            raise TypeError(f"got {name!r} of {tensor.dtype}, wanted floats; use a real view of it")
    return trained


# ------------------------------------------------------------------ checks


def _checked_sigmas(sigmas: Sequence[float]) -> tuple[float, ...]:
    found = tuple(float(sigma) for sigma in ([sigmas] if isinstance(sigmas, Real) else sigmas))
    if len(found) < 2 or len(set(found)) < len(found):
        raise ValueError(
            f"got sigmas {found}, wanted two or more different ones to synthesize others; give "
            f"(0.05, 0.10)"
        )
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _checked_interval(name: str, interval: Any) -> Any:
    if not _is_number(interval) or not interval > 0:
        raise ValueError(f"got {name}={interval!r}, wanted a number above 0; give 1 for each step")
    return interval


def _checked_step(step: Any, last: float) -> int | float:
    if not _is_number(step):
        raise TypeError(f"got {step!r} as a step, wanted a number; give the steps done so far")
    if not last < step < float("inf"):
        raise ValueError(
            f"got step {step}, wanted a step above the last update's, {last}; give the steps done "
            f"so far, counted from 1 by one clock"
        )
    return int(step) if isinstance(step, Integral) else float(step)


def _passes(before: float, now: float, interval: float) -> bool:
    """Whether a multiple of the interval lies after `before`, up to `now`.

    The tolerance makes 0.3 a multiple of 0.1 in floating point.
    """
    if isinstance(now, int) and isinstance(interval, int):
        return now // interval > before // interval
    return floor(now / interval + NEARLY) > floor(before / interval + NEARLY)
