"""Estimates of a training step's peak memory: memlab against the estimators in common use.

    python benchmarks/planner.py [--quick] [--results FOLDER]

Compares the measured peak of a second step on the CPU with

    memlab              a dry run of the same step
    16 bytes a weight   Rajbhandari et al. 2020 (arXiv 1910.02054): 2 + 2 + 12, mixed precision
    with activations    weights, gradients and state in their actual dtypes, plus the activations
                        of Korthikanti et al. 2022 (arXiv 2205.05198): sbh(34 + 5as/h) per layer
                        (34 with fused attention, 2 with recomputation) and 4sbh(1 + v/h) at the end
    cookbook            EleutherAI's calc_transformer_mem.py: sbh(16p + 2 + (2p + 1)as/h) per
                        layer; always counts the attention scores, even with fused attention
    accelerate          `accelerate estimate-memory`, "Training using Adam"
    DeepSpeed 2 and 3   estimate_zero2_ and estimate_zero3_model_states_mem_needs, one GPU

Every estimator gets its best case: the true number of weights, and every setting it has a parameter
for (element sizes, micro-batch, recomputation, offloading). An estimator cannot count techniques
that it does not support, so there are two summaries: all configurations, and the supported ones.
16 bytes, accelerate and DeepSpeed count only weights, gradients and state, as they document. A
third summary compares them with those bytes alone.

Errors are (estimate − measurement) / measurement; memlab's are in bytes.

Prints Markdown and writes a section to `benchmarks/results/<machine>.json`.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from common import heading, parser_with_results, progress, save, set_environment
from common import table as markdown_table
from torch import nn

from memlab.model import GPT, PRESETS, GPTConfig
from memlab.trace import Trace
from memlab.train import Setting, build, combined, dry_trace, measured
from memlab.units import format_bytes

# fmt: off
SHAPES = {
    #                          V    C   L  H KV hidden   T
    "wide":       GPTConfig( 2_000, 256,  4, 4, 4, 688, 256),
    "deep":       GPTConfig( 1_000, 128, 16, 4, 2, 344, 256),
    "many-words": GPTConfig(32_000, 128,  2, 2, 2, 344, 256, False),
}
# fmt: on

# ------------------------------------------------------------------ configurations


@dataclass(frozen=True)
class PlannerCase:
    """A configuration: model shape, batch and techniques."""

    shape: str
    batch: int
    seq_len: int
    techniques: str = "plain"
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> GPTConfig:
        return SHAPES.get(self.shape) or PRESETS[self.shape]

    @property
    def setting(self) -> Setting:
        return Setting(self.config, self.batch, self.seq_len, self.dtype)

    @property
    def rows(self) -> frozenset[str]:
        """Return the techniques' names, and the dtype unless one of them implies the precision."""
        rows = frozenset(self.techniques.split("+")) - {"plain"}
        precision = rows & {"autocast", "master-weights", "bfloat16"}
        return rows | (precision or {str(self.dtype).removeprefix("torch.")})

    def __str__(self) -> str:
        dtype = "" if self.dtype is torch.float32 else "bfloat16, "
        return f"{self.shape}, {self.batch} × {self.seq_len}, {dtype}{self.techniques}"


BF16 = torch.bfloat16
CASES = (
    *(
        PlannerCase("25m", 2, 128, techniques)
        for techniques in (
            *("plain", "autocast", "master-weights", "bfloat16", "adam8bit", "checkpointing"),
            *("chunked-loss", "lora", "accumulation", "int8-activations"),
            "checkpointing+lion8bit+step-in-backward+chunked-loss",
        )
    ),
    *(
        PlannerCase("34m", 1, 256, techniques)
        for techniques in ("plain", "eager-attention", "sqrt-checkpointing", "lion")
    ),
    *(PlannerCase("124m", 1, 64, techniques) for techniques in ("plain", "checkpointing+autocast")),
    PlannerCase("124m", 1, 128, "checkpointing+lion8bit+step-in-backward+chunked-loss", BF16),
    *(
        PlannerCase("wide", 8, 128, techniques)
        for techniques in (*("plain", "offloaded-optimizer", "checkpointing+master-weights"),)
    ),
    PlannerCase("wide", 8, 256, "plain", BF16),
    *(
        PlannerCase("deep", 4, 256, techniques)
        for techniques in ("plain", "checkpointing", "selective-checkpointing", "streamed-layers")
    ),
    *(
        PlannerCase("many-words", 2, 256, techniques)
        for techniques in ("plain", "chunked-loss+adam-mini")
    ),
)
QUICK = (
    PlannerCase("tiny", 2, 32),
    PlannerCase("tiny", 2, 64, "checkpointing+master-weights"),
    PlannerCase("tiny", 3, 16, "lora", BF16),
)

