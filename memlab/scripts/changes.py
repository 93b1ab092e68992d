"""Changes that save memory in a script that runs unmodified, each with the code that makes it.

A change is applied from outside, at the model's first forward pass with gradients, when the script
has made its model and its optimizer. So its saving is predicted, not estimated. The code is for the
framework that runs the script's loop.

    LoRA             of peft, in a model of transformers with weights from a file
    checkpointing    transformers' own, or around each layer of a list
    autocast         the forward pass in bfloat16
    8-bit optimizer  in place of Adam and AdamW
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memlab.metering.frames import frames
from memlab.optim import Adam8bit
from memlab.planner.outside import (
    adams_groups,
    checkpointed,
    is_adam,
    is_sharded,
    paths_of_layers,
    stepped_by,
)
from memlab.trace import Trace

FRAMEWORKS = {  # a part of the file of a loop that a framework runs
    "transformers/trainer.py": "Trainer",
    "lightning/pytorch": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate/": "accelerate",
}
_PLAIN = "plain"


class NotPossibleError(Exception):
    """The change does not apply to the script. The message says why."""


@dataclass(frozen=True)
class Change:
    """One change, or several.

    apply    changes the model and its optimizers; raises NotPossibleError
    code     lines of Python by framework; "plain" is for any other
    """

    name: str
    apply: Callable[[nn.Module, list[torch.optim.Optimizer]], None]
    code: Mapping[str, tuple[str, ...]]

    def lines(self, framework: str) -> tuple[str, ...]:
        return self.code.get(framework, self.code[_PLAIN])


def _lora(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    if not getattr(model, "name_or_path", ""):
        raise NotPossibleError("the model is not a transformers model with weights from a file")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise NotPossibleError("the script has adapters already")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise NotPossibleError("peft is not installed; pip install peft") from error
    inject_adapter_in_model(LoraConfig(r=LORA_RANK, target_modules="all-linear"), model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = []
        optimizer.param_groups[0]["params"] = trained


def _checkpointing(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    own = next((m for m in model.modules() if hasattr(m, "gradient_checkpointing_enable")), None)
    if own is not None and getattr(own, "supports_gradient_checkpointing", True):
        if any(getattr(m, "gradient_checkpointing", False) for m in own.modules()):
            raise NotPossibleError("the script checkpoints already")
        own.gradient_checkpointing_enable({"use_reentrant": False})
        return
    if not paths_of_layers(model):
        raise NotPossibleError("no nn.ModuleList or nn.Sequential holds the layers")
    checkpointed(lambda: None, model, None)


def _autocast(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    kinds = {weight.dtype for weight in model.parameters()}
    if kinds != {torch.float32}:
        raise NotPossibleError("not all weights are in float32")
    if torch.is_autocast_enabled(_device_type(model)):
        raise NotPossibleError("the script uses autocast already")
    forward, device = model.forward, _device_type(model)

    @wraps(forward)
    def in_bfloat16(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = in_bfloat16  # type: ignore[method-assign]


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def _eight_bits(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    replaceable = [optimizer for optimizer in optimizers if is_adam(optimizer)]
    if not replaceable:
        raise NotPossibleError(
            "no optimizer is Adam or AdamW with a learning rate given as a number"
        )
    if any(is_sharded(module) for module in model.modules()):
        raise NotPossibleError(
            "bitsandbytes' optimizers do not take FSDP2's weights; torchao.optim.AdamW8bit does"
        )
    for optimizer in replaceable:
        stepped_by(Adam8bit, adams_groups)(lambda: None, model, optimizer)


LORA_RANK = 16
CHANGES = (  # in the order of application
    Change(
        "LoRA",
        _lora,
        {
            _PLAIN: (
                "# trains only adapters, beside frozen weights",
                "from peft import LoraConfig, get_peft_model",
                f'lora = LoraConfig(r={LORA_RANK}, target_modules="all-linear")',
                "model = get_peft_model(model, lora)  # before creating the optimizer",
            ),
        },
    ),
    Change(
        "checkpointing",
        _checkpointing,
        {
            "Trainer": ("TrainingArguments(..., gradient_checkpointing=True)",),
            _PLAIN: (
                "model.gradient_checkpointing_enable()  # a transformers model",
                "# any other model: in forward, around each layer",
                "x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
            ),
        },
    ),
    Change(
        "bfloat16 autocast",
        _autocast,
        {
            "Trainer": ("TrainingArguments(..., bf16=True)",),
            "Lightning": ('Trainer(..., precision="bf16-mixed")',),
            "accelerate": ('Accelerator(..., mixed_precision="bf16")',),
            _PLAIN: (
                'with torch.autocast("cuda", dtype=torch.bfloat16):',
                "    output = model(...)  # predicted with the loss outside, on bfloat16 outputs",
                "# GPUs before Ampere (T4, V100): torch.float16 and torch.amp.GradScaler",
            ),
        },
    ),
    Change(
        "8-bit AdamW",
        _eight_bits,
        {
            "Trainer": ('TrainingArguments(..., optim="adamw_bnb_8bit")',),
            _PLAIN: (
                "import bitsandbytes",
                "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=...)",
            ),
        },
    ),
)


_LEAST_VOCABULARY = 4096


def chunked_loss(framework: str, models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the code that computes the loss in chunks of tokens."""
    if framework == "Trainer":
        return ("TrainingArguments(..., use_liger_kernel=True)  # pip install liger-kernel",)
    head, _ = _widest_linear(models)
    return (
        "from memlab.losses import chunked_cross_entropy",
        f"loss = chunked_cross_entropy(hidden, model.{head}.weight, targets)",
        f"# hidden: the input of {head}, of shape (tokens, features)",
    )


