"""GPUs: architecture, multiprocessors, memory and speeds, from gpus.csv.

    GPUS["rtx4090"].total_bytes         23.52 GiB of the advertised "24 GB"
    GPUS["rtx4090"].memory_bandwidth    1.008e12 bytes per second

A card sold as "24 GB" has 24 GiB. The driver keeps a part, and error correction another one (T4,
L4, A10G, L40S). `torch.cuda` reports the rest as `total_memory`, which out-of-memory messages call
the total capacity. It also depends on the driver. The table has the smallest value found on Linux,
so that a plan fits with every driver. On Windows a card reports nearly all of its memory, but the
desktop uses a part.

Where no value was found, `is_measured` is False and the memory follows a rule:

    NVIDIA, AMD, Intel   the advertised memory minus what the most similar measured GPU loses: of
                         the same architecture and kind of memory, else of the same vendor and
                         kind; of these the nearest in size. A larger GPU loses the same share, a
                         smaller one the same bytes, or with error correction the same share.
    Apple                what macOS recommends as the most that a GPU uses, `torch.mps.
                         recommended_max_memory()`: two thirds of 8 to 32 GB (ollama #434: 21845 of
                         32768 MiB) and three quarters of more (llama.cpp #3213: 73728 of 98304
                         MiB). torch allows 1.7 times as much by default, which swaps.

The multiprocessors are as torch.cuda.get_device_properties or deviceQuery printed them, or by the
vendor's specification. The speeds are the data sheets' peaks, which no training step reaches.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memlab.units import BINARY_UNITS

GIB = BINARY_UNITS["GiB"]
MIB = BINARY_UNITS["MiB"]

# CUDA context of a torch process: the smallest and largest values that users reported 2023 to 2026
# (pytorch #107667, #109888, invoke-ai #9413, unsloth-zoo #1053, LMCache #4019).
CONTEXT_BYTES = 256 * MIB, 616 * MIB
# The T4's context is from 28 training steps with torch 2.14 and CUDA 13.0 (Anassbzdd/fitcheck). It
# is 104.9 MiB before the first step.
_MEASURED_CONTEXT = {"t4": 2 * (round(140.875 * MIB),)}

# One direction of 16 lanes, by the standard: 8, 16 or 32 Gbit/s per lane, minus the encoding.
PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9
NVLINK_C2C = 450e9

_FILE = Path(__file__).parent / "gpus.csv"


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that predictions and plans need."""

    name: str  # as typed at the command line
    full_name: str  # as torch.cuda.get_device_name returns it
    arch: str  # as torch.cuda.get_arch_list returns it
    multiprocessors: int  # streaming multiprocessors, Xe cores or GPU cores, as torch counts them
    advertised_gb: int
    total_bytes: int  # as torch reports it
    is_measured: bool  # False if the total is by rule
    flops: float  # per second: dense bfloat16 matmuls, float32 accumulation; else float16
    float32_flops: float  # per second: outside tensor cores, torch's default
    memory_bandwidth: float  # bytes per second
    host_bandwidth: float  # bytes per second from or to the host, one direction
    link_bandwidth: float  # bytes per second from or to another such card, one direction
    context_bytes: tuple[int, int] = CONTEXT_BYTES  # smallest and largest after a training step

    @property
    def target(self) -> str:
        """The device that predictions for this GPU take."""
        return f"cuda:{self.name}"

    @property
    def family(self) -> str:
        """The name without the memory size: "a100" of "a100-80"."""
        return self.name.removesuffix(f"-{self.advertised_gb}")

    @cached_property
    def vendor(self) -> str:
        return _vendor(self.full_name)

    @property
    def is_amd(self) -> bool:
        return self.vendor == "AMD"

    @property
    def runs_cuda(self) -> bool:
        """Whether torch drives it as "cuda", with NVIDIA's or AMD's libraries."""
        return self.vendor in ("NVIDIA", "AMD")

    @cached_property
    def capability(self) -> tuple[int, int]:
        """The compute capability, as torch.cuda reports it. Only GPUs that run "cuda" have one."""
        digits = re.fullmatch(r"sm_(\d+)(\d)|gfx(\d+)(\d)\w", self.arch)
        assert digits is not None
        major, minor = (int(digit) for digit in digits.groups() if digit is not None)
        return major, minor

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies in bfloat16. NVIDIA's before Ampere do so in float32."""
        return self.vendor != "NVIDIA" or self.capability >= (8, 0)

    @property
    def bfloat16_flops(self) -> float:
        """Matmul operations per second in bfloat16: float32's where the GPU doesn't have it, which
        is an upper bound (openxla/xla #12429 measured less than half of it on a T4)."""
        return self.flops if self.has_bfloat16 else self.float32_flops

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most resident threads (CUDA Programming Guide, technical specifications)."""
        small = dict.fromkeys(("sm_86", "sm_87", "sm_89", "sm_120"), 1536)
        return {"sm_75": 1024, **small}.get(self.arch, 2048)


# ------------------------------------------------------------------ the table


def _rows() -> Iterator[dict[str, str]]:
    """Yield the lines of the table, one for each choice of memory."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        for size in row["memory"].split("/"):
            name = f"{row['name']}-{size}" if row["kind"] == "unified" else row["name"]
            yield {**row, "name": name, "memory": size}