# ------------------------------------------------------------------ inputs of the estimators


@dataclass(frozen=True)
class EstimatorInputs:
    """The parameters of a case that estimators accept. `*_bytes` are bytes per element."""

    config: GPTConfig
    weights: int
    trained: int
    largest_layer: int  # weights of the largest module
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int  # includes float32 master weights
    activation_bytes: int
    batch: int  # sequences per micro-batch
    seq_len: int
    mixed: bool
    fused: bool  # attention stores no scores
    recomputed: bool
    offloaded: bool  # optimizer state
    streamed: bool  # weights and gradients too


# Bytes of state per weight. Other rows have AdamW's two moments in the weights' dtype.
STATE_BYTES = {"adam8bit": 2, "lion": 4, "lion8bit": 1, "sgd": 0, "master-weights": 12}


def inputs_of(case: PlannerCase) -> EstimatorInputs:
    rows, model = case.rows, empty_model(case)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    is_16_bit = bool(rows & {"bfloat16", "master-weights"})
    size = 2 if is_16_bit else 4
    state = [STATE_BYTES[row] for row in rows & STATE_BYTES.keys()]
    if "adam-mini" in rows:
        state = [size]  # one second moment per row
    return EstimatorInputs(
        case.config,
        weights=sum(count for count, _ in counts),
        trained=sum(count for count, is_trained in counts if is_trained),
        largest_layer=max(
            sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
        ),
        weight_bytes=size,
        gradient_bytes=size,
        state_bytes=state[0] if state else 2 * size,
        activation_bytes=2 if is_16_bit or "autocast" in rows else 4,
        batch=1 if "accumulation" in rows else case.batch,
        seq_len=case.seq_len,
        mixed=is_16_bit or "autocast" in rows,
        fused="eager-attention" not in rows,
        recomputed=bool(rows & {"checkpointing", "sqrt-checkpointing"}),
        offloaded=bool(rows & {"offloaded-optimizer", "streamed-layers"}),
        streamed="streamed-layers" in rows,
    )


def empty_model(case: PlannerCase) -> nn.Module:
    """Return the case's model on the meta device, in float32."""
    with torch.device("meta"):
        model = GPT(case.config)
    if "lora" in case.rows:
        combined("lora").change_model(model)
    return model


# ------------------------------------------------------------------ the estimators


def sixteen_bytes(inputs: EstimatorInputs) -> int:
    """Rajbhandari et al. 2020, section 3.1: (2 + 2 + K)Ψ with K = 12."""
    return 16 * inputs.weights


def states(inputs: EstimatorInputs) -> int:
    """Return the bytes of weights, gradients and state in their actual dtypes."""
    return (
        inputs.weight_bytes * inputs.weights
        + (inputs.gradient_bytes + inputs.state_bytes) * inputs.trained
    )


def korthikanti_activations(inputs: EstimatorInputs) -> int:
    """Korthikanti et al. 2022, equations 1, 5 and 6 and section 4.3, for one GPU.

    The paper assumes 2 bytes per activation; float32 activations are scaled in proportion.
    """
    s, b, h, a = inputs.seq_len, inputs.batch, inputs.config.hidden_size, inputs.config.heads
    per_token = 2 if inputs.recomputed else 34 + (0 if inputs.fused else 5 * a * s / h)
    end = 4 * (1 + inputs.config.vocab_size / h)
    return round(s * b * h * (inputs.config.layers * per_token + end) * inputs.activation_bytes / 2)


def with_activations(inputs: EstimatorInputs) -> int:
    return states(inputs) + korthikanti_activations(inputs)


def cookbook(inputs: EstimatorInputs) -> int:
    """EleutherAI/cookbook, calc/calc_transformer_mem.py, for one GPU."""
    s, b, h, a = inputs.seq_len, inputs.batch, inputs.config.hidden_size, inputs.config.heads
    p = inputs.activation_bytes
    per_token = 16 * p + 2 + (0 if inputs.recomputed else (2 * p + 1) * a * s / h)
    return states(inputs) + round(s * b * h * inputs.config.layers * per_token)


