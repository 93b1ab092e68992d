"""What has a kernel of somebody else's to stand beside: 8-bit optimizers, attention, the loss,
and memlab's own kernels."""

from typing import Any

from common import Report, table

from memlab.units import format_bytes

from .bench import Bench, facts_by_name
from .fused_jobs import PROBLEMS, TORCH
from .kernel_jobs import AIM, RACES, TO_LIMIT, TO_PEER
from .optim_jobs import PAIRS

Found = dict[str, dict[str, Any]]  # by name, what is known of it


def optimizers(bench: Bench) -> Report:
    """Beside bitsandbytes' CUDA kernels, which nobody's tests compare."""
    found = bench.in_turn("optim", PAIRS)
    times = _listed(found, "time over bitsandbytes'")
    return _report(f"Beside bitsandbytes' kernels our step takes: {times} the time.", found)


def fused(bench: Bench) -> Report:
    """Attention and the loss by parts, beside torch's own and beside the whole tensor."""
    found = bench.in_turn("fused", PROBLEMS)
    times = _listed(found, f"time over that of {TORCH}")
    return _report(f"Beside torch's own, ours takes: {times} the time.", found)


def kernels(bench: Bench) -> Report:
    """memlab's own kernels beside production's, and beside what the card can do."""
    found = bench.in_turn("kernels", RACES)
    missed = [name for name, a in found.items() if a[TO_PEER] > a[AIM]]
    where = "In Triton's interpreter, whose times say nothing: of" if bench.rehearsal else "Of"
    sentence = (
        f"{where} {len(found)} kernels {len(found) - len(missed)} are as fast as was aimed at"
        + (f"; not so: {', '.join(missed)}." if missed else ".")
    )
    titles = ("kernel", "of", "ms", "time", "aim", "to the card's limit", "error", "on the way")
    lines = [
        (
            name,
            a["what"],
            text(a["milliseconds"], ""),
            f"{a[TO_PEER]:.2f} × {a['peer']}",
            f"{a[AIM]:.2f} ×",
            f"{a[TO_LIMIT]:.2f} × ({a['limit']})",
            f"{text(a['error'], '')} {a['error of']}",
            text(a["on the way_bytes"], "on the way_bytes"),
        )
        for name, a in found.items()
    ]
    return Report(sentence, table(titles, lines), facts_by_name(found))


def _listed(found: Found, fact: str) -> str:
    return ", ".join(f"{name} {a[fact]:.2f} ×" for name, a in found.items() if fact in a)


def _report(sentence: str, found: Found) -> Report:
    names = dict.fromkeys(fact for answer in found.values() for fact in answer)
    lines = [(fact, *(text(answer.get(fact), fact) for answer in found.values())) for fact in names]
    plain = {
        f"{name}, {fact}": value for name, answer in found.items() for fact, value in answer.items()
    }
    return Report(sentence, table(("", *found), lines), plain)


def text(value: Any, fact: str) -> str:
    if value is None:
        return ""
    if fact.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
