"""The answer that fits a screen: the cause, its evidence, one remedy with its code, what it saves.

`memlab explain` prints it, a notebook shows it for `memlab.explain(error)`, and so does the monitor
after an error. Everything else is behind `--all` and in the report.
"""

from collections.abc import Iterator

from memlab.explain import summary
from memlab.explain.explanation import Explanation
from memlab.explain.findings import Finding
from memlab.units import WIDTH, paragraph

MOST_ROWS = 12  # with more, only the first evidence is shown
MOST_EVIDENCE = 2  # sentences
MOST_CODE = 4  # lines


def answer(found: Explanation) -> str:
    """Return the answer as text, at most about ten lines."""
    for evidence in (MOST_EVIDENCE, 1):
        text = "\n".join(_lines(found, evidence))
        if text.count("\n") < MOST_ROWS:
            break
    return text


def _lines(found: Explanation, most_evidence: int) -> Iterator[str]:
    yield paragraph(f"{summary.KINDS[found.kind]}: {summary.headline(found)}")
    if found.log is None:
        yield from map(paragraph, (*summary.places(found), *summary.notes(found)))
    if not found.findings:
        yield paragraph("no known cause was found")
        return
    first, *others = found.findings
    yield paragraph(f"{summary.title_of_causes(found)}: {titled(first)}")
    yield from (clipped(f"  - {line}") for line in first.evidence[:most_evidence])
    beside = found.log.message.others if found.log else ""
    if beside and beside not in first.evidence[:most_evidence]:
        yield clipped(f"  - beside it: {beside}")
    remedy = next(summary.advice(first, found.replays), "")
    yield paragraph(f"  → {remedy}")
    fix = next(iter(first.cause.fixes if first.fixes is None else first.fixes), None)
    if found.situation and fix and fix.do != remedy:  # a replay says what it saves, not how
        yield paragraph(f"  → {fix.do}")
    if first.code and fix and (found.situation or fix.do == remedy):
        yield from (f"      {line}" for line in first.code.splitlines()[:MOST_CODE] if line)
    if found.log and fix and fix.saves:
        yield paragraph(f"  saves {fix.saves}")
    if others:
        yield paragraph(f"or: {titled(others[0])}")
    if first.decide and not first.word.startswith("high"):
        yield paragraph(f"to find out: {first.decide}")


def titled(finding: Finding) -> str:
    """Return a cause with its confidence."""
    return f"{finding.cause.title} ({finding.word}{'' if finding.counts else ', an estimate'})"


def basis(finding: Finding) -> str:
    """Say what a confidence rests on."""
    if finding.counts is None:
        return "confidence: estimated from shares and sizes, not counted on known cases"
    right, called = finding.counts
    return f"confidence: {right} of the {called} public reports that look like this had this cause"


def clipped(line: str) -> str:
    """Return a line that fits the screen; a long path or message loses its middle."""
    if len(line) <= 2 * WIDTH - 10:
        return paragraph(line)
    return paragraph(f"{line[:WIDTH]} … {line[-WIDTH // 2 :]}")
