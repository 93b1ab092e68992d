"""`memlab measure`: one training step, plain and with each technique, side by side."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from memlab.cli import report, terminal
from memlab.cli.choices import (
    SUITABLE,
    choose_device,
    choose_setting,
    choose_techniques,
    require_kernels,
    taken_by_kernels,
)
from memlab.cli.errors import UsageError, in_one_line, is_out_of_memory
from memlab.cli.parsing import choose_folder
from memlab.cli.patience import MOST_SECONDS, Patience
from memlab.cli.requests import Request
from memlab.cli.results import write
from memlab.cli.rows import Announce, Row, SideBySide, dry_row, predicted_row
from memlab.configs.targets import TARGETS
from memlab.train import Plugs, Setting


def measure_techniques(request: Request) -> int:
    """Measure, print a table, write pictures and numbers; 1 if a technique failed, else 0."""
    chosen = choose_techniques(request)
    folder = choose_folder(request.out)
    request = replace(request, device=choose_device(request))
    setting, dry = choose_setting(request), request.dry
    if request.kernels and not dry:
        require_kernels(setting.device)
    on_cuda = replace(setting, device="cuda")
    foreseen = _to_be_foreseen(setting, chosen, request)
    terminal.say(report.headline(setting, dry) + "\n")
    if request.kernels:
        terminal.say(taken_by_kernels(chosen) + "\n")
    patience = None if dry or request.techniques else _patience(setting, chosen)
    with terminal.progress((1 if dry else 2) * len(chosen) + len(foreseen)) as announce:
        rows = measured_rows(setting, chosen, dry, announce, patience)
        predicted = measured_rows(on_cuda, foreseen, True, announce)
    _show(rows, report.legend(rows), report.remarks(rows), report.measured_dry(rows))
    terminal.say(f"\nplain: {rows[0].trace}")
    if predicted:
        terminal.say("\nThe same steps on CUDA, predicted:\n")
        _show(
            predicted,
            report.legend(predicted),
            report.failures(predicted),
            report.notes(predicted[0]),
            [f"more: memlab measure {options(setting)} --dry-run --device cuda"],
        )
    write(rows, f"{setting}, dry run" if dry else str(setting), folder, predicted)
    return int(any(row.failure for row in rows))


def _patience(setting: Setting, chosen: dict[str, Plugs]) -> Patience | None:
    """Nobody asked for a row by name; who asked for another model has time."""
    if setting.device != "cpu":
        return None
    return Patience(chosen, most_seconds=MOST_SECONDS if setting == SUITABLE["cpu"] else math.inf)


def _to_be_foreseen(
    setting: Setting, chosen: dict[str, Plugs], request: Request
) -> dict[str, Plugs]:
    """What is predicted for CUDA beside a CPU's figures: of all techniques the plain step alone."""
    if setting.device != "cpu":
        return {}
    return chosen if request.techniques else {"plain": chosen["plain"]}


def options(setting: Setting) -> str:
    """The setting as it is given at the command line, but for its device."""
    dtype = str(setting.dtype).removeprefix("torch.")
    dtype = "" if setting.dtype is torch.float32 else f" --dtype {dtype}"
    return f"--model {setting.model} --batch {setting.batch} --seq {setting.seq_len}{dtype}"


def _show(rows: list[Row], *sentences: Iterable[str]) -> None:
    """The table, and what needs a word more."""
    terminal.show_table(report.table(rows))
    if text := "\n".join(map(terminal.paragraph, chain(*sentences))):
        terminal.say(f"\n{text}")


def measured_rows(
    setting: Setting,
    chosen: dict[str, Plugs],
    dry: bool,
    announce: Announce,
    patience: Patience | None = None,
) -> list[Row]:
    """A row for each technique, the plain one first. A technique that fails has a row that says
    so: the others are not lost with it. One that takes too much patience is measured dry."""
    if not dry:
        row_of = SideBySide(setting, chosen["plain"]).row
    elif setting.device in TARGETS:
        row_of = partial(predicted_row, setting)
    else:
        row_of = partial(dry_row, setting)
    rows: list[Row] = []
    for name, technique in chosen.items():
        try:
            if patience and (reason := patience.too_long(name)) and rows:
                rows.append(replace(dry_row(setting, name, technique, announce), dry_for=reason))
            else:
                rows.append(row_of(name, technique, announce))
        except Exception as error:
            if rows:
                rows.append(Row(name, failure=in_one_line(error)))
            elif is_out_of_memory(error):
                raise UsageError(
                    f"the plain step ran out of memory with {setting}; try "
                    f"--batch {max(1, setting.batch // 2)}, or --dry-run, which takes none"
                ) from error
            else:
                raise
    return rows
