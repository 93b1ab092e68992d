"""Day 18: what its checks tell a learner, and what the lesson claims."""

import warnings
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # holds a tensor of its own, from its import on
import torch.nn.functional as F
from close import assert_close
from lesson_parts import lesson_part

import memlab
from memlab.course import days, model_parallel
from memlab.course.peers import in_turns
from memlab.course.solutions import given, solution
from memlab.model import PRESETS
from memlab.planner.parallel import (
    micro_batches_in_flight,
    pipeline_elements,
    ring_attention_elements,
    saved_bytes,
    tensor_parallel_elements,
)
from memlab.reference import pipeline
from memlab.scripts.launch import Launch
from memlab.scripts.ranks import run_ranks as dry_run_ranks
from memlab.zero.formulas import ring_elements
from memlab.zero.launch import run_ranks

SCRIPTS = Path(memlab.__file__).parents[1] / "benchmarks" / "llama"
RANKS = 2

# ------------------------------------------------------------------ the solutions and the library


@pytest.mark.parametrize("sequence", [False, True])
def test_saved_elements_are_the_planners(sequence):
    """In bytes of float32, with the table's two kinds."""
    for ranks in (1, 2, 4):
        found = solution("18.2")(64, 32, 4, 96, ranks, sequence)
        kinds = {"whole": 4 * (6 * 32 + 2), "divided": 4 * (4 * 32 + 4 + 2 * 96)}
        expected = saved_bytes(64, **kinds, tensor=ranks, sequence_parallel=sequence)
        assert 4 * found == expected


def test_the_order_is_the_references_and_has_the_planners_micro_batches_in_flight():
    most_in_flight = lesson_part(18, "most_in_flight")
    for stages, micro_batches in ((1, 4), (4, 8), (4, 2)):
        for stage in range(stages):
            order = solution("18.4")(stage, stages, micro_batches)
            assert order == pipeline.one_forward_one_backward(stage, stages, micro_batches)
            expected = micro_batches_in_flight(stage, stages, micro_batches)
            assert most_in_flight(order) == expected


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (5, 3)])
def test_both_orders_have_the_bubble_of_the_formula(stages, micro_batches):
    timeline, gpipe, _ = lesson_part(18, "timeline", "gpipe", "UNITS")
    for order_of in (gpipe, pipeline.one_forward_one_backward):
        ends = timeline(order_of, stages, micro_batches)
        idle = 1 - 3 * micro_batches / max(ends.values())
        assert idle == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        assert len(ends) == 2 * stages * micro_batches


def test_the_ring_attends_as_torch_does():
    q, k, v = (torch.randn(3 * 4, 5, dtype=torch.float64) for _ in range(3))
    whole = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    found = in_turns(solution("18.5"), [[x.chunk(3)[r] for x in (q, k, v)] for r in range(3)])
    assert_close(torch.cat([out for out, _ in found]), whole)


# ------------------------------------------------------------------ seven ways on two ranks


@pytest.fixture(scope="module")
def found():
    return run_ranks("memlab.course.model_parallel:all_ways", RANKS, timeout=300)


C, V, INNER, L = (
    getattr(model_parallel, name) for name in ("HIDDEN", "VOCABULARY", "INTERMEDIATE", "LAYERS")
)
ROWS, BATCH = model_parallel.TARGETS, model_parallel.BATCH
MATRICES, NORMS, END = 4 * C * C + 2 * C * INNER, 2 * C, V * C  # of a layer; embedding


