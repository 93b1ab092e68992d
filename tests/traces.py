"""Helpers that make and compare traces of dry runs and predictions."""

from itertools import accumulate, groupby

import memlab
from memlab.trace import Event, Trace

WORKSPACE = 8_519_680  # bytes per cuBLAS handle


def renumbered(trace: Trace) -> list[Event]:
    """Return the events with storages renumbered from 0 in order of appearance.

    The order of frees between two operators depends on Python and changes no peak, so frees are
    sorted.
    """
    numbers: dict[int, int] = {}
    events = [e._replace(storage=numbers.setdefault(e.storage, len(numbers))) for e in trace.events]
    runs = groupby(events, key=lambda event: event.bytes < 0)
    return [e for frees, run in runs for e in (sorted(run) if frees else run)]


def same_in_a_dry_run(make) -> Trace:
    """Assert that the second step of `make()` is equal dry and real, and return its dry trace."""
    traces = []
    for mode in (None, memlab.dry_run()):
        if mode is not None:
            mode.__enter__()
        try:
            step, model = make()
            step()
            traces.append(memlab.measure(step, model=model))
        finally:
            if mode is not None:
                mode.__exit__(None, None, None)
    real, dry = traces
    assert dry.dry
    assert not real.dry
    assert renumbered(real) == renumbered(dry)
    return dry


def predicted(function, **options) -> memlab.Trace:
    """Predict the first call of `function("cuda")`."""
    return memlab.predict(lambda: (lambda: function("cuda"), None, None), steps=1, **options)


def births(trace: memlab.Trace, operator: str = "") -> list[tuple[int, str]]:
    """Return (bytes, dtype) of allocations by operators whose name contains `operator`."""
    return [
        (event.bytes, event.dtype)
        for event in trace.events
        if event.bytes > 0 and event.category != "rounding" and operator in event.operator
    ]


def peak_of_storages(trace: Trace) -> int:
    """Return the peak without workspaces and rounding."""
    changes = (e.bytes for e in trace.events if e.category not in ("workspace", "rounding"))
    return max(accumulate(changes))
