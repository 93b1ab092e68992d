"""What a training step takes, said beforehand: by memlab and by what people use today, on trial.

    python benchmarks/planner.py [--quick] [--results FOLDER]

For each configuration, the peak of a real second step on the CPU, metered, against

    memlab              a dry run of the same step, in which nothing is computed and no memory taken
    16 bytes a weight   Rajbhandari et al. 2020 (arXiv 1910.02054): 2 + 2 + 12, mixed precision
    with activations    the same by kind, 16 only where it is: weights, gradients and state at their
                        own sizes, and the activations of Korthikanti et al. 2022 (2205.05198):
                        sbh(34 + 5as/h) a layer, 34 where attention is fused, 2 recomputed;
                        4sbh(1 + v/h) at the end
    cookbook            EleutherAI's calc_transformer_mem.py: sbh(16p + 2 + (2p + 1)as/h) a layer;
                        it always counts the scores, fused attention or not
    accelerate          `accelerate estimate-memory`, its "Training using Adam"
    DeepSpeed 2 and 3   estimate_zero2_ and estimate_zero3_model_states_mem_needs, one GPU

Every estimator has its best case: it is told the true number of weights, and the sizes of weights,
gradients, state and activations, the micro-batch, recomputation and offloading as far as it has a
word for them. What it has no word for it cannot count, so there are two summaries: of all
configurations, and of those that are made of its own words alone. And 16 bytes, accelerate and
DeepSpeed count weights, gradients and state, and say so: what they lack of a peak is what they
leave to the reader, so a third column holds them against those bytes alone.

Errors are estimate less measurement, as shares of what was measured; of memlab's, bytes.

Prints Markdown, and writes a section to `benchmarks/results/<machine>.json`.
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

# ------------------------------------------------------------------ what is tried


@dataclass(frozen=True)
class Case:
    """A configuration: a shape, a batch, techniques."""

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
        """The techniques' names, and one for the precision."""
        rows = frozenset(self.techniques.split("+")) - {"plain"}
        precision = rows & {"autocast", "master-weights", "bfloat16"}
        return rows | (precision or {str(self.dtype).removeprefix("torch.")})

    def __str__(self) -> str:
        dtype = "" if self.dtype is torch.float32 else "bfloat16, "
        return f"{self.shape}, {self.batch} × {self.seq_len}, {dtype}{self.techniques}"


BF16 = torch.bfloat16
CASES = (
    *(
        Case("25m", 2, 128, techniques)
        for techniques in (
            *("plain", "autocast", "master-weights", "bfloat16", "adam8bit", "checkpointing"),
            *("chunked-loss", "lora", "accumulation", "int8-activations"),
            "checkpointing+lion8bit+step-in-backward+chunked-loss",
        )
    ),
    *(
        Case("34m", 1, 256, techniques)
        for techniques in ("plain", "eager-attention", "sqrt-checkpointing", "lion")
    ),
    *(Case("124m", 1, 64, techniques) for techniques in ("plain", "checkpointing+autocast")),
    Case("124m", 1, 128, "checkpointing+lion8bit+step-in-backward+chunked-loss", BF16),
    *(
        Case("wide", 8, 128, techniques)
        for techniques in (*("plain", "offloaded-optimizer", "checkpointing+master-weights"),)
    ),
    Case("wide", 8, 256, "plain", BF16),
    *(
        Case("deep", 4, 256, techniques)
        for techniques in ("plain", "checkpointing", "selective-checkpointing", "streamed-layers")
    ),
    *(Case("many-words", 2, 256, techniques) for techniques in ("plain", "chunked-loss+adam-mini")),
)
QUICK = (
    Case("tiny", 2, 32),
    Case("tiny", 2, 64, "checkpointing+master-weights"),
    Case("tiny", 3, 16, "lora", BF16),
)

# ------------------------------------------------------------------ what estimators are told


@dataclass(frozen=True)
class Told:
    """The truth about a case, in the words of the estimators. Bytes are those of an element."""

    config: GPTConfig
    weights: int  # all that there are
    trained: int
    largest_layer: int  # weights of the largest module
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int  # with float32 copies of weights
    activation_bytes: int
    batch: int  # sequences at once
    seq_len: int
    mixed: bool
    fused: bool  # attention that stores no scores
    recomputed: bool
    offloaded: bool  # the state
    streamed: bool  # weights and gradients too


# The bytes of state a weight, where it is not AdamW's two moments in the weights' own dtype.
STATE_BYTES = {"adam8bit": 2, "lion": 4, "lion8bit": 1, "sgd": 0, "master-weights": 12}


