"""Flash attention against the reference and torch: its values, its gradients, and its bytes."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from quick import quick
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import memlab
from memlab.attention import attention_reference, flash_attention
from memlab.checkpointing import checkpoint
from memlab.compression import compressed_activations
from memlab.model import GPT, PRESETS

B, H, D = 2, 4, 8
LENGTHS = [(33, 33), (5, 33), (33, 5), (1, 7), (7, 1)]
MASKS = [
    {"causal": causal, "alignment": alignment, "window": window}
    for causal, alignment, window in product(
        (False, True), ("top-left", "bottom-right"), (None, (3, 2), (0, None))
    )
]
BLIND = {"causal": True, "alignment": "bottom-right"}  # with more queries, the first see no key


def random_qkv(*, batch=B, heads=H, kv_heads=H, queries=33, keys=None, width=D, **options):
    options = {"dtype": torch.float64, "requires_grad": True} | options
    torch.manual_seed(0)
    shapes = (heads, queries), *((kv_heads, queries if keys is None else keys),) * 2
    return [torch.randn(batch, h, t, width, **options) for h, t in shapes]


def value_and_gradients(attention, q, k, v):
    out = attention(q, k, v)
    torch.manual_seed(1)
    upstream = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)


def largest(tensors) -> float:
    """Of all: with one key, the gradients of queries and keys cancel to zero."""
    return max(x.abs().max().item() for x in tensors)


# ------------------------------------------------------------------ values and gradients


@pytest.mark.few(6)
@pytest.mark.parametrize("tile", quick([16], [4, 16, 64]))
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_values_and_gradients_equal_the_reference(queries, keys, kv_heads, tile):
    qkv = random_qkv(queries=queries, keys=keys, kv_heads=kv_heads)
    for mask in MASKS:
        ours = value_and_gradients(partial(flash_attention, tile=tile, **mask), *qkv)
        theirs = value_and_gradients(partial(attention_reference, **mask), *qkv)
        assert_close(ours, theirs, summed=largest(theirs))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_values_and_gradients_equal_torch(queries, keys, causal):
    qkv = random_qkv(queries=queries, keys=keys, kv_heads=2)
    torchs = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    ours = value_and_gradients(partial(flash_attention, causal=causal, tile=8), *qkv)
    theirs = value_and_gradients(torchs, *qkv)
    assert_close(ours, theirs, summed=largest(theirs))


@pytest.mark.parametrize("value_dim", [1, 3, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_values_may_have_a_head_dimension_of_their_own_as_in_torch(causal, value_dim):
    q, k, v = random_qkv(kv_heads=2, keys=20)
    v = torch.randn(B, 2, 20, value_dim, dtype=v.dtype, requires_grad=True)
    torchs = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    theirs = value_and_gradients(torchs, q, k, v)
    for attention in (partial(flash_attention, tile=8), attention_reference):
        ours = value_and_gradients(partial(attention, causal=causal), q, k, v)
        assert_close(ours, theirs, summed=largest(theirs))
    by_token = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert flash_attention(by_token, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (33, 33), (3, 5), (5, 3)])
def test_gradients_equal_finite_differences(queries, keys, alignment):
    qkv = random_qkv(batch=1, heads=2, kv_heads=1, queries=queries, keys=keys, width=2)
    attend = partial(flash_attention, causal=True, alignment=alignment, tile=4)
    assert torch.autograd.gradcheck(attend, qkv, fast_mode=queries == 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_error_is_at_most_twice_the_references(causal, dtype):
    """FlashAttention's criterion: twice the reference's error from float64, three times for
    gradients."""
    exact = [x.to(dtype).double().detach().requires_grad_() for x in random_qkv(queries=200)]
    rounded = [x.to(dtype).detach().requires_grad_() for x in exact]
    reference = partial(attention_reference, causal=causal)
    wanted = value_and_gradients(reference, *exact)
    ours = value_and_gradients(partial(flash_attention, causal=causal, tile=32), *rounded)
    naive = value_and_gradients(reference, *rounded)
    for most, a, b, c in zip((2, 3, 3, 3), ours, naive, wanted, strict=True):
        assert a.dtype == dtype
        assert 0 < (a - c).abs().max() <= most * (b - c).abs().max() + 1e-5


@pytest.mark.parametrize("scale", [0.7, 0.0, -1.0])
def test_the_scale_can_be_chosen(scale):
    qkv = random_qkv()
    ours = value_and_gradients(partial(flash_attention, scale=scale, tile=8), *qkv)
    theirs = value_and_gradients(partial(attention_reference, scale=scale), *qkv)
    assert_close(ours, theirs)


def test_scores_in_the_thousands_do_not_overflow():
    q, k, v = random_qkv()
    result = flash_attention(1e4 * q, k, v, tile=8)
    assert_close(result, attention_reference(1e4 * q, k, v))


@pytest.mark.parametrize("tile", [2, 64])
def test_a_query_that_sees_no_key_gets_zero_and_gives_no_gradient(tile):
    qkv = random_qkv(queries=7, keys=3)
    out, dq, *others = value_and_gradients(partial(flash_attention, tile=tile, **BLIND), *qkv)
    assert out[:, :, :4].eq(0).all()
    assert dq[:, :, :4].eq(0).all()
    assert all(x.isfinite().all() for x in others)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_empty_queries_or_keys_are_allowed(queries, keys):
    q, k, v = random_qkv(queries=queries, keys=keys)
    out, dq, dk, dv = value_and_gradients(flash_attention, q, k, v)
    assert torch.equal(out, torch.zeros_like(q))
    assert not any(x.any() for x in (dq, dk, dv))


def test_the_tile_size_changes_only_the_order_of_sums():
    qkv = random_qkv(queries=20)
    one, *others = (
        value_and_gradients(partial(flash_attention, tile=tile), *qkv) for tile in (1, 7, 256)
    )
    for other in others:
        assert_close(one, other)


def test_two_runs_give_the_same_bits():
    qkv = random_qkv(queries=100, dtype=torch.float32)
    attend = partial(flash_attention, causal=True, tile=16)
    one, other = (value_and_gradients(attend, *qkv) for _ in range(2))
    assert all(map(torch.equal, one, other))


def test_the_saved_lse_is_the_log_sum_exp_of_the_scaled_scores():
    q, k, v = random_qkv(queries=9, keys=5)
    *_, lse = flash_attention(q, k, v, scale=0.3, tile=2).grad_fn.saved_tensors
    assert_close(lse, (0.3 * q @ k.mT).logsumexp(-1))
    *_, lse = flash_attention(q, k, v, tile=2, **BLIND).grad_fn.saved_tensors
    assert lse[:, :, :4].eq(math.inf).all()
    assert lse[:, :, 4:].isfinite().all()


def test_the_result_has_the_memory_layout_of_the_queries():
    q = torch.randn(B, 33, H, D).transpose(1, 2)
    out = flash_attention(q, q, q)
    assert out.stride() == q.stride()
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


# ------------------------------------------------------------------ bytes


def kept_for_backward(attention, *arguments, **settings):
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attention(*arguments, **settings)
    del out
    return sorted(x.untyped_storage().nbytes() for x in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_arguments_the_result_and_one_element_per_query(dtype):
    T, KV = 100, 2
    qkv = random_qkv(queries=T, kv_heads=KV, dtype=dtype)
    q_bytes, k_bytes = B * H * T * D * dtype.itemsize, B * KV * T * D * dtype.itemsize
    lse_bytes = 4 * B * H * T
    kept = kept_for_backward(flash_attention, *qkv, causal=True, tile=16, dropout=0.1)
    assert kept == sorted([q_bytes, q_bytes, k_bytes, k_bytes, lse_bytes])


@pytest.mark.few(1)
@pytest.mark.parametrize("dropout", quick([0.1], [0.0, 0.1]))
@pytest.mark.parametrize("kv_heads", quick([1], [4, 1]))
@pytest.mark.parametrize("causal", [False, True])
def test_the_score_matrix_is_never_stored(causal, kv_heads, dropout):
    T, tile = 300, 16
    qkv = random_qkv(batch=1, queries=T, kv_heads=kv_heads, dtype=torch.float32)

    def step():
        flash_attention(*qkv, causal=causal, tile=tile, dropout=dropout).sum().backward()

    trace = memlab.measure(step)
    made = [event for event in trace.events if event.bytes > 0 and event.phase != "before"]
    assert max(math.prod(event.shape) for event in made) < T * T
    tiles = [event for event in made if event.shape[-1:] == (tile,) and len(event.shape) == 3]
    assert max(math.prod(event.shape) for event in tiles) == max(4, H // kv_heads) * tile**2


def test_the_reference_stores_the_score_matrix():
    T = 300
    qkv = random_qkv(batch=1, queries=T, dtype=torch.float32)
    trace = memlab.measure(lambda: attention_reference(*qkv, causal=True).sum().backward())
    assert max(math.prod(event.shape) for event in trace.events) == H * T * T


def bend(attention):
    """By how many bytes the peak at three times a length is above the straight line."""

    def peak_bytes(length):
        qkv = random_qkv(batch=1, queries=length, dtype=torch.float32)
        return memlab.measure(lambda: attention(*qkv, causal=True).sum().backward()).peak_bytes

    one, two, three = map(peak_bytes, (96, 192, 288))
    return three - two - (two - one)


def test_the_peak_is_linear_in_the_length_and_the_references_quadratic():
    assert bend(partial(flash_attention, tile=16)) == 0
    score_matrices = bend(attention_reference) / (2 * 96**2)  # (3² - 2²) - (2² - 1²) = 2
    assert score_matrices >= 2 * H * 4  # bytes: two score matrices of H heads in float32


CASES = [
    {"queries": 70, "tile": 16, "causal": True},
    {"queries": 64, "tile": 16, "causal": True, "kv_heads": 2, "dropout": 0.1},
    {"queries": 100, "tile": 32, "causal": True, "window": (20, 0), "dtype": torch.bfloat16},
    {"queries": 40, "keys": 90, "tile": 16, "alignment": "bottom-right", "causal": True},
    {"queries": 90, "keys": 40, "tile": 16, "kv_heads": 1, "dtype": torch.bfloat16, **BLIND},
    {"queries": 50, "tile": 3, "heads": 8, "kv_heads": 8, "causal": True, "width": 32},
    {"queries": 50, "tile": 64, "heads": 8, "kv_heads": 8, "dtype": torch.bfloat16},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", quick(CASES[2:4], CASES))
def test_a_dry_run_has_the_same_peak_and_visits_fewer_tiles(case):
    of_tensors = {"queries", "keys", "heads", "kv_heads", "dtype", "width"}
    tensors = {"dtype": torch.float32} | {n: x for n, x in case.items() if n in of_tensors}
    settings = {n: x for n, x in case.items() if n not in of_tensors}

    def traced():
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_qkv(**tensors)]
        step = lambda: flash_attention(*qkv, **settings).sum().backward()  # noqa: E731
        return memlab.measure(step)

    real = traced()
    with memlab.dry_run():
        dry = traced()
    assert dry.peak_bytes == real.peak_bytes
    assert dry.at_peak == real.at_peak
    assert dry.live_bytes == real.live_bytes
    assert len(dry.events) < len(real.events)


# ------------------------------------------------------------------ dropout


def dropped_probs(q, k, **settings):
    """Return softmax(scores) ∘ kept, the multiplier of the values."""
    identity = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    assert k.shape[2] == k.shape[3]
    return flash_attention(q, k, identity, **settings)


SQUARE = {"queries": 33, "keys": 33, "width": 33}


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_backward_drops_what_forward_dropped(kv_heads):
    p = 0.3
    settings = {"causal": True, "tile": 8}
    q, k, v = random_qkv(kv_heads=kv_heads, **SQUARE)
    torch.manual_seed(5)
    dropped = dropped_probs(q, k, dropout=p, **settings)
    weights = dropped_probs(q, k, **settings)
    kept = torch.where(weights == 0, 0, dropped / weights).detach()
    assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / (1 - p)))

    def reference(q, k, v):
        k, v = (x.repeat_interleave(H // kv_heads, 1) for x in (k, v))
        scores = (q @ k.mT / math.sqrt(33)).masked_fill(torch.ones(33, 33).triu(1) > 0, -math.inf)
        return (scores.softmax(-1) * kept) @ v

    def ours(q, k, v):
        torch.manual_seed(5)
        return flash_attention(q, k, v, dropout=p, **settings)

    assert_close(value_and_gradients(ours, q, k, v), value_and_gradients(reference, q, k, v))


def test_dropout_keeps_the_expected_fraction_in_every_tile():
    q, _, v = random_qkv(queries=256, batch=1)
    zeros = torch.zeros_like(q)  # every probability is 1/256
    kept = flash_attention(zeros, zeros, torch.ones_like(v), dropout=0.25, tile=64)[..., 0]
    share = kept * 0.75  # the kept fraction of a query's keys
    deviation = math.sqrt(0.75 * 0.25 / 256)  # of one query's fraction
    assert abs(share.mean() - 0.75) < 5 * deviation / math.sqrt(share.numel())
    assert 0.8 < share.std() / deviation < 1.2


def test_dropping_everything_gives_zeros_as_in_torch():
    qkv = random_qkv()
    for attention in (
        partial(flash_attention, dropout=1.0),
        partial(F.scaled_dot_product_attention, dropout_p=1.0),
    ):
        assert not any(x.any() for x in value_and_gradients(attention, *qkv))


def test_only_a_call_with_dropout_draws_from_the_generator_and_only_once():
    qkv = random_qkv()
    torch.manual_seed(3)
    torch.randint(2**63 - 1, ())
    after_one = torch.get_rng_state()
    torch.manual_seed(3)
    out = flash_attention(*qkv, dropout=0.5, tile=4)
    assert torch.equal(torch.get_rng_state(), after_one)
    again = flash_attention(*qkv, dropout=0.5, tile=4)
    assert not torch.equal(out, again)
    before = torch.get_rng_state()
    out.sum().backward()
    flash_attention(*qkv)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ combinations


def trained(attention, **options):
    torch.manual_seed(0)
    model = GPT(PRESETS["tiny"], attention=attention, dtype=torch.float64, **options)
    tokens = torch.randint(256, (2, 65))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_model_accepts_it_in_place_of_torchs_attention():
    ours, theirs = (trained(a) for a in (partial(flash_attention, tile=24), attention_reference))
    assert_close(ours, theirs)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpointing_it_gives_the_same_bits(dropout):
    qkv = random_qkv(kv_heads=2)

    def attend(q, k, v):
        return flash_attention(q * 2, k, v, dropout=dropout, causal=True, tile=8)

    torch.manual_seed(2)
    plain = value_and_gradients(attend, *qkv)
    torch.manual_seed(2)
    again = value_and_gradients(partial(checkpoint, attend), *qkv)
    assert all(map(torch.equal, plain, again))


def test_8_bit_activations_change_its_gradients_slightly():
    qkv = random_qkv(dtype=torch.float32, queries=64)

    def attend(q, k, v):
        with compressed_activations(bits=8, min_numel=1):
            return flash_attention(q * 1, k * 1, v * 1, causal=True, tile=16)

    exact = value_and_gradients(partial(flash_attention, causal=True), *qkv)
    for a, b in zip(value_and_gradients(attend, *qkv)[1:], exact[1:], strict=True):
        assert 0 < (a - b).norm() / b.norm() < 0.02


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_one_call_with_its_settings():
    qkv = random_qkv()
    expected = flash_attention(*qkv, causal=True, window=(3, 0), scale=0.5, tile=8)
    with Seen() as seen:
        out = flash_attention(*qkv, causal=True, window=(3, 0), scale=0.5, tile=8)
    assert seen.functions == [flash_attention]
    assert torch.equal(out, expected)


def test_under_autocast_it_gets_the_same_inputs_as_torchs_attention():
    qkv = random_qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = value_and_gradients(partial(flash_attention, tile=8), *qkv)
        assert F.scaled_dot_product_attention(*qkv).dtype == ours[0].dtype == torch.bfloat16
    halves = [x.bfloat16() for x in qkv]
    plain = value_and_gradients(partial(flash_attention, tile=8), *halves)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, plain, strict=True))


def test_autocast_accepts_queries_and_values_of_different_dtypes():
    q, k, v = random_qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention(q.bfloat16(), k.bfloat16(), v).dtype == torch.bfloat16


def test_memory_can_be_predicted_through_it():
    def build():
        model = GPT(PRESETS["tiny"], attention=flash_attention)
        tokens = torch.zeros(1, 64, dtype=torch.long)
        return lambda: model(tokens, tokens).backward(), model, None

    assert memlab.predict(build).peak_bytes > 0


def test_without_a_gradient_nothing_is_kept():
    qkv = random_qkv(requires_grad=False)
    assert kept_for_backward(flash_attention, *qkv) == []


def test_several_backward_passes_over_one_graph_agree():
    q, k, v = random_qkv()
    out = flash_attention(q, k, v, dropout=0.2, tile=8).sum()
    first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, (q, k, v))))


# ------------------------------------------------------------------ errors


def test_a_second_derivative_is_an_error():
    q, k, v = random_qkv()
    out = flash_attention(q, k, v)
    [gradient] = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative: .* use attention_reference"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("shapes", "settings", "wanted"),
    [
        (((4, 6, 8),) * 3, {}, r"got q \(4, 6, 8\), .*; give q as \(B, H, Tq, D\)"),
        (((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 5, 8)), {}, r"and v as \(B, KV, Tk, Dv\)"),
        (((1, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {}, "the same B, and q and k the same D"),
        (((1, 4, 6, 8), (1, 4, 6, 4), (1, 4, 6, 4)), {}, "the same B, and q and k the same D"),
        (((1, 4, 6, 0),) * 3, {}, "with a head dimension of 0; give at least 1"),
        (((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 0)), {}, "with a head dimension of 0"),
        (((1, 4, 6, 8), (1, 3, 6, 8), (1, 3, 6, 8)), {}, "4 query heads cannot share 3 key/val"),
        (((1, 4, 6, 8),) * 3, {"dropout": 1.1}, "got dropout=1.1; give a probability from 0"),
        (((1, 4, 6, 8),) * 3, {"tile": 0}, "got tile=0; give at least 1"),
        (((1, 4, 6, 8),) * 3, {"alignment": "top"}, "got alignment='top'; choose"),
        (((1, 4, 6, 8),) * 3, {"window": (-1, 0)}, r"got window=\(-1, 0\); give how many"),
    ],
)
def test_invalid_arguments_are_named_in_the_error(shapes, settings, wanted):
    with pytest.raises(ValueError, match=wanted):
        flash_attention(*map(torch.zeros, shapes), **settings)


def test_different_dtypes_are_an_error():
    q, k, v = random_qkv()
    with pytest.raises(ValueError, match=r"q in torch.float64, .* and v in torch.float32; give"):
        flash_attention(q, k, v.float())
    with pytest.raises(ValueError, match="in one floating-point dtype"):
        flash_attention(q.long(), k.long(), v.long())


def test_a_transform_of_torch_func_is_an_error_in_one_sentence():
    q, k, v = (x.detach() for x in random_qkv())
    with pytest.raises(RuntimeError, match=r"got flash_attention inside vmap, .*; use att"):
        torch.vmap(flash_attention)(q[None], k[None], v[None])
    wanted = attention_reference(q, k, v)
    assert_close(torch.vmap(attention_reference)(q[None], k[None], v[None])[0], wanted)
