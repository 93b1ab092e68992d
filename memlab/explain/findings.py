"""The known causes of running out of memory, and what a finding says.

A finding names one cause with a confidence between 0 and 1, the evidence for it, and what to do.
"""

from dataclasses import dataclass

from memlab.explain.fixes import FIXES, Fix

CONFIDENT, LIKELY, POSSIBLE = 0.7, 0.4, 0.15  # least confidence of each word
# Of a rule that was right r of n times: (r + 0.5) / (n + 1), so 4 of 4 and 15 of 16 are high.
COUNTED_HIGH, COUNTED_MEDIUM = 0.9, 0.75
CONTEXT_BYTES = 1_000_000_000  # at most, of one CUDA context


@dataclass(frozen=True)
class Cause:
    """A known cause: a short name, a title, and what to do."""

    name: str
    title: str
    fixes: tuple[Fix, ...]

    @property
    def advice(self) -> tuple[str, ...]:
        return tuple(fix.do for fix in self.fixes)


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence. `fixes`, if given, replaces those of the cause.

    The confidence of a log's cause comes from `counts`: how often its rule was right, and called,
    on public reports. `decide` is the one check that tells it from the next cause.
    """

    cause: Cause
    confidence: float
    evidence: tuple[str, ...]
    fixes: tuple[Fix, ...] | None = None
    counts: tuple[int, int] | None = None
    decide: str = ""
    code: str = ""  # of the first fix, for the framework that a log shows

    @property
    def todo(self) -> tuple[str, ...]:
        """What to do."""
        return tuple(fix.do for fix in (self.cause.fixes if self.fixes is None else self.fixes))

    @property
    def word(self) -> str:
        """How sure the finding is."""
        confident, likely = (COUNTED_HIGH, COUNTED_MEDIUM) if self.counts else (CONFIDENT, LIKELY)
        if self.confidence >= confident:
            return "high confidence"
        return "medium confidence" if self.confidence >= likely else "low confidence"


CAUSES = {name: Cause(name, title, fixes) for name, (title, fixes) in FIXES.items()}


def finding(name: str, confidence: float, *evidence: str) -> Finding:
    """Return a finding, its confidence limited to 0.01..0.99."""
    return Finding(CAUSES[name], min(0.99, max(0.01, confidence)), tuple(filter(None, evidence)))


def ranked(found: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings worth showing, the most confident first."""
    shown = [each for each in found if each.confidence >= POSSIBLE]
    return tuple(sorted(shown or found[:1], key=lambda each: -each.confidence))
