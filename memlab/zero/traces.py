"""The trace of a rank, joined from those of its turns.

Ranks take turns, so a rank's step is metered in pieces. What one piece leaves alive the next one
finds; in between nothing of the rank moves.
"""

from collections import Counter
from collections.abc import Sequence

from memlab.trace import Event, Trace
from memlab.zero.units import ROOT


def joined(pieces: Sequence[Trace], phases: Sequence[str | None]) -> Trace:
    """One trace of all pieces. A phase that is given is that of what a piece did outside of
    backward and of an optimizer; what a storage holds is what the last piece knows of it."""
    category = {event.storage: event.category for piece in pieces for event in piece.events}
    live: Counter[int] = Counter()
    found: list[Event] = []
    events: list[Event] = []
    for number, (piece, phase) in enumerate(zip(pieces, phases, strict=True)):
        before = {e.storage: e for e in piece.events if e.phase == "before"}
        for storage in [s for s, count in live.items() if count and number]:
            there = before.pop(storage).bytes if storage in before else 0
            if there != live[storage]:
                last = next(e for e in reversed(events + found) if e.storage == storage)
                events.append(last._replace(bytes=there - live[storage], phase=last.phase))
                live[storage] = there
        for storage, event in before.items():  # nobody touched it until now
            found.append(event)
            live[storage] += event.bytes
        for event in piece.events:
            if event.phase != "before":
                events.append(event._replace(phase=_phase(event, phase)))
                live[event.storage] += event.bytes
    events = [_with_category(event, category[event.storage]) for event in (*found, *events)]
    first = pieces[0]
    return Trace(tuple(events), device=first.device, dry=first.dry, notes=first.notes)


def gathered_at_peak(trace: Trace, units: Sequence[str]) -> dict[str, int]:
    """Bytes of whole weights at the peak, by the unit that they belong to; the largest first.

    Shards belong to no module of the model, so they are not among them. `units` are all but the
    root.
    """
    gathered: Counter[str] = Counter()
    for event in trace.alive(trace.peak_position):
        if event.category == "parameters" and event.module:
            unit = next((u for u in units if f"{event.module}.".startswith(f"{u}.")), ROOT)
            gathered[unit] += event.bytes
    return dict(gathered.most_common())


def _phase(event: Event, phase: str | None) -> str:
    return phase if phase and event.phase == "forward" else event.phase


def _with_category(event: Event, category: str) -> Event:
    return event._replace(category=category)
