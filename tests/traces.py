"""Traces of dry runs and predictions, and how tests compare them."""

from itertools import accumulate, groupby

import memlab
from memlab.trace import Event, Trace

WORKSPACE = 8_519_680  # of one handle of cuBLAS


def renumbered(trace: Trace) -> list[Event]:
    """The events, with storages numbered from 0 in the order they appear.

    Of several storages that die between two operators, Python decides which dies first; that
    changes no peak, so such runs of frees are sorted.
    """
    numbers: dict[int, int] = {}
    events = [e._replace(storage=numbers.setdefault(e.storage, len(numbers))) for e in trace.events]
    runs = groupby(events, key=lambda event: event.bytes < 0)
    return [e for frees, run in runs for e in (sorted(run) if frees else run)]


def same_in_a_dry_run(make) -> Trace:
    """Asserts that the second step of `make()` has the same events dry and real; returns them."""
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
    """The first call of `function(device)`, for CUDA."""
    return memlab.predict(lambda: (lambda: function("cuda"), None, None), steps=1, **options)


def births(trace: memlab.Trace, operator: str = "") -> list[tuple[int, str]]:
    """(bytes, dtype) of what is allocated by the operators whose names contain `operator`."""
    return [
        (event.bytes, event.dtype)
        for event in trace.events
        if event.bytes > 0 and event.category != "rounding" and operator in event.operator
    ]


def peak_of_storages(trace: Trace) -> int:
    """Without what CUDA adds: workspaces and rounding."""
    changes = (e.bytes for e in trace.events if e.category not in ("workspace", "rounding"))
    return max(accumulate(changes))
