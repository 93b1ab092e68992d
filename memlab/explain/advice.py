"""What to do about a log's cause: the fixes that it does not rule out, in its framework's code.

A log may show that a fix is done already (a batch of 1, bfloat16), that it does not apply
(inference has no gradients to accumulate), or that this torch calls a setting by another name.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from memlab.explain.findings import Finding
from memlab.explain.fixes import LENGTH, Fix
from memlab.explain.messages import Message
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
_TOOL, _VARIABLE = "nvidia-smi", "CUDA_VISIBLE_DEVICES"
_WORDS_OF = {  # by backend: what replaces the words of CUDA. ROCm's torch keeps torch.cuda.
    "HIP": ((_TOOL, "rocm-smi"), (_VARIABLE, "HIP_VISIBLE_DEVICES")),
    "XPU": ((_TOOL, "xpu-smi"), (_VARIABLE, "ZE_AFFINITY_MASK"), ("torch.cuda", "torch.xpu")),
    "NPU": (
        (_TOOL, "npu-smi info"),
        (_VARIABLE, "ASCEND_RT_VISIBLE_DEVICES"),
        ("torch.cuda", "torch.npu"),
    ),
    "MPS": (
        ("torch.cuda.memory_allocated", "torch.mps.current_allocated_memory"),
        ("torch.cuda", "torch.mps"),
        ('"cuda"', '"mps"'),
    ),
}
_CUDA_ALONE = re.compile(r"BitsAndBytes|bitsandbytes|bnb|liger")
_FRAMEWORKS = (  # of a log's paths and lines, the most particular first
    ("vllm", r"/vllm/|\[vllm|vllm serve"),
    ("diffusers", r"diffusers"),
    ("deepspeed", r"/deepspeed/|deepspeed\.|DeepSpeed|exits with return code"),
    ("lightning", r"pytorch_lightning|lightning/pytorch|lightning_fabric"),
    ("trainer", r"transformers/(trainer|modeling_utils|models)|/trl/|llamafactory|axolotl|/peft/"),
    ("accelerate", r"/accelerate/|accelerate launch"),
    ("tensorflow", r"tensorflow|keras"),
    ("jax", r"\bjax|XlaRuntimeError"),
    ("ray", r"\bray\.|\braylet\b|/ray/|ray::"),
)
# What a log may show that makes a fix useless.
DONE: dict[str, Callable[[TextSituation], bool]] = {
    "batch of 1": lambda s: s.batch_of_one,
    "inference": lambda s: s.infers,
    "training": lambda s: not s.infers,
    "evaluation": lambda s: s.evaluates,
    "checkpointing": lambda s: s.recomputes,
    "16 bits": lambda s: uses_16_bits(s.log.text),
    "no diffusers": lambda s: "diffusers" not in s.log.text or not s.infers,
    "no cast": lambda s: not any(_CAST.search(line.source) for line in s.log.inner_lines),
    "other fixes": lambda s: not s.batch_of_one,
    "MPS": lambda s: s.on_mps,
    "not MPS": lambda s: not s.on_mps,
    "worker": lambda s: s.in_worker,
    "no worker": lambda s: not s.in_worker,
    "too large in 4 bits": lambda s: s.too_large_in_4_bits,
    "card full before JAX": lambda s: bool(s.jax_found_no_room),
    "no kernel line": lambda s: not s.killed_bytes,
    "no joined outputs": lambda s: not s.joins_outputs,
    "no buffer": lambda s: not s.makes_buffer,
    "one copy": lambda s: s.copies < 2,
    "llama.cpp's weights": lambda s: s.llama_buffer == "weights",
    "llama.cpp's KV cache": lambda s: s.llama_buffer == "the KV cache",
    "no gather": lambda s: "partition_parameters.py" not in s.frames,
    "no deepspeed": lambda s: "deepspeed" not in frameworks_in(s.log.text),
    "no ray": lambda s: "ray" not in frameworks_in(s.log.text),
}


def for_log(found: Finding, situation: TextSituation) -> Finding:
    """Return a finding with the fixes that fit its log, and the first one's code."""
    fits = [fix for fix in found.cause.fixes if _fits(fix, situation)] or found.cause.fixes[-1:]
    fixes = tuple(in_words_of(_fitted(fix, situation), situation.message) for fix in fits)
    decide = _renamed(found.decide.format_map(situation.words), situation.message)
    return replace(found, fixes=fixes, decide=decide, code=code_for(fixes[0], situation.log.text))


def for_snapshot(found: Finding, files: str) -> Finding:
    """Return a finding with the fixes that need no word of a log, and the first one's code."""
    fixes = tuple(f for f in found.cause.fixes if not any(n.startswith("no") for n in f.unless))
    return replace(found, fixes=fixes, code=code_for(fixes[0], files))


def _fitted(fix: Fix, situation: TextSituation) -> Fix:
    """Return a fix with the length that fits, if the log says it."""
    length = situation.fitting_tokens or LENGTH
    return replace(
        fix, code={name: code.replace(LENGTH, length) for name, code in fix.code.items()}
    )


def _fits(fix: Fix, situation: TextSituation) -> bool:
    return not any(DONE[name](situation) for name in fix.unless)


def frameworks_in(text: str) -> list[str]:
    """Return the frameworks that a text names, the most particular first."""
    return [name for name, pattern in _FRAMEWORKS if re.search(pattern, text)]


def code_for(fix: Fix, text: str) -> str:
    """Return a fix's code for the framework that a text names, or else plain torch's."""
    shown = (fix.code[name] for name in frameworks_in(text) if name in fix.code)
    return next(shown, "") or next(iter(fix.code.values()), "")


def uses_16_bits(text: str) -> bool:
    """Whether a log prints that it trains in 16 bits."""
    return bool(_SIXTEEN_BITS.search(text))


def in_words_of(fix: Fix, message: Message) -> Fix:
    """Return a fix with the settings and tools of the torch that wrote the message."""
    codes = {
        name: _renamed(code, message)
        for name, code in fix.code.items()
        if message.backend not in ("MPS", "NPU") or not _CUDA_ALONE.search(code)
    }
    return replace(fix, do=_renamed(fix.do, message), code=codes)


def _renamed(text: str, message: Message) -> str:
    """Return a sentence or code in the words of the message's backend."""
    setting = (f"{ALLOCATOR_VARIABLE}=expandable_segments:True", allocator_setting(message))
    for old, new in (*_WORDS_OF.get(message.backend, ()), setting):
        text = text.replace(old, new)
    return text


def allocator_setting(message: Message) -> str:
    """Return the setting against fragmentation in the words of the torch that wrote the message.

    Versions before 2.1 have no expandable segments; their messages name max_split_size_mb. On AMD
    GPUs torch names the same variable differently, and names it in its message.
    """
    name = message.variable or ALLOCATOR_VARIABLE
    old = message.reserved is not None and not message.names_expandable
    return f"{name}={'max_split_size_mb:128' if old else 'expandable_segments:True'}"
