"""`memlab plan --deepspeed`: what the parts of a DeepSpeed training hold, and which keys decide."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memlab.cli.errors import UsageError, quoted
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_report import Result, carry_out
from memlab.cli.requests import PlanRequest
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
    return carry_out(OfDeepSpeed(model, shape, path, config, parts, request.gpus), folder)


@dataclass(frozen=True)
class OfDeepSpeed:
    """List the parts of a training; nothing is predicted, and no option is tried."""

    model: str
    shape: GPTConfig
    path: str
    config: DeepSpeedConfig
    parts: Sequence[Held]
    gpus: int
    stages: int = 0

    def plan(self, announce: Callable[[str], None]) -> Result:
        title, gpus = f"{self.model} with {self.path}", self.gpus
        on = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        return Result(
            title,
            self._numbers(),
            [f"{title}: ZeRO stage {self.config[STAGE]} on {on}"],
            _columns(self.config, self.parts),
            blocks=["\n".join(map(paragraph, _remarks(self.config))) + "\n"],
        )

    def _numbers(self) -> dict[str, Any]:
        return {
            "verdict": "not judged",
            "model": self.model,
            "library": "memlab",
            "parameters": self.shape.parameters,
            "gpus": self.gpus,
            "target": "cuda",
            **dict.fromkeys(("memory", "margin_bytes", "budget_bytes")),
            **dict.fromkeys(("bytes_as_it_is", "chosen")),
            "options": [],
            "deepspeed": {
                "config": self.path,
                "parts": [
                    {
                        "part": each.part,
                        "gpu_bytes": each.gpu,
                        "host_bytes": each.host,
                        "disk_bytes": each.disk,
                        "keys": {path: self.config[path] for path in each.keys},
                    }
                    for each in self.parts
                ],
                "uncounted": self.config.uncounted,
                "unknown": self.config.unknown,
            },
            "notes": self.config.notes,
        }


def _columns(config: DeepSpeedConfig, parts: Sequence[Held]) -> dict[str, list[str]]:
    places = {"GPU": "gpu", "host": "host", "NVMe": "disk"}
    counts = {title: [getattr(each, name) for each in parts] for title, name in places.items()}
    return {
        "part: the keys that decide its bytes": [
            f"{each.part}: {', '.join(_settings(config, each.keys))}" for each in parts
        ],
        **{
            title: [format_bytes(count) if count else "" for count in of_place]
            for title, of_place in counts.items()
        },
    }


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