def deepspeed_zero2_gpu_bytes(weights: int, cpu_offload: bool) -> int:
    """DeepSpeed 0.19.8, estimate_zero2_model_states_mem_needs on one GPU."""
    return 2 * weights if cpu_offload else 2 * weights + 18 * weights


def deepspeed_zero3_gpu_bytes(
    weights: int, largest_layer: int, cpu_offload: bool, cpu_offload_params: bool
) -> int:
    """DeepSpeed 0.19.8, estimate_zero3_model_states_mem_needs on one GPU."""
    kept = 18 if not cpu_offload else 0 if cpu_offload_params else 2
    return 4 * largest_layer + kept * weights


def deepspeed_2(inputs: EstimatorInputs) -> int:
    return deepspeed_zero2_gpu_bytes(inputs.weights, inputs.offloaded)


def deepspeed_3(inputs: EstimatorInputs) -> int:
    return deepspeed_zero3_gpu_bytes(
        inputs.weights, inputs.largest_layer, inputs.offloaded, inputs.streamed
    )


def accelerate_bytes(case: PlannerCase, inputs: EstimatorInputs) -> int:
    """Return the largest of the four figures of `accelerate estimate-memory` for training."""
    from accelerate.commands.estimate import estimate_training_usage  # seconds to import
    from accelerate.utils import calculate_maximum_sizes

    total_bytes, _ = calculate_maximum_sizes(empty_model(case))
    return max(
        estimate_training_usage(total_bytes, "bfloat16" if inputs.mixed else "float32").values()
    )


@dataclass(frozen=True)
class Estimator:
    """An estimator, and the techniques that it supports."""

    estimate: Callable[[PlannerCase, EstimatorInputs], int]
    supported: frozenset[str]
    states_only: bool = False  # documented to exclude activations
    package: str | None = None  # required

    @cached_property
    def is_installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def supports(self, case: PlannerCase) -> bool:
        return case.rows <= self.supported


SIZES = frozenset(("float32", "autocast", "master-weights", "bfloat16", "lora", "accumulation"))
SIZES |= {"adam8bit", "lion", "lion8bit", "adam-mini", "sgd", "checkpointing", "sqrt-checkpointing"}
MIXED = frozenset(("float32", "autocast", "master-weights"))  # with AdamW


def _from_inputs(
    rule: Callable[[EstimatorInputs], int],
) -> Callable[[PlannerCase, EstimatorInputs], int]:
    return lambda case, inputs: rule(inputs)


ESTIMATORS = {
    "16 bytes a weight": Estimator(_from_inputs(sixteen_bytes), MIXED, states_only=True),
    "with activations": Estimator(_from_inputs(with_activations), SIZES | {"eager-attention"}),
    "cookbook": Estimator(_from_inputs(cookbook), SIZES | {"eager-attention"}),
    "accelerate": Estimator(accelerate_bytes, MIXED, states_only=True, package="accelerate"),
    "DeepSpeed 2": Estimator(
        _from_inputs(deepspeed_2), frozenset({"master-weights", "offloaded-optimizer"}), True
    ),
    "DeepSpeed 3": Estimator(
        _from_inputs(deepspeed_3),
        frozenset({"master-weights", "offloaded-optimizer", "streamed-layers"}),
        True,
    ),
}

# ------------------------------------------------------------------ measured


@dataclass(frozen=True)
class EstimateRow:
    """Measured, predicted and estimated bytes of a case; None if an estimator is not installed."""

    configuration: str
    measured_bytes: int
    states_bytes: int  # peak of weights, gradients and state
    predicted_bytes: int
    estimates: dict[str, int | None]
    supported_by: tuple[str, ...]

    @property
    def off(self) -> int:
        return self.predicted_bytes - self.measured_bytes

    def error(self, name: str) -> float | None:
        return _share(self.estimates[name], self.measured_bytes)

    def error_of_states(self, name: str) -> float | None:
        return _share(self.estimates[name], self.states_bytes)


def _share(estimate: int | None, of: int) -> float | None:
    return None if estimate is None else estimate / of - 1


