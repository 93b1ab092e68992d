"""Our 8-bit optimizers beside bitsandbytes' CUDA kernels, which nobody's tests compare."""

from typing import Any

from common import table

from memlab.units import format_bytes

from .bench import Bench, Report
from .optim_jobs import PAIRS


def run(bench: Bench) -> Report:
    """One pair after the other: they are timed."""
    found: dict[str, dict[str, Any]] = {}
    for name in PAIRS:
        found[name] = bench.submit("optim", name).result()
        bench.say(f"{name}: {found[name].get('failure') or found[name]['what']}")
    failures = [
        f"{name}: {answer['failure']}" for name, answer in found.items() if "failure" in answer
    ]
    if failures:
        raise RuntimeError("; ".join(failures))  # readers are shown what is kept
    times = [f"{name} {a[TIME]:.2f} ×" for name, a in found.items()]
    sentence = f"Beside bitsandbytes' kernels our step takes: {', '.join(times)} the time."
    names = dict.fromkeys(fact for answer in found.values() for fact in answer)
    lines = [(fact, *(text(answer.get(fact), fact) for answer in found.values())) for fact in names]
    plain = {
        f"{name}, {fact}": value for name, answer in found.items() for fact, value in answer.items()
    }
    return Report(sentence, table(("", *found), lines), plain)


TIME = "time over bitsandbytes'"


def text(value: Any, fact: str) -> str:
    if value is None:
        return ""
    if fact.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
