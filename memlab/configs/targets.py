"""The CUDA kernels and GPUs that a prediction assumes.

On CUDA, torch chooses a kernel by shape, dtype and options, and kernels save different tensors:
flash attention saves no score matrix, fused RMSNorm one element per row, dropout one byte per
element. A prediction runs on fake CPU tensors, for which torch would choose CPU kernels, so these
settings decide instead.
"""

import math
import re
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from memlab.configs.gpu_names import LIST_HINT, gpus_called, nearest_gpus
from memlab.configs.gpus import GPUS, Gpu

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
    """The GPU of a prediction. Its architecture decides which kernels torch can choose.

    The rules are from torch's sources of 2026: `parseChosenWorkspaceSize` in CublasHandlePool.cpp,
    and sdp_utils.cpp. They assume cuDNN 9.16 or newer, as in the wheels for CUDA 13, and AOTriton
    0.11 without TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL. A GPU that torch does not drive as "cuda"
    (Intel's, Apple's) has no such rules: the kernels of most cards are assumed.
    """

    device: str  # as passed to `memlab.predict`
    name: str  # as printed
    gpu: Gpu

    @property
    def card(self) -> str:
        return self.gpu.full_name

    @property
    def chip(self) -> Gpu:
        """The GPU whose kernels are assumed."""
        return self.gpu if self.gpu.runs_cuda else GPUS[_MOST_CARDS]

    @property
    def note(self) -> str | None:
        """One sentence for a GPU of a kind that no prediction was ever compared with."""
        if self.gpu.is_amd:
            return (
                "never compared with an AMD GPU: apart from workspaces and the choice of the "
                "attention kernel, CUDA's kernels are assumed"
            )
        if not self.gpu.runs_cuda:
            return (
                f"never compared with an {self.gpu.vendor} GPU: the kernels and the allocator of "
                f"an {self.chip.full_name} are assumed"
            )
        return None

    @property
    def capability(self) -> tuple[int, int]:
        return self.chip.capability

    @property
    def multiprocessors(self) -> int:
        return self.chip.multiprocessors

    @property
    def total_bytes(self) -> int:
        return self.gpu.total_bytes

    # ---------------------------------------------------------------- matmuls

    @property
    def workspace_bytes(self) -> int:
        """The workspace of a cuBLAS or hipBLAS handle: 32 MiB on Hopper and, since torch 2.12
        (pytorch #175344), on Blackwell; else ":4096:2:16:8" in KiB."""
        if self.gpu.is_amd:
            return (128 if self.gpu.arch.startswith(("gfx94", "gfx95")) else 32) * 2**20
        return 32 * 2**20 if self.capability >= (9, 0) else 8_519_680

    @property
    def lt_workspace_bytes(self) -> int:
        """The workspace of cuBLASLt or hipBLASLt, per thread."""
        # 2.0 MiB of Qwen's memory on a T4 with torch 2.14: one for forward, one for backward. In
        # 2.13 cuBLASLt shares cuBLAS's workspace (pytorch #168175, #173002), so there this may be
        # too much.
        return 76 * 2**20 if self.gpu.is_amd else 2**20

    @property
    def has_bfloat16(self) -> bool:
        """Whether the hardware has bfloat16 and TF32, which older cards emulate or lack."""
        return self.chip.has_bfloat16

    # ---------------------------------------------------------------- attention

    @property
    def attention_order(self) -> tuple[str, ...]:
        """The fused attention kernels that this GPU has, in torch's order of preference."""
        if self.gpu.is_amd:
            return ("flash", "efficient") if self.gpu.arch in _AOTRITON else ()
        if self.capability < (8, 0):
            return ("efficient",)
        if self.capability[0] in (9, 10):
            return ("cudnn", "flash", "efficient")
        return ("flash", "efficient", "cudnn")

    def fused_attention(
        self,
        dtype: str,
        heads: int,
        key_heads: int,
        head_dims: tuple[int, int],
        *,
        trains: bool = True,
        dropout_p: float = 0.0,
    ) -> tuple[str, ...]:
        """Return the fused kernels that take this dtype, these numbers of heads and these head
        dimensions (queries' and keys', values'), in torch's order of preference. Without any of
        them, torch uses math attention, which stores the scores. Masks, strides, user's settings
        and the shape of queries can rule out more."""
        width, value_width = head_dims
        # Otherwise math attention casts to float32 and saves 4·H·T bytes of scores per token. For
        # bfloat16 on a T4, that is 1,156 MB in a small model's step where flash attention needs 545
        # MB. Float32 with grouped heads stores them too: 1.07 GB per block at 2 × 2,048 tokens and
        # 32 heads (test_attention_runs_the_kernel_that_torch_would_choose).
        half = dtype == "float16" or (dtype == "bfloat16" and self.has_bfloat16)
        alignment = self.efficient_alignment(4 if dtype == "float32" else 2)
        takes = {
            "flash": half
            and width == value_width <= self.max_flash_head_dim
            and (not trains or self.flash_can_train(width, dropout_p)),
            "efficient": (half or dtype == "float32")
            and heads == key_heads
            and max(head_dims) <= self.max_efficient_head_dim
            and width % alignment == value_width % alignment == 0,
            "cudnn": half
            and self.cudnn_head_dims(width, value_width)
            and width % 8 == value_width % 8 == 0
            and (dropout_p * 16).is_integer(),
        }
        return tuple(kernel for kernel in self.attention_order if takes[kernel])

    @property
    def max_flash_head_dim(self) -> int:
        return 512 if self.gpu.is_amd and not self.gpu.arch.startswith("gfx11") else 256

    @property
    def max_efficient_head_dim(self) -> float:
        return 256 if self.gpu.is_amd else math.inf

    def flash_can_train(self, head_dim: int, dropout_p: float) -> bool:
        """Return whether flash attention's backward fits into shared memory, which is smaller in
        consumer and workstation cards."""
        if self.gpu.is_amd or not ((8, 6) <= self.capability <= (8, 9) or self.capability >= (12,)):
            return True
        return head_dim <= 192 or (head_dim > 224 and dropout_p == 0)

    def efficient_alignment(self, element_bytes: int) -> int:
        """Return the number of elements that must divide the head dimension: 16 bytes if tensor
        cores multiply this dtype (torch assumes that a GTX 16 has them), else 1."""
        has_tensor_cores = self.has_bfloat16 or (element_bytes == 2 and self.capability >= (7, 0))
        return 16 // element_bytes if has_tensor_cores else 1

    def cudnn_head_dims(self, query: int, value: int) -> bool:
        """Return whether cuDNN's attention takes these head dimensions."""
        if self.capability[0] == 10 and (query, value) == (192, 128):  # DeepSeek's
            return True
        return max(query, value) <= (256 if self.capability == (9, 0) else 128)


