"""How to train a transformers model with the usual packages, as settings and as code.

    method         full: all weights. lora: adapters beside frozen weights. qlora: beside 4-bit ones
    precision      dtype of the weights, and whether autocast runs in bfloat16
    optimizer      of torch, bitsandbytes or torchao
    checkpointing  transformers' own, one segment per layer

This module does not import torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

METHODS = ("full", "lora", "qlora")
PRECISIONS = ("float32", "autocast", "bfloat16")
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adam8bit": "bitsandbytes.optim.AdamW8bit",
    "paged-adam8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "torchao-adam8bit": "torchao.optim.AdamW8bit",
    "sgd": "torch.optim.SGD",
}
# Optimizer state per weight on the GPU, by the weight's itemsize. Paged state is in host memory.
STATE_BYTES: dict[str, Callable[[int], int]] = {
    "adamw": lambda itemsize: 2 * itemsize,
    "adam8bit": lambda itemsize: 2,
    "paged-adam8bit": lambda itemsize: 0,
    "torchao-adam8bit": lambda itemsize: 2,
    "sgd": lambda itemsize: 0,
}
ATTENTIONS = ("default", "sdpa", "eager")  # default: what transformers chooses for the model
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Recipe:
    """How to train. Adapters' weights are in float32, as peft makes them, and run in autocast."""

    method: str = "full"
    precision: str = "float32"
    optimizer: str = "adamw"
    checkpointing: bool = False
    attention: str = "default"
    rank: int = 8
    targets: str = ALL_LINEAR  # or names of layers, joined by commas

    def __post_init__(self) -> None:
        for name, known in (
            ("method", METHODS),
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("attention", ATTENTIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"got {name}={getattr(self, name)!r} in a recipe; choose one of "
                    f"{', '.join(known)}"
                )
        if self.rank < 1:
            raise ValueError(f"got rank {self.rank}; give at least 1")

    @property
    def uses_autocast(self) -> bool:
        return self.precision == "autocast" or self.method != "full"

    @property
    def weights_dtype(self) -> str:
        return "bfloat16" if self.precision == "bfloat16" or self.method != "full" else "float32"

    @property
    def group(self) -> str:
        """The trained weights and their precision: only rows of one group can be compared."""
        if self.method == "full":
            return f"all weights, {_PRECISION_WORDS[self.precision]}"
        base = "4-bit" if self.method == "qlora" else "bfloat16"
        return f"LoRA of rank {self.rank} beside {base} weights"

    @property
    def words(self) -> str:
        """The techniques beyond the group's."""
        parts = [self.optimizer]
        parts += ["checkpointing"] * self.checkpointing
        parts += ["eager attention"] * (self.attention == "eager")
        return ", ".join(parts)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.group}: {self.words}"

    @property
    def adapter_targets(self) -> str | list[str]:
        """peft's target_modules."""
        return self.targets if self.targets == ALL_LINEAR else self.targets.split(",")


_PRECISION_WORDS = {
    "float32": "float32",
    "autocast": "float32 with bfloat16 autocast",
    "bfloat16": "bfloat16",
}


# What memlab's names of techniques change in a recipe.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"checkpointing": True},
    "autocast": {"precision": "autocast"},
    "bfloat16": {"precision": "bfloat16"},
    "adam8bit": {"optimizer": "adam8bit"},
    "paged-adam8bit": {"optimizer": "paged-adam8bit"},
    "torchao-adam8bit": {"optimizer": "torchao-adam8bit"},
    "sgd": {"optimizer": "sgd"},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "eager-attention": {"attention": "eager"},
}
USUAL = (
    *("plain", "checkpointing", "autocast", "bfloat16", "adam8bit", "lora", "qlora"),
    *("autocast+adam8bit+checkpointing", "lora+checkpointing", "qlora+checkpointing"),
)


def recipe_named(names: str, **settings: Any) -> Recipe:
    """Return the recipe of techniques joined by "+", with further settings of a Recipe.

    Raises ValueError for an unknown technique, and for two that change the same.
    """
    changes: dict[str, Any] = {}
    for name in names.split("+"):
        if name not in TECHNIQUES:
            raise ValueError(
                f"got the technique {name!r}; a model of transformers trains with "
                f"{', '.join(TECHNIQUES)}"
            )
        if both := changes.keys() & TECHNIQUES[name].keys():
            raise ValueError(f"got {names!r}, whose parts set the {both.pop()} twice; choose one")
        changes |= TECHNIQUES[name]
    return Recipe(**{**settings, **changes})