def told(case: Case) -> Told:
    rows, model = case.rows, empty_model(case)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    narrow = bool(rows & {"bfloat16", "master-weights"})
    size = 2 if narrow else 4
    state = [STATE_BYTES[row] for row in rows & STATE_BYTES.keys()]
    if "adam-mini" in rows:
        state = [size]  # its second moment has a number for each row
    return Told(
        case.config,
        weights=sum(count for count, _ in counts),
        trained=sum(count for count, is_trained in counts if is_trained),
        largest_layer=max(
            sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
        ),
        weight_bytes=size,
        gradient_bytes=size,
        state_bytes=state[0] if state else 2 * size,
        activation_bytes=2 if narrow or "autocast" in rows else 4,
        batch=1 if "accumulation" in rows else case.batch,
        seq_len=case.seq_len,
        mixed=narrow or "autocast" in rows,
        fused="eager-attention" not in rows,
        recomputed=bool(rows & {"checkpointing", "sqrt-checkpointing"}),
        offloaded=bool(rows & {"offloaded-optimizer", "streamed-layers"}),
        streamed="streamed-layers" in rows,
    )


def empty_model(case: Case) -> nn.Module:
    """Its shapes alone, in float32."""
    with torch.device("meta"):
        model = GPT(case.config)
    if "lora" in case.rows:
        combined("lora").change_model(model)
    return model


# ------------------------------------------------------------------ the estimators


def sixteen_bytes(of: Told) -> int:
    """Rajbhandari et al. 2020, section 3.1: (2 + 2 + K)Ψ with K = 12."""
    return 16 * of.weights


def states(of: Told) -> int:
    """The same with the sizes that there are."""
    return of.weight_bytes * of.weights + (of.gradient_bytes + of.state_bytes) * of.trained


def korthikanti_activations(of: Told) -> int:
    """Korthikanti et al. 2022, equations 1, 5 and 6 and section 4.3, for one GPU; published for
    activations of 2 bytes, and here in proportion for those of 4."""
    s, b, h, a = of.seq_len, of.batch, of.config.width, of.config.heads
    per_token = 2 if of.recomputed else 34 + (0 if of.fused else 5 * a * s / h)
    end = 4 * (1 + of.config.vocab_size / h)
    return round(s * b * h * (of.config.layers * per_token + end) * of.activation_bytes / 2)


def with_activations(of: Told) -> int:
    return states(of) + korthikanti_activations(of)


def cookbook(of: Told) -> int:
    """EleutherAI/cookbook, calc/calc_transformer_mem.py, for one GPU."""
    s, b, h, a = of.seq_len, of.batch, of.config.width, of.config.heads
    p = of.activation_bytes
    per_token = 16 * p + 2 + (0 if of.recomputed else (2 * p + 1) * a * s / h)
    return states(of) + round(s * b * h * of.config.layers * per_token)


def deepspeed_zero2_gpu_bytes(weights: int, cpu_offload: bool) -> int:
    """DeepSpeed 0.19.8, estimate_zero2_model_states_mem_needs on one GPU."""
    return 2 * weights if cpu_offload else 2 * weights + 18 * weights


def deepspeed_zero3_gpu_bytes(
    weights: int, largest_layer: int, cpu_offload: bool, cpu_offload_params: bool
) -> int:
    """DeepSpeed 0.19.8, estimate_zero3_model_states_mem_needs on one GPU."""
    kept = 18 if not cpu_offload else 0 if cpu_offload_params else 2
    return 4 * largest_layer + kept * weights


def deepspeed_2(of: Told) -> int:
    return deepspeed_zero2_gpu_bytes(of.weights, of.offloaded)


def deepspeed_3(of: Told) -> int:
    return deepspeed_zero3_gpu_bytes(of.weights, of.largest_layer, of.offloaded, of.streamed)


def accelerate_bytes(case: Case, of: Told) -> int:
    """What `accelerate estimate-memory` shows for training: the largest of its four moments."""
    from accelerate.commands.estimate import estimate_training_usage  # seconds to import
    from accelerate.utils import calculate_maximum_sizes

    total_bytes, _ = calculate_maximum_sizes(empty_model(case))
    return max(estimate_training_usage(total_bytes, "bfloat16" if of.mixed else "float32").values())


