"""The code that sets up a recipe with memlab's own techniques around a transformers model."""

from collections.abc import Iterator, Sequence

from memlab.transformers_models.recipes import ALL_LINEAR, Recipe, loop_code

_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(weights)",
    "adam8bit": 'Adam8bit(weights, rounding="stochastic")',
    "paged-adam8bit": 'OffloadedOptimizer(Adam8bit(weights, rounding="stochastic"), DiskStore())',
    "torchao-adam8bit": 'Adam8bit(weights, rounding="stochastic")',
    "sgd": "torch.optim.SGD(weights)",
}


def memlab_code(recipe: Recipe, auto_class: str, name: str, paths: Sequence[str]) -> Iterator[str]:
    """Yield the lines; `paths` are those of the model's stacks of layers."""
    yield "import torch"
    yield f"from transformers import {auto_class}"
    yield from sorted(_imports(recipe))
    yield ""
    yield f"model = {auto_class}.from_pretrained("
    yield f'    "{name}",'
    yield f"    dtype=torch.{recipe.weights_dtype},"
    if recipe.attention != "default":
        yield f'    attn_implementation="{recipe.attention}",'
    yield "    use_cache=False,"
    yield ")" if recipe.method == "qlora" else ").cuda()"
    yield from _adapters(recipe)
    if recipe.checkpointing:
        for path in paths:
            yield f"for layer in model.{path}:"
            yield "    layer.forward = partial(checkpoint, layer.forward)"
    yield "weights = [p for p in model.parameters() if p.requires_grad]"
    yield f"optimizer = {_OPTIMIZERS[recipe.optimizer]}"
    yield ""
    yield from loop_code(recipe)


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


def _adapters(recipe: Recipe) -> Iterator[str]:
    if recipe.method == "full":
        return
    if recipe.targets == ALL_LINEAR:
        chosen = 'not name.endswith("lm_head")'
    else:
        names = ", ".join(f'"{name}"' for name in recipe.targets.split(","))
        chosen = f'name.rpartition(".")[2] in ({names},)'
    yield f"where = lambda name: {chosen}"
    if recipe.method == "lora":
        yield f"add_lora(model, rank={recipe.rank}, where=where)"
    else:
        yield f"add_qlora(model, rank={recipe.rank}, adapt=where)"
        yield "prepare_for_low_bits(model)"
        yield "model.cuda()"