@dataclass(frozen=True)
class Loaded:
    """The model that printed code loads.

    auto_class   of transformers, such as AutoModelForCausalLM
    name         of the model, for from_pretrained
    device       of the training
    has_cache    whether its config has `use_cache`, which training turns off
    head         path of its output layer, which gets no adapter; "" if it has none
    stacks       paths of its lists of layers
    """

    auto_class: str
    name: str
    device: str = "cuda"
    has_cache: bool = True
    head: str = "lm_head"
    stacks: tuple[str, ...] = ()

    def loading(self, recipe: Recipe, *options: str, on_device: bool) -> Iterator[str]:
        """Yield the lines that load the model, and move it unless it is `on_device` already."""
        yield f"model = {self.auto_class}.from_pretrained("
        yield f'    "{self.name}",'
        yield f"    dtype=torch.{recipe.weights_dtype},"
        if self.has_cache:
            yield "    use_cache=False,"
        if recipe.attention != "default":
            yield f'    attn_implementation="{recipe.attention}",'
        yield from (f"    {option}," for option in options)
        yield ")" if on_device else f"){self.move}"

    @property
    def move(self) -> str:
        return ".cuda()" if self.device == "cuda" else f'.to("{self.device}")'


TRAIN = "model.train()  # from_pretrained returns it in evaluation mode"


def code(recipe: Recipe, loaded: Loaded) -> Iterator[str]:
    """Yield the lines of Python that set up the training with transformers, peft and
    bitsandbytes; the batches and the loop are the user's."""
    yield "import torch"
    yield from sorted(_imports(recipe, loaded.auto_class))
    yield ""
    options: tuple[str, ...] = ()
    if recipe.method == "qlora":
        yield "four_bits = BitsAndBytesConfig("
        yield '    load_in_4bit=True, bnb_4bit_quant_type="nf4",'
        yield "    bnb_4bit_use_double_quant=True,"
        yield "    bnb_4bit_compute_dtype=torch.bfloat16,"
        yield ")"
        options = ("quantization_config=four_bits", 'device_map={"": 0}')
    yield from loaded.loading(recipe, *options, on_device=recipe.method == "qlora")
    yield from _prepared(recipe)
    yield TRAIN
    package, _, kind = OPTIMIZERS[recipe.optimizer].rpartition(".")
    yield f"optimizer = {f'torch.optim.{kind}' if package == 'torch.optim' else kind}("
    yield "    [p for p in model.parameters() if p.requires_grad]"
    yield ")"
    yield ""
    yield from loop_code(recipe, loaded.device)


def loop_code(recipe: Recipe, device: str) -> Iterator[str]:
    """Yield the lines of one training step."""
    yield "# batch: a dictionary of the model's inputs and labels, on the GPU"
    if recipe.uses_autocast:
        yield f'with torch.autocast("{device}", dtype=torch.bfloat16):'
    yield f"{'    ' * recipe.uses_autocast}loss = model(**batch).loss"
    yield "loss.backward()"
    yield "optimizer.step()"
    yield "optimizer.zero_grad()"


def _prepared(recipe: Recipe) -> Iterator[str]:
    """Yield the lines that add checkpointing and adapters."""
    if recipe.method == "qlora":
        yield "model = prepare_model_for_kbit_training("
        yield f"    model, use_gradient_checkpointing={recipe.checkpointing},"
        yield '    gradient_checkpointing_kwargs={"use_reentrant": False},'
        yield ")"
    elif recipe.checkpointing:
        yield 'model.gradient_checkpointing_enable({"use_reentrant": False})'
    if recipe.method != "full":
        targets = repr(recipe.adapter_targets).replace("'", '"')
        yield "adapters = LoraConfig("
        yield f"    r={recipe.rank}, lora_alpha={2 * recipe.rank}, target_modules={targets}"
        yield ")"
        yield "model = get_peft_model(model, adapters)"


def _imports(recipe: Recipe, auto_class: str) -> Iterator[str]:
    four_bits = ", BitsAndBytesConfig" if recipe.method == "qlora" else ""
    yield f"from transformers import {auto_class}{four_bits}"
    if recipe.method != "full":
        kbit = ", prepare_model_for_kbit_training" if recipe.method == "qlora" else ""
        yield f"from peft import LoraConfig, get_peft_model{kbit}"
    package, _, name = OPTIMIZERS[recipe.optimizer].rpartition(".")
    if package != "torch.optim":
        yield f"from {package} import {name}"
