"""Ring attention in real processes against attention in one process and against torch's ring."""

from math import prod

import pytest
from close import is_close
from parallel_ranks import DATTENTION, DOUBLE, QKV, RING_MISTAKES, SHAPE, TILE
from torch.nn.functional import scaled_dot_product_attention

import memlab
from memlab.planner.parallel import ring_attention_blocks, ring_attention_elements
from memlab.reference.tiled_attention import flash

pytestmark = pytest.mark.distributed


@pytest.fixture
def ranks(launched):
    return [found["ring"] for found in launched]


@pytest.fixture(scope="module")
def one():
    """Return the output and the gradients of q, k and v in one process."""
    qkv = [x.clone().requires_grad_() for x in QKV]
    out = scaled_dot_product_attention(*qkv, is_causal=True)
    out.backward(DATTENTION)
    return [out.detach(), *(x.grad for x in qkv)]


def close(found, expected):
    """Return for each value of a rank whether it is right within rounding."""
    return [is_close(mine, other) for mine, other in zip(found, expected, strict=True)]


def of_rank(values, rank, ranks):
    return [x.chunk(ranks, -2)[rank] for x in values]


def test_output_and_gradients_are_those_of_one_process(ranks, one):
    for rank, found in enumerate(ranks):
        assert all(close(found["ours"]["values"], of_rank(one, rank, len(ranks))))


def test_torchs_ring_gives_the_same(ranks):
    for found in ranks:
        assert all(close(found["ours"]["values"], found["torch"]))


def test_torchs_context_parallelism_does_not_take_the_cpus_attention(ranks):
    for found in ranks:
        # Its ring, `_templated_ring_attention`, takes the operators as an argument and runs on
        # gloo.
        assert "flash_attention_for_cpu" in found["not supported"]


def test_blocks_that_are_added_without_weights_are_wrong_on_all_ranks_but_0(ranks, one):
    """Rank 0 sees its own block alone, but other ranks' outputs are in its keys' gradients. The
    values' gradients need only the log-sum-exp, which is right."""
    assert "blocks are added without weights" in RING_MISTAKES
    for rank, found in enumerate(ranks):
        values = found["wrong"]["blocks are added without weights"]
        right = close(values, of_rank(one, rank, len(ranks)))
        assert right == [rank == 0, rank == 0, False, True]


def test_gradients_that_do_not_go_round_reach_the_wrong_keys_and_values(ranks, one):
    assert "gradients do not go round" in RING_MISTAKES
    for rank, found in enumerate(ranks):
        values = found["wrong"]["gradients do not go round"]
        assert close(values, of_rank(one, rank, len(ranks))) == [True, True, False, False]


# ------------------------------------------------------------------ bytes


def sizes(ranks):
    """Return the bytes of a rank's q (k, v or output as well) and of its log-sum-exp."""
    block = DOUBLE * prod(SHAPE) // ranks
    return block, block // SHAPE[-1]


def test_a_rank_saves_its_share_of_the_sequence(ranks):
    block, lse = sizes(len(ranks))
    assert [found["ours"]["held"] for found in ranks] == [4 * block + lse] * len(ranks)


def test_forward_holds_two_blocks_of_keys_and_values_of_others_at_most(ranks):
    """q, k, v, the output before, of the block and after, two temporaries of the merge."""
    block, lse = sizes(len(ranks))
    for rank, found in enumerate(ranks):
        others = 2 * ring_attention_blocks(rank, len(ranks))
        assert found["ours"]["peaks"][0] == (8 + others) * block + 3 * lse


def test_backward_holds_them_and_sums_beyond_the_attention_to_one_block(ranks):
    """The sums are dq, dk and dv."""
    block, _ = sizes(len(ranks))
    q, k, v = (x.chunk(len(ranks), -2)[0].clone().requires_grad_() for x in QKV)
    dout = DATTENTION.chunk(len(ranks), -2)[0].clone()
    out = flash(q, k, v, TILE, 0)
    with memlab.meter() as running:
        out.backward(dout)
    for rank, found in enumerate(ranks):
        others = 2 * ring_attention_blocks(rank, len(ranks))
        assert found["ours"]["peaks"][1] == running.trace.peak_bytes + (3 + others) * block


def test_each_rank_sends_keys_and_values_twice_and_their_gradients_once(ranks):
    block, _ = sizes(len(ranks))
    for rank, found in enumerate(ranks):
        to_the_next = block, (rank + 1) % len(ranks)
        forward, backward = found["ours"]["sent"]
        assert forward == [to_the_next] * 2 * (len(ranks) - 1)
        assert backward == [to_the_next] * 2 * (len(ranks) - 1 + len(ranks))
        batch, heads, length, head_dim = SHAPE
        elements = ring_attention_elements(length, 2 * heads * head_dim, len(ranks))
        assert sum(count for count, _ in forward + backward) == DOUBLE * batch * elements
