"""The CUDA kernels and cards that a prediction assumes.

On CUDA, torch chooses a kernel by shape, dtype and options, and kernels save different tensors:
flash attention saves no score matrix, fused RMSNorm one element per row, dropout one byte per
element. A prediction runs on fake CPU tensors, for which torch would choose CPU kernels, so these
settings decide instead.
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
    """The kernels that a prediction assumes; the defaults are CUDA's.

    attention   the kernel of `scaled_dot_product_attention`: "auto" follows torch's rules, any
                other value names a kernel to use where its inputs allow it
    norms       RMSNorm as one "fused" kernel, or as "composite" small operators
    dropout     one "fused" kernel with a bool mask, or "composite" with a mask in the input's dtype
    optimizer   the implementation in torch.optim, unless its constructor sets one: "auto" and
                "foreach" update all parameters at once, "loop" one by one, "fused" in one kernel
    autocast    the device whose operator list `torch.autocast("cuda")` follows

    Raises ValueError for an unknown value.
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
                    f"got Kernels({name}={got!r}); use one of {', '.join(map(repr, options))}"
                )

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))


DEFAULT = Kernels()


@dataclass(frozen=True)
class Target:
    """A class of GPUs with the same memory behaviour, and the card that scripts see."""

    name: str
    workspace_bytes: int  # per cuBLAS handle
    multiprocessors: int  # streaming multiprocessors, which large reductions are split among
    card: str  # as torch.cuda.get_device_name returns it
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
    """Return the target with this name. Raises ValueError for an unknown name."""
    if name not in TARGETS:
        raise ValueError(f"got device {name!r}; use one of {', '.join(map(repr, TARGETS))}")
    return TARGETS[name]
