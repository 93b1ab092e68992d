"""`memlab measure` and `memlab train` for a model of transformers."""

import torch
from torch import Tensor

from memlab.cli import report, terminal
from memlab.cli.choices import require_memory
from memlab.cli.errors import UsageError, is_out_of_memory, quoted
from memlab.cli.measure import Measurement
from memlab.cli.memory_cap import choose_cap, memory_cap
from memlab.cli.requests import Request, StepRequest, TrainRequest
from memlab.cli.rows import Announce
from memlab.cli.steps import peak, run_steps, summary, timed_step
from memlab.metering import measure
from memlab.train.adapters import LORA_RANK
from memlab.transformers_models.recipes import USUAL, Recipe, recipe_named
from memlab.transformers_models.setting import TransformersSetting
from memlab.transformers_models.sources import Source
from memlab.transformers_models.structure import adapted_layers
from memlab.transformers_models.tasks import Size
from memlab.transformers_models.training import Training


def choose_transformers(request: Request, source: Source) -> Measurement:
    """Check the options of `memlab measure`, and return what they ask for."""
    setting = _setting(request, source)
    names = dict.fromkeys(("plain", *(request.techniques or USUAL)))
    chosen = {name: _recipe(name, request, setting) for name in names}
    if not request.dry:
        _require_memory(setting, chosen["plain"])
    return Measurement(setting, chosen, request.dry)


def train_transformers(request: TrainRequest, source: Source) -> None:
    """Run the steps and print their losses, then the peak and the time."""
    name, steps = request.technique, request.steps
    setting = _setting(request, source)
    recipe = _recipe(name, request, setting)
    cap_bytes = choose_cap(request.memory, setting.device)
    _require_memory(setting, recipe)
    terminal.echo(f"{report.headline(setting, dry=False)}\ntechnique: {name}\n")
    with terminal.progress(steps + 2) as announce, memory_cap(cap_bytes):
        try:
            done = _run(setting, recipe, steps, announce)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UsageError(
                f"{name} ran out of memory with {setting}; memlab plan --model {source.name} finds "
                f"recipes that fit"
            ) from error
    terminal.echo(f"\n{done}")


def _setting(request: StepRequest, source: Source) -> TransformersSetting:
    options = {"--ranks": request.ranks, "--zero": request.zero}
    for option, given in options.items():
        if given is not None:
            raise UsageError(
                f"got {option} for {source.name}, a model of transformers; it works with memlab's "
                f"own models only: leave it out"
            )
    size = Size(request.batch or 1, request.seq_len, request.image)
    assert request.device is not None
    setting = TransformersSetting(Training(source, size), request.device)
    try:
        str(setting)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return setting


def _recipe(name: str, request: StepRequest, setting: TransformersSetting) -> Recipe:
    if request.dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"got --dtype {quoted(request.dtype)}; give float32 or bfloat16")
    try:
        layers = adapted_layers(setting.training.skeleton, request.lora_targets or "all")
    except ValueError as error:
        raise UsageError(f"--lora-targets: {error}") from error
    settings = {
        "precision": request.dtype or "float32",
        "rank": request.lora_rank or LORA_RANK,
        "targets": layers,
    }
    try:
        return recipe_named(name, **settings)
    except ValueError as error:
        raise UsageError(f"got --technique {quoted(name)}: {error}") from error


def _require_memory(setting: TransformersSetting, recipe: Recipe) -> None:
    if setting.device == "cpu":
        wanted = setting.dry_trace(recipe).peak_bytes
        require_memory("a step", setting, wanted, "use memlab measure --dry-run")


def _run(setting: TransformersSetting, recipe: Recipe, steps: int, announce: Announce) -> str:
    announce("building")
    losses: list[Tensor] = []
    training = setting.build(recipe, on_loss=losses.append)
    taken = run_steps(lambda: timed_step(training.step, losses), steps, announce)
    dtype = losses[0].dtype
    losses.clear()
    announce("peak")

    def measured_bytes() -> int:
        step, model, optimizer = training.step, training.model, training.optimizer
        return measure(step, model=model, optimizer=optimizer).peak_bytes

    highest = peak(torch.device(setting.device), measured_bytes)
    return summary(taken, dtype, highest, of="on the same random batch")
