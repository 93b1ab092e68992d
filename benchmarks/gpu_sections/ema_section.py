"""Two averages of a training on the GPU, stored on the GPU, the host or the disk."""

from typing import Any

from common import SectionReport, table

from memlab.units import format_bytes

from .bench import Bench, facts_by_name
from .ema_jobs import ON_THE_HOST, PLACES

HEADER = ("averages", "size", "on the GPU", "peak of an update", "peak of a synthesis",
          "error", "time / a step")  # fmt: skip


def run(bench: Bench) -> SectionReport:
    found = bench.in_turn("ema", PLACES)
    plain = {"what": found[ON_THE_HOST]["what"], **facts_by_name(found)}
    lines = [(name, *cells(answer)) for name, answer in found.items()]
    return SectionReport(sentence(found), table(HEADER, lines), plain)


def cells(answer: dict[str, Any]) -> tuple[str, ...]:
    counted = ("averages_bytes", "held_bytes", "update_bytes", "synthesis_bytes")
    return (
        *(format_bytes(answer[name]) for name in counted),
        f"{answer['synthesis error']:.1e}",
        f"{answer['time of step and update / step']:.2f} ×",
    )


def sentence(found: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{name} {format_bytes(answer['held_bytes'])} and "
        f"{answer['time of step and update / step']:.2f} × the time"
        for name, answer in found.items()
    ]
    return f"GPU memory of two averages, and time with updates: {', '.join(parts)}."