_MOST_CARDS = "a100-80"

# The AMD architectures with AOTriton's attention kernels. Others have none, or experimental ones.
_AOTRITON = frozenset({"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"})


def _by_arch() -> dict[str, Gpu]:
    """Return the GPU that stands for each architecture: the one with the most multiprocessors,
    because large reductions have more scratch memory there; the first of several."""
    found: dict[str, Gpu] = {}
    for gpu in GPUS.values():
        if gpu.runs_cuda and gpu.multiprocessors > getattr(
            found.get(gpu.arch), "multiprocessors", 0
        ):
            found[gpu.arch] = gpu
    return found


TARGETS = {
    target.device: target
    for target in (
        Target("cuda", "most cards", GPUS[_MOST_CARDS]),
        Target("cuda:hopper", "Hopper", GPUS["h100"]),
        *(Target(gpu.target, gpu.full_name, gpu) for gpu in GPUS.values()),
        *(
            Target(f"cuda:{arch}", f"{arch} ({gpu.full_name})", gpu)
            for arch, gpu in _by_arch().items()
        ),
    )
}


def target_named(name: str) -> Target:
    """Return the target of "cuda", "cuda:hopper", a GPU ("cuda:t4", "cuda:RTX 3060", "cuda:a100")
    or an architecture ("cuda:sm_86", "cuda:8.6"). Raises ValueError for an unknown name."""
    if target := find_target(name):
        return target
    raise ValueError(f"got device {name!r}; {accepted_devices(name)}")


def find_target(name: str) -> Target | None:
    """Return the target by any of its spellings; None if the name is unknown."""
    prefix, colon, rest = name.partition(":")
    if prefix == "cuda" and re.fullmatch(r"\d", rest):  # the index of a device
        return TARGETS["cuda"]
    if name in TARGETS or (prefix, colon) != ("cuda", ":"):
        return TARGETS.get(name)
    if digits := re.fullmatch(r"sm_?(\d+)(\d)[af]?|(\d+)\.(\d)", rest):
        return TARGETS.get(f"cuda:sm_{''.join(filter(None, digits.groups()))}")
    return _target_called(rest)


def target_of(gpu_name: str, arch: str) -> Target | None:
    """Return the target of a real GPU: its own, else its architecture's, else None."""
    return _target_called(gpu_name) or TARGETS.get(f"cuda:{arch}")


def accepted_devices(name: str, *others: str) -> str:
    """Suggest the target that a wrong name may mean, and list the accepted names."""
    near = [f"cuda:{gpu}" for gpu in nearest_gpus(name.removeprefix("cuda:"))]
    near = near or get_close_matches(name, [*others, "cuda", "cuda:hopper"], n=1)
    question = f"did you mean {' or '.join(near)}? Use" if near else "use"
    return (
        f"{question} {', '.join((*others, 'cuda', 'cuda:hopper'))}, cuda:GPU such as cuda:rtx4090 "
        f"({LIST_HINT}) or cuda:ARCHITECTURE such as cuda:sm_86"
    )


def _target_called(name: str) -> Target | None:
    """Return the target of a GPU's name; of several memory sizes, the largest."""
    largest = max(gpus_called(name), key=lambda gpu: gpu.total_bytes, default=None)
    return None if largest is None else TARGETS[largest.target]
