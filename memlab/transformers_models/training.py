"""Build a training of a transformers model as a user would, with random weights."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from memlab.internals.lazy import LazyModule
from memlab.transformers_models.recipes import OPTIMIZERS, Loaded, Recipe
from memlab.transformers_models.sources import Source
from memlab.transformers_models.structure import (
    Stack,
    is_shortened,
    shorten,
    stacks,
    with_fewer_layers,
)
from memlab.transformers_models.tasks import Size, Task, class_names, completed, described, task_of

peft = LazyModule("peft")  # an adapter's recipe needs it

_SIZE = re.compile(r"size|layers|heads|dim$|^d_|^n_|width|channels|experts")
Parts = tuple[Callable[[], Any], nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Training:
    """A model of a config, its task, and the size of a batch."""

    source: Source
    size: Size = field(default_factory=Size)

    def __str__(self) -> str:
        return f"{self.source.name}, {self.described}"

    @property
    def described(self) -> str:
        """What is assumed of the training, in one line."""
        return described(self.task, self.completed_size, self.config)

    @property
    def stored_quantized(self) -> str:
        """How the file's weights are quantized; "" if they are not."""
        return str(self.source.fields().get("quantization_config", {}).get("quant_method", ""))

    @cached_property
    def config(self) -> Any:
        """The config. Raises ValueError if transformers cannot read it."""
        self._require_positive_sizes()
        try:
            return transformers.AutoConfig.from_pretrained(
                self.source.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # many kinds: unknown model types, wrong fields, remote code
            raise ValueError(
                f"transformers {transformers.__version__} cannot read {self.source.path}: "
                f"{self._blame(error)}"
            ) from error

    def _require_positive_sizes(self) -> None:
        """Raise ValueError for a negative number of layers, heads and the like."""
        for name, value in self.source.fields().items():
            if _SIZE.search(name) and isinstance(value, int) and value < 0:
                raise ValueError(f"{self.source.path} has {name} = {value}, which is negative")

    def _blame(self, error: Exception) -> str:
        """Return why transformers failed: a field that names something unknown, or its message."""
        fields = self.source.fields()
        for name in ("dtype", "torch_dtype"):
            dtype = str(fields.get(name, "float32")).removeprefix("torch.")
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                return f"{name} is {dtype!r}, which is no dtype of torch; write bfloat16 or float32"
        for name in ("rope_scaling", "rope_parameters"):
            rope = fields.get(name)
            kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
            if kind not in (None, "default", *ROPE_INIT_FUNCTIONS):
                known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
                return f"rope_type in {name} is {kind!r}, and it knows {known}"
        return " ".join(str(error).split())[:200]

    @cached_property
    def task(self) -> Task:
        return task_of(self.config)

    @cached_property
    def class_name(self) -> str:
        """The model's class: the config's, if it is one for the task."""
        names = class_names(self.task, self.config.model_type)
        return next((name for name in self.config.architectures or () if name in names), names[0])

    @cached_property
    def completed_size(self) -> Size:
        return completed(self.size, self.task, self.config)

    @cached_property
    def skeleton(self) -> Any:
        """The model on the meta device: shapes only. Raises ValueError if it cannot be built."""
        try:
            with torch.device("meta"), quiet():
                return self.model(Recipe())
        except Exception as error:  # many kinds: sizes that do not go together
            raise ValueError(
                f"transformers {transformers.__version__} cannot build the model of "
                f"{self.source.path}: {self._blame(error)}"
            ) from error

    @property
    def parameters(self) -> int:
        """The number of the model's weights."""
        return sum(weight.numel() for weight in self.skeleton.parameters())

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        return stacks(self.skeleton)

    def loaded(self, device: str = "cuda", name: str | None = None) -> Loaded:
        """Return what printed code has to know of the model."""
        output = self.skeleton.get_output_embeddings()
        return Loaded(
            self.task.auto_class,
            name or self.source.name,
            device,
            has_cache=hasattr(self.config, "use_cache"),
            head=next((n for n, m in self.skeleton.named_modules() if m is output), ""),
            stacks=tuple(stack.path for stack in self.stacks),
        )

    def model(self, recipe: Recipe, depths: Mapping[str, int] | None = None) -> nn.Module:
        """Build the model with random weights, optionally with stacks of fewer layers.

        A config with fewer layers is faster, if it gives the same model as removing layers does.
        """
        fields = depths and with_fewer_layers(self.config.to_dict(), self.stacks, depths)
        if fields and depths:
            model = self._model(recipe, fields)
            if is_shortened(model, self.skeleton, depths):
                return model
        model = self._model(recipe, self.config.to_dict())
        shorten(model, depths or {})
        return model

    def _model(self, recipe: Recipe, fields: Mapping[str, Any]) -> nn.Module:
        auto = getattr(transformers, self.task.auto_class)
        config = type(self.config).from_dict(dict(fields))  # a model changes its config
        if self.size.image is not None:
            config.image_size = self.size.image
        config.use_cache = False
        if hasattr(config, "quantization_config"):  # of the published weights
            del config.quantization_config
        config.architectures = [self.class_name]
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
        options = {"dtype": getattr(torch, recipe.weights_dtype)}
        if recipe.attention != "default":
            options["attn_implementation"] = recipe.attention
        return auto.from_config(config, **options)

    def build(
        self,
        recipe: Recipe,
        device: str = "cuda",
        *,
        depths: Mapping[str, int] | None = None,
        on_loss: Callable[[torch.Tensor], object] = lambda loss: None,
    ) -> Parts:
        """Return (step, model, optimizer), optionally with stacks of fewer layers. `on_loss` is
        called with the loss of each step."""
        with quiet():
            model = self.model(recipe, depths)
            if recipe.method == "qlora":
                model = _in_four_bits(model, depths or {}, device)
            model = _prepared(model.to(device), recipe)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = _class(OPTIMIZERS[recipe.optimizer])(trained)
        batch = self.task.inputs(self.config, self.completed_size)
        inputs = {name: _moved(tensor, device, model.dtype) for name, tensor in batch.items()}

        def step() -> None:
            autocast = torch.autocast(device, torch.bfloat16)
            with autocast if recipe.uses_autocast else nullcontext():
                loss = model(**inputs).loss
            on_loss(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, model, optimizer


@contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and advice on a model built only to be measured."""
    bars = transformers.utils.logging
    level, shows_bars = logging.root.manager.disable, bars.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if shows_bars:
            bars.enable_progress_bar()


def _prepared(model: Any, recipe: Recipe) -> Any:
    """Add adapters and checkpointing, if the recipe has them."""
    without_reentrance = {"use_reentrant": False}
    if recipe.method == "qlora":
        model = peft.prepare_model_for_kbit_training(
            model, recipe.checkpointing, gradient_checkpointing_kwargs=without_reentrance
        )
    elif recipe.checkpointing:
        model.gradient_checkpointing_enable(without_reentrance)
    if recipe.method != "full":
        adapters = peft.LoraConfig(
            r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=recipe.adapter_targets
        )
        model = peft.get_peft_model(model, adapters)
    model.train()
    return model


def _moved(tensor: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return an input on the device, images and sound in the dtype of the weights."""
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def _in_four_bits(model: Any, depths: Mapping[str, int], device: str) -> nn.Module:
    """Load the model's weights again as `from_pretrained` does, which quantizes them one by one."""
    kind: Any = type(model)

    class Shortened(kind):
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            shorten(self, depths)

    Shortened.__name__ = kind.__name__  # it decides the loss
    weights = model.state_dict()
    for tied in model.all_tied_weights_keys:  # not in a file
        weights.pop(tied, None)
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return Shortened.from_pretrained(
        None,
        config=model.config,
        state_dict=weights,
        dtype=model.dtype,
        quantization_config=four_bits,
        device_map={"": 0 if device == "cuda" else device},
    )


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
