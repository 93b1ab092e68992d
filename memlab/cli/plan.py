"""`memlab plan`: find recipes that make a model's training fit, and their cost.

The options are checked without importing torch, so that a typo is reported at once.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from memlab.cli.errors import UsageError, quoted
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_options import choose_group, choose_kinds, choose_memory
from memlab.cli.requests import PlanRequest
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.planner.cards import Memory
from memlab.planner.options import Query, usual_seq_len
from memlab.transformers_models.sources import Source

if TYPE_CHECKING:  # it imports torch
    from memlab.cli.plan_report import Strategy

# Options of memlab's own recipes: with one of them, several GPUs share a recipe by ZeRO.
OF_RECIPES = ("precision", "optimizer", "lora", "qlora", "lora_rank", "lora_targets")


def plan_model(request: PlanRequest) -> int:
    """Search, print what fits, write a picture and results; return 1 if nothing fits, else 0."""
    strategy, folder = choose_strategy(request), choose_folder(request.out)
    from memlab.cli.plan_report import carry_out

    return carry_out(strategy, folder)


def choose_strategy(request: PlanRequest) -> "Strategy":
    """Check all options, and return the way to plan with all that it needs. Several GPUs get
    meshes, unless an option asks for recipes or the model is no Llama."""
    if request.model is None:
        raise UsageError(
            f"got no --model; give one of {', '.join(PRESETS)}, a config.json, or --script"
        )
    group = choose_group(request)
    memory, target = choose_memory(request.memory, request.device, request.margin)
    model = choose_model(request.model, request.library)
    if isinstance(model, Source):
        from memlab.cli.plan_transformers import of_transformers

        return of_transformers(request, model, group, memory, target)
    kinds = choose_kinds(request, group)
    query = _query(request, model, memory, target)
    is_on_gpus = request.gpus > 1 and target.startswith("cuda")
    if is_on_gpus and not (model.beyond_llama or request.options_given(*OF_RECIPES)):
        from memlab.cli.plan_meshes import Meshes

        return Meshes(query, request.recipes, Path(request.out))
    from memlab.cli.plan_recipes import Recipes

    return Recipes(query, kinds, request.recipes)


def _query(request: PlanRequest, config: GPTConfig, memory: Memory, target: str) -> Query:
    """Return what to plan for one of memlab's own models."""
    name = request.model or ""
    if request.image is not None:
        raise UsageError(f"got --image {request.image}; {name} takes no images")
    if request.code is not None:
        raise UsageError(
            f"got --code {quoted(request.code)} for {name}, which memlab trains itself: leave it "
            f"out, or add --library transformers"
        )
    seq_len = usual_seq_len(config) if request.seq_len is None else request.seq_len
    try:
        return Query(name, config, memory, request.gpus, request.batch, seq_len, target)
    except ValueError as error:
        raise UsageError(str(error)) from error
