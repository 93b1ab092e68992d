"""The reference attention against brute force, torch's fused kernels, and its own byte count."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from quick import together
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.attention import attention_reference, repeat_heads

B, H, T, D = 2, 4, 6, 8


def random_qkv(*, heads=H, kv_heads=H, queries=T, keys=T, dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    return [
        torch.randn(B, h, t, D, generator=generator, dtype=dtype).requires_grad_(grad)
        for h, t in shapes
    ]


def sees(i, j, *, queries, keys, causal=False, alignment="top-left", window=None):
    """Whether query i sees key j."""
    if alignment == "bottom-right":
        i += keys - queries
    left, right = window or (None, None)
    return (
        not (causal and j > i)
        and (left is None or j >= i - left)
        and (right is None or j <= i + right)
    )


def by_hand(q, k, v, **settings):
    """Compute attention one query at a time, in plain Python."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    lengths = {"queries": q.shape[2], "keys": k.shape[2]}
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = [j for j in range(k.shape[2]) if sees(i, j, **lengths, **settings)]
        keys, values = (x[b, h // group, seen].tolist() for x in (k, v))
        query = q[b, h, i].tolist()
        products = [sum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
        scores = [product / math.sqrt(D) for product in products]
        exponentials = [math.exp(score) for score in scores]
        for d in range(D) if seen else ():
            weighted = sum(e * value[d] for e, value in zip(exponentials, values, strict=True))
            out[b, h, i, d] = weighted / sum(exponentials)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_reference_equals_the_sum_written_out_by_hand(causal, kv_heads):
    q, k, v = random_qkv(kv_heads=kv_heads)
    expected = by_hand(q, k, v, causal=causal)
    result = attention_reference(q, k, v, causal=causal)
    assert_close(result, expected)


@together("window", [None, (2, 1), (0, None), (None, 0), (1, 0)])
@together("causal", [False, True])
@together("alignment", ["top-left", "bottom-right"])
@together(("queries", "keys"), [(6, 6), (2, 5), (5, 2), (6, 0)])
def test_the_reference_equals_the_sum_by_hand_in_every_alignment_and_window(
    queries, keys, alignment, causal, window
):
    q, k, v = random_qkv(queries=queries, keys=keys)
    settings = {"causal": causal, "alignment": alignment, "window": window}
    result = attention_reference(q, k, v, **settings)
    assert_close(result, by_hand(q, k, v, **settings))


def test_a_query_that_sees_no_key_gets_zero_and_gives_no_gradient():
    q, k, v = random_qkv(queries=5, keys=2, grad=True)
    out = attention_reference(q, k, v, causal=True, alignment="bottom-right")
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert out[:, :, :3].eq(0).all()
    assert dq[:, :, :3].eq(0).all()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (2, 5), (5, 2), (1, 7)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_reference_equals_torch_at_every_pair_of_lengths(causal, queries, keys, kv_heads):
    q, k, v = random_qkv(queries=queries, keys=keys, kv_heads=kv_heads)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    result = attention_reference(q, k, v, causal=causal)
    assert_close(result, expected)


def test_the_reference_has_the_gradients_of_torch():
    q, k, v = random_qkv(kv_heads=2, grad=True)
    ours = attention_reference(q, k, v, causal=True)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.manual_seed(0)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), upstream),
        torch.autograd.grad(theirs, (q, k, v), upstream),
        strict=True,
    ):
        assert_close(a, b)


def test_the_scale_can_be_chosen():
    q, k, v = random_qkv()
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.7)
    assert_close(attention_reference(q, k, v, scale=0.7), expected)


def test_a_scale_of_zero_is_a_plain_average():
    q, k, v = random_qkv()
    expected = v.mean(dim=2, keepdim=True).expand_as(v)
    assert_close(attention_reference(q, k, v, scale=0.0), expected)


def test_scores_in_the_thousands_do_not_overflow():
    q, k, v = random_qkv(dtype=torch.float32)
    expected = F.scaled_dot_product_attention(1e3 * q, k, v)
    assert_close(attention_reference(1e3 * q, k, v), expected)


def test_a_causal_query_sees_the_keys_up_to_its_own_position():
    q, k, v = random_qkv(queries=2, keys=5)
    assert_close(attention_reference(q, k, v, causal=True)[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_has_the_dtype_of_the_queries(dtype):
    q, k, v = random_qkv(dtype=dtype)
    assert attention_reference(q, k, v, causal=True).dtype == dtype


def test_the_float32_error_of_the_reference_is_at_most_twice_torchs():
    q, k, v = random_qkv(queries=64, keys=64)
    exact = attention_reference(q, k, v, causal=True)
    q, k, v = q.float(), k.float(), v.float()
    ours = (attention_reference(q, k, v, causal=True) - exact).abs().max()
    theirs = (F.scaled_dot_product_attention(q, k, v, is_causal=True) - exact).abs().max()
    assert 0 < ours <= 2 * theirs + 1e-6


def test_repeated_heads_are_adjacent():
    x = torch.arange(3).view(1, 3, 1, 1)
    assert repeat_heads(x, 2).flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_repeating_heads_once_copies_nothing():
    x = torch.randn(B, H, T, D)
    assert repeat_heads(x, 1).data_ptr() == x.data_ptr()


def saved_bytes(attention, q, k, v, **settings):
    """Return bytes kept for backward without the arguments, by shape of the storage's first
    tensor."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, (tuple(tensor.shape), storage.nbytes(), tensor))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(q, k, v, **settings)
    for argument in (q, k, v):
        storages.pop(argument.untyped_storage()._cdata, None)
    return sorted(nbytes for _, nbytes, _ in storages.values())


def test_backward_keeps_one_score_matrix_per_head_and_the_scaled_queries():
    q, k, v = random_qkv(grad=True)
    scores, queries = 8 * B * H * T * T, 8 * B * H * T * D
    assert saved_bytes(attention_reference, q, k, v) == sorted([scores, queries])


def test_a_causal_mask_is_kept_once_for_all_heads_at_one_byte_per_score():
    q, k, v = random_qkv(grad=True)
    plain = saved_bytes(attention_reference, q, k, v)
    causal = saved_bytes(attention_reference, q, k, v, causal=True)
    assert causal == sorted([*plain, T * T])


def test_a_head_of_length_8192_keeps_256_mib_in_float32():
    q, k, v = (torch.empty(1, 1, 8192, 64, device="meta", requires_grad=True) for _ in range(3))
    assert saved_bytes(attention_reference, q, k, v)[-1] == 256 * 2**20


class ScoreMatricesAlive(TorchDispatchMode):
    """Counts the most score matrices alive after any operator."""

    def __init__(self):
        super().__init__()
        self.seen, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if out.numel() == B * H * T * T and out.dtype != torch.bool:
            self.seen.append(weakref.ref(out))
        alive = {x().data_ptr() for x in self.seen if x() is not None}
        self.most = max(self.most, len(alive))
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_scores_and_probabilities_are_alive_together(causal):
    with ScoreMatricesAlive() as scores:
        attention_reference(*random_qkv(), causal=causal)
    assert scores.most == 2


def test_an_indivisible_number_of_heads_is_an_error():
    q, k, v = random_qkv(heads=4, kv_heads=3)
    wanted = "4 query heads cannot share 3 key/value heads evenly; .* that divides 4"
    with pytest.raises(ValueError, match=wanted):
        attention_reference(q, k, v)
