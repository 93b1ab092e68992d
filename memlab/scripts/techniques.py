"""The techniques that `memlab run --advise` tries: each changes a script's model and optimizers.

They raise NotPossibleError if they do not apply.
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn

from memlab.internals.torch_internals import top_saved_tensors_hooks
from memlab.metering.frames import frames
from memlab.optim import Adam8bit
from memlab.planner.outside import (
    adams_groups,
    checkpointed,
    is_adam,
    is_sharded,
    layers_of,
    stepped_by,
)
from memlab.scripts.late_logits import late_logits
from memlab.world.data.hub import FROM_A_FILE


class NotPossibleError(Exception):
    """The change does not apply to the script. The message says why."""


LORA_RANK = 16


def lora(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Train adapters of peft beside frozen weights."""
    if not getattr(model, FROM_A_FILE, False):
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


def checkpointing(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Recompute layers in backward: by transformers' own method, or each layer of a list."""
    own: Any = next(
        (m for m in model.modules() if hasattr(m, "gradient_checkpointing_enable")), None
    )
    if own is not None and getattr(own, "supports_gradient_checkpointing", True):
        if any(getattr(m, "gradient_checkpointing", False) for m in own.modules()):
            raise NotPossibleError("the script checkpoints already")
        renamed = getattr(own, "activation_checkpointing_enable", None)  # in transformers 5
        (renamed or own.gradient_checkpointing_enable)({"use_reentrant": False})
        return
    layers = layers_of(model)
    if not layers:
        raise NotPossibleError("no nn.ModuleList or nn.Sequential holds the layers")
    checkpointed(lambda: None, model, None)
    _refuse_own_checkpoints(model, layers)


def _refuse_own_checkpoints(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise NotPossibleError when the script runs a layer in a checkpoint, which replaces the hooks
    of saved tensors, or disables gradients."""
    outside = top_saved_tensors_hooks()

    def check(layer: nn.Module, args: Any) -> None:
        if top_saved_tensors_hooks() != outside or not torch.is_grad_enabled():
            raise NotPossibleError("the script checkpoints its layers already")

    handles = [layer.register_forward_pre_hook(check) for layer in layers]

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        for handle in handles:
            handle.remove()

    handles.append(model.register_forward_hook(stop))


def bfloat16_autocast(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Run the forward pass with autocast in bfloat16."""
    _autocast(model, torch.bfloat16)


def float16_autocast(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Run the forward pass with autocast in float16."""
    _autocast(model, torch.float16)


def _autocast(model: nn.Module, dtype: torch.dtype) -> None:
    kinds = {weight.dtype for weight in model.parameters()}
    if kinds != {torch.float32}:
        raise NotPossibleError("not all weights are in float32")
    if torch.is_autocast_enabled(_device_type(model)):
        raise NotPossibleError("the script uses autocast already")
    context = torch.autocast(_device_type(model), dtype)
    model.forward = context(model.forward)
    # What a framework's autocast covers decides the peak: accelerate's casts the outputs to
    # float32, Lightning's covers the loss, a plain loop's neither
    # (test_autocast_from_outside_has_the_peak_of_the_frameworks_option).
    if getattr(model, "_is_accelerate_prepared", False):  # the Trainer's models, too
        from accelerate.utils import convert_outputs_to_fp32

        model.forward = convert_outputs_to_fp32(model.forward)
    for frame in frames():
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "training_step" and isinstance(owner, nn.Module):
            owner.training_step = context(owner.training_step)  # Lightning's: with the loss


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def eight_bit_adam(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Replace Adam and AdamW by memlab's 8-bit Adam."""
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


def fused_optimizer(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Let the optimizers of torch update in one kernel, without copies of all weights."""
    groups = [g for each in optimizers if type(each) in _HAVE_FUSED for g in each.param_groups]
    if not groups:
        raise NotPossibleError("no optimizer is Adam, AdamW, SGD or Adagrad of torch.optim")
    for group in groups:
        group["foreach"], group["fused"] = False, True


_HAVE_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def chunked_loss(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Compute the logits and their cross-entropy in chunks of tokens."""
    late_logits(_own_head(model))


def released_logits(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Compute the logits for the loss only, so that no name holds them in backward."""
    late_logits(_own_head(model), in_chunks=False)


def no_grad_in_evaluation(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Run the forward pass without gradients wherever the model is in evaluation mode."""
    forward = model.forward

    @wraps(forward)
    def without_gradients(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and model.training):
            return forward(*args, **kwargs)

    model.forward = without_gradients


def _own_head(model: nn.Module) -> nn.Linear:
    """Return the layer that computes the logits, if they are large and its weight is whole."""
    path, head = head_of(model) or ("", None)
    if head is None:
        raise NotPossibleError(
            f"no linear layer has {_LEAST_VOCABULARY:,} outputs or more, so the logits are small"
        )
    if any(is_sharded(module) for module in model.modules()):
        raise NotPossibleError(f"FSDP2 gathers the weight of {path} only while it runs")
    return head


_LEAST_VOCABULARY = 4096


def head_of(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Return the path and the layer that computes the logits: of the linear layers with at least
    4,096 outputs, the last with as many as an embedding has rows, else the one with most."""
    wide = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features >= _LEAST_VOCABULARY
    ]
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    of_vocabulary = [found for found in wide if found[1].out_features in rows]
    if of_vocabulary:
        return of_vocabulary[-1]
    return max(wide, key=lambda found: found[1].out_features, default=None)
