"""Why a prediction differs from a measurement, in one sentence for each row."""

from .predictions import EvidenceRow

_TOLERANCE = 0.005  # of the measurement: the device's figure itself is no better
_DEPTHWISE = ("MnasNet", "MobileNetV2")
REASONS = {
    "LoRA": "repeats of this measurement differ by up to 20 MiB",
    "QLoRA": "loading left other gaps; repeats differ by 8 MiB allocated and 20 MiB reserved",
    "transformer": "NVML samples every few milliseconds, and counts the kernels that CUDA loads",
    "CNN": "cuDNN's workspaces decide how freed blocks are used again",
    "own convolutions": "cuDNN chooses the workspaces; a rule predicts them",
    "own recurrent": "cuDNN's workspaces for recurrent layers are undocumented",
    "own compiled": "the order of some frees differs; cuDNN lists fewer plans without a driver",
    "compiled": "printed with one decimal, all but the first in GiB; reserved: not published",
    "own transformers": "the order of some frees differs",
    "vision transformer": (
        "printed with two decimals; ViT-g's versions and picture size are not recorded"
    ),
    "Liger kernel": "another version of Liger-Kernel, or of torch, which was not recorded",
    "torch operator": "another version of torch, which was not recorded",
}


def reason(row: EvidenceRow) -> str:
    """Return why the prediction differs, or "exact"."""
    of = row.measurement
    if row.allocated_is_exact and of.reserved_bytes in (None, row.reserved_bytes):
        return "exact"
    if row.reserved_error is None:
        return REASONS[of.kind]
    if of.unrecorded and abs(row.reserved_error) > _TOLERANCE:
        return f"not recorded: {of.unrecorded}"
    if of.kind == "CNN" and row.reserved_error < -0.02:
        return _too_low(row)
    return REASONS.get(of.kind, "")


def _too_low(row: EvidenceRow) -> str:
    if row.measurement.facts["set"] == "anova-2024":
        return "torch 2.3's cuDNN chooses other kernels"
    if row.measurement.model in _DEPTHWISE:
        most = f"{(row.reserved_most_bytes or 0) / 2**20:,.0f}"
        return f"larger workspaces for depthwise convolutions; upper bound {most} MiB"
    return REASONS["CNN"]
