"""Tensor and sequence parallelism against one process and against torch's DTensor."""

import pytest
from close import assert_close, is_close
from parallel_ranks import (
    BATCH,
    DOUBLE,
    DOUT,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAUNCH_TIME_OUT,
    MISTAKES,
    PLAIN,
    SPLIT,
    TOKENS,
    WAYS,
    Block,
    X,
    dying,
    outcome,
    saved_bytes_of,
    whole_weights,
)

from memlab.configs.shapes import GPTConfig
from memlab.planner.cards import CARDS
from memlab.planner.costs import step_seconds
from memlab.planner.parallel import saved_bytes, tensor_parallel_elements
from memlab.planner.recipes import Recipe
from memlab.zero.formulas import ring_elements
from memlab.zero.launch import RanksFailed, run_ranks

pytestmark = pytest.mark.distributed

ROWS = TOKENS * BATCH


@pytest.fixture
def ranks(launched):
    return [found["tensor"] for found in launched]


@pytest.fixture(scope="module")
def one():
    return outcome(Block(whole_weights(), PLAIN), X, DOUT)


def share(name, whole, rank, ranks, way):
    """Return what a rank is to have of an output or gradient of one process."""
    dim = SPLIT.get(name)
    if name in ("output", "input"):
        dim = 0 if way == "sequence" else None
    return whole if dim is None else whole.chunk(ranks, dim)[rank]


def differing(found, one, rank, ranks, way):
    """Return the names of the values that differ by more than rounding."""
    return {
        name
        for name, value in found.items()
        if not is_close(value, share(name, one[name], rank, ranks, way))
    }


@pytest.mark.parametrize("way", WAYS)
def test_outputs_and_all_gradients_are_those_of_one_process(ranks, one, way):
    for rank, found in enumerate(ranks):
        values = found[way]["values"]
        assert values.keys() == one.keys()
        assert differing(values, one, rank, len(ranks), way) == set()


@pytest.mark.parametrize(
    ("mistake", "way", "wrong"),
    [
        ("no all-reduce in backward", "tensor", {"input", "norm1", "norm2", "qkv", "out"}),
        ("an all-reduce in both passes", "tensor", set(SPLIT) | {"input"}),
        ("each rank its own norm gradient", "sequence", {"norm1", "norm2"}),
    ],
)
def test_a_wrong_conjugate_shows_in_the_gradients(ranks, one, mistake, way, wrong):
    assert mistake in MISTAKES
    for rank, found in enumerate(ranks):
        assert differing(found["wrong"][mistake], one, rank, len(ranks), way) == wrong


def expected_saved(way, ranks):
    """Return the bytes that a rank saves for the block's backward pass.

    Every norm saves the normalized x, its output and 1/RMS (the norm of the CPU is a composite).
    The residual stream is saved between the halves, and as the output, which the caller holds.
    """
    norms, stream = 2 * (2 * HIDDEN + 1), 2 * HIDDEN
    attention = 3 * HIDDEN + HIDDEN + HEADS  # q, k, v, output, log-sum-exp
    return saved_bytes(
        ROWS,
        whole=DOUBLE * (norms + stream),
        divided=DOUBLE * (attention + 2 * INTERMEDIATE),
        tensor=ranks,
        sequence_parallel=way == "sequence",
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_saves_its_share_of_the_activations(ranks, way):
    expected = expected_saved(way, len(ranks))
    assert [found[way]["saved"] for found in ranks] == [expected] * len(ranks)


def test_only_with_sequence_parallelism_all_activations_are_divided():
    assert expected_saved("sequence", 2) * 2 == expected_saved("tensor", 1)
    assert expected_saved("tensor", 2) * 2 > 1.3 * expected_saved("tensor", 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_holds_its_share_of_the_matrices_and_all_norm_weights(ranks, way):
    own = ROWS // len(ranks) if way == "sequence" else ROWS  # of the input's gradient
    matrices = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * INTERMEDIATE
    expected = DOUBLE * (matrices // len(ranks) + 2 * HIDDEN)
    for found in ranks:
        assert found[way]["held"] == {
            "parameters": expected,
            "gradients": expected + DOUBLE * own * HIDDEN,
        }


def test_tensor_parallelism_sends_four_all_reduces_as_the_planner_counts(ranks):
    config = GPTConfig(
        vocab_size=10,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        layers=1,
        heads=HEADS,
        kv_heads=HEADS,
        seq_len=TOKENS,
    )
    recipe, card = Recipe(precision="float32", tensor_parallel=len(ranks)), CARDS["h100"]
    seconds = step_seconds(config, recipe, BATCH, TOKENS, gpus=len(ranks), card=card)
    of_float32 = seconds["network"] * card.link_bandwidth
    for found in ranks:
        assert found["tensor"]["sent"] == {
            "all_reduce": 4,
            "bytes": pytest.approx(DOUBLE / 4 * of_float32),
        }


def test_sequence_parallelism_sends_as_much_forward_and_gathers_again_in_backward(ranks):
    stream = tensor_parallel_elements(ROWS, HIDDEN, len(ranks), sequence_parallel=True)
    norms = 2 * 2 * ring_elements(HIDDEN, len(ranks))
    for found in ranks:
        assert found["sequence"]["sent"] == {
            "all_gather": 2 + 2 + 2,  # forward, backward of reduce-scatters, inputs once more
            "reduce_scatter": 2 + 2,
            "all_reduce": 2,  # of the norms' gradients
            "bytes": DOUBLE * (stream + norms),
        }


@pytest.mark.parametrize("way", WAYS)
def test_torchs_parallel_modules_give_the_same(ranks, way):
    for found in ranks:
        theirs, ours = (found["torch"][way][whose][0] for whose in ("theirs", "ours"))
        assert theirs.keys() == ours.keys()
        for name, value in theirs.items():
            assert_close(ours[name], value)


def test_torchs_sequence_parallelism_saves_the_gathered_input_and_ours_a_share(ranks):
    for found in ranks:
        # DTensor redistributes before the matmul, so torch saves the gathered input. Korthikanti et
        # al. gather again in backward.
        theirs, ours = (found["torch"]["sequence"][whose][1] for whose in ("theirs", "ours"))
        assert theirs - ours == DOUBLE * (ROWS - ROWS // len(ranks)) * HIDDEN
        theirs, ours = (found["torch"]["tensor"][whose][1] for whose in ("theirs", "ours"))
        assert theirs == ours


@pytest.mark.parametrize("way", WAYS)
def test_the_meter_counts_a_ranks_part_of_torchs_parallel_modules(ranks, way):
    for found in ranks:
        (_, theirs, trace), (_, _, ours) = (found["torch"][way][w] for w in ("theirs", "ours"))
        assert saved_bytes_of(trace) >= theirs
        assert trace.at_end["parameters"] == ours.at_end["parameters"]


def test_a_weight_that_ranks_do_not_divide_is_refused(ranks):
    for found in ranks:
        assert found["refused"] == f"got size 7 in dimension 0; use a multiple of {len(ranks)}"


def test_a_rank_that_dies_in_backward_ends_all_with_one_sentence():
    with pytest.raises(RanksFailed, match=r"^rank 1 of 2 failed: killed by SIGKILL$"):
        run_ranks(dying, 2, timeout=LAUNCH_TIME_OUT)
