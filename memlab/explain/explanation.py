"""Explain a file: why memory ran out, with evidence and the predicted effect of each remedy."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from memlab.explain.advice import for_snapshot
from memlab.explain.causes import findings
from memlab.explain.findings import Finding, ranked
from memlab.explain.histories import history_of
from memlab.explain.messages import Log, read_log
from memlab.explain.reading import Source, of_text, read_file
from memlab.explain.remedies import Replays, replays
from memlab.explain.rules import text_findings
from memlab.explain.situation import Situation
from memlab.explain.text_causes import TextSituation

RECORD_NEXT = (  # three lines for the user's script
    "torch.cuda.memory._record_memory_history(max_entries=200_000)",
    "try: train()",
    'finally: torch.cuda.memory._dump_snapshot("snapshot.pickle")',
)


@dataclass(frozen=True, repr=False)
class Explanation:
    """The causes of one file, the most confident first.

    A snapshot, recording or trace has a `situation`, and `replays` unless it is too long to replay.
    A log has a `log`.
    """

    kind: str  # "snapshot", "recording", "trace" or "log"
    findings: tuple[Finding, ...]
    situation: Situation | None = None
    replays: Replays | None = None
    log: Log | None = None

    @property
    def cause(self) -> str | None:
        """The name of the most confident cause, such as "logits"; None if nothing was found."""
        return self.findings[0].cause.name if self.findings else None

    def __repr__(self) -> str:
        from memlab.explain.answer import answer

        return answer(self)


def explain(
    file: str | Path, *, device: int | None = None, total_bytes: int | None = None
) -> Explanation:
    """Explain a snapshot, an out-of-memory log or a memlab trace.

    Args:
        device: of a snapshot with several; by default the one that ran out of memory.
        total_bytes: of the card, which a snapshot does not state.

    Raises:
        ValueError: if the file is none of these, is damaged, or holds more than plain data.
    """
    return explain_source(read_file(Path(file)), device=device, total_bytes=total_bytes)


def explain_text(text: str) -> Explanation:
    """Explain an out-of-memory message or a log that contains one."""
    return explain_source(of_text(text))


def explain_error(error: BaseException | None = None) -> Explanation:
    """Explain an exception; by default the last one that a notebook or a prompt showed."""
    error = error or getattr(sys, "last_value", None)
    if error is None:
        raise ValueError("no exception was shown before; pass one: memlab.explain(error)")
    return explain_text("".join(traceback.format_exception(error)))


def explain_source(
    source: Source,
    *,
    device: int | None = None,
    total_bytes: int | None = None,
    on_remedy: Callable[[str], object] = str,
) -> Explanation:
    """Explain what a file holds. `on_remedy` is called before each remedy is replayed."""
    if source.snapshot is None:
        log = read_log(source.text, source.unread_bytes)
        return Explanation(source.kind, text_findings(TextSituation(log)), log=log)
    situation = Situation(history_of(source.snapshot, device), total_bytes)
    if not situation.history.blocks:
        raise ValueError("no memory was allocated in it; record a step before you dump a snapshot")
    replayed = replays(situation, on_remedy)
    files = "\n".join(frame.filename for frame in situation.context_stack)
    after = (_after_replay(each, replayed) for each in findings(situation))
    found = [for_snapshot(each, files) for each in after]
    return Explanation(source.kind, ranked(found), situation, replayed)


def _after_replay(found: Finding, replayed: Replays | None) -> Finding:
    """Doubt fragmentation if expandable segments, which have almost none, do not help."""
    if found.cause.name != "fragmentation" or replayed is None or not replayed.reproduces:
        return found
    for outcome in replayed.remedies:
        if outcome.name.startswith("expandable_segments"):
            strength = found.confidence * (1.15 if outcome.fits else 0.5)
            return replace(found, confidence=min(0.99, strength))
    return found
