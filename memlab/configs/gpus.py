"""Common GPUs: architecture, multiprocessors and memory.

    gpu_named("RTX 4090").total_bytes      23.52 GiB of the advertised "24 GB"

A card sold as "24 GB" has 24 GiB. The driver keeps a part, and error correction another one (T4,
L4, A10G, L40S). `torch.cuda` reports the rest as `total_memory`, which out-of-memory messages call
the total capacity. It also depends on the driver. The table has the smallest value found on Linux,
so that a plan fits with every driver. On Windows a card reports nearly all of its memory, and the
desktop uses some of that.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from memlab.units import BINARY_UNITS

GIB = BINARY_UNITS["GiB"]
MIB = BINARY_UNITS["MiB"]

# CUDA context of a torch process: the smallest and largest values that users reported 2023 to 2026
# (pytorch #107667, #109888, invoke-ai #9413, unsloth-zoo #1053, LMCache #4019).
CONTEXT_BYTES = 256 * MIB, 616 * MIB


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU on which predictions depend."""

    name: str  # as typed at the command line
    full_name: str  # as torch.cuda.get_device_name returns it
    arch: str  # as torch.cuda.get_arch_list returns it
    multiprocessors: int  # streaming multiprocessors; compute units on AMD
    total_bytes: int  # as torch.cuda reports it
    context_bytes: tuple[int, int] = CONTEXT_BYTES  # smallest and largest after a training step

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, as torch.cuda reports it."""
        digits = re.fullmatch(r"sm_(\d+)(\d)|gfx(\d)(\d)\w", self.arch)
        assert digits is not None
        major, minor = (int(digit) for digit in digits.groups() if digit is not None)
        return major, minor

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most resident threads (CUDA Programming Guide, technical specifications)."""
        return {"sm_75": 1024, "sm_86": 1536, "sm_89": 1536, "sm_120": 1536}.get(self.arch, 2048)

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")


def _gib(number: float) -> int:
    """Convert GiB, given with the two decimals of an out-of-memory message, to bytes."""
    return round(number * GIB)


