"""`memlab measure`: one training step, plain and with each technique, side by side."""

import math
import shlex
from dataclasses import dataclass, field, replace
from typing import Any

from memlab.cli import report, terminal
from memlab.cli.adapter_options import choose_adapters, list_adapters
from memlab.cli.choices import SUITABLE, choose_device, choose_setting, choose_techniques
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import Request
from memlab.cli.results import write
from memlab.cli.rows import Announce, best_rows, measured_rows
from memlab.transformers_models.sources import Source

SECONDS = 40.0  # until the last row begins; with imports, predictions and pictures it is a minute


@dataclass(frozen=True)
class Measurement:
    """The options of `memlab measure`, resolved.

    setting     memlab.train's, with plugs as techniques, or a TransformersSetting, with recipes
    chosen      techniques, the plain one first
    to_predict  those to predict for CUDA afterwards
    adapters    a line about them
    timed       how many techniques to time after dry runs of all; None: all run as `dry` says
    """

    setting: Any
    chosen: dict[str, Any]
    dry: bool
    to_predict: dict[str, Any] = field(default_factory=dict)
    adapters: str = ""
    timed: int | None = None

    @property
    def stages(self) -> int:
        """How many rows `carry_out` announces."""
        again = 0 if self.timed is None else min(self.timed + 1, len(self.chosen))
        return len(self.chosen) + again + len(self.to_predict)

    def carry_out(self, announce: Announce) -> report.Result:
        """Measure the rows, and predict those for CUDA."""
        if self.timed is None:
            rows = measured_rows(self.setting, self.chosen, self.dry, announce)
        else:
            is_first_command = self.setting == SUITABLE["cpu"] and self.timed == report.SHOWN
            seconds = SECONDS if is_first_command else math.inf
            rows = best_rows(self.setting, self.chosen, announce, self.timed, seconds)
        on_cuda = replace(self.setting, device="cuda") if self.to_predict else None
        predicted = measured_rows(on_cuda, self.to_predict, True, announce)
        return report.Result(self.setting, self.dry, rows, predicted, self.adapters)


def measure_model(request: Request) -> int:
    """Measure, print a table, write pictures and results; return 1 if a technique failed."""
    what, folder = choose_measurement(request), choose_folder(request.out)
    with terminal.progress(what.stages) as announce:
        found = what.carry_out(announce)
    model = f"plan --model {shlex.quote(request.model)} --gpu rtx4090" if request.model else ""
    terminal.show(report.of_result(found, everything=request.all))
    terminal.echo(f"next: memlab {model or 'run --gpu rtx4090 your_script.py'}")
    write(found.rows, found.title, folder, found.predicted)
    return int(any(row.failure for row in found.rows))


def choose_measurement(request: Request) -> Measurement:
    """Check all options, and return what they ask for. A dry run of a model has one row, the plain
    step, unless the user asks for more."""
    found = choose_model(request.model, request.library) if request.model else None
    one_answer = found and request.dry and not request.all
    techniques = request.techniques or (["plain"] if one_answer else None)
    request = replace(request, device=choose_device(request), techniques=techniques)
    if isinstance(found, Source):
        from memlab.cli.transformers_steps import choose_transformers

        return choose_transformers(request, found)
    chosen, setting = choose_techniques(request), choose_setting(request)
    adapters = list_adapters(chosen, choose_adapters(request.lora_rank, request.lora_targets))
    if setting.device != "cpu":
        return Measurement(setting, chosen, request.dry, adapters=adapters)
    to_predict = chosen if request.techniques else {"plain": chosen["plain"]}
    timed = None if request.dry or request.techniques else report.SHOWN
    if timed and request.all:
        timed = len(chosen)
    return Measurement(setting, chosen, request.dry, to_predict, adapters, timed)
