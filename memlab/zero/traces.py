"""Join the traces of a rank's turns into one trace.

Ranks take turns, so a rank's step is metered in several traces. A trace starts with the tensors
that the previous one left alive. Between turns, the rank's memory does not change.
"""

from collections import Counter
from collections.abc import Sequence

from memlab.trace import Event, Trace
from memlab.zero.units import ROOT


def join_traces(traces: Sequence[Trace], phases: Sequence[str | None]) -> Trace:
    """Join the traces of all turns. A phase other than None replaces "forward" in its trace.

    A storage gets the category that the last trace gives it.
    """
    category = {event.storage: event.category for trace in traces for event in trace.events}
    live: Counter[int] = Counter()
    initial: list[Event] = []
    events: list[Event] = []
    for number, (trace, phase) in enumerate(zip(traces, phases, strict=True)):
        before = {e.storage: e for e in trace.events if e.phase == "before"}
        for storage in [s for s, count in live.items() if count and number]:
            now = before.pop(storage).bytes if storage in before else 0
            if now != live[storage]:
                last = next(e for e in reversed(events + initial) if e.storage == storage)
                events.append(last._replace(bytes=now - live[storage], phase=last.phase))
                live[storage] = now
        for storage, event in before.items():  # first used in this turn
            initial.append(event)
            live[storage] += event.bytes
        for event in trace.events:
            if event.phase != "before":
                events.append(event._replace(phase=_phase(event, phase)))
                live[event.storage] += event.bytes
    events = [e._replace(category=category[e.storage]) for e in (*initial, *events)]
    first = traces[0]
    return Trace(tuple(events), device=first.device, dry=first.dry, notes=first.notes)


def gathered_at_peak(trace: Trace, units: Sequence[str]) -> dict[str, int]:
    """Return the bytes of whole weights at the peak, by unit, largest first.

    Shards belong to no module of the model, so they do not count. `units` excludes the root.
    """
    gathered: Counter[str] = Counter()
    for event in trace.alive(trace.peak_position):
        if event.category == "parameters" and event.module:
            unit = next((u for u in units if f"{event.module}.".startswith(f"{u}.")), ROOT)
            gathered[unit] += event.bytes
    return dict(gathered.most_common())


def _phase(event: Event, phase: str | None) -> str:
    return phase if phase and event.phase == "forward" else event.phase
