"""`memlab plan --deepspeed`: what a DeepSpeed config costs and saves, and whether it fits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memlab.cli import terminal
from memlab.cli.documents import room_numbers
from memlab.cli.errors import UsageError, quoted
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.plan import choose_memory
from memlab.cli.plan_report import room
from memlab.cli.results import write_formula_plan
from memlab.configs.deepspeed import KEYS, MICRO, DeepSpeedConfig, read_deepspeed
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE
from memlab.planner.cards import Memory, budget_bytes
from memlab.planner.deepspeed import DeepSpeedStep, Effect, effects
from memlab.planner.formulas import RESERVED
from memlab.planner.options import option_numbers, verdict
from memlab.planner.search import MAX_SEQUENCES, TOKENS, USUAL_SEQ_LEN
from memlab.units import format_bytes, paragraph


def plan_deepspeed(
    path: str,
    *,
    model: str | None,
    memory: str | None,
    gpus: int,
    batch: int | None,
    seq_len: int | None,
    target: str | None,
    margin: str | None,
    out: str,
) -> int:
    """Print what each key changes and whether the config fits; return 1 if it does not, else 0."""
    if model is None:
        raise UsageError(
            f"got --deepspeed without --model; give one of {', '.join(PRESETS)}, or a config.json"
        )
    gpu_memory, target = choose_memory(memory, target, margin)
    if target == "cpu":
        raise UsageError(
            "got --device cpu with --deepspeed, which is planned for GPUs; leave it out"
        )
    folder = choose_folder(out)
    step = _step_of(path, model, batch=batch, seq_len=seq_len, gpus=gpus, target=target)
    found = list(effects(step))
    budget = budget_bytes(gpu_memory, target)
    limits = _limits(step, budget)
    _show(path, model, step, found, gpu_memory, limits)
    numbers = _numbers(path, model, step, found, gpu_memory, limits)
    write_formula_plan(f"{model} with {path}, in {gpu_memory.name}", numbers, folder)
    return 0 if _needed(step) <= budget else 1


def _step_of(
    path: str, model: str, *, batch: int | None, seq_len: int | None, gpus: int, target: str
) -> DeepSpeedStep:
    shape = choose_model(model)
    if not isinstance(shape, GPTConfig):
        raise UsageError(
            f"got --deepspeed for {quoted(model)}; its bytes are computed by formula, which memlab "
            f"has for Llama, Mistral, Qwen and Gemma"
        )
    seq_len = min(USUAL_SEQ_LEN, shape.seq_len) if seq_len is None else seq_len
    if seq_len > shape.seq_len:
        raise UsageError(f"got --seq {seq_len}; {model} takes 1 to {shape.seq_len}")
    try:
        config = read_deepspeed(path, gpus=gpus, batch=batch, hidden_size=shape.hidden_size)
        return DeepSpeedStep(shape, config, seq_len=seq_len, gpus=gpus, target=target)
    except ValueError as error:
        raise UsageError(f"got --deepspeed {quoted(path)}: {error}") from error


def _needed(step: DeepSpeedStep) -> int:
    """Return the peak with the allowance for what the allocator reserves beyond it."""
    return round((1 + RESERVED) * step.gpu_bytes)


def _limits(step: DeepSpeedStep, budget: int) -> tuple[int | None, int | None]:
    """Return the largest micro-batch and the longest sequence that fit, or None."""

    def with_length(tokens: int) -> DeepSpeedStep:
        return DeepSpeedStep(
            step.model, step.config, seq_len=tokens, gpus=step.gpus, target=step.target
        )

    longest = _largest(
        lambda n: _needed(with_length(n * TOKENS)) <= budget, step.model.seq_len // TOKENS
    )
    batch = _largest(lambda n: _needed(step.changed(MICRO, n)) <= budget, MAX_SEQUENCES)
    return batch, longest and longest * TOKENS


def _largest(fits: Callable[[int], bool], maximum: int) -> int | None:
    """Return the last number from 1 to `maximum` that fits; None if 1 does not."""
    low, high = 0, maximum + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


# ------------------------------------------------------------------ the report


def _show(
    path: str,
    model: str,
    step: DeepSpeedStep,
    found: Sequence[Effect],
    memory: Memory,
    limits: tuple[int | None, int | None],
) -> None:
    terminal.echo("\n".join(map(paragraph, _headline(path, model, step, memory))) + "\n")
    for sentences in (_complaints(step.config), _remarks(step, found)):
        if lines := list(map(paragraph, sentences)):
            terminal.echo("\n".join(lines) + "\n")
    terminal.show_table(_stored(found))
    if moving := [effect for effect in found if any(effect.moved.values())]:
        terminal.echo("\nbytes that each process moves in an optimizer step:")
        terminal.show_table(_moved(moving))
    terminal.echo("")
    terminal.show_table(_peak(step))
    terminal.echo("\n" + "\n".join(map(paragraph, _result(step, memory, limits))) + "\n")


def _headline(path: str, model: str, step: DeepSpeedStep, memory: Memory) -> Iterator[str]:
    config, gpus = step.config, f"{step.gpus} GPU{'s' if step.gpus > 1 else ''}"
    steps = config.accumulation_steps
    yield (
        f"{model} with {path}: ZeRO stage {config.stage} on {gpus}, {config.micro_batch} × "
        f"{step.formula.seq_len} tokens, {steps} micro-batch{'es' if steps > 1 else ''} in a step"
    )
    yield room(memory, step.target)
    yield "by formula, for one process; memlab does not run DeepSpeed"


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


def _moved(found: Sequence[Effect]) -> Any:
    columns = {"key": [_named(effect) for effect in found]}
    titles = {"network": "between GPUs", "host": "GPU to host and back", "disk": "to NVMe and back"}
    for name, title in titles.items():
        columns[title] = [_signed(effect.moved[name]) for effect in found]
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


def _peak(step: DeepSpeedStep) -> Any:
    terms = sorted(step.terms.items(), key=lambda term: -term[1])
    return terminal.table_of(
        {
            f"the GPU at its peak ({step.moment})": [name.replace("_", " ") for name, _ in terms],
            "bytes": [format_bytes(count) for _, count in terms],
        }
    )


def _result(
    step: DeepSpeedStep, memory: Memory, limits: tuple[int | None, int | None]
) -> Iterator[str]:
    needed, budget = _needed(step), budget_bytes(memory, step.target)
    rest = budget - needed
    outcome = f"fits, {format_bytes(rest)} left" if rest >= 0 else f"lacks {format_bytes(-rest)}"
    yield (
        f"GPU: ≈ {format_bytes(step.gpu_bytes)} allocated; with {RESERVED:.0%} more for reserved "
        f"memory, {format_bytes(needed)} of {format_bytes(budget)}: {outcome}"
    )
    if rest < 0:
        yield "memlab plan without --deepspeed searches for techniques that make it fit"
    batch, longest = limits
    if batch and longest:
        yield (
            f"fits up to a micro-batch of {batch:,} at {step.formula.seq_len} tokens, and up to "
            f"{longest:,} tokens at a micro-batch of {step.config.micro_batch}"
        )
    processes = min(step.gpus, MAX_GPUS_PER_MACHINE)
    for where, terms in (("host", step.host), ("NVMe", step.disk)):
        count = sum(terms.values())
        if not count:
            continue
        pinned = f", {format_bytes(step.pinned_bytes)} pinned" if where == "host" else ""
        yield f"{where}: {format_bytes(count)}{pinned} ({_listed(terms)})"
        if processes > 1:
            yield f"  on a machine with {processes} GPUs: {format_bytes(processes * count)}"


def _listed(terms: dict[str, int]) -> str:
    return ", ".join(f"{k.replace('_', ' ')} {format_bytes(v)}" for k, v in terms.items())


# ------------------------------------------------------------------ the document


def _numbers(
    path: str,
    model: str,
    step: DeepSpeedStep,
    found: Sequence[Effect],
    memory: Memory,
    limits: tuple[int | None, int | None],
) -> dict[str, Any]:
    needed, budget = _needed(step), budget_bytes(memory, step.target)
    fits = needed <= budget
    option = option_numbers(
        f"DeepSpeed, ZeRO stage {step.stage}",
        fits=fits,
        needed_bytes=needed,
        missing_bytes=needed - budget,
        group="full fine-tuning",
        by_formula=step.moments,
        largest_batch=limits[0],
        longest_sequence=limits[1],
    )
    return {
        **room_numbers(memory, step.target),
        "verdict": verdict(fits, fits),
        "model": model,
        "library": "memlab",
        "parameters": step.model.parameters,
        "batch": step.config.micro_batch,
        "seq_len": step.formula.seq_len,
        "gpus": step.gpus,
        "bytes_as_it_is": step.gpu_bytes,
        "chosen": 0 if fits else None,
        "options": [option],
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
                "moved": effect.moved,
            }
            for effect in found
        ],
        "host": step.host,
        "pinned_bytes": step.pinned_bytes,
        "disk": step.disk,
        "moved": step.moved,
        "without_effect": list(config.without_effect),
        "uncounted": list(config.uncounted),
        "unknown": dict(config.unknown),
    }