def weights_of(way: str, stage: int) -> int:
    """The elements that a rank holds."""
    if way in ("tensor", "sequence"):
        return L * (MATRICES // RANKS + NORMS) + END + END // RANKS + C
    if way in ("GPipe", "1F1B"):
        return L // RANKS * (MATRICES + NORMS) + END + (C if stage else 0)
    return L * (MATRICES + NORMS) + 2 * END + C


def sent_of(way: str, stage: int) -> int:
    """The elements that a rank sends in a step. The loss has three sums or maxima of a row."""
    whole = weights_of("one", 0)
    head = ring_elements(ROWS * C, RANKS)  # a pass
    loss = 3 * 2 * ring_elements(ROWS, RANKS)
    in_order = pipeline_elements(stage, RANKS, BATCH, ROWS // BATCH * C)
    return {
        "one": 0,
        "data": 2 * ring_elements(whole, RANKS),
        "tensor": L * tensor_parallel_elements(ROWS, C, RANKS) + 2 * head + loss,
        "sequence": L * tensor_parallel_elements(ROWS, C, RANKS, sequence_parallel=True)
        + 3 * head
        + loss
        + 2 * ring_elements((2 * L + 1) * C + END, RANKS),  # gradients of norms and embedding
        "context": L * ring_attention_elements(ROWS, 2 * C, RANKS)
        + 2 * ring_elements(whole, RANKS),
        "GPipe": in_order,
        "1F1B": in_order,
    }[way]


@pytest.mark.few(1)
@pytest.mark.distributed
@pytest.mark.parametrize("way", ["one", "data", "tensor", "sequence", "context", "GPipe", "1F1B"])
def test_a_rank_holds_and_sends_what_the_formulas_say(found, way):
    for rank, ways in enumerate(found):
        has, held = ways[way]["bytes"], 4 * weights_of(way, rank)
        assert (has["parameters"], has["gradients"]) == (held, held)
        counters = 4 * len(ways[way]["gradients"])  # AdamW's steps
        assert has["optimizer_state"] == 2 * held + counters
        assert has["sent"] == 4 * sent_of(way, rank)


@pytest.mark.distributed
def test_all_ways_have_the_gradients_of_one_process(found):
    right = model_parallel.right_gradients()
    for rank, ways in enumerate(found):
        for way, of_way in ways.items():
            for name, gradient in of_way["gradients"].items():
                dim = model_parallel.split_of(name) if way in ("tensor", "sequence") else None
                whole = right[name]
                expected = whole if dim is None else whole.chunk(RANKS, dim)[rank]
                assert_close(gradient, expected)


@pytest.mark.distributed
def test_a_rank_saves_what_the_lesson_says(found):
    one = found[0]["one"]["bytes"]
    for rank, ways in enumerate(found):
        has = {way: of_way["bytes"]["activations"] for way, of_way in ways.items()}
        for way in ("data", "sequence", "context"):
            assert 2 * has[way] == one["activations"]
        assert has["tensor"] == L * 4 * solution("18.2")(ROWS, C, 4, INNER, RANKS, False)
        flights = micro_batches_in_flight(rank, RANKS, BATCH)
        assert has["1F1B"] == flights * one["activations"] // (RANKS * BATCH)


# ------------------------------------------------------------------ at scale


REAL = """
import os, warnings
import torch.distributed.pipelining
from memlab.scripts.launch import launch_of
from memlab.scripts.running import run

def main(words):
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # as under torchrun
    warnings.simplefilter("ignore")
    return dict(run(launch_of(words), real=True).trace.at_peak)
"""


def predicted(script: str, count: int, arguments: tuple[str, ...], **settings: Any) -> Any:
    launch = Launch(str(SCRIPTS / script), arguments=arguments).with_ranks(count)
    with warnings.catch_warnings(action="ignore"):
        return dry_run_ranks(launch, **settings)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "ranks", "arguments"),
    [
        ("fsdp2.py", 2, "tiny 4 32 2"),
        pytest.param("three_d.py", 4, "tiny 2 1 2 2 32 4", marks=pytest.mark.slow),
        pytest.param("three_d.py", 4, "tiny 2 2 1 2 32 4", marks=pytest.mark.slow),
    ],
)
def test_the_scripts_dry_runs_have_the_bytes_of_real_ranks(script, ranks, arguments):
    words = tuple(arguments.split())
    real = run_ranks(REAL, ranks, [str(SCRIPTS / script), *words], timeout=300)
    dry = predicted(script, ranks, words, ranks=tuple(range(ranks)), device="cpu")
    found = [dict(outcome.trace.at_peak) for outcome in dry.values()]
    assert list(map(with_gradients_summed, found)) == list(map(with_gradients_summed, real))


def with_gradients_summed(at_peak: dict[str, int]) -> dict[str, int]:
    """Two moments of a pipeline's step have the same peak, and differ in whether a gradient has
    arrived at its weight. Real ranks wait for each other, so which comes first varies."""
    others = dict(at_peak)
    gradients = others.pop("gradients", 0) + others.pop("backward_temporaries", 0)
    return {**others, "gradients, arrived or not": gradients}


@pytest.mark.filterwarnings("ignore")
def test_the_first_stage_makes_the_gradient_of_the_whole_embedding():
    dry = predicted("three_d.py", 4, ("tiny", "2", "1", "2", "1", "8", "2"), ranks=(0,))
    tiny = PRESETS["tiny"]
    whole = tiny.vocab_size, tiny.hidden_size
    made = {event.shape for event in dry[0].trace.events if event.phase == "backward"}
    assert whole in made  # half of it would do


@cache
def the_lessons() -> tuple[Any, Any]:
    rank_0, deeper, _ = lesson_part(
        18,
        *("rank_0", "deeper", "SCRIPTS"),
        **{"days": days, "memlab": memlab, "warnings": warnings},
        **{"Launch": Launch, "dry_run_ranks": dry_run_ranks},
    )
    return rank_0, deeper


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_70b_with_all_blocks_has_the_peak_that_three_and_four_blocks_give():
    rank_0, deeper = the_lessons()
    three, four, every = (
        rank_0("fsdp2.py", 8, "llama-3-70b", layers, 4096, 2) for layers in (3, 4, 80)
    )
    found, right = sum(deeper(three, four, 76).values()), every.peak_bytes
    assert abs(found / right - 1) < 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_stage_of_405b_has_the_peak_that_one_and_two_blocks_give():
    rank_0, deeper = the_lessons()
    one, two, five = (
        rank_0("three_d.py", 128, "llama-3-405b", 4, 4, 8, blocks, 8192, 4) for blocks in (1, 2, 5)
    )
    found = sum(deeper(one, two, 3).values())
    assert abs(found / five.peak_bytes - 1) < 1e-5
    assert ceil(PRESETS["llama-3-405b"].layers / 4) == 32


def test_the_lessons_attention_is_causal():
    attend = given(18, "attend")
    q = torch.randn(3, 2, dtype=torch.float64)
    out, _ = attend(q, q, q, 0)
    assert_close(out[0], q[0])
