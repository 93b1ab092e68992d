"""Synthesis: averages of any length, from snapshots on disk, a piece of a tensor at a time.

Saves    all of memory but the buffers of a piece: for four lengths at once 12 · 2¹⁷ numbers, 6 MiB,
         of whatever model and however many snapshots.
Costs    a pass over the snapshots' bytes, for all lengths together.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, section 3.2 and algorithm 3.

Which loop is the outer one decides the bytes, for a sum of S snapshots of N weights:

    for each snapshot: for each tensor    N·4 bytes a length, and a snapshot that is loaded
    for each piece: for each snapshot     a piece a length: it is complete, and can be written,
                                          before the next one begins

The second wants all files open at once, and reads a piece of each in turn. Mapped, that costs no
memory that is not the system's to take back. And it is the faster one, for sums stay in the
processor's cache: eight snapshots' pieces are the rows of a matrix, and shares (lengths × 8) times
that matrix (8 × piece) is all lengths' part in one product, which reads each number once.
"""

import fnmatch
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from memlab.ema.profiles import power_profile, profile_error, solve_weights
from memlab.ema.snapshots import PATTERN, Reader, Shapes, Snapshot, of_one_run
from memlab.ema.tensor_files import TensorWriter, written

FORMAT = "memlab ema synthesized 1"
PIECE = 2**17  # numbers, and
ROWS = 8  # snapshots at a time: 4 MiB in float32
BAR_AFTER_SECONDS = 2.0
WARN_ABOVE = 0.01  # profile_error

Out = str | os.PathLike[str] | nn.Module | Mapping[str, Tensor] | None