# The multiprocessors are as torch.cuda.get_device_properties or deviceQuery printed them on such a
# GPU, which agrees with the CUDA cores of NVIDIA's architecture papers and datasheets (64 per
# multiprocessor on V100, T4 and A100, else 128; none are published for A10G and B200) and with the
# compute units of AMD's. No print of an rtx4060 was found: 3,072 cores by NVIDIA's specification.
#
# The total bytes are from users' error messages:
#   rtx3080 zai-org/CogVideo #34 · rtx3090 vllm #16343 · rtx4090 Soul-AILab/SoulX-FlashTalk #5
#   (23.64 with older drivers: ali-vilab/VGen #104) · rtx5090 TrajectoryCrafter #20
#   rtx4060 Stone-ResearchLife/xMem
#   t4 Zheng-Chong/CatVTON #133 (14.75 with older drivers: hpcaitech/Open-Sora #697)
#   v100-16 kchengiva/Shift-GCN #34 · v100-32 haotian-liu/LLaVA #812 · l4 ArcInstitute/evo2 #190
#   l40s stepfun-ai/Step-Video-T2V #8 · a100-40 TianheWu/CoSeR #10 · a100-80 OOTDiffusion #235
#   h200 stas00/ml-engineering · b200 pytorch/ao #4002
# or from get_device_properties, in MiB: rtx3060, rtx4080, a10g, a6000 (47.54 in
# google-research/semivl #18), h100 (79.11 in vllm #27508), mi300x (ROCm/ROCm #4203).
#
# The T4's context is from 28 training steps with torch 2.14 and CUDA 13.0 (Anassbzdd/fitcheck). It
# is 104.9 MiB before the first step.
_T4_CONTEXT = 2 * (round(140.875 * MIB),)
# fmt: off
_TABLE = (
    #   name       torch.cuda.get_device_name  arch      SMs  total
    Gpu("rtx3060", "NVIDIA GeForce RTX 3060", "sm_86",    28, 11_931 * MIB),
    Gpu("rtx3080", "NVIDIA GeForce RTX 3080", "sm_86",    68, _gib(9.78)),
    Gpu("rtx3090", "NVIDIA GeForce RTX 3090", "sm_86",    82, _gib(23.68)),
    Gpu("rtx4060", "NVIDIA GeForce RTX 4060", "sm_89",    24, _gib(7.64)),
    Gpu("rtx4080", "NVIDIA GeForce RTX 4080", "sm_89",    76, 16_049 * MIB),
    Gpu("rtx4090", "NVIDIA GeForce RTX 4090", "sm_89",   128, _gib(23.52)),
    Gpu("rtx5090", "NVIDIA GeForce RTX 5090", "sm_120",  170, _gib(31.36)),
    Gpu("t4",      "Tesla T4",                "sm_75",    40, _gib(14.56), _T4_CONTEXT),
    Gpu("v100-16", "Tesla V100-SXM2-16GB",    "sm_70",    80, _gib(15.78)),
    Gpu("v100-32", "Tesla V100-SXM2-32GB",    "sm_70",    80, _gib(31.74)),
    Gpu("a10g",    "NVIDIA A10G",             "sm_86",    80, 22_587 * MIB),
    Gpu("l4",      "NVIDIA L4",               "sm_89",    58, _gib(22.03)),
    Gpu("a6000",   "NVIDIA RTX A6000",        "sm_86",    84, 48_676 * MIB),
    Gpu("l40s",    "NVIDIA L40S",             "sm_89",   142, _gib(44.42)),
    Gpu("a100-40", "NVIDIA A100-SXM4-40GB",   "sm_80",   108, _gib(39.50)),
    Gpu("a100-80", "NVIDIA A100-SXM4-80GB",   "sm_80",   108, _gib(79.25)),
    Gpu("h100",    "NVIDIA H100 80GB HBM3",   "sm_90",   132, 81_009 * MIB),
    Gpu("h200",    "NVIDIA H200",             "sm_90",   132, _gib(139.80)),
    Gpu("b200",    "NVIDIA B200",             "sm_100",  148, _gib(178.35)),
    Gpu("mi300x",  "AMD Instinct MI300X",     "gfx942",  304, 196_592 * MIB),
)
# fmt: on
GPUS = {gpu.name: gpu for gpu in _TABLE}

# Words in the names that nvidia-smi and torch print which do not distinguish these GPUs.
_FILLER_WORDS = frozenset(
    {
        *("nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "gpu", "gb"),
        *("sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"),
    }
)


def find_gpu(name: str) -> Gpu | None:
    """Find a GPU by any spelling: "rtx4090", "NVIDIA GeForce RTX 4090", "4090"."""
    return _BY_NORMALIZED_NAME.get(_normalized(name))


def nearest_gpus(name: str) -> list[str]:
    """Return the names of the GPUs that a partial or misspelled name may mean."""
    wanted = _normalized(name)
    near = [known for known in _BY_NORMALIZED_NAME if wanted and known.startswith(wanted)]
    near = near or get_close_matches(wanted, _BY_NORMALIZED_NAME, n=1)
    return list(dict.fromkeys(_BY_NORMALIZED_NAME[known].name for known in near))


def _normalized(name: str) -> str:
    """Return the name in lower case, without separators, filler words and "GB"."""
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word not in _FILLER_WORDS]
    return "".join(re.sub(r"^([0-9]+)gi?b$", r"\1", word) for word in words)


# Also "4090" and "RTX A6000", as people write them, and "H100 80GB HBM3", as torch prints it.
_BY_NORMALIZED_NAME = {
    **{_normalized(gpu.name): gpu for gpu in _TABLE},
    **{gpu.name.removeprefix("rtx"): gpu for gpu in _TABLE if gpu.name.startswith("rtx")},
    "rtxa6000": GPUS["a6000"],
    "h10080": GPUS["h100"],
}
