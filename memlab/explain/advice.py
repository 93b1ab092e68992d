"""Advice for one log, without what the log rules out, and in the words of its version of torch.

A cause states what helps in general. A log may show that some of it is done already (a batch of 1,
bfloat16), that it does not apply (inference has no gradients to accumulate), or that this torch
calls a setting by another name.
"""

import re
from collections.abc import Iterator

from memlab.explain.findings import Finding, with_advice
from memlab.explain.messages import Log, Message

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
_TOOLS = {
    "HIP": ("rocm-smi", "HIP_VISIBLE_DEVICES"),
    "XPU": ("xpu-smi", "ZE_AFFINITY_MASK"),
}
_MPS = (
    "Close other applications: they share this memory.",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 removes the limit, but the system may then swap or stop.",
)
_INFERENCE = (
    "Run fewer inputs at once, or smaller ones (resolution, tokens).",
    "With diffusers: pipe.vae.enable_tiling(), pipe.enable_model_cpu_offload().",
)
_NOTHING_LEFT = "Shorten the inputs, offload activations, or shard the model (FSDP, ZeRO-3)."


def for_log(found: Finding, log: Log, *, infers: bool) -> Finding:
    """Return a finding with the advice that fits its log.

    Args:
        infers: whether gradients are disabled or an evaluation ran, so that nothing trains.
    """
    if found.advice is not None:  # a rule has chosen
        return found
    lines = {
        "batch": lambda: _batch(found, log, infers),
        "logits": lambda: _logits(found, log),
        "no-checkpointing": lambda: (line for line in found.todo if _fits(line, log)),
        "fragmentation": lambda: _fragmentation(found, log.message),
        "other-process": lambda: _other_process(found, log.message),
        "limit": lambda: _MPS if log.message.backend == "MPS" else found.todo,
    }.get(found.cause.name)
    return with_advice(found, *lines()) if lines else found


def _batch(found: Finding, log: Log, infers: bool) -> Iterator[str]:
    if log.message.backend == "CPU":
        yield "Use smaller batches or less data at once: this is the computer's own memory."
        return
    left = [line for line in (_INFERENCE if infers else found.todo) if _fits(line, log)]
    yield from left or [_NOTHING_LEFT]
    if log.message.backend == "MPS":
        yield from _MPS


def _logits(found: Finding, log: Log) -> Iterator[str]:
    """Yield the advice about a cast only if the failing lines show one."""
    chunks, _cast = found.todo
    yield chunks
    if any(_CAST.search(line.source) for line in log.inner_lines):
        yield "Keep the logits in 16 bits: drop the cast to float32 before the loss."


def _fits(line: str, log: Log) -> bool:
    """Whether the log does not show that this is done, or that it does not apply."""
    if line.startswith("Halve the batch"):
        return log.numbers.get("batch") != 1
    if line.startswith("Use autocast"):
        return not uses_16_bits(log.text)
    if line.startswith("With diffusers"):
        return "diffusers" in log.text
    return True


def uses_16_bits(text: str) -> bool:
    """Whether a log prints that it trains in 16 bits."""
    return bool(_SIXTEEN_BITS.search(text))


def _fragmentation(found: Finding, message: Message) -> Iterator[str]:
    _setting, *others = found.todo
    if message.backend in ("CUDA", "HIP"):
        yield allocator_setting(message)
    elif message.backend == "XPU":
        yield "Call torch.xpu.empty_cache() before the large request."
    yield from others


def allocator_setting(message: Message) -> str:
    """Return the setting against fragmentation in the words of the torch that wrote the message.

    Versions before 2.1 have no expandable segments; their messages name max_split_size_mb. On AMD
    GPUs torch names the same variable differently, and names it in its message.
    """
    name = message.variable or ALLOCATOR_VARIABLE
    old = message.reserved is not None and not message.names_expandable
    setting = "max_split_size_mb:128" if old else "expandable_segments:True"
    return f"Set {name}={setting} before the program starts."


def _other_process(found: Finding, message: Message) -> Iterator[str]:
    if message.backend in ("MPS", "CPU"):
        yield _MPS[0]
        return
    tool, variable = _TOOLS.get(message.backend, ("nvidia-smi", "CUDA_VISIBLE_DEVICES"))
    for line in found.todo:
        yield line.replace("nvidia-smi", tool).replace("CUDA_VISIBLE_DEVICES", variable)