@dataclass(frozen=True)
class Estimator:
    """Somebody's rule, and the techniques that it has a word for."""

    estimate: Callable[[Case, Told], int]
    words: frozenset[str]
    states_only: bool = False  # it says that activations are not in it
    package: str | None = None  # that is asked

    @cached_property
    def is_here(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def knows(self, case: Case) -> bool:
        return case.rows <= self.words


SIZES = frozenset(("float32", "autocast", "master-weights", "bfloat16", "lora", "accumulation"))
SIZES |= {"adam8bit", "lion", "lion8bit", "adam-mini", "sgd", "checkpointing", "sqrt-checkpointing"}
MIXED = frozenset(("float32", "autocast", "master-weights"))  # plain AdamW in either


def _of_words(rule: Callable[[Told], int]) -> Callable[[Case, Told], int]:
    return lambda case, of: rule(of)


ESTIMATORS = {
    "16 bytes a weight": Estimator(_of_words(sixteen_bytes), MIXED, states_only=True),
    "with activations": Estimator(_of_words(with_activations), SIZES | {"eager-attention"}),
    "cookbook": Estimator(_of_words(cookbook), SIZES | {"eager-attention"}),
    "accelerate": Estimator(accelerate_bytes, MIXED, states_only=True, package="accelerate"),
    "DeepSpeed 2": Estimator(
        _of_words(deepspeed_2), frozenset({"master-weights", "offloaded-optimizer"}), True
    ),
    "DeepSpeed 3": Estimator(
        _of_words(deepspeed_3),
        frozenset({"master-weights", "offloaded-optimizer", "streamed-layers"}),
        True,
    ),
}

# ------------------------------------------------------------------ measured


@dataclass(frozen=True)
class Row:
    """A case: bytes measured, predicted, and estimated; None where an estimator is not here."""

    configuration: str
    measured_bytes: int
    states_bytes: int  # the most that weights, gradients and state are at once
    predicted_bytes: int
    estimates: dict[str, int | None]
    known_to: tuple[str, ...]

    @property
    def off(self) -> int:
        return self.predicted_bytes - self.measured_bytes

    def error(self, name: str) -> float | None:
        return _share(self.estimates[name], self.measured_bytes)

    def error_of_states(self, name: str) -> float | None:
        return _share(self.estimates[name], self.states_bytes)


def _share(estimate: int | None, of: int) -> float | None:
    return None if estimate is None else estimate / of - 1


def compared(case: Case) -> Row:
    """Predicted first, while no memory is taken; then a real first step, and the second."""
    technique = combined(case.techniques)
    predicted_bytes = dry_trace(case.setting, technique).peak_bytes
    training = build(case.setting, technique)
    training.step()
    trace = measured(training)
    of = told(case)
    return Row(
        str(case),
        trace.peak_bytes,
        most_states(trace),
        predicted_bytes,
        {name: e.estimate(case, of) if e.is_here else None for name, e in ESTIMATORS.items()},
        tuple(name for name, estimator in ESTIMATORS.items() if estimator.knows(case)),
    )


def most_states(trace: Trace) -> int:
    """The most bytes at one moment that are weights, gradients or an optimizer's state."""
    kinds = ("parameters", "gradients", "optimizer_state")
    return max(accumulate(event.bytes for event in trace.events if event.category in kinds))


# ------------------------------------------------------------------ in words


def sentence(rows: Sequence[Row]) -> str:
    """Whether every prediction is the measurement."""
    off = [row for row in rows if row.off]
    worst = max(off, key=lambda row: abs(row.off), default=None)
    told = f"Of {len(rows)} configurations, {len(rows) - len(off)} are predicted to the byte"
    return (
        f"{told}." if worst is None else f"{told}; {worst.configuration} is {worst.off:+,} B off."
    )


def missing() -> Iterator[str]:
    for name, estimator in ESTIMATORS.items():
        if not estimator.is_here:
            yield f"{name}: not installed, so its column is empty; pip install {estimator.package}"


def results_table(rows: Sequence[Row]) -> str:
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


def _cell(row: Row, name: str) -> str:
    """In parentheses where the estimator has no word for something in the configuration."""
    error = row.error(name)
    if error is None:
        return "not installed"
    return f"{error:+.0%}" if name in row.known_to else f"({error:+.0%})"


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Of each estimator, memlab first, sizes of errors as shares: (median, worst)."""
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


def _errors(row: Row, name: str) -> tuple[float | None, float | None]:
    if name == "memlab":
        return row.off / row.measured_bytes, None
    return row.error(name), row.error_of_states(name)


def _is_known(row: Row, name: str) -> bool:
    return name == "memlab" or name in row.known_to


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
    header = ("off by, median and worst", "all", "in its own words", "of these", "…, states alone")
    return markdown_table(header, lines)


def _pair(spread: tuple[float, float] | None) -> str:
    return "" if spread is None else f"{spread[0]:.0%}, {spread[1]:.0%}"


# ------------------------------------------------------------------ the command


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument("--quick", action="store_true", help="few and tiny, to see that it runs")
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
            gc.collect()  # a wrapped block and its wrapper hold each other
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
