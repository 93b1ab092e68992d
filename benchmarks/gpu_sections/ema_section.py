"""Two averages beside a training on the GPU, wherever they live."""

from typing import Any

from common import Report, table

from memlab.units import format_bytes

from .bench import Bench, facts_by_name
from .ema_jobs import ON_THE_HOST, PLACES

HEADER = ("averages", "bytes", "held of the GPU", "most in an update", "most in a synthesis",
          "off by", "time / a step")  # fmt: skip


def run(bench: Bench) -> Report:
    found = bench.in_turn("ema", PLACES)
    plain = {"what": found[ON_THE_HOST]["what"], **facts_by_name(found)}
    lines = [(name, *cells(answer)) for name, answer in found.items()]
    return Report(sentence(found), table(HEADER, lines), plain)


def cells(answer: dict[str, Any]) -> tuple[str, ...]:
    counted = ("averages_bytes", "held_bytes", "update_bytes", "synthesis_bytes")
    return (
        *(format_bytes(answer[name]) for name in counted),
        f"{answer['synthesized, off by']:.1e}",
        f"{answer['time of a step and an update over a step']:.2f} ×",
    )


def sentence(found: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{name} {format_bytes(answer['held_bytes'])} and "
        f"{answer['time of a step and an update over a step']:.2f} × the time"
        for name, answer in found.items()
    ]
    return f"Two averages, updated at each step, take of the GPU: {', '.join(parts)}."
