"""Changes that save memory in a script that runs unmodified, each with the code that makes it.

A change is applied from outside, at the model's first forward pass with gradients, when the script
has made its model and its optimizer. So its saving is predicted, not estimated. The code is for the
framework that runs the script's loop.

    LoRA             of peft, in a model of transformers with weights from a file
    checkpointing    transformers' own, or around each layer of a list
    autocast         the forward pass in bfloat16, or in float16 on GPUs that emulate bfloat16
    chunked loss     the logits and their cross-entropy, in chunks of tokens
    fused optimizer  one kernel, without copies of all weights
    8-bit optimizer  in place of Adam and AdamW
    no_grad          evaluations without gradients
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.configs.targets import find_target
from memlab.internals.replacing import replaced
from memlab.metering.frames import frames
from memlab.planner.outside import is_sharded, layers_of, paths_of_layers
from memlab.scripts.evaluations import Evaluation, is_trained
from memlab.scripts.techniques import (
    LORA_RANK,
    bfloat16_autocast,
    checkpointing,
    chunked_loss,
    eight_bit_adam,
    float16_autocast,
    fused_optimizer,
    head_of,
    lora,
    no_grad_in_evaluation,
    released_logits,
)
from memlab.trace import Trace

FRAMEWORKS = {  # a part of the file of a loop that a framework runs
    "transformers/trainer.py": "Trainer",
    "lightning/pytorch": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate/": "accelerate",
}
_PLAIN = "plain"


@dataclass(frozen=True)
class Change:
    """One change, or several.

    apply    changes the model and its optimizers; raises NotPossibleError
    code     lines of Python by framework; "plain" is for any other. HEAD stands for the path of the
             layer that computes the logits, LAYERS for the paths of the lists of layers
    """

    name: str
    apply: Callable[[nn.Module, list[torch.optim.Optimizer]], None]
    code: Mapping[str, tuple[str, ...]]

    def lines(self, framework: str, models: Iterable[nn.Module] = ()) -> tuple[str, ...]:
        lines = self.code.get(framework, self.code[_PLAIN])
        head = next(filter(None, map(head_of, models)), ("head", None))[0]
        paths = {
            path.removeprefix("module.")
            for model in models
            for path in paths_of_layers(model)
            if is_trained(model.get_submodule(path))
        }
        layers = ", ".join(f"model.{path}".rstrip(".") for path in sorted(paths)) or "the model"
        names = {"HEAD": head.removeprefix("module."), "LAYERS": layers}
        for name, path in names.items():
            lines = tuple(line.replace(name, path) for line in lines)
        return lines


CHANGES = (  # in the order of application
    Change(
        "LoRA",
        lora,
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
        checkpointing,
        {
            "Trainer": ("TrainingArguments(..., gradient_checkpointing=True)",),
            _PLAIN: (
                "model.gradient_checkpointing_enable()  # a transformers model",
                "# any other model: in forward, around each layer of LAYERS",
                "x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
            ),
        },
    ),
    Change(
        "bfloat16 autocast",
        bfloat16_autocast,
        {
            "Trainer": ("TrainingArguments(..., bf16=True)",),
            "Lightning": ('Trainer(..., precision="bf16-mixed")',),
            "accelerate": ('Accelerator(..., mixed_precision="bf16")',),
            _PLAIN: (
                'with torch.autocast("cuda", dtype=torch.bfloat16):',
                "    output = model(...)  # predicted with only this inside",
            ),
        },
    ),
    Change(
        "float16 autocast",
        float16_autocast,
        {
            "Trainer": ("TrainingArguments(..., fp16=True)",),
            "Lightning": ('Trainer(..., precision="16-mixed")',),
            "accelerate": ('Accelerator(..., mixed_precision="fp16")',),
            _PLAIN: (
                "# with torch.amp.GradScaler, without which small gradients become 0",
                'with torch.autocast("cuda", dtype=torch.float16):',
                "    output = model(...)  # predicted with only this inside",
            ),
        },
    ),
    Change(
        "chunked loss",
        chunked_loss,
        {
            "Trainer": (
                "TrainingArguments(..., use_liger_kernel=True)  # pip install liger-kernel",
            ),
            _PLAIN: (
                "from memlab.losses import chunked_cross_entropy",
                "loss = chunked_cross_entropy(hidden, model.HEAD.weight, targets)",
                "# hidden: the input of HEAD, of shape (tokens, features)",
            ),
        },
    ),
    Change(
        "logits released",
        released_logits,
        {
            _PLAIN: (
                "del logits  # and other names of them, before loss.backward()",
                "# or return only the loss from a function: backward does not need the logits",
            ),
        },
    ),
    Change(
        "fused optimizer",
        fused_optimizer,
        {
            "Trainer": ('TrainingArguments(..., optim="adamw_torch_fused")',),
            _PLAIN: ("optimizer = torch.optim.AdamW(model.parameters(), ..., fused=True)",),
        },
    ),
    Change(
        "8-bit AdamW",
        eight_bit_adam,
        {
            "Trainer": ('TrainingArguments(..., optim="adamw_bnb_8bit")',),
            _PLAIN: (
                "import bitsandbytes",
                "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=...)",
            ),
        },
    ),
    Change(
        "no_grad in evaluation",
        no_grad_in_evaluation,
        {_PLAIN: ("with torch.no_grad():  # around the evaluation, its loss included",)},
    ),
)


_NOT_COMBINED = ("logits released",)  # a chunked loss has no logits


def changes_for(
    device: str, trace: Trace, models: Sequence[nn.Module], evaluation: Evaluation | None = None
) -> tuple[Change, ...]:
    """Return the changes to try on a device: autocast in bfloat16, but in float16 on GPUs that
    multiply bfloat16 in float32; to release the logits only if they are alive in backward; a
    fused optimizer only for a peak with temporaries of the optimizer; and no_grad only for an
    evaluation with gradients, at the highest peak."""
    target = find_target(device)
    has_bfloat16 = target is None or target.has_bfloat16
    leave_out = {"float16 autocast" if has_bfloat16 else "bfloat16 autocast"}
    if not _holds_logits(trace, models):
        leave_out.add("logits released")
    if not trace.at_peak.get("optimizer_temporaries"):
        leave_out.add("fused optimizer")
    is_lower = evaluation is None or evaluation.peak_bytes < trace.peak_bytes
    if evaluation is None or is_lower or not evaluation.gradients:
        leave_out.add("no_grad in evaluation")
    return tuple(change for change in CHANGES if change.name not in leave_out)


def _holds_logits(trace: Trace, models: Sequence[nn.Module]) -> bool:
    """Whether the output of the layer that computes the logits is alive at a peak in backward."""
    heads = dict(filter(None, map(head_of, models)))
    if trace.peak_phase != "backward":
        return False
    return any(
        event.phase == "forward"
        and event.module in heads
        and event.shape[-1:] == (heads[event.module].out_features,)
        for event in trace.alive(trace.peak_position)
    )


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
    layers = [layer for model in models for layer in layers_of(model)]
    if not layers:
        return None
    whole = max(sum(w.nbytes for w in layer.parameters()) for layer in layers)
    shared = sum(trace.at_peak.get(category, 0) for category in _SHARDED)
    return trace.peak_bytes - shared + -(-shared // ranks) + 2 * whole


def combinations_of(helpful: Sequence[Change]) -> list[tuple[Change, ...]]:
    """Return the two, three, … of the helpful changes that save most, and all of them with LoRA,
    which changes what is trained. The best change is the first."""
    alone = [change for change in helpful if change.name not in _NOT_COMBINED]
    if any(change.name == "8-bit AdamW" for change in alone):
        alone = [change for change in alone if change.name != "fused optimizer"]
    others = [change for change in alone if change.name != "LoRA"]
    found = [tuple(others[:count]) for count in range(2, len(others) + 1)]
    if len(alone) > max(1, len(others)):
        found.append(tuple(alone))
    return found


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
    """Apply the change before the first forward pass with gradients inside `with`.

    `optimizers` returns the optimizers that exist by then, without the change's own. A module's
    call looks its `forward` up before it runs any hook, so a hook would be too late.
    """
    waiting = [] if change is None else [change]

    def changing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if waiting and torch.is_grad_enabled() and is_trained(module):
                waiting.pop().apply(module, optimizers())
            return call(module, *args, **kwargs)

        return called

    # With a hook, step 2 was right, but reserved memory kept the first step's peak: 24.7 instead of
    # 20.4 GiB for autocast in a GPT (test_a_change_acts_from_the_first_step_on).
    with replaced({(nn.Module, "__call__"): changing} if waiting else {}):
        yield


def running_framework() -> str:
    """Return the framework whose loop is running, from the files on the stack. transformers'
    Trainer and Lightning may step inside accelerate, so the order of FRAMEWORKS decides."""
    paths = [Path(frame.f_code.co_filename).as_posix() for frame in frames()]
    found = (name for part, name in FRAMEWORKS.items() if any(part in path for path in paths))
    return next(found, _PLAIN)
