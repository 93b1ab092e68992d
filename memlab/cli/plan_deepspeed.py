"""`memlab plan --deepspeed`: what the parts of a DeepSpeed training hold, and which keys decide."""

from collections.abc import Iterator, Sequence
from typing import Any

from memlab.cli import terminal
from memlab.cli.errors import UsageError, quoted
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import PlanRequest
from memlab.cli.results import write_formula_plan
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.planner.deepspeed import STAGE, DeepSpeedConfig, Held, held, read_deepspeed
from memlab.units import format_bytes, paragraph

_FORMULA = (
    "by formula, for one process; memlab does not run DeepSpeed's engine. The parts do not all "
    "exist at the same moment, and activations come on top. Predict those of a script without the "
    "engine: memlab run --gpu GPU train.py"
)


def plan_deepspeed(request: PlanRequest) -> int:
    """Print and write the parts; return 0."""
    path, model = request.deepspeed, request.model
    assert path is not None
    if model is None:
        raise UsageError(
            f"got --deepspeed without --model; give one of {', '.join(PRESETS)}, or a config.json"
        )
    folder, shape = choose_folder(request.out), choose_model(model)
    if not isinstance(shape, GPTConfig):
        raise UsageError(
            f"got --deepspeed for {quoted(model)}; its bytes are computed by formula, which memlab "
            f"has for Llama, Mistral, Qwen and Gemma"
        )
    try:
        config = read_deepspeed(path, hidden_size=shape.hidden_size)
        parts = held(shape, config, gpus=request.gpus)
    except ValueError as error:
        raise UsageError(f"got --deepspeed {quoted(path)}: {error}") from error
    title = f"{model} with {path}"
    gpus = f"{request.gpus} GPU{'s' if request.gpus > 1 else ''}"
    terminal.echo(paragraph(f"{title}: ZeRO stage {config[STAGE]} on {gpus}") + "\n")
    terminal.show_table(_table(config, parts))
    terminal.echo("\n" + "\n".join(map(paragraph, _remarks(config))) + "\n")
    write_formula_plan(title, _numbers(request, shape, config, parts), folder)
    return 0


def _table(config: DeepSpeedConfig, parts: Sequence[Held]) -> Any:
    places = {"GPU": "gpu", "host": "host", "NVMe": "disk"}
    counts = {title: [getattr(each, name) for each in parts] for title, name in places.items()}
    return terminal.table_of(
        {
            "part: the keys that decide its bytes": [
                f"{each.part}: {', '.join(_settings(config, each.keys))}" for each in parts
            ],
            **{
                title: [format_bytes(count) if count else "" for count in of_place]
                for title, of_place in counts.items()
            },
        }
    )


def _settings(config: DeepSpeedConfig, keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys in the file, and the defaults that are sizes."""
    for path in keys:
        value = config[path]
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 1
        if path in config.values or is_size or path == STAGE:
            shown = str(value).lower() if isinstance(value, bool) else value
            text = f"{shown:,}" if isinstance(shown, int) else shown
            default = "" if path in config.values else " (default)"
            yield f"{path.removeprefix('zero_optimization.')} = {text}{default}"


def _remarks(config: DeepSpeedConfig) -> Iterator[str]:
    for key, near in config.unknown.items():
        what = "DeepSpeed refuses it" if "." in key else "DeepSpeed ignores it"
        yield f"unknown key: {key}; " + (f"did you mean {near}? " if near else "") + what
    if config.uncounted:
        yield f"changes none of these bytes, or is not counted: {', '.join(config.uncounted)}"
    yield from (f"note: {note}" for note in config.notes)
    yield _FORMULA


def _numbers(
    request: PlanRequest, model: GPTConfig, config: DeepSpeedConfig, parts: Sequence[Held]
) -> dict[str, Any]:
    return {
        "verdict": "not judged",
        "model": request.model,
        "library": "memlab",
        "parameters": model.parameters,
        "gpus": request.gpus,
        "target": "cuda",
        **dict.fromkeys(("batch", "seq_len", "memory", "margin_bytes", "budget_bytes")),
        **dict.fromkeys(("bytes_as_it_is", "chosen")),
        "options": [],
        "deepspeed": {
            "config": request.deepspeed,
            "parts": [
                {
                    "part": each.part,
                    "gpu_bytes": each.gpu,
                    "host_bytes": each.host,
                    "disk_bytes": each.disk,
                    "keys": {path: config[path] for path in each.keys},
                }
                for each in parts
            ],
            "uncounted": config.uncounted,
            "unknown": config.unknown,
        },
        "notes": config.notes,
    }
