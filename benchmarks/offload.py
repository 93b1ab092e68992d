"""Offloading to disk: memory, traffic and time for state, gradients, weights and activations.

    python benchmarks/offload.py [--rounds 5] [--model 25m] [--results FOLDER]

    peak       peak memory on the device in the second step
    between    memory after a step
    buffers    the store's host memory
    moved      bytes written and read in a step
    ahead      share of bytes read that were prefetched
    time       time of a step including its writes, as a ratio to the step without offloading:
               median and quartiles of rounds where all take turns
    hidden     lower bound of the copy time that overlaps with the step: 1 − (extra time of the
               step) / (time of its copies alone)

On a CPU, device and host share their memory, so the benchmark offloads to files in the temporary
folder. "A commit each step" uses a folder that survives the process, so its bytes are synced to
disk. The other files may stay in the page cache, and then the time measures copies to and from the
cache. Times are wall-clock times because waiting counts: the machine must be idle.

Prints Markdown and writes `benchmarks/results/<machine>.json`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from common import (
    Spread,
    heading,
    parser_with_results,
    progress,
    ratios,
    save,
    set_environment,
    side_by_side,
)
from common import table as markdown_table
from rich.progress import Progress
from torch import nn

import memlab
from memlab.internals.cycles import no_cycle_collection
from memlab.model import PRESETS
from memlab.offload import (
    DiskStore,
    OffloadedOptimizer,
    Store,
    offloaded_activations,
    stream_layers,
)
from memlab.train import Plugs, Setting, Training, build
from memlab.units import format_bytes

NOTHING = "nothing"
COMMITTED = "state and weights, a commit each step"


@dataclass(frozen=True)
class OffloadSizes:
    """Sizes of the benchmark."""

    setting: Setting = Setting("25m", batch=4, seq_len=256)  # noqa: RUF009, it is frozen
    sub_group: int = 2**21  # weights; a sub-group's two moments are 16 MiB
    rounds: int = 5
    alone_bytes: int = 2**26  # copied alone, to time the copies


@dataclass(frozen=True)
class OffloadedParts:
    """What to offload."""

    optimizer: dict[str, Any] | None = None  # settings of OffloadedOptimizer; None for none
    activations: bool = False
    layers: bool = False
    persistent: bool = False  # the store survives the process

    def technique(self, store: Store, sub_group: int) -> Plugs:
        changed: dict[str, Any] = {}
        if self.layers:
            changed["change_model"] = lambda model: stream_layers(model, store)
        if self.activations:
            changed["around_forward"] = lambda device: offloaded_activations(store)
        if self.optimizer is not None:
            settings = {"sub_group": sub_group, **self.optimizer}
            changed["stepping"] = lambda inner: OffloadedOptimizer(inner, store, **settings)
        return Plugs(**changed)


EVERYTHING = {"gradients": True, "weights": True}
WAYS = {
    NOTHING: OffloadedParts(),
    "state": OffloadedParts({}),
    "state and gradients": OffloadedParts({"gradients": True}),
    COMMITTED: OffloadedParts({"weights": True}, persistent=True),
    "activations": OffloadedParts(activations=True),
    "layers, their gradients and state": OffloadedParts(EVERYTHING, layers=True),
    "all of these": OffloadedParts(EVERYTHING, activations=True, layers=True),
}


@dataclass(frozen=True)
class OffloadRow:
    """Memory, traffic and time of one way to offload."""

    peak_bytes: int
    between_bytes: int
    buffer_bytes: int
    written: int
    read: int
    prefetched: int
    alone_seconds: float  # copying the same bytes without a step
    seconds: list[float]


# ------------------------------------------------------------------ measured


@contextmanager
def disk_stores() -> Iterator[Callable[[OffloadedParts], DiskStore]]:
    """Yield a function that makes stores in temporary folders."""
    with ExitStack() as stack:

        def made(way: OffloadedParts) -> DiskStore:
            folder = stack.enter_context(tempfile.TemporaryDirectory()) if way.persistent else None
            return stack.enter_context(DiskStore(folder))

        yield made


def compared(
    ways: dict[str, OffloadedParts],
    plan: OffloadSizes,
    made: Callable[[OffloadedParts], Store],
    rounds: Sequence[int],
) -> dict[str, OffloadRow]:
    """Measure the memory of every way, which warms up, then the times."""
    device, rows, runs = plan.setting.device, {}, {}
    for name, way in ways.items():
        store = made(way)
        training = build(plan.setting, way.technique(store, plan.sub_group))
        rows[name] = bytes_of(training, store, plan.alone_bytes)
        runs[name] = partial(timed, training.step, store, device)
    seconds = side_by_side(runs, rounds)
    return {name: replace(row, seconds=seconds[name]) for name, row in rows.items()}


def bytes_of(training: Training, store: Store, alone_bytes: int) -> OffloadRow:
    """Return a row without the time of the step."""
    training.step()
    store.flush()
    store.traffic.reset()
    trace = memlab.measure(training.step, model=training.model, optimizer=training.optimizer)
    store.flush()
    moved = replace(store.traffic)
    alone = alone_seconds(store, _device_of(training.model), alone_bytes, moved)
    buffers = getattr(store, "buffer_bytes", 0)
    return OffloadRow(trace.peak_bytes, trace.live_bytes, buffers, **asdict(moved),
               alone_seconds=alone, seconds=[])  # fmt: skip


def alone_seconds(store: Store, device: torch.device, sample: int, moved: Any) -> float:
    """Extrapolate the time of the copies alone from `sample` bytes in each direction."""
    if not moved.written + moved.read:
        return 0.0
    tensor = torch.ones(sample // 4, device=device)
    store.put("alone", tensor)  # warm-up: allocates the buffers
    store.flush()
    down = timed(lambda: store.put("alone", tensor), store, device)
    up = timed(lambda: store.get("alone"), store, device)
    store.delete("alone")
    return moved.written / sample * down + moved.read / sample * up


def timed(run: Callable[[], object], store: Store, device: torch.device | str) -> float:
    """Return the seconds until the run is done and its writes are flushed."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    with no_cycle_collection():
        wait()
        start = time.perf_counter()
        run()
        wait()
        store.flush()
        return time.perf_counter() - start


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


