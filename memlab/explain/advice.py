"""What to do about a log's cause: the fixes that it does not rule out, in its framework's code.

A log may show that a fix is done already (a batch of 1, bfloat16), that it does not apply
(inference has no gradients to accumulate), or that this torch calls a setting by another name.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memlab.explain.findings import Finding
from memlab.explain.fixes import Fix
from memlab.explain.messages import Message

if TYPE_CHECKING:
    from memlab.explain.text_causes import TextSituation

ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"  # which every version of torch reads
_SIXTEEN_BITS = re.compile(
    r"(?i)\b(bf16|fp16|amp|use_amp|bfloat16|float16)['\"]?[ \t]{0,4}[=:][ \t]{0,4}(true|1|on|yes)"
    r"|\b(torch_)?dtype['\"]?[ \t=:]{1,4}(torch\.)?(bfloat16|float16|bf16|fp16)"
    r"|mixed[_-]precision['\"]?[ \t=:]{1,4}['\"]?(bf16|fp16)|autocast"
)
_CAST = re.compile(
    r"\.(float|double)\(\)|\bupcast|\.(to|type)\([^()\n]{0,60}\btorch\.(float32|float|double)\b"
    r"|\bdtype[ \t]{0,4}=[ \t]{0,4}torch\.(float32|float)\b"
)
_TOOLS = {  # by backend: the program that lists processes, the variable that chooses a card
    "HIP": ("rocm-smi", "HIP_VISIBLE_DEVICES"),
    "XPU": ("xpu-smi", "ZE_AFFINITY_MASK"),
    "NPU": ("npu-smi info", "ASCEND_RT_VISIBLE_DEVICES"),
}
_MPS = (
    Fix("Close other applications: they share this memory."),
    Fix(
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 removes the limit, but the system may then swap or "
        "stop."
    ),
)
_WORKER = (
    Fix(
        "Return CPU tensors from the dataset, and move the batch to the GPU in the training loop: "
        "each worker that uses CUDA needs a context of its own."
    ),
    Fix(
        "If the workers must use CUDA, set num_workers=0 or make the batch of the training smaller."
    ),
)
_FRAMEWORKS = (  # of a log's paths and lines, the most particular first
    ("vllm", r"/vllm/|\[vllm|vllm serve"),
    ("diffusers", r"diffusers"),
    ("deepspeed", r"/deepspeed/|deepspeed\.|DeepSpeed"),
    ("lightning", r"pytorch_lightning|lightning/pytorch|lightning_fabric"),
    ("trainer", r"transformers/(trainer|modeling_utils|models)|/trl/|llamafactory|axolotl|/peft/"),
    ("accelerate", r"/accelerate/|accelerate launch"),
    ("tensorflow", r"tensorflow|keras"),
    ("jax", r"\bjax|XlaRuntimeError"),
)
# What a log may show that makes a fix useless.
DONE: dict[str, Callable[["TextSituation"], bool]] = {
    "batch of 1": lambda s: s.batch_of_one,
    "inference": lambda s: s.infers,
    "training": lambda s: not s.infers,
    "evaluation": lambda s: s.evaluates,
    "checkpointing": lambda s: s.recomputes,
    "16 bits": lambda s: uses_16_bits(s.log.text),
    "no diffusers": lambda s: "diffusers" not in s.log.text or not s.infers,
    "no cast": lambda s: not any(_CAST.search(line.source) for line in s.log.inner_lines),
    "other fixes": lambda s: not s.batch_of_one,
}


def for_log(found: Finding, situation: "TextSituation") -> Finding:
    """Return a finding with the fixes that fit its log, and the first one's code."""
    fixes = tuple(fix for fix in found.cause.fixes if _fits(fix, situation))
    if found.cause.name == "batch" and situation.on_mps:
        fixes += _MPS
    if found.cause.name == "other-process" and situation.in_worker:
        fixes = _WORKER
    fixes = tuple(_in_words_of(fix, situation.message) for fix in fixes or found.cause.fixes[-1:])
    decide = found.decide.format_map(situation.words)
    return replace(found, fixes=fixes, decide=decide, code=code_for(fixes[0], situation.log.text))


def _fits(fix: Fix, situation: "TextSituation") -> bool:
    return not any(DONE[name](situation) for name in fix.unless)


def code_for(fix: Fix, text: str) -> str:
    """Return a fix's code for the framework that a text names, or else plain torch's."""
    shown = (name for name, pattern in _FRAMEWORKS if re.search(pattern, text))
    return next((fix.code[name] for name in shown if name in fix.code), "") or next(
        iter(fix.code.values()), ""
    )


def uses_16_bits(text: str) -> bool:
    """Whether a log prints that it trains in 16 bits."""
    return bool(_SIXTEEN_BITS.search(text))


def _in_words_of(fix: Fix, message: Message) -> Fix:
    """Return a fix with the settings and tools of the torch that wrote the message."""
    tool, variable = _TOOLS.get(message.backend, ("nvidia-smi", "CUDA_VISIBLE_DEVICES"))
    pairs = [("nvidia-smi", tool), ("CUDA_VISIBLE_DEVICES", variable)]
    pairs.append((f"{ALLOCATOR_VARIABLE}=expandable_segments:True", allocator_setting(message)))

    def renamed(text: str) -> str:
        for old, new in pairs:
            text = text.replace(old, new)
        return text

    return replace(
        fix, do=renamed(fix.do), code={name: renamed(code) for name, code in fix.code.items()}
    )


def allocator_setting(message: Message) -> str:
    """Return the setting against fragmentation in the words of the torch that wrote the message.

    Versions before 2.1 have no expandable segments; their messages name max_split_size_mb. On AMD
    GPUs torch names the same variable differently, and names it in its message.
    """
    name = message.variable or ALLOCATOR_VARIABLE
    old = message.reserved is not None and not message.names_expandable
    return f"{name}={'max_split_size_mb:128' if old else 'expandable_segments:True'}"