def compared(case: PlannerCase) -> EstimateRow:
    """Predict the peak in a dry run, then measure the second of two real steps."""
    technique = combined(case.techniques)
    predicted_bytes = dry_trace(case.setting, technique).peak_bytes
    training = build(case.setting, technique)
    training.step()
    trace = measured(training)
    inputs = inputs_of(case)
    return EstimateRow(
        str(case),
        trace.peak_bytes,
        most_states(trace),
        predicted_bytes,
        {
            name: e.estimate(case, inputs) if e.is_installed else None
            for name, e in ESTIMATORS.items()
        },
        tuple(name for name, estimator in ESTIMATORS.items() if estimator.supports(case)),
    )


def most_states(trace: Trace) -> int:
    """Return the peak of weights, gradients and optimizer state together."""
    kinds = ("parameters", "gradients", "optimizer_state")
    return max(accumulate(event.bytes for event in trace.events if event.category in kinds))


# ------------------------------------------------------------------ tables


def sentence(rows: Sequence[EstimateRow]) -> str:
    """Say how many predictions equal the measurement."""
    off = [row for row in rows if row.off]
    worst = max(off, key=lambda row: abs(row.off), default=None)
    exact = f"{len(rows) - len(off)} of {len(rows)} configurations are predicted to the byte"
    return (
        f"{exact}." if worst is None else f"{exact}; {worst.configuration} is {worst.off:+,} B off."
    )


def missing() -> Iterator[str]:
    for name, estimator in ESTIMATORS.items():
        if not estimator.is_installed:
            yield f"{name}: not installed, so its column is empty; pip install {estimator.package}"


def results_table(rows: Sequence[EstimateRow]) -> str:
    lines = [
        (
            row.configuration,
            format_bytes(row.measured_bytes),
            f"{row.off:+,} B" if row.off else "exact",
            *(_cell(row, name) for name in ESTIMATORS),
        )
        for row in rows
    ]
    return markdown_table(("configuration", "measured", "memlab", *ESTIMATORS), lines)


def _cell(row: EstimateRow, name: str) -> str:
    """Return the error, in parentheses if the estimator does not support the configuration."""
    error = row.error(name)
    if error is None:
        return "not installed"
    return f"{error:+.0%}" if name in row.supported_by else f"({error:+.0%})"


def summaries(rows: Sequence[EstimateRow]) -> dict[str, dict[str, Any]]:
    """Return (median, worst) relative errors for each estimator, memlab first."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("memlab", *ESTIMATORS):
        of = [_errors(row, name) for row in rows]
        known = [e for row, e in zip(rows, of, strict=True) if _is_known(row, name)]
        found[name] = {
            "all": _spread([peak for peak, _ in of]),
            "known": _spread([peak for peak, _ in known]),
            "known configurations": len(known),
        }
        if name in ESTIMATORS and ESTIMATORS[name].states_only:
            found[name]["states"] = _spread([states for _, states in known])
    return found


def _errors(row: EstimateRow, name: str) -> tuple[float | None, float | None]:
    if name == "memlab":
        return row.off / row.measured_bytes, None
    return row.error(name), row.error_of_states(name)


def _is_known(row: EstimateRow, name: str) -> bool:
    return name == "memlab" or name in row.supported_by


def _spread(errors: Sequence[float | None]) -> tuple[float, float] | None:
    sizes = [abs(error) for error in errors if error is not None]
    return (statistics.median(sizes), max(sizes)) if sizes else None


def summary_table(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        (
            name,
            _pair(of["all"]),
            str(of["known configurations"]),
            _pair(of["known"]),
            _pair(of.get("states")),
        )
        for name, of in found.items()
    ]
    header = ("off by, median and worst", "all", "supported", "of supported", "…, states only")
    return markdown_table(header, lines)


def _pair(spread: tuple[float, float] | None) -> str:
    return "" if spread is None else f"{spread[0]:.0%}, {spread[1]:.0%}"


# ------------------------------------------------------------------ the command


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few and tiny configurations, to check that it runs"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    cases = QUICK if given.quick else CASES
    print(heading("The planner"))
    rows = []
    with progress() as bar:
        for case in bar.track(cases, description="configurations"):
            rows.append(compared(case))
            gc.collect()  # a wrapped block and its wrapper form a cycle
    found = summaries(rows)
    notes = "\n\n".join(missing())
    parts = (sentence(rows), results_table(rows), summary_table(found), notes)
    print("\n" + "\n\n".join(filter(None, parts)))
    content = {
        "summary": sentence(rows),
        "of": len(rows),
        "exact": sum(not row.off for row in rows),
        "errors": found,
        "rows": [asdict(row) for row in rows],
    }
    save(given.results, "planner", "quick" if given.quick else "accuracy", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
