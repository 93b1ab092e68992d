"""`memlab.monitor`: the memory of every step of a training, while it trains."""

import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab.internals.torch_internals import exclude_from_dynamo
from memlab.monitoring.counters import Counters, Reading, counters_for, device_in_use
from memlab.monitoring.reports import Interval, StepMemory, emitter, plural
from memlab.monitoring.snapshots import MAX_ENTRIES, OomWatch, explanation, is_oom, say
from memlab.monitoring.texts import (
    FragmentationWarning,
    LeakWarning,
    MemoryWarning,
    fragmentation_text,
    is_harmless,
    leak_text,
    nearly_full_text,
    oom_text,
    retries_text,
)
from memlab.monitoring.trends import FragmentationDetector, LeakDetector
from memlab.units import format_bytes

T = TypeVar("T")
DUMP_AT = 0.95  # with a history, of the capacity
KEPT_STEPS = 16  # in `recent`
_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)


class monitor:  # noqa: N801 - used as a function: `with memlab.monitor() as monitor:`
    """Watch the memory of each training step, and warn at the first sign of trouble.

        with memlab.monitor():          # a step ends with each optimizer.step()
            train()

        monitor = memlab.monitor()      # or mark them yourself, also inside `with`
        for batch in loader:
            ...
            optimizer.step()
            monitor.step()

    It prints nothing while all is well. It warns once of each: memory that keeps growing after
    each step (LeakWarning), fragmentation (FragmentationWarning), nearly full memory
    (MemoryWarning). An out-of-memory error inside `with` prints what filled the memory; on CUDA a
    snapshot is written before the error unwinds.

    device        the device to watch; by default the one that the training uses. One monitor
                  watches one device
    every         print a line after so many steps, and a summary after `with`
    history       record the stack of each allocation on CUDA or XPU, for the snapshots. Without
                  `with`, the recording starts after the first step and does not end
    max_entries   the number of recorded allocations and frees to keep
    dump_at       write a snapshot (once) when a step's peak passes this share of the memory. The
                  default is 0.95 with `history`, else never
    snapshot_dir  where snapshots are written
    reset_peak    False leaves the device's peak counter alone. Each step's peak is then the
                  highest since other code reset it. True resets it after each step, also for
                  torch.cuda.max_memory_allocated; `monitor.peak_bytes` has the whole run's peak

    The first step's peak includes everything before it. On the CPU the memory is the process's
    own, without mapped files, and there are no snapshots.
    """

    @exclude_from_dynamo
    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        every: int | None = None,
        history: bool = False,
        max_entries: int = MAX_ENTRIES,
        dump_at: float | None = None,
        snapshot_dir: str | os.PathLike[str] = ".",
        reset_peak: bool = True,
    ) -> None:
        _check(every, dump_at, max_entries)
        self.peak_bytes = 0  # of the whole run
        self.peak_step = 0
        self.num_steps = 0
        self.is_running = False  # inside `with`
        self.recent: deque[StepMemory] = deque(maxlen=KEPT_STEPS)
        self._device = None if device is None else torch.device(device)
        self._counters: Counters | None = None
        self._resets_peak = reset_peak
        self._prints = every is not None
        self._dump_at = DUMP_AT if dump_at is None and history else dump_at
        self._outlets: list[Interval] = []
        self._oom = OomWatch(
            snapshot_dir, self._device, max_entries if history else None, _describer(self)
        )
        self._warned: set[type[MemoryWarning]] = set()
        self._carried_peak = 0
        self._finds_steps = True  # inside `with`, until the first call of `step`
        self._hook: Any = None
        self._first_optimizer: Callable[[], Any] = _nothing
        if every is not None:
            self._outlets.append(Interval(every, print))

    # ------------------------------------------------------------------ steps

    @exclude_from_dynamo
    def step(self, number: int | None = None) -> StepMemory:
        """End a training step, and return its memory. `number` is its number in the logs."""
        if self._finds_steps:
            self._stop_finding_steps()
        return self._record(number)

    def steps(self, batches: Iterable[T]) -> "Steps[T]":
        """Iterate over the batches, and end a step after each."""
        return Steps(self, batches)

    def log_to(self, target: Any, *, every: int = 1) -> "monitor":
        """Send bytes to TensorBoard, W&B or a function after each `every` steps; return `self`.

        target   a SummaryWriter, a W&B run or a function (name, value, step). W&B gets the values
                 with `commit=False`, as part of the row of your next `run.log`: log as often
        """
        _check(every)
        self._outlets.append(Interval(every, emitter(target)))
        return self

    def _record(self, number: int | None, optimizer: Any = None) -> StepMemory:
        counters = self._counters or self._start(optimizer)
        reading = counters.read()
        if self._resets_peak:
            counters.reset_peak()
        self.num_steps += 1
        peak, self._carried_peak = max(reading.peak_bytes, self._carried_peak), 0
        now = StepMemory(
            self.num_steps if number is None else number,
            peak,
            reading.allocated_bytes,
            reading.reserved_bytes,
            reading.allocated_bytes - self.recent[-1].allocated_bytes if self.recent else 0,
        )
        self.recent.append(now)
        self._oom.next_step = now.step + 1
        if peak > self.peak_bytes:
            self.peak_bytes, self.peak_step = peak, now.step
        for outlet in self._outlets:
            outlet.add(now)
        self._watch(counters, now, reading)
        return now

    def _start(self, optimizer: Any = None) -> Counters:
        device = self._device or device_in_use(optimizer)
        self._counters = counters = counters_for(device)
        self._oom.device = device
        self._oom.start()
        self._capacity = counters.capacity_bytes()
        self._reset_detectors(counters)
        return counters

    def _reset_detectors(self, counters: Counters) -> None:
        self._leaks = LeakDetector(
            counters.smallest_leak_bytes,
            counters.smallest_leak_share,
            peak_is_per_step=counters.peak_is_exact and self._resets_peak,
        )
        self._fragments = FragmentationDetector(self._capacity) if counters.peak_is_exact else None

    # ------------------------------------------------------------------ signs of trouble

    def _watch(self, counters: Counters, now: StepMemory, reading: Reading) -> None:
        device, capacity = counters.device, self._capacity
        if LeakWarning not in self._warned:
            leak = self._leaks.add(now.allocated_bytes, now.peak_bytes)
            if leak is not None and not is_harmless(leak, capacity):
                self._warn(LeakWarning, leak_text(leak, device, counters.counts, capacity))
        if FragmentationWarning not in self._warned and self._fragments is not None:
            found = self._fragments.add(reading, self.peak_bytes)
            if found is not None:
                text = fragmentation_text if found.is_large else retries_text
                self._warn(FragmentationWarning, text(found, device))
        if self._dump_at is None or capacity is None or MemoryWarning in self._warned:
            return
        if now.peak_bytes >= self._dump_at * capacity:
            self._oom.dump(device, "full", now.step)
            path = self._oom.path
            self._warn(
                MemoryWarning, nearly_full_text(now.step, now.peak_bytes, capacity, device, path)
            )

    def _warn(self, category: type[MemoryWarning], text: str) -> None:
        self._warned.add(category)
        warnings.warn(text, category, stacklevel=_level_of_user_code())

    # ------------------------------------------------------------------ with

    @exclude_from_dynamo
    def __enter__(self) -> "monitor":
        self.is_running = True
        if self._finds_steps and self._hook is None:
            self._hook = register_optimizer_step_post_hook(_hook_of(weakref.ref(self)))
        self._oom.start()
        return self

    @exclude_from_dynamo
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.is_running = False
        self._remove_hook()
        if is_oom(error):
            try:
                self._explain_oom(error)
            except Exception as another:  # it must not replace the memory error
                say(f"memlab: no report ({type(another).__name__}: {another})")
        elif self._prints:
            print(self)
        self._oom.stop()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step each time the first optimizer steps; a step may use several optimizers."""
        first = self._first_optimizer()
        if first is None:
            self._first_optimizer = weakref.ref(optimizer)
        if first is None or first is optimizer:
            self._record(None, optimizer)

    def _stop_finding_steps(self) -> None:
        """Forget the steps found so far: from now on the caller marks them."""
        self._finds_steps = False
        self._remove_hook()
        if self._counters is not None and self.num_steps:
            self._carried_peak, self.peak_bytes = self.peak_bytes, 0
            self.num_steps = 0
            self.recent.clear()
            for outlet in self._outlets:
                outlet.take()
            self._reset_detectors(self._counters)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _explain_oom(self, error: BaseException | None) -> None:
        """Print what filled the memory, after the error left `with`."""
        device = (self._counters or self._start()).device
        if not self._oom.has_seen_this_step():
            note = self._oom.dump(device, "oom", self._oom.next_step)
            say(self._describe_oom(device) + note)
        if text := explanation(self._oom.path, error):
            say(text)

    def _describe_oom(self, device: torch.device) -> str:
        return oom_text(device, self._oom.requested, self.recent, self.peak_bytes)

    def __str__(self) -> str:
        if self._counters is None or not self.recent:
            return "no steps yet: call monitor.step() after each, or use a torch.optim optimizer"
        last = self.recent[-1]
        parts = [
            f"peak {format_bytes(self.peak_bytes)} in step {self.peak_step}",
            f"{format_bytes(last.allocated_bytes)} after the last step",
        ]
        if last.reserved_bytes is not None:
            parts.append(f"{format_bytes(last.reserved_bytes)} reserved")
        return f"{plural(self.num_steps, 'step')} on {self._counters.device}: {', '.join(parts)}"


class Steps(Generic[T]):
    """Batches, with the end of a step after each. As long as the batches."""

    def __init__(self, running: monitor, batches: Iterable[T]) -> None:
        self._monitor, self._batches = running, batches

    def __iter__(self) -> Iterator[T]:
        for batch in self._batches:
            yield batch
            self._monitor.step()

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def _hook_of(reference: "weakref.ref[monitor]") -> Callable[..., None]:
    """Return a hook for all optimizers; torch.compile leaves it alone."""

    @exclude_from_dynamo
    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        running = reference()
        if running is not None:
            running._after_optimizer_step(optimizer)

    return after_step


def _describer(running: monitor) -> Callable[[torch.device], str]:
    """Return a function that does not keep the monitor alive."""
    reference = weakref.WeakMethod(running._describe_oom)
    return lambda device: reference()(device)  # type: ignore[misc] # only the monitor's watch calls


def _level_of_user_code() -> int:
    """Return the `stacklevel` at which the caller of this function should warn."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


def _nothing() -> None:
    """A reference to no optimizer."""


def _check(every: int | None, dump_at: float | None = None, max_entries: int = 1) -> None:
    if every is not None and (not isinstance(every, int) or every < 1):
        raise ValueError(f"got every={every!r}; pass the number of steps between two lines")
    if dump_at is not None and not 0 < dump_at <= 1:
        raise ValueError(f"got dump_at={dump_at!r}; pass a share of the memory, such as 0.95")
    if not isinstance(max_entries, int) or max_entries < 1:
        raise ValueError(
            f"got max_entries={max_entries!r}; pass how many allocations to keep, such as 100_000"
        )