# ------------------------------------------------------------------ derived figures


def saved(found: dict[str, OffloadRow], name: str) -> float:
    """Return the saved share of the peak."""
    return 1 - found[name].peak_bytes / found[NOTHING].peak_bytes


def slowdown(found: dict[str, OffloadRow], name: str) -> Spread:
    return ratios(found[name].seconds, found[NOTHING].seconds)


def ahead(row: OffloadRow) -> float | None:
    return row.prefetched / row.read if row.read else None


def hidden(found: dict[str, OffloadRow], name: str) -> float | None:
    """Return a lower bound of the share of copy time that overlaps with the step.

    It is a lower bound because the step may have other extra work. None without any copies.
    """
    row, plain = found[name], found[NOTHING]
    if not row.alone_seconds:
        return None
    extra = _median(row.seconds) - _median(plain.seconds)
    return min(1.0, max(0.0, 1 - extra / row.alone_seconds))


def _median(seconds: Sequence[float]) -> float:
    return ratios(seconds, [1.0] * len(seconds)).median


def facts(found: dict[str, OffloadRow]) -> dict[str, dict[str, Any]]:
    """Return the rows as plain data, with the derived figures."""
    return {
        name: {
            **asdict(row),
            "saved": saved(found, name),
            "slowdown": slowdown(found, name)._asdict(),
            "ahead": ahead(row),
            "hidden": hidden(found, name),
        }
        for name, row in found.items()
    }


def results_table(found: dict[str, OffloadRow]) -> str:
    rows = [
        (
            name,
            f"{format_bytes(row.peak_bytes)}, −{saved(found, name):.0%}",
            format_bytes(row.between_bytes),
            format_bytes(row.buffer_bytes),
            format_bytes(row.written),
            format_bytes(row.read),
            _share(ahead(row)),
            f"{slowdown(found, name)} ×",
            _share(hidden(found, name)),
        )
        for name, row in found.items()
    ]
    header = ("offloaded", "peak", "between steps", "store's buffers", "written", "read", "ahead",
              "time / nothing offloaded", "hidden")  # fmt: skip
    return markdown_table(header, rows)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def sentence(found: dict[str, OffloadRow]) -> str:
    """Return the saved share of the peak and the time ratio of each way."""
    parts = [
        f"{name}: {saved(found, name):.0%} in {slowdown(found, name).median:.2f} × the time"
        for name in found
        if name != NOTHING
    ]
    return f"Peak memory saved: {'; '.join(parts)}."


# ------------------------------------------------------------------ the command


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__, OffloadSizes.rounds)
    parser.add_argument(
        "--model",
        default=OffloadSizes.setting.model,
        choices=PRESETS,
        metavar="NAME",
        help="model to train",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, plan: OffloadSizes | None = None) -> int:
    set_environment()
    given = arguments(words)
    plan = plan or OffloadSizes(setting=replace(OffloadSizes.setting, model=given.model))
    torch.set_num_threads(1)  # the store's thread uses the other core
    print(heading("Offloading to the disk"))
    with progress() as bar, disk_stores() as made:
        found = compared(WAYS, plan, made, _rounds(bar, given.rounds))
    print(f"\n## {plan.setting}, sub-groups of {plan.sub_group:,} weights\n")
    print(sentence(found), end="\n\n")
    print(results_table(found))
    content = {
        "what": str(plan.setting),
        "sub_group": plan.sub_group,
        "summary": sentence(found),
        "ways": facts(found),
    }
    save(given.results, "offload", "disk", content)
    return 0


def _rounds(bar: Progress, count: int) -> Any:
    return bar.track(range(count), description="rounds")


if __name__ == "__main__":
    sys.exit(main())
