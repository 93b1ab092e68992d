"""`memlab measure`: one training step, plain and with each technique, side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memlab.cli import report, terminal
from memlab.cli.adapter_options import choose_adapters, list_adapters
from memlab.cli.choices import (
    SUITABLE,
    choose_device,
    choose_setting,
    choose_techniques,
)
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import Request
from memlab.cli.results import write
from memlab.cli.rows import Row, measured_rows
from memlab.cli.time_budget import MAX_SECONDS, TimeBudget
from memlab.train import Setting
from memlab.transformers_models.sources import Source


@dataclass(frozen=True)
class Measurement:
    """What to measure.

    setting     memlab.train's, with plugs as techniques, or a TransformersSetting, with recipes
    chosen      techniques, the plain one first
    to_predict  those to predict for CUDA afterwards
    adapters    a line about them
    seconds     after which rows get dry runs
    """

    setting: Any
    chosen: dict[str, Any]
    dry: bool
    to_predict: dict[str, Any] = field(default_factory=dict)
    adapters: str = ""
    seconds: float | None = None


def measure_model(request: Request) -> int:
    """Measure, print a table, write pictures and results; return 1 if a technique failed."""
    what, folder = choose_measurement(request), choose_folder(request.out)
    terminal.echo(report.headline(what.setting, what.dry) + "\n")
    if what.adapters:
        terminal.echo(what.adapters + "\n")
    rows, predicted = _measured(what)
    _show(what, rows, predicted)
    write(rows, f"{what.setting}, dry run" if what.dry else str(what.setting), folder, predicted)
    return int(any(row.failure for row in rows))


def choose_measurement(request: Request) -> Measurement:
    """Check all options, and return what they ask for. By default, only the plain step is predicted
    for CUDA, and the time is limited: a user who chose a model gets all of it measured."""
    found = choose_model(request.model, request.library) if request.model else None
    if isinstance(found, Source):
        from memlab.cli.transformers_steps import choose_transformers

        return choose_transformers(request, found)
    chosen = choose_techniques(request)
    adapters = list_adapters(chosen, choose_adapters(request.lora_rank, request.lora_targets))
    setting = choose_setting(replace(request, device=choose_device(request)))
    if setting.device != "cpu":
        return Measurement(setting, chosen, request.dry, adapters=adapters)
    to_predict = chosen if request.techniques else {"plain": chosen["plain"]}
    seconds = MAX_SECONDS if setting == SUITABLE["cpu"] else math.inf
    is_limited = not (request.dry or request.techniques)
    return Measurement(
        setting, chosen, request.dry, to_predict, adapters, seconds if is_limited else None
    )


def _measured(what: Measurement) -> tuple[list[Row], list[Row]]:
    """Measure the rows, and predict those for CUDA."""
    budget = None if what.seconds is None else TimeBudget(what.chosen, max_seconds=what.seconds)
    stages = (1 if what.dry else 2) * len(what.chosen) + len(what.to_predict)
    with terminal.progress(stages) as announce:
        rows = measured_rows(what.setting, what.chosen, what.dry, announce, budget)
        if not what.to_predict:
            return rows, []
        on_cuda = replace(what.setting, device="cuda")
        return rows, measured_rows(on_cuda, what.to_predict, True, announce)


def _show(what: Measurement, rows: Sequence[Row], predicted: Sequence[Row]) -> None:
    context = report.context_of(what.setting.device if what.dry else None)
    parts = report.legend(rows, context), report.remarks(rows), report.dry_rows_note(rows)
    report.show(report.table(rows, context=context), *parts)
    terminal.echo(f"\nplain: {rows[0].trace}")
    if predicted:
        terminal.echo("\nThe same steps on CUDA, predicted:\n")
        report.show(
            report.table(predicted),
            report.legend(predicted),
            report.failures(predicted),
            report.notes(predicted[0]),
            [f"more: memlab measure {options(what.setting)} --dry-run --device cuda"],
        )


def options(setting: Setting) -> str:
    """Format the setting as command-line options, without its device."""
    dtype = str(setting.dtype).removeprefix("torch.")
    dtype = "" if setting.dtype is torch.float32 else f" --dtype {dtype}"
    return f"--model {setting.model} --batch {setting.batch} --seq {setting.seq_len}{dtype}"
