"""Which kernels CUDA would take: a policy that can be read, printed and flipped.

On CUDA, torch picks a kernel by shape, dtype and what the caller asked for, and kernels differ in
what they keep: flash attention keeps no score matrix, the fused RMSNorm one number a row, dropout
one byte an element. A prediction runs on fake CPU tensors, where torch would pick the CPU's. So it
takes the choice from here.
"""

from dataclasses import dataclass, fields
from typing import Any

_OPTIONS = {
    "attention": ("auto", "flash", "efficient", "cudnn", "math"),
    "norms": ("fused", "composite"),
    "dropout": ("fused", "composite"),
    "optimizer": ("auto", "foreach", "loop", "fused"),
    "autocast": ("cuda", "cpu"),
}


@dataclass(frozen=True)
class Kernels:
    """The choices of a prediction; the defaults are what CUDA does when nobody asks otherwise.

    attention   what `scaled_dot_product_attention` runs: "auto" by torch's own rules, or one
                kernel wherever it is able to
    norms       RMSNorm as one kernel, or "composite": a product of small operators
    dropout     one kernel with a mask of bools, or "composite": a mask in the input's dtype
    optimizer   of torch.optim, where its constructor was asked for nothing: "auto" and "foreach"
                work on all parameters at once, "loop" on one after another, "fused" in one kernel
    autocast    whose list of operators `torch.autocast("cuda")` follows

    ValueError for what is no option.
    """

    attention: str = "auto"
    norms: str = "fused"
    dropout: str = "fused"
    optimizer: str = "auto"
    autocast: str = "cuda"

    def __post_init__(self) -> None:
        for name, options in _OPTIONS.items():
            got: Any = getattr(self, name)
            if got not in options:
                raise ValueError(
                    f"Kernels({name}={got!r}): {name} is one of {', '.join(map(repr, options))}"
                )

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))


DEFAULT = Kernels()


@dataclass(frozen=True)
class Target:
    """A class of cards, as far as it decides about memory, and the card that stands for it where a
    script asks for one."""

    name: str
    workspace_bytes: int  # of each of cuBLAS's handles
    multiprocessors: int  # among which large reductions are split
    card: str  # as torch.cuda.get_device_name says it
    capability: tuple[int, int]
    total_bytes: int  # as torch.cuda reports it
    prefers_cudnn: bool = False  # for attention, before flash


_A100 = ("NVIDIA A100-SXM4-80GB", (8, 0), 81_152 * 2**20)
_H100 = ("NVIDIA H100 80GB HBM3", (9, 0), 81_009 * 2**20)
TARGETS = {
    "cuda": Target("most cards", 8_519_680, 108, *_A100),  # :4096:2:16:8, in KiB
    "cuda:hopper": Target("Hopper", 32 * 2**20, 132, *_H100, prefers_cudnn=True),  # cuDNN > 9.15
}


def target_named(name: str) -> Target:
    """The class of cards with this name; ValueError for one that is not known."""
    if name not in TARGETS:
        raise ValueError(f"got target {name!r}; known are {', '.join(map(repr, TARGETS))}")
    return TARGETS[name]
