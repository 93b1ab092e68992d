"""`memlab explain`: why memory ran out, from a snapshot, a log or a trace."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from memlab.cli import terminal
from memlab.cli.errors import UsageError, quoted
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import ExplainRequest
from memlab.cli.results import write_explanation
from memlab.cli.terminal import echo, note, table_of
from memlab.explain import (
    Explanation,
    Finding,
    Source,
    explain_source,
    of_text,
    read_file,
    read_stream,
    summary,
)
from memlab.explain.answer import answer, basis, titled
from memlab.units import format_bytes, paragraph

STANDARD_INPUT = "-"
PATIENCE_SECONDS = 2  # of silence
MOST_ADVICE = 4  # lines for each of the first findings


def explain_file(request: ExplainRequest) -> None:
    """Print the summary and write the report."""
    folder = choose_folder(request.out)
    found = _explanation(request)
    if request.all:
        _show(found)
    else:
        echo(answer(found))
        echo(paragraph("everything else: --all, and the report"))
    echo("")
    write_explanation(found, request.file, folder)


def _explanation(request: ExplainRequest) -> Explanation:
    total = _total_bytes(request.memory)
    try:
        progress = Progress()
        source = _source(request.file, progress.on_bytes)
        _note_ignored(request, source)
        return explain_source(source, device=request.device, total_bytes=total, on_remedy=progress)
    except OSError as error:
        raise UsageError(
            f"got {quoted(request.file)}, which cannot be read ({error.strerror}); name a "
            f"snapshot, a log or a trace, or - for standard input"
        ) from error
    except ValueError as error:
        raise UsageError(f"got {quoted(request.file)}: {error}") from error


def _source(file: str, on_bytes: Callable[[int], None]) -> Source:
    if file == STANDARD_INPUT:
        stream = getattr(sys.stdin, "buffer", None)  # a snapshot, or a log with any bytes
        return read_stream(stream, on_bytes) if stream else of_text(sys.stdin.read())
    return read_file(Path(file), on_bytes)


class Progress:
    """Says what is read and which remedies are replayed, on standard error, if that takes long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._read_at = clock()

    def __call__(self, remedy: str) -> None:
        if self._clock() - self._start > PATIENCE_SECONDS:
            terminal.announce(f"replaying: {remedy}")

    def on_bytes(self, count: int) -> None:
        if self._clock() - self._read_at > PATIENCE_SECONDS:
            self._read_at = self._clock()
            terminal.announce(f"reading: {format_bytes(count)}")


def _note_ignored(request: ExplainRequest, source: Source) -> None:
    """Say which options have no effect on a log."""
    given = {"--device": request.device, "--memory": request.memory}
    ignored = [name for name, value in given.items() if value is not None]
    if source.kind == "log" and ignored:
        note(paragraph(f"ignored {' and '.join(ignored)}: a log states its own GPU and memory"))


def _total_bytes(memory: str | None) -> int | None:
    if memory is None:
        return None
    from memlab.planner.cards import memory_named

    try:
        return memory_named(memory).total_bytes
    except ValueError as error:
        raise UsageError(f"got --memory {quoted(memory)}: {error}") from error


# ------------------------------------------------------------------ the summary


def _show(found: Explanation) -> None:
    echo(paragraph(f"{summary.KINDS[found.kind]}: {summary.headline(found)}"))
    for line in summary.places(found):
        echo(paragraph(line))
    for line in summary.notes(found):
        echo(paragraph(line))
    _show_memory(found)
    for number, finding in enumerate(found.findings):
        _show_finding(found, number, finding)
    if found.situation and found.findings:
        note = summary.replay_note(found.replays, found.situation)
        echo("\n" + paragraph(f"remedies: {note}"))
    if summary.needs_recording(found):
        _show_recording(found)


def _show_memory(found: Explanation) -> None:
    echo("")
    rows: Sequence[tuple[str, ...]]
    titles: tuple[str, ...]
    if found.log:
        rows = summary.size_rows(found.log.message)
        titles = ("stated by the message", "bytes")
    else:
        assert found.situation is not None
        rows = summary.peak_rows(found.situation)
        titles = ("alive then", "bytes", "share", "from sizes alone")
    if rows:
        terminal.show_table(table_of(dict(zip(titles, zip(*rows, strict=True), strict=True))))
    if found.situation:
        lines = [*filter(None, [summary.stack_note(found.situation)])]
        lines += summary.growth_lines(found.situation)
        lines += summary.fragmentation_lines(found.situation)
        echo("\n".join(["", *map(paragraph, lines)]))


def _show_finding(found: Explanation, number: int, finding: Finding) -> None:
    title = summary.title_of_causes(found) if number == 0 else "or"
    echo("\n" + paragraph(f"{title}: {titled(finding)}"))
    for line in finding.evidence:
        echo(paragraph(f"  - {line}"))
    most = MOST_ADVICE + 1 if number == 0 else 1
    for line in [*summary.advice(finding, found.replays)][:most]:
        echo(paragraph(f"  → {line}"))
        if line == finding.todo[0] and finding.code:  # it is the code of the first fix
            echo("\n".join(f"      {row}" for row in finding.code.splitlines()))
    if finding.decide:
        echo(paragraph(f"  to find out: {finding.decide}"))
    echo(paragraph(f"  {basis(finding)}"))


def _show_recording(found: Explanation) -> None:
    echo("\n" + paragraph(f"To decide, record the next run ({summary.why_record(found)}):"))
    for line in summary.record_next():
        echo(f"  {line}")
