"""`memlab plan --gpu list`: the GPUs that predictions and plans know, by vendor."""

from collections.abc import Sequence

from memlab.cli import terminal
from memlab.configs.gpus import GIB, GPUS, Gpu
from memlab.units import paragraph

_REMARK = (
    "memory: as torch reports it, in GiB, the smallest value that users reported on Linux; ≈ by a "
    "rule (memlab/configs/gpus.py). GB/s and TFLOPS (16-bit and float32, dense) are the data "
    "sheets' peaks. 16-bit is bfloat16, but float16 on NVIDIA's GPUs before Ampere, which "
    "multiply bfloat16 in float32. torch sees each half of an MI250, MI250X or Max 1550 as a GPU"
)


def show_gpus() -> None:
    """Print a table of each vendor's GPUs, and what the columns mean."""
    for vendor in dict.fromkeys(gpu.vendor for gpu in GPUS.values()):
        of_vendor = [gpu for gpu in GPUS.values() if gpu.vendor == vendor]
        terminal.show_table(terminal.table_of(_columns(vendor, of_vendor)))
        terminal.echo("")
    terminal.echo(paragraph(_REMARK))


def _columns(vendor: str, gpus: Sequence[Gpu]) -> dict[str, list[str]]:
    return {
        vendor: [gpu.name for gpu in gpus],
        "sold as": [f"{gpu.advertised_gb} GB" for gpu in gpus],
        "memory": [_memory(gpu) for gpu in gpus],
        "GB/s": [f"{gpu.memory_bandwidth / 1e9:,.0f}" for gpu in gpus],
        "16-bit": [f"{gpu.flops / 1e12:,.1f}" for gpu in gpus],
        "float32": [f"{gpu.float32_flops / 1e12:,.1f}" for gpu in gpus],
        "arch": [gpu.arch for gpu in gpus],
    }


def _memory(gpu: Gpu) -> str:
    return f"{'' if gpu.is_measured else '≈ '}{gpu.total_bytes / GIB:.2f}"
