"""`memlab plan`: find recipes that make a model's training fit, and their cost.

The options are checked without importing torch, so that a typo is reported at once.
"""

import os

from memlab.cli import terminal
from memlab.cli.adapter_options import choose_adapters
from memlab.cli.errors import UsageError, quoted, suggestions
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_options import choose_kinds, choose_memory
from memlab.cli.requests import PlanRequest
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.planner.cards import Memory
from memlab.planner.processes import ProcessEndedError
from memlab.planner.recipes import Recipe
from memlab.transformers_models.sources import Source

# Options of memlab's own recipes: with one of them, several GPUs share a recipe by ZeRO.
OF_RECIPES = ("precision", "optimizer", "lora", "qlora", "lora_rank", "lora_targets")
MAX_WORKERS = 4  # each imports torch, which takes seconds and about 300 MiB


def plan_model(request: PlanRequest) -> int:
    """Search, print what fits, write a picture and results; return 1 if nothing fits, else 0."""
    if request.model is None:
        raise UsageError(
            f"got no --model; give one of {', '.join(PRESETS)}, a config.json, or --script"
        )
    memory, target = choose_memory(request.memory, request.device, request.margin)
    choose_folder(request.out)
    config = choose_model(request.model, request.library)
    group = _group(request)
    if isinstance(config, Source):
        return _plan_transformers(request, config, group, memory, target)
    if request.image is not None:
        raise UsageError(f"got --image {request.image}; {request.model} takes no images")
    if request.code is not None:
        raise UsageError(
            f"got --code {quoted(request.code)} for {request.model}, which memlab trains itself: "
            f"leave it out, or add --library transformers"
        )
    if request.gpus > 1 and target.startswith("cuda") and not request.options_given(*OF_RECIPES):
        from memlab.cli.plan_meshes import plan_meshes
        from memlab.planner.meshes import why_no_llama

        if why_no_llama(config) is None:
            return plan_meshes(request, config, memory, target)
    adapters = choose_adapters(request.lora_rank, request.lora_targets)
    learned = choose_kinds(request.precision, request.optimizer, group, adapters)
    return _plan_recipes(request, config, learned, memory, target)


def _plan_transformers(
    request: PlanRequest, source: Source, group: str | None, memory: Memory, target: str
) -> int:
    from memlab.cli.plan_transformers import CODE, choose_recipes, plan_transformers
    from memlab.transformers_models.tasks import Size
    from memlab.transformers_models.training import Training

    model, code = request.model, request.code
    if request.gpus != 1:
        raise UsageError(
            f"got --gpus for {model}, a model of transformers; it is planned for one GPU: leave it "
            f"out"
        )
    if target == "cpu":
        raise UsageError(
            f"got --device cpu for {model}, a model of transformers, which is planned for a GPU; "
            f"memlab measure --model {model} --dry-run counts a step on the CPU"
        )
    if code not in (None, *CODE):
        raise UsageError(f"got --code {quoted(code)}; {suggestions(code, CODE)}")
    training = Training(source, Size(request.batch, request.seq_len, request.image))
    choice = choose_recipes(training, request, group)
    return plan_transformers(training, choice, memory, target, request.out, code or CODE[0])


def _plan_recipes(
    request: PlanRequest,
    config: GPTConfig,
    learned: tuple[Recipe, ...],
    memory: Memory,
    target: str,
) -> int:
    from memlab.cli.choices import require_countable
    from memlab.cli.plan_report import show
    from memlab.cli.results import write_plan
    from memlab.planner.search import USUAL_SEQ_LEN, plan

    assert request.model is not None
    try:
        tokens = min(request.seq_len or USUAL_SEQ_LEN, config.seq_len)
        require_countable(config, request.batch, tokens)
        with terminal.progress(request.recipes + 2) as announce:
            found = plan(
                request.model,
                memory,
                gpus=request.gpus,
                batch=request.batch,
                seq_len=request.seq_len,
                learned=learned,
                count=request.recipes,
                workers=min(MAX_WORKERS, os.cpu_count() or 1),
                target=target,
                announce=announce,
            )
    except (ValueError, ProcessEndedError) as error:
        raise UsageError(str(error)) from error
    show(found)
    write_plan(found, choose_folder(request.out))
    return 0 if found.best else 1


def _group(request: PlanRequest) -> str | None:
    """Return the group of recipes that the options ask for; None: all."""
    if request.qlora and request.lora is not None:
        raise UsageError("got --qlora together with --lora or --full; give one of them")
    if request.qlora:
        return "QLoRA"
    return {None: None, True: "LoRA", False: "full fine-tuning"}[request.lora]
