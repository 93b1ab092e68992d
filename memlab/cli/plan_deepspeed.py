"""`memlab plan --deepspeed`: what each key of a DeepSpeed config costs and saves, in bytes."""

from collections.abc import Iterator, Sequence
from typing import Any

from memlab.cli import terminal
from memlab.cli.errors import UsageError, quoted
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import PlanRequest
from memlab.cli.results import write_formula_plan
from memlab.configs.deepspeed import KEYS, DeepSpeedConfig, read_deepspeed
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.planner.deepspeed import DeepSpeedStep, Effect, effects
from memlab.planner.search import USUAL_SEQ_LEN
from memlab.units import format_bytes, paragraph


def plan_deepspeed(request: PlanRequest) -> int:
    """Print and write what each key changes; return 0."""
    path, model = request.deepspeed, request.model
    assert path is not None
    if model is None:
        raise UsageError(
            f"got --deepspeed without --model; give one of {', '.join(PRESETS)}, or a config.json"
        )
    folder = choose_folder(request.out)
    step = _step_of(request, path, model)
    found = list(effects(step))
    _show(path, model, step, found)
    write_formula_plan(f"{model} with {path}", _numbers(path, model, step, found), folder)
    return 0


def _step_of(request: PlanRequest, path: str, model: str) -> DeepSpeedStep:
    shape = choose_model(model)
    if not isinstance(shape, GPTConfig):
        raise UsageError(
            f"got --deepspeed for {quoted(model)}; its bytes are computed by formula, which memlab "
            f"has for Llama, Mistral, Qwen and Gemma"
        )
    gpus, longest = request.gpus, shape.seq_len
    batch = request.batch if "batch" in request.given else None
    seq_len = min(USUAL_SEQ_LEN, longest) if request.seq_len is None else request.seq_len
    if seq_len > longest:
        raise UsageError(f"got --seq {seq_len}; {model} takes 1 to {longest}")
    try:
        config = read_deepspeed(path, gpus=gpus, batch=batch, hidden_size=shape.hidden_size)
        return DeepSpeedStep(shape, config, seq_len=seq_len, gpus=gpus)
    except ValueError as error:
        raise UsageError(f"got --deepspeed {quoted(path)}: {error}") from error


# ------------------------------------------------------------------ the report


def _show(path: str, model: str, step: DeepSpeedStep, found: Sequence[Effect]) -> None:
    terminal.echo(paragraph(_headline(path, model, step)) + "\n")
    for sentences in (_complaints(step.config), _remarks(step, found)):
        if lines := list(map(paragraph, sentences)):
            terminal.echo("\n".join(lines) + "\n")
    terminal.show_table(_stored(found))
    terminal.echo(
        "\n"
        + paragraph(
            "by formula, for one process; memlab does not run DeepSpeed's engine. Whether a "
            "training fits: memlab run --gpu GPU train.py, without the engine and with the "
            "micro-batch of one process, then these differences"
        )
        + "\n"
    )


def _headline(path: str, model: str, step: DeepSpeedStep) -> str:
    config, gpus = step.config, f"{step.gpus} GPU{'s' if step.gpus > 1 else ''}"
    steps = config.accumulation_steps
    return (
        f"{model} with {path}: ZeRO stage {config.stage} on {gpus}, {config.micro_batch} × "
        f"{step.formula.seq_len} tokens, {steps} micro-batch{'es' if steps > 1 else ''} in a step"
    )


def _complaints(config: DeepSpeedConfig) -> Iterator[str]:
    """Yield remarks on unknown and uncounted keys."""
    for key, near in config.unknown.items():
        hint = f"; did you mean {near}?" if near else ""
        what = "DeepSpeed refuses it" if "." in key else "DeepSpeed ignores it"
        yield f"unknown key: {key}{hint} {what}" if near else f"unknown key: {key}; {what}"
    if config.uncounted:
        yield f"not counted: {', '.join(config.uncounted)}"


def _remarks(step: DeepSpeedStep, found: Sequence[Effect]) -> Iterator[str]:
    yield from (f"note: {note}" for note in step.config.notes)
    silent = [effect.path for effect in found if not effect.changes]
    if unchanged := [*silent, *step.config.without_effect]:
        yield f"no effect on memory: {', '.join(unchanged)}"


def _stored(found: Sequence[Effect]) -> Any:
    changing = [effect for effect in found if effect.changes]
    columns = {
        "each key, compared with its off value": [_described(effect) for effect in changing],
        "GPU": [_signed(effect.gpu) for effect in changing],
        "GPU peak": [_signed(effect.peak) for effect in changing],
        "host": [_signed(effect.host) for effect in changing],
        "pinned": [_signed(effect.pinned) for effect in changing],
        "NVMe": [_signed(effect.disk) for effect in changing],
    }
    return terminal.table_of(columns)


def _described(effect: Effect) -> str:
    return f"{_named(effect)}: {KEYS[effect.path].does}"


def _named(effect: Effect) -> str:
    value = effect.value
    shown = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else value
    text = f"{shown:,}" if isinstance(shown, int) else str(shown)
    return f"{effect.path} = {text}{'' if effect.is_given else ' (default)'}"


def _signed(count: int) -> str:
    return f"{'+' if count > 0 else ''}{format_bytes(count)}" if count else ""


# ------------------------------------------------------------------ the document


def _numbers(path: str, model: str, step: DeepSpeedStep, found: Sequence[Effect]) -> dict[str, Any]:
    return {
        "verdict": "not judged",
        "model": model,
        "library": "memlab",
        "parameters": step.model.parameters,
        "batch": step.config.micro_batch,
        "seq_len": step.formula.seq_len,
        "gpus": step.gpus,
        "target": step.target,
        **dict.fromkeys(("memory", "margin_bytes", "budget_bytes", "bytes_as_it_is", "chosen")),
        "options": [],
        "deepspeed": _config_numbers(path, step, found),
        "notes": list(step.config.notes),
    }


def _config_numbers(path: str, step: DeepSpeedStep, found: Sequence[Effect]) -> dict[str, Any]:
    config = step.config
    return {
        "config": path,
        "accumulation_steps": config.accumulation_steps,
        "keys": [
            {
                "key": effect.path,
                "value": effect.value,
                "off": effect.off,
                "is_given": effect.is_given,
                "gpu_bytes": effect.gpu,
                "peak_bytes": effect.peak,
                "host_bytes": effect.host,
                "pinned_bytes": effect.pinned,
                "disk_bytes": effect.disk,
            }
            for effect in found
        ],
        "host": step.host,
        "pinned_bytes": step.pinned_bytes,
        "disk": step.disk,
        "without_effect": list(config.without_effect),
        "uncounted": list(config.uncounted),
        "unknown": dict(config.unknown),
    }