def _gpus() -> Iterator[Gpu]:
    rows = list(_rows())
    measured = [row for row in rows if row["reported_mib"]]
    for row in rows:
        link = row["link"]
        memory_bandwidth = float(row["bandwidth"]) * 1e9
        host_bandwidth = _host_bandwidth(row["host"], memory_bandwidth)
        yield Gpu(
            row["name"],
            row["full_name"],
            row["arch"],
            int(row["multiprocessors"]),
            int(row["memory"]),
            _reported_bytes(row) if row["reported_mib"] else _bytes_by_rule(row, measured),
            bool(row["reported_mib"]),
            float(row["bf16"]) * 1e12,
            float(row["float32"]) * 1e12,
            memory_bandwidth,
            host_bandwidth,
            float(link) * 1e9 if link else host_bandwidth,
            _MEASURED_CONTEXT.get(row["name"], CONTEXT_BYTES),
        )


def _reported_bytes(row: dict[str, str]) -> int:
    return round(float(row["reported_mib"]) * MIB)


def _bytes_by_rule(row: dict[str, str], measured: list[dict[str, str]]) -> int:
    """Return the memory that torch reports, by the rule of the module's docstring."""
    size_gb = int(row["memory"])
    vendor = _vendor(row["full_name"])
    if vendor == "Apple":
        return size_gb * GIB * 2 // 3 if size_gb <= 32 else size_gb * GIB * 3 // 4
    alike = [
        other
        for other in measured
        if other["kind"] == row["kind"] and _vendor(other["full_name"]) == vendor
    ]
    alike = [other for other in alike if other["arch"] == row["arch"]] or alike
    distance = {other["name"]: abs(int(other["memory"]) - size_gb) for other in alike}
    nearest = min(distance.values())
    lost = max(_lost_bytes(row, o) for o in alike if distance[o["name"]] == nearest)
    return (size_gb * GIB - lost) // MIB * MIB


def _lost_bytes(row: dict[str, str], measured: dict[str, str]) -> int:
    """Return what a GPU loses of its advertised memory if it is like a measured one."""
    lost = int(measured["memory"]) * GIB - _reported_bytes(measured)
    ratio = int(row["memory"]) / int(measured["memory"])
    return math.ceil(lost * (ratio if row["kind"] == "gddr-ecc" else max(1, ratio)))


def _vendor(full_name: str) -> str:
    first = full_name.split()[0].removesuffix("(R)")
    return first if first in ("AMD", "Intel", "Apple") else "NVIDIA"


def _host_bandwidth(host: str, memory_bandwidth: float) -> float:
    if host in ("c2c", "unified"):
        return NVLINK_C2C if host == "c2c" else memory_bandwidth
    generation, lanes = host.split("x")
    return {"3": PCIE_3, "4": PCIE_4, "5": PCIE_5}[generation] * int(lanes) / 16


GPUS = {gpu.name: gpu for gpu in _gpus()}