def logits_bytes(trace: Trace, models: Iterable[nn.Module]) -> int:
    """Return the bytes at the peak in tensors whose rows are a vocabulary: logits, their gradients
    and copies. A vocabulary is the largest output of a linear layer, from 4,096 up."""
    _, vocabulary = _widest_linear(models)
    if vocabulary < _LEAST_VOCABULARY:
        return 0
    weights = ("parameters", "gradients", "optimizer_state")
    return sum(
        event.bytes
        for event in trace.alive(trace.peak_position)
        if event.shape[-1:] == (vocabulary,) and event.category not in weights
    )


def _widest_linear(models: Iterable[nn.Module]) -> tuple[str, int]:
    """Return the path and the output features of the linear layer with most of them."""
    widths = {
        name.removeprefix("module."): module.out_features  # DDP's prefix
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    return max(widths.items(), key=lambda one: one[1], default=("", 0))


FSDP = {
    "Trainer": ("TrainingArguments(..., fsdp=True)  # from transformers 5 on this is FSDP2",),
    "Lightning": ('Trainer(..., strategy="fsdp", devices=2)',),
    "accelerate": ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 ...",),
    _PLAIN: (
        "from torch.distributed.fsdp import fully_shard  # started by torchrun",
        "for layer in layers:  # the model's list of layers",
        "    fully_shard(layer)",
        "fully_shard(model)  # before creating the optimizer",
    ),
}
_SHARDED = ("parameters", "gradients", "optimizer_state", "optimizer_temporaries")


def sharded_bytes(trace: Trace, models: Iterable[nn.Module], ranks: int) -> int | None:
    """Estimate by formula how much each GPU holds at the peak with FSDP2.

    Each has its share of the weights, gradients and optimizer state, everything else as before, and
    the whole weights of two layers: one computes while the next arrives. None if no model has a
    list of layers, and if FSDP2 shards them already.
    """
    if any(is_sharded(module) for model in models for module in model.modules()):
        return None
    layers = [
        layer
        for model in models
        for path in paths_of_layers(model)
        for layer in model.get_submodule(path)
    ]
    if not layers:
        return None
    whole = max(sum(w.nbytes for w in layer.parameters()) for layer in layers)
    shared = sum(trace.at_peak.get(category, 0) for category in _SHARDED)
    return trace.peak_bytes - shared + -(-shared // ranks) + 2 * whole


def together(changes: tuple[Change, ...]) -> Change:
    """Return all of them as one change."""
    changes = tuple(sorted(changes, key=CHANGES.index))

    def apply(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        for change in changes:
            change.apply(model, optimizers)

    names = {name for change in changes for name in change.code}
    code = {name: tuple(line for c in changes for line in c.lines(name)) for name in names}
    return Change(" + ".join(change.name for change in changes), apply, code)


@contextmanager
def applied(
    change: Change | None, optimizers: Callable[[], list[torch.optim.Optimizer]]
) -> Iterator[None]:
    """Apply the change at the first forward pass with gradients inside `with`.

    `optimizers` returns the optimizers that exist by then, without those that the change creates.
    """
    if change is None:
        yield
        return

    def before_forward(module: nn.Module, args: Any) -> None:
        trains = any(weight.requires_grad for weight in module.parameters())
        if torch.is_grad_enabled() and trains:
            handle.remove()
            change.apply(module, optimizers())

    handle = register_module_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        handle.remove()


def running_framework() -> str:
    """Return the framework whose loop is running, from the files on the stack. transformers'
    Trainer and Lightning may step inside accelerate, so the order of FRAMEWORKS decides."""
    paths = [Path(frame.f_code.co_filename).as_posix() for frame in frames()]
    found = (name for part, name in FRAMEWORKS.items() if any(part in path for path in paths))
    return next(found, _PLAIN)