@torch.no_grad()
def synthesize(
    snapshots: Any,
    sigma: float | Sequence[float],
    *,
    only: str | Sequence[str] | None = None,
    out: Out | Sequence[Out] = None,
    at: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The average of relative width `sigma`, made of snapshots.

    snapshots   the folder, paths, or what `find_snapshots` has found
    only        names or patterns of tensors, or of modules: "head", "blocks.*.attention"
    out         a model or a mapping of tensors, which are written in place; a path, for a
                safetensors file; None, for new tensors in a dict
    at          the time of the average, which has to be a snapshot's; None: the last
    dtype       of a file or of new tensors; what is there already keeps its own

    Several sigmas are made in one pass, with as many in `out`. Returns what `out` is, or the dict;
    of several, a list. What is not averaged (buffers, frozen weights) is that of the snapshot at
    `at`.

    ValueError for a damaged snapshot, by its checksums; to read it as it is, pass what
    `find_snapshots(folder, verify=False)` returns.

    Warns if the profile's error is above 1 %. The numbers of snapshots are taken as they are. A
    file is whole or not there, whatever happens. Tensors written in place can't be: of what was
    interrupted, a note says so, and the same call again makes it whole. ValueError for snapshots
    that are cut short or don't belong together, for names that are not there, for tensors of other
    shapes, and for a file where a snapshot is.
    """
    found = of_one_run(snapshots)
    sigmas = [sigma] if isinstance(sigma, Real) else list(sigma)
    outs = [out] if isinstance(sigma, Real) else _one_for_each(out, len(sigmas))
    _require_free(outs, found)
    time_of = _checked_time(found, at)
    found = [snapshot for snapshot in found if snapshot.step <= time_of]
    weights = _weights(found, sigmas, time_of)
    everything = found[-1].shapes
    shapes = {name: everything[name] for name in chosen(everything, only)}
    about = [_about(found[-1], each) for each in sigmas]
    with ExitStack() as stack:
        targets = [
            stack.enter_context(_target(each, found[-1], shapes, dtype, what))
            for each, what in zip(outs, about, strict=True)
        ]
        for snapshot in found:
            stack.callback(snapshot.file.close)
        pieces = sum(-(-prod(shape) // PIECE) for shape in shapes.values())
        advance = stack.enter_context(_bar(pieces))
        stack.enter_context(_exact_products())
        for name, shape in shapes.items():
            _sum_up(name, prod(shape), found, weights, targets, advance)
    results = [target.result for target in targets]
    return results[0] if isinstance(sigma, Real) else results


def _one_for_each(out: Any, count: int) -> list[Any]:
    """Where each of several averages goes."""
    if count == 0:
        raise ValueError("got no sigma; give one, or several")
    if out is None:
        return [None] * count
    if isinstance(out, (str, os.PathLike, nn.Module, Mapping)) or len(out) != count:
        got = 1 if isinstance(out, (str, os.PathLike, nn.Module, Mapping)) else len(out)
        raise ValueError(f"got {got} of out for {count} sigmas; give a list with one for each")
    return list(out)


def _require_free(outs: Sequence[Any], found: Sequence[Snapshot]) -> None:
    """ValueError for a path that is a snapshot's, or would be taken for one; for one that is given
    twice; and for a folder that is not there."""
    paths = [Path(out).resolve() for out in outs if isinstance(out, (str, os.PathLike))]
    folders = {snapshot.path.resolve().parent for snapshot in found}
    for path in paths:
        if path.parent in folders and fnmatch.fnmatchcase(path.name, PATTERN):
            raise ValueError(
                f"got out={str(path)!r}, a snapshot's name in the snapshots' folder; give another"
            )
        if paths.count(path) > 1:
            raise ValueError(f"got out={str(path)!r} twice; give each average a file of its own")
        if not path.parent.is_dir():
            raise ValueError(f"got out={str(path)!r}, whose folder is not there; make it first")


def _sum_up(
    name: str,
    numel: int,
    found: Sequence[Snapshot],
    weights: np.ndarray,
    targets: Sequence[Any],
    advance: Callable[[int], None],
) -> None:
    """One tensor, for all targets."""
    last = found[-1]
    dtype = last.dtype(name)
    if name in last.followed:
        for target in targets:
            target.write(name, 0, last.read(name, 0, numel))
        advance(-(-numel // PIECE))
        return
    size = min(PIECE, numel)
    sums = torch.empty(len(targets), size, dtype=dtype)
    rows = torch.empty(min(ROWS, len(found)), size, dtype=dtype)
    shares = torch.tensor(weights.tolist(), dtype=dtype)  # (targets, snapshots)
    readers = [snapshot.reader(name) for snapshot in found]
    for start in range(0, numel, PIECE):
        length = min(PIECE, numel - start)
        _weighted_sums(sums[:, :length], rows[:, :length], shares, readers, start)
        for target, total in zip(targets, sums, strict=True):
            target.write(name, start, total[:length])
        advance(1)


def _weighted_sums(
    sums: Tensor, rows: Tensor, shares: Tensor, readers: Sequence[Reader], start: int
) -> None:
    """sums ← shares @ snapshots, of the numbers from `start` on: (targets, piece)."""
    for first in range(0, len(readers), ROWS):
        group = readers[first : first + ROWS]
        for row, read in zip(rows, group, strict=False):
            row.copy_(read(start, start + len(row)))
        part = shares[:, first : first + len(group)]
        sums.addmm_(part, rows[: len(group)], beta=min(first, 1))


@contextmanager
def _exact_products() -> Iterator[None]:
    """Of float32 as it is, also for whoever lets training round it to fewer digits."""
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


# ------------------------------------------------------------------ the plan


def chosen(names: Sequence[str] | Mapping[str, Any], only: str | Sequence[str] | None) -> list[str]:
    """The names that a pattern fits, or that lie in a module that it fits. ValueError for a pattern
    that fits nothing."""
    if only is None:
        return list(names)
    picked: set[str] = set()
    for pattern in [only] if isinstance(only, str) else only:
        fit = {name for name in names if _fits(name, pattern)}
        if not fit:
            raise ValueError(
                f"got only={pattern!r}, which fits none of {len(names)} tensors; give a name such "
                f"as {next(iter(names), '')!r}, or a pattern"
            )
        picked |= fit
    return [name for name in names if name in picked]


def _fits(name: str, pattern: str) -> bool:
    path = name.split(".")
    return any(
        fnmatch.fnmatchcase(".".join(path[:depth]), pattern) for depth in range(1, len(path) + 1)
    )


def _checked_time(found: Sequence[Snapshot], at: float | None) -> float:
    times = sorted({snapshot.step for snapshot in found})
    if at is None or at in times:
        return times[-1] if at is None else at
    nearest = min(times, key=lambda t: abs(t - at))
    raise ValueError(
        f"got at={at}, when no snapshot was taken: nothing knows the weights from the last one "
        f"before on, and later ones know too much; give the time of one, such as {nearest}"
    )


def _weights(found: Sequence[Snapshot], sigmas: Sequence[float], time_of: float) -> np.ndarray:
    """(sigmas, snapshots)"""
    profiles = [snapshot.profile for snapshot in found]
    rows = []
    for sigma in sigmas:
        target = power_profile(sigma, time_of)
        rows.append(solve_weights(profiles, target))
        error = profile_error(profiles, target, rows[-1])
        if error > WARN_ABOVE:
            warnings.warn(
                f"the nearest to sigma {sigma} that {len(found)} snapshots come is a profile that "
                f"is off by {error:.2g} (profile_error); take more snapshots, or another sigma",
                stacklevel=4,
            )
    return np.array(rows)


def _about(last: Snapshot, sigma: float) -> dict[str, str]:
    """The metadata of a file."""
    return {
        "format": FORMAT,
        "run": last.run,
        "clock": last.clock,
        "step": json.dumps(last.step),
        "sigma": json.dumps(float(sigma)),
        "model": last.model,
        "tied": json.dumps(last.tied),
    }


# ------------------------------------------------------------------ where it goes


@contextmanager
def _target(
    out: Out, last: Snapshot, shapes: Shapes, dtype: torch.dtype, about: Mapping[str, str]
) -> Iterator[Any]:
    """Something with `write(name, start, numbers)` and a `result`."""
    kinds = {
        name: (last.dtype(name) if name in last.followed else dtype, shape)
        for name, shape in shapes.items()
    }
    if isinstance(out, (str, os.PathLike)):
        with written(out, kinds, about) as file:
            yield _ToFile(file, kinds, Path(out))
        return
    if out is None:
        new = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in kinds.items()}
        others = {other: new[name] for other, name in last.tied.items() if name in new}
        yield _ToTensors(new, {**new, **others})
        return
    tensors = out.state_dict(keep_vars=True) if isinstance(out, nn.Module) else out
    _require_fit(tensors, last, shapes)
    target = _ToTensors({name: tensors[name].detach() for name in shapes}, out)
    try:
        yield target
        target.finish()
    except BaseException as error:
        if target.is_begun:
            error.add_note("the tensors of `out` were being written, and are no average: try again")
        raise


def _require_fit(tensors: Mapping[str, Any], last: Snapshot, shapes: Shapes) -> None:
    for name, shape in shapes.items():
        there = tensors.get(name)
        got = tuple(there.shape) if isinstance(there, Tensor) else None
        if got != shape:
            raise ValueError(
                f"{last.path} is of another model than `out`: got {name!r} of shape "
                f"{'none' if got is None else got}, wanted {shape}; give the model that was "
                f"trained, or choose tensors with only="
            )


class _ToFile:
    def __init__(self, file: TensorWriter, kinds: Mapping[str, Any], path: Path) -> None:
        self._file, self._kinds, self.result = file, kinds, path

    def write(self, name: str, start: int, numbers: Tensor) -> None:
        self._file.write(name, start, numbers.to(self._kinds[name][0]))


class _ToTensors:
    """In place; a tensor that is no contiguous run of numbers by way of one that is."""

    def __init__(self, tensors: Mapping[str, Tensor], result: Any) -> None:
        self._tensors, self.result = tensors, result
        self._name, self._flat = "", torch.empty(0)

    @property
    def is_begun(self) -> bool:
        """Whether something was written."""
        return self._name != ""

    def write(self, name: str, start: int, numbers: Tensor) -> None:
        if name != self._name:
            self.finish()
            tensor = self._tensors[name]
            self._name, self._flat = name, tensor.contiguous().view(-1)
        self._flat[start : start + len(numbers)].copy_(numbers)

    def finish(self) -> None:
        if self._name and not self._tensors[self._name].is_contiguous():
            tensor = self._tensors[self._name]
            tensor.copy_(self._flat.view(tensor.shape))


# ------------------------------------------------------------------ how far it is


@contextmanager
def _bar(pieces: int) -> Iterator[Callable[[int], None]]:
    """Counts pieces; a bar on standard error (a terminal) after two seconds."""
    console = Console(stderr=True)
    with ExitStack() as stack:
        begun, done, bar, task = time.monotonic(), 0, None, None

        def advance(count: int) -> None:
            nonlocal done, bar, task
            done += count
            if bar is None and time.monotonic() - begun > BAR_AFTER_SECONDS:
                bar = stack.enter_context(Progress(console=console, transient=True))
                task = bar.add_task("averaging", total=pieces)
            if bar is not None:
                bar.update(task, completed=done)

        yield advance
