"""`memlab plan`: find recipes that make a model's training fit, and their cost.

The options are checked without importing torch, so that a typo is reported at once.
"""

from typing import TYPE_CHECKING

from memlab.cli.adapter_options import choose_adapters
from memlab.cli.errors import UsageError, quoted
from memlab.cli.models import choose_model, require_countable
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_options import choose_group, choose_kinds, choose_memory, require_known
from memlab.cli.requests import PlanRequest
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.planner.cards import Memory
from memlab.planner.options import Query, usual_seq_len
from memlab.transformers_models.sources import Source

if TYPE_CHECKING:  # they import torch
    from memlab.cli.plan_report import Strategy

# Options of memlab's own recipes: with one of them, several GPUs share a recipe by ZeRO.
OF_RECIPES = ("precision", "optimizer", "lora", "qlora", "lora_rank", "lora_targets")
CODE = ("production", "memlab")  # whose techniques the printed code of a transformers model uses


def plan_model(request: PlanRequest) -> int:
    """Search, print what fits, write a picture and results; return 1 if nothing fits, else 0."""
    strategy = choose_strategy(request)
    from memlab.cli.plan_report import carry_out

    return carry_out(strategy, choose_folder(request.out))


def choose_strategy(request: PlanRequest) -> "Strategy":
    """Check all options, and return the way to plan with all that it needs."""
    if request.model is None:
        raise UsageError(
            f"got no --model; give one of {', '.join(PRESETS)}, a config.json, or --script"
        )
    memory, target = choose_memory(request.memory, request.device, request.margin)
    choose_folder(request.out)
    model = choose_model(request.model, request.library)
    if isinstance(model, Source):
        return _of_transformers(request, model, memory, target)
    return _of_memlab(request, request.model, model, memory, target)


def _of_memlab(
    request: PlanRequest, name: str, config: GPTConfig, memory: Memory, target: str
) -> "Strategy":
    """Several GPUs get meshes, unless an option asks for recipes or the model is no Llama."""
    group = choose_group(request)
    if request.image is not None:
        raise UsageError(f"got --image {request.image}; {name} takes no images")
    if request.code is not None:
        raise UsageError(
            f"got --code {quoted(request.code)} for {name}, which memlab trains itself: leave it "
            f"out, or add --library transformers"
        )
    adapters = choose_adapters(request.lora_rank, request.lora_targets)
    kinds = choose_kinds(request.precision, request.optimizer, group, adapters)
    seq_len = usual_seq_len(config) if request.seq_len is None else request.seq_len
    require_countable(config, request.batch, min(seq_len, config.seq_len))
    try:
        query = Query(name, config, memory, request.gpus, request.batch, seq_len, target)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if request.gpus > 1 and target.startswith("cuda") and not request.options_given(*OF_RECIPES):
        from memlab.cli.plan_meshes import Meshes
        from memlab.planner.meshes import why_no_llama

        if why_no_llama(config) is None:
            return Meshes(query, request.recipes, choose_folder(request.out))
    from memlab.cli.plan_recipes import Recipes

    return Recipes(query, kinds, request.recipes)


def _of_transformers(
    request: PlanRequest, source: Source, memory: Memory, target: str
) -> "Strategy":
    name, code, group = request.model, request.code, choose_group(request)
    if request.gpus != 1:
        raise UsageError(
            f"got --gpus for {name}, a model of transformers; it is planned for one GPU: leave it "
            f"out"
        )
    if target == "cpu":
        raise UsageError(
            f"got --device cpu for {name}, a model of transformers, which is planned for a GPU; "
            f"memlab measure --model {name} --dry-run counts a step on the CPU"
        )
    require_known("--code", code, CODE)
    from memlab.cli.plan_transformers import OfTransformers, choose_recipes

    training, choice = choose_recipes(request, source, group)
    return OfTransformers(training, choice, memory, target, code or CODE[0])
