"""GPU figures that lessons show to readers without a GPU, through `stored_on_a_gpu("day 1")`.

The lessons print the results as stored: bytes under names that end in `_bytes`, a description of
the step under `what`. The results are therefore flat.
"""

from typing import Any

from common import SectionReport, table

from memlab.units import format_bytes

from .bench import Bench
from .day_jobs import SIDE_BY_SIDE


def first_day(bench: Bench) -> SectionReport:
    """Measure Day 1's step on the GPU."""
    found = _measured(bench, "day 1")
    sentence = (
        f"Day 1's step ({found['what']}) peaks at {format_bytes(found['peak_bytes'])} in "
        f"{found['peak_in']}."
    )
    return _report(sentence, found)


def second_day(bench: Bench) -> SectionReport:
    """Measure allocated, reserved and device memory of Day 2's four steps."""
    found = _measured(bench, "day 2")
    numbers = [
        f"{name} {format_bytes(found[f'{name}_bytes'])}" for name in ("allocated", "reserved")
    ]
    return _report(f"Day 2's steps ({found['what']}): {', '.join(numbers)}.", found)


def compared(bench: Bench) -> SectionReport:
    """Compare the techniques of the section's day."""
    steps = SIDE_BY_SIDE[bench.section]
    jobs = {words: bench.submit("step", technique) for words, technique in steps.items()}
    found: dict[str, Any] = {}
    for words, job in jobs.items():
        answer = _or_raise(job.result())
        found["what"] = answer["what"]
        for kind in ("peak", "reserved"):
            found[f"{words}, {kind}_bytes"] = answer[f"{kind}_bytes"]
    peaks = [f"{words} {format_bytes(found[f'{words}, peak_bytes'])}" for words in steps]
    sentence = f"The step of {bench.section} ({found['what']}) peaks at: {', '.join(peaks)}."
    return _report(sentence, found)


def timed(bench: Bench) -> SectionReport:
    """Time techniques against the plain step."""
    found = _measured(bench, "time")
    what = f"{found['what']}: time as a ratio to the plain step"
    lines = [(name, f"{ratio:.2f} ×") for name, ratio in found.items() if name != "what"]
    return SectionReport(f"{what}.", table(("", "time"), lines), found)


def _measured(bench: Bench, day: str) -> dict[str, Any]:
    return _or_raise(bench.submit(day).result())


def _or_raise(found: dict[str, Any]) -> dict[str, Any]:
    if "failure" in found:
        raise RuntimeError(found["failure"])  # do not store incomplete results
    return found


def _report(sentence: str, found: dict[str, Any]) -> SectionReport:
    lines = [(name.removesuffix("_bytes").replace("_", " "), text(name, found)) for name in found]
    return SectionReport(sentence, table(("", "measured"), lines), found)


def text(name: str, found: dict[str, Any]) -> str:
    return format_bytes(found[name]) if name.endswith("_bytes") else str(found[name])
