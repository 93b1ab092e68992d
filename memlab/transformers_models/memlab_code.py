"""The code that sets up a recipe with memlab's own techniques around a transformers model."""

from collections.abc import Iterator

from memlab.transformers_models.recipes import ALL_LINEAR, TRAIN, Loaded, Recipe, loop_code

_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(weights)",
    "adam8bit": 'Adam8bit(weights, rounding="stochastic")',
    "paged-adam8bit": 'OffloadedOptimizer(Adam8bit(weights, rounding="stochastic"), DiskStore())',
    "torchao-adam8bit": 'Adam8bit(weights, rounding="stochastic")',
    "sgd": "torch.optim.SGD(weights)",
}


def memlab_code(recipe: Recipe, loaded: Loaded) -> Iterator[str]:
    """Yield the lines that train with memlab's techniques in place of production's."""
    yield "import torch"
    yield f"from transformers import {loaded.auto_class}"
    yield from sorted(_imports(recipe))
    yield ""
    yield from loaded.loading(recipe, on_device=recipe.method == "qlora")
    yield from _adapters(recipe, loaded)
    if recipe.checkpointing:
        for path in loaded.stacks:
            yield f"for layer in model.{path}:"
            yield "    layer.forward = partial(checkpoint, layer.forward)"
    yield TRAIN
    yield "weights = [p for p in model.parameters() if p.requires_grad]"
    yield f"optimizer = {_OPTIMIZERS[recipe.optimizer]}"
    yield ""
    yield from loop_code(recipe, loaded.device)


def _imports(recipe: Recipe) -> Iterator[str]:
    if recipe.method == "lora":
        yield "from memlab.lora import add_lora"
    if recipe.method == "qlora":
        yield "from memlab.qlora import add_qlora, prepare_for_low_bits"
    if recipe.checkpointing:
        yield "from functools import partial"
        yield "from memlab.checkpointing import checkpoint"
    if "8bit" in recipe.optimizer:
        yield "from memlab.optim import Adam8bit"
    if recipe.optimizer == "paged-adam8bit":
        yield "from memlab.offload import DiskStore, OffloadedOptimizer"


def _adapters(recipe: Recipe, loaded: Loaded) -> Iterator[str]:
    if recipe.method == "full":
        return
    if recipe.targets == ALL_LINEAR:
        chosen = f'name != "{loaded.head}"' if loaded.head else "True"
    else:
        names = ", ".join(f'"{name}"' for name in recipe.targets.split(","))
        chosen = f'name.rpartition(".")[2] in ({names},)'
    yield f"where = lambda name: {chosen}"
    if recipe.method == "lora":
        yield f"add_lora(model, rank={recipe.rank}, where=where)"
    else:
        yield f"add_qlora(model, rank={recipe.rank}, adapt=where)"
        yield "prepare_for_low_bits(model)"
        yield f"model{loaded.move}"
