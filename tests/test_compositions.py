"""Two techniques at once: every pair of rows either has the gradients and the bytes that the two
should have together, or is refused in a sentence.

The bytes left after a step are compared with a closed form. The peak is compared with a dry run,
event by event.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from quick import quick, together
from torch import Tensor

from memlab import compression
from memlab.cli.choices import SUITABLE
from memlab.lora import added_weights
from memlab.model import GPT, PRESETS
from memlab.offload.layers import stream_of
from memlab.trace import Trace
from memlab.train import TECHNIQUES, Setting, build, combined, dry_trace, measured
from memlab.train.registry import exclusions

CONFIG = replace(PRESETS["tiny"], layers=2)
SETTING = Setting(CONFIG, batch=2, seq_len=16)
SIZES = [p.numel() for p in GPT(CONFIG).parameters()]
RANK = 8
ADAPTERS = {"lora", "qlora"}
LEARNING_RATE = 1e-3  # of every AdamW, and of SGD with momentum
LARGEST_GRADIENT = 0.6

ROWS = [name for name in TECHNIQUES if name != "plain"]
PAIRS = ["+".join(pair) for pair in combinations(ROWS, 2)]

OPTIMIZERS = {name for name, row in TECHNIQUES.items() if "optimizer" in row.plugs}
# Of each of these a step has one.
EITHER_OR = (
    OPTIMIZERS,
    {"checkpointing", "sqrt-checkpointing", "selective-checkpointing"},
    {"int8-activations", "int4-activations", "offloaded-activations"},
    {"autocast", "loss-scaling"},
    {"eager-attention", "flash-attention"},
    {"lora", "qlora"},
    {"step-in-backward", "offloaded-optimizer", "streamed-layers"},
)


def is_refused(pair: str) -> bool:
    names = set(pair.split("+"))
    return frozenset(names) in exclusions() or any(names <= kinds for kinds in EITHER_OR)


TOGETHER = [pair for pair in PAIRS if not is_refused(pair)]


@together("pair", [pair for pair in PAIRS if is_refused(pair)])
def test_two_that_do_not_go_together_are_refused_in_a_sentence(pair):
    one, other = pair.split("+")
    with pytest.raises(
        ValueError,
        match=f"^{one} and {other} .*; (leave one of the two out(; for .*)?|use .*)$",
    ):
        combined(f"{other}+{one}")


def test_every_pair_of_the_table_of_refusals_is_one_of_rows():
    assert {frozenset(pair.split("+")) for pair in PAIRS} >= exclusions().keys()


# ------------------------------------------------------------------ what two come to


class Outcome(NamedTuple):
    """Of two steps: the gradients of the first, the trace of the second, the weights after it."""

    gradients: dict[str, Tensor]
    trace: Trace
    weights: dict[str, Tensor]


@cache
def outcome(names: str) -> Outcome:
    compression._default_generator.cache_clear()  # the same draws each time
    training = build(SETTING, combined(names))
    training.step()
    gradients = gradients_of(training)
    trace = measured(training)
    return Outcome(gradients, trace, dict(present(training.model)))


def gradients_of(training) -> dict[str, Tensor]:
    """Copies, by the model's names."""
    return {
        name: stepped.grad.to(torch.float32, copy=True)
        for name, stepped in stepped_weights(training)
        if stepped.grad is not None
    }


def gradients_of_adapters_from(pair: str) -> dict[str, Tensor]:
    """In float32, from where the pair starts: LoRA's factors are drawn in the weights' dtype."""
    start = dict(build(SETTING, combined(pair)).model.named_parameters())
    training = build(SETTING, combined(adapting(pair)))
    with torch.no_grad():
        for name, weight in training.model.named_parameters():
            weight.copy_(start[name])
    training.step()
    return gradients_of(training)


def adapting(pair: str) -> str | None:
    """Which of the two trains adapters alone, if one does."""
    return next((name for name in pair.split("+") if name in ADAPTERS), None)


