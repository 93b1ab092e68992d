"""`memlab measure`: one training step, plain and with each technique, side by side."""

import math
from dataclasses import replace

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
from memlab.cli.rows import measured_rows
from memlab.cli.time_budget import MAX_SECONDS, TimeBudget
from memlab.train import Plugs, Setting
from memlab.transformers_models.sources import Source


def measure_model(request: Request) -> int:
    """Measure the model that `--model` names; return 1 if a technique failed."""
    found = choose_model(request.model, request.library) if request.model else None
    if isinstance(found, Source):
        from memlab.cli.transformers_steps import measure_transformers

        return measure_transformers(request, found)
    return measure_techniques(request)


def measure_techniques(request: Request) -> int:
    """Measure, print a table, write pictures and results; return 1 if a technique failed."""
    chosen = choose_techniques(request)
    folder = choose_folder(request.out)
    request = replace(request, device=choose_device(request))
    setting, dry = choose_setting(request), request.dry
    on_cuda = replace(setting, device="cuda")
    to_predict = _techniques_to_predict(setting, chosen, request)
    terminal.echo(report.headline(setting, dry) + "\n")
    if line := list_adapters(chosen, choose_adapters(request.lora_rank, request.lora_targets)):
        terminal.echo(line + "\n")
    time_budget = None if dry or request.techniques else _time_budget(setting, chosen)
    with terminal.progress((1 if dry else 2) * len(chosen) + len(to_predict)) as announce:
        rows = measured_rows(setting, chosen, dry, announce, time_budget)
        predicted = measured_rows(on_cuda, to_predict, True, announce)
    context = report.context_of(setting.device if dry else None)
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
            [f"more: memlab measure {options(setting)} --dry-run --device cuda"],
        )
    write(rows, f"{setting}, dry run" if dry else str(setting), folder, predicted)
    return int(any(row.failure for row in rows))


def _time_budget(setting: Setting, chosen: dict[str, Plugs]) -> TimeBudget | None:
    """Limit the time of the default run only: a user who chose a model gets all of it measured."""
    if setting.device != "cpu":
        return None
    return TimeBudget(chosen, max_seconds=MAX_SECONDS if setting == SUITABLE["cpu"] else math.inf)


def _techniques_to_predict(
    setting: Setting, chosen: dict[str, Plugs], request: Request
) -> dict[str, Plugs]:
    """Choose what to predict for CUDA after a CPU run: by default only the plain step."""
    if setting.device != "cpu":
        return {}
    return chosen if request.techniques else {"plain": chosen["plain"]}


def options(setting: Setting) -> str:
    """Format the setting as command-line options, without its device."""
    dtype = str(setting.dtype).removeprefix("torch.")
    dtype = "" if setting.dtype is torch.float32 else f" --dtype {dtype}"
    return f"--model {setting.model} --batch {setting.batch} --seq {setting.seq_len}{dtype}"
