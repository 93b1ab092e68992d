"""`memlab explain`: why memory ran out, from a snapshot, a log or a trace."""

import sys
from dataclasses import dataclass
from pathlib import Path

from memlab.cli import terminal
from memlab.cli.errors import UsageError, quoted
from memlab.cli.parsing import choose_folder
from memlab.cli.results import write_explanation
from memlab.cli.terminal import echo, table_of
from memlab.explain import Explanation, Source, explain_source, of_text, read_file, summary
from memlab.units import paragraph

STANDARD_INPUT = "-"
MOST_ADVICE = 4  # lines for each of the first findings


@dataclass(frozen=True)
class Question:
    """The arguments of `memlab explain`."""

    file: str
    device: int | None
    memory: str | None
    out: str


def explain_file(question: Question) -> None:
    """Print the summary and write the report."""
    folder = choose_folder(question.out)
    found = _explanation(question)
    _show(found)
    echo("")
    write_explanation(found, question.file, folder)


def _explanation(question: Question) -> Explanation:
    total = _total_bytes(question.memory)
    try:
        source = _source(question.file)
        return explain_source(source, device=question.device, total_bytes=total)
    except OSError as error:
        raise UsageError(
            f"got {quoted(question.file)}, which cannot be read ({error.strerror}); name a "
            f"snapshot, a log or a trace, or - for standard input"
        ) from error
    except ValueError as error:
        raise UsageError(f"got {quoted(question.file)}: {error}") from error


def _source(file: str) -> Source:
    if file == STANDARD_INPUT:
        stream = getattr(sys.stdin, "buffer", None)  # a log may hold any bytes
        return of_text(stream.read().decode("utf-8", "replace") if stream else sys.stdin.read())
    return read_file(Path(file))


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
    if place := summary.place(found):
        echo(paragraph(f"at {place}"))
    for line in summary.notes(found):
        echo(paragraph(line))
    _show_memory(found)
    for number, finding in enumerate(found.findings):
        _show_finding(found, number, finding)
    if found.situation and found.findings:
        note = summary.replay_note(found.replays, found.situation)
        echo("\n" + paragraph(f"remedies: {note}"))
    if found.log or summary.needs_recording(found):
        _show_recording(found)


def _show_memory(found: Explanation) -> None:
    echo("")
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


def _show_finding(found: Explanation, number: int, finding) -> None:
    title = summary.title_of_causes(found) if number == 0 else "or"
    echo("\n" + paragraph(f"{title}: {finding.cause.title} ({finding.word})"))
    for line in finding.evidence:
        echo(paragraph(f"  - {line}"))
    if number == 0:
        for line in [*summary.advice(finding, found.replays)][: MOST_ADVICE + 1]:
            echo(paragraph(f"  → {line}"))


def _show_recording(found: Explanation) -> None:
    echo("\n" + paragraph(f"To decide, record the next run ({summary.why_record(found)}):"))
    for line in summary.record_next():
        echo(f"  {line}")