def stepped_weights(training) -> Iterator[tuple[str, Tensor]]:
    """By the model's names: the trained weights, or the stepped copies. Groups of matrices and
    others have names, and another order than the model's."""
    names = [name for name, p in training.model.named_parameters() if p.requires_grad]
    groups = training.optimizer.param_groups
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    stepped = [p for group in groups for p in group["params"] if p.requires_grad]
    return zip(names, stepped, strict=True)


def present(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights, fetched from where they are."""
    streams = {stream_of(weight) for weight in model.parameters()} - {None}
    for stream in streams:
        with stream.present():
            yield from ((n, p.detach().clone()) for n, p in model.named_parameters())
    if not streams:
        yield from ((name, p.detach()) for name, p in model.named_parameters())


# ------------------------------------------------------------------ values

# How far a technique's gradients may be from those without it. Gradients are up to 0.6.
ERRORS = {
    "int8-activations": 0.003,
    "int4-activations": 0.16,  # the draws depend on the last bits: the CPU's and torch's
    "autocast": 0.01,
    "loss-scaling": 0.002,
    "fp8": 0.015,
    "bfloat16": 0.03,
    "master-weights": 0.03,
    "eager-attention": 1e-6,
    "flash-attention": 1e-6,
    "chunked-loss": 1e-6,
    "accumulation": 1e-6,
}
WITHOUT_GRADIENTS = {"step-in-backward", "streamed-layers"}  # after the step


def error(pair: str) -> float:
    """Of both: where one rounds, another order of sums is rounded, too."""
    names = pair.split("+")
    # Gradients of adapters are a fifth of the others', beside 4-bit weights a quarter, and beside
    # FP8 matmuls two fifths.
    scale = 0.25 if "qlora" in names else 0.2 if "lora" in names else 1
    if "lora" in names and "fp8" in names:
        scale = 0.4
    return scale * sum(ERRORS.get(name, 0) for name in names)


@pytest.mark.few(2)
@pytest.mark.parametrize("pair", quick(TOGETHER[::8], TOGETHER))
def test_two_techniques_have_the_gradients_of_the_plain_step(pair):
    """Or LoRA's gradients, if one of them is LoRA."""
    names = set(pair.split("+"))
    if names & WITHOUT_GRADIENTS:
        has_the_weights_of_the_other_alone(*names)
        return
    ours = outcome(pair).gradients
    wanted = gradients_of_adapters_from(pair) if adapting(pair) else outcome("plain").gradients
    assert ours.keys() == wanted.keys()
    assert max((ours[n] - wanted[n]).abs().max().item() for n in wanted) <= error(pair)


def has_the_weights_of_the_other_alone(one: str, other: str) -> None:
    """After two steps; where weights are rounded at random, within what two roundings come to, but
    for the few whose gradient changed its sign."""
    alone = other if one in WITHOUT_GRADIENTS else one
    ours, wanted = outcome(f"{one}+{other}").weights, outcome(alone).weights
    assert ours.keys() == wanted.keys()
    for name, weight in wanted.items():
        largest = weight.abs() + 2 * LEARNING_RATE  # that it may have been on the way
        rounding = 2**-7 * largest if alone == "bfloat16" else torch.zeros_like(weight)
        if alone == "momentum-sgd":  # in bfloat16; a step is the rate times it
            rounding += 2**-7 * LEARNING_RATE * LARGEST_GRADIENT
        distance = (ours[name] - weight).abs()
        assert distance.float().mean() <= rounding.float().mean(), name
        assert (distance <= 2 * rounding + 2 * LEARNING_RATE * rounding.bool()).all(), name


# ------------------------------------------------------------------ bytes

KEPT = ("parameters", "gradients", "optimizer_state")


@pytest.mark.few(4)
@pytest.mark.parametrize("pair", quick(TOGETHER[::4], TOGETHER))
def test_after_the_step_two_techniques_hold_what_the_formulas_of_both_say(pair):
    at_end = outcome(pair).trace.at_end
    assert {what: at_end.get(what, 0) for what in KEPT} == expected_at_end(set(pair.split("+")))


def expected_at_end(names: set[str]) -> dict[str, int]:
    """Bytes of weights, gradients and state after a step."""
    is_low = bool(names & {"bfloat16", "master-weights"})
    of_a_number = 2 if is_low else 4
    trained = added() if ADAPTERS & names else SIZES
    held = sum(SIZES) + (sum(trained) if ADAPTERS & names else 0)
    if "qlora" in names:  # matrices of blocks are buffers
        held -= sum(rows * columns for rows, columns in matrices()) * CONFIG.layers
    parameters, gradients = of_a_number * held, of_a_number * sum(trained)
    state = state_bytes(trained, names)
    if "master-weights" in names:
        parameters, gradients = parameters + 4 * sum(trained), 4 * sum(trained)
    if "streamed-layers" in names:
        outside_the_blocks = CONFIG.vocab_size * CONFIG.hidden_size + CONFIG.hidden_size
        parameters = of_a_number * outside_the_blocks
    if names & WITHOUT_GRADIENTS:
        gradients = 0
    if names & {"offloaded-optimizer", "streamed-layers"}:
        state = 4 * len(trained) if counts_steps(names) else 0
    return {"parameters": parameters, "gradients": gradients, "optimizer_state": state}


def matrices() -> list[tuple[int, int]]:
    """The inputs and outputs of a block's seven matrices."""
    C, hidden = CONFIG.hidden_size, CONFIG.intermediate_size
    KV_D = CONFIG.kv_heads * CONFIG.head_dim
    return [(C, C), (C, KV_D), (C, KV_D), (C, C), (C, hidden), (C, hidden), (hidden, C)]


def added() -> list[int]:
    """The numbers of each of LoRA's factors."""
    factors = [RANK * n for size in matrices() for n in size] * CONFIG.layers
    assert sum(factors) == CONFIG.layers * sum(added_weights(*size, RANK) for size in matrices())
    return factors


def counts_steps(names: set[str]) -> bool:
    """Whether the optimizer is torch's AdamW, which counts in a tensor for each weight."""
    return not names & (OPTIMIZERS - {"master-weights", "foreach-adamw", "fused-adamw"})


def state_bytes(sizes: list[int], names: set[str]) -> int:
    """Of the optimizer, for trained weights of these sizes."""
    n = sum(sizes)
    if counts_steps(names):
        return 8 * n + 4 * len(sizes)
    if "sgd" in names:
        return 0
    if "momentum-sgd" in names:
        return 2 * n
    if "bfloat16" in names:
        return 4 * n
    if "lion" in names:
        return 4 * n
    if "adam-mini" in names:
        return 4 * (n + blocks(names))
    if own := names & MATRICES_KEEP.keys():
        return 4 * matrix_state(sizes, names, *own)
    moments = 2 if "adam8bit" in names else 1
    large = [size for size in sizes if size >= 4096]
    codes = 66 * 1024 if large else 0  # 1 KiB, and 65 of the look-up table
    in_8_bits = sum(size + 4 * -(-size // 256) for size in large)
    return moments * (in_8_bits + 4 * (n - sum(large)) + codes)


# Numbers in the state of a matrix, by its short and long side.
MATRICES_KEEP = {
    "muon": lambda short, long: short * long,
    "galore": lambda short, long: CONFIG.hidden_size // 4 * (short + 2 * long),
    "apollo-mini": lambda short, long: 2 * long + 1,
}


def matrix_state(sizes: list[int], names: set[str], own: str) -> int:
    """Elements in the state: of hidden layers' matrices, and two for all other weights. GaLore's
    rank equals the adapters' rank, so it leaves their matrices to AdamW."""
    shapes = CONFIG.layers * matrices()
    if ADAPTERS & names:
        shapes = [(RANK, side) for shape in shapes for side in shape]
    if own == "galore" and ADAPTERS & names:
        shapes = []
    others = sum(sizes) - sum(rows * columns for rows, columns in shapes)
    return 2 * others + sum(MATRICES_KEEP[own](min(shape), max(shape)) for shape in shapes)


def blocks(names: set[str]) -> int:
    """The second moments of Adam-mini: one for each row, or head, or norm."""
    C, KV_D, D = CONFIG.hidden_size, CONFIG.kv_heads * CONFIG.head_dim, CONFIG.head_dim
    hidden, L = CONFIG.intermediate_size, CONFIG.layers
    if ADAPTERS & names:
        return L * (7 * RANK + C + 2 * KV_D + C + 2 * hidden + C)
    of_a_block = C // D + KV_D // D + KV_D + C + 2 * hidden + C + 2
    return CONFIG.vocab_size + 1 + L * of_a_block


def test_a_closed_form_of_another_technique_is_not_that_of_the_pair():
    at_end = outcome("lora+lion").trace.at_end
    wrong = expected_at_end({"lora", "adam8bit"})
    assert {what: at_end.get(what, 0) for what in KEPT} != wrong


def kept_for_backward(names: str) -> int:
    """Bytes of activations, when the first gradient is made."""
    alive = 0
    for event in outcome(names).trace.events:
        if event.phase == "backward":
            break
        alive += event.bytes * (event.category == "activations")
    return alive


LEAVES_ACTIVATIONS = {"step-in-backward", "offloaded-optimizer", "post-hoc-ema"} | (
    OPTIMIZERS - {"bfloat16", "master-weights"}
)
BESIDE_AN_OPTIMIZER = [p for p in TOGETHER if LEAVES_ACTIVATIONS & set(p.split("+"))]


@pytest.mark.few(3)
@pytest.mark.parametrize("pair", quick(BESIDE_AN_OPTIMIZER[::4], BESIDE_AN_OPTIMIZER))
def test_an_optimizer_leaves_what_is_kept_for_backward_to_the_other(pair):
    one, other = pair.split("+")
    alone = other if one in LEAVES_ACTIVATIONS else one
    wanted = "plain" if alone in LEAVES_ACTIVATIONS else alone
    assert kept_for_backward(pair) == kept_for_backward(wanted)


@pytest.mark.few(4)
@pytest.mark.parametrize("pair", [pair for pair in TOGETHER if "post-hoc-ema" in pair])
def test_two_averages_come_on_top_of_the_other_technique(pair):
    other = pair.replace("+post-hoc-ema", "").replace("post-hoc-ema+", "")
    trained = added() if other in ADAPTERS else SIZES
    ours, alone = outcome(pair).trace.live_bytes, outcome(other).trace.live_bytes
    assert ours - alone == 2 * 4 * sum(trained)


# Value-dependent once: masks that a dry run could not know, checks that it left out.
SURPRISING = [
    *("int8-activations+lora", "int4-activations+lora"),
    *("adam8bit+offloaded-optimizer", "adam8bit+streamed-layers", "lion8bit+streamed-layers"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("pair", quick(SURPRISING, TOGETHER))
def test_the_peak_of_two_techniques_is_that_of_a_dry_run(pair):
    ours, dry = outcome(pair).trace, dry_trace(SETTING, combined(pair))
    assert (ours.peak_bytes, ours.at_peak) == (dry.peak_bytes, dry.at_peak)


# ------------------------------------------------------------------ the page and the results

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/COMPOSITIONS.md").read_text(encoding="utf-8")
(RESULTS,) = (ROOT / "benchmarks" / "results").glob("cpu-*.json")
STORED = json.loads(RESULTS.read_text(encoding="utf-8"))["compositions"]["peaks"]


def test_the_page_says_why_each_refused_pair_does_not_work():
    lines = [line for line in PAGE.splitlines() if line.startswith("- **")]
    said = {frozenset(names.split(" and ")): why for names, why in map(_reason_in, lines)}
    assert said == exclusions()


def _reason_in(line: str) -> tuple[str, str]:
    _, _, text = line.partition("** ")
    names, _, why = text.partition(": ")
    return names, why


def test_the_results_have_each_technique_and_each_pair_that_works():
    assert STORED["pairs"].keys() == {*ROWS, *TOGETHER}


@pytest.mark.few(1)
@pytest.mark.parametrize("names", quick(["chunked-loss", "checkpointing+lion"], [*ROWS, *TOGETHER]))
def test_a_stored_peak_is_that_of_a_dry_run(names):
    assert STORED["pairs"][names] == dry_trace(SUITABLE["cpu"], combined(names)).peak_bytes
