"""`flash_attn_func` has the flash-attn package's interface, and torch's values."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from close import assert_close

from memlab.attention import attention_reference
from memlab.attention.package_interface import flash_attn_func

# From the package's README ("How to use FlashAttention") and docstring, flash-attn 2.8.4.
DOCUMENTED = {
    "q": inspect.Parameter.empty,
    "k": inspect.Parameter.empty,
    "v": inspect.Parameter.empty,
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
# The causal masks of the README, for (2, 5) and (5, 2) queries and keys.
DOCUMENTED_MASKS = {
    (2, 5): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    (5, 2): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
}
B, H, KV, D = 2, 4, 2, 8


def random_qkv(queries=33, keys=None, *, dtype=torch.float64, device="cpu", kv_heads=KV):
    torch.manual_seed(0)
    shapes = (queries, H), *((queries if keys is None else keys, kv_heads),) * 2
    return [torch.randn(B, *s, D, dtype=dtype, device=device, requires_grad=True) for s in shapes]


def sdpa(q, k, v, *, mask=None, **options):
    """torch's attention in the package's layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options).transpose(1, 2)


def assert_same_with_gradients(ours, theirs, qkv):
    assert_close(ours, theirs)
    upstream = torch.randn_like(theirs)
    pairs = zip(
        torch.autograd.grad(ours, qkv, upstream, retain_graph=True),
        torch.autograd.grad(theirs, qkv, upstream),
        strict=True,
    )
    for a, b in pairs:
        assert_close(a, b)


def test_names_order_and_defaults_are_the_documented_ones():
    found = inspect.signature(flash_attn_func).parameters
    assert {name: p.default for name, p in found.items()} == DOCUMENTED
    assert list(found) == list(DOCUMENTED)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_are_torchs(causal, scale):
    qkv = random_qkv()
    ours = flash_attn_func(*qkv, causal=causal, softmax_scale=scale)
    assert ours.shape == (B, 33, H, D)
    assert_same_with_gradients(ours, sdpa(*qkv, is_causal=causal, scale=scale), qkv)


@pytest.mark.parametrize("lengths", DOCUMENTED_MASKS)
def test_the_causal_mask_is_the_documented_one(lengths):
    qkv = random_qkv(*lengths)
    mask = torch.tensor(DOCUMENTED_MASKS[lengths], dtype=torch.bool)
    ours = flash_attn_func(*qkv, causal=True)
    theirs = sdpa(*qkv, mask=mask).masked_fill(~mask.any(1)[None, :, None, None], 0)
    assert_close(ours, theirs)


@pytest.mark.parametrize("window", [(3, 2), (0, -1), (-1, 0), (5, 0)])
@pytest.mark.parametrize("lengths", [(33, 33), (7, 33)])
def test_windows_are_relative_to_the_bottom_right_diagonal(window, lengths):
    """Keys between i + keys − queries − left and i + keys − queries + right, inclusive."""
    queries, keys = lengths
    qkv = random_qkv(queries, keys)
    diagonal = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)
    left, right = (math.inf if side < 0 else side for side in window)
    mask = (j >= diagonal - left) & (j <= diagonal + right)
    ours = flash_attn_func(*qkv, window_size=window)
    assert_same_with_gradients(ours, sdpa(*qkv, mask=mask), qkv)


def test_the_log_sum_exp_is_that_of_the_scores_and_infinite_without_keys():
    q, k, v = random_qkv(5, 2)
    _, lse, probs = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    scores = q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(H // KV, 1).mT / D**0.5
    mask = torch.tensor(DOCUMENTED_MASKS[5, 2], dtype=torch.bool)
    expected = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
    expected = expected.masked_fill(expected == -math.inf, math.inf)
    assert_close(lse, expected.detach())
    assert lse.shape == (B, H, 5)
    assert probs is None


def test_dropout_has_the_right_mean():
    q, k, v = (x.detach() for x in random_qkv())
    runs = [flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2000)]
    mean = torch.stack(runs).mean(0)
    assert (mean - flash_attn_func(q, k, v)).abs().max() < 0.15
    assert not torch.equal(runs[0], runs[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softcap": 20.0}, "got softcap, which memlab's tiled attention lacks"),
        ({"alibi_slopes": torch.ones(H)}, "got alibi_slopes"),
    ],
)
def test_what_is_missing_is_one_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        flash_attn_func(*random_qkv(), **arguments)


def test_a_wrong_layout_is_named():
    q, k, v = random_qkv()
    with pytest.raises(ValueError, match=r"got q .*; give it as \(batch, tokens, heads"):
        flash_attn_func(q[0], k, v)
    with pytest.raises(ValueError, match="8 query heads cannot share 7"):  # heads before tokens
        flash_attn_func(*(x.transpose(1, 2) for x in random_qkv(8, 7)))


def test_the_installed_package_has_this_interface():
    package = pytest.importorskip("flash_attn")
    found = inspect.signature(package.flash_attn_func).parameters
    assert {name: p.default for name, p in found.items()} == DOCUMENTED


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (16, 0)])
def test_the_installed_package_has_these_values_on_a_gpu(causal, window):
    """The bound is the package's own: twice the error of the score matrix in bfloat16."""
    package = pytest.importorskip("flash_attn")
    qkv = [x.detach() for x in random_qkv(257, dtype=torch.bfloat16, device="cuda")]
    theirs = package.flash_attn_func(*qkv, causal=causal, window_size=window)
    ours = flash_attn_func(*qkv, causal=causal, window_size=window)
    exact, unfused = (
        attention_reference(
            *(x.transpose(1, 2) for x in given),
            causal=causal,
            alignment="bottom-right",
            window=tuple(None if side < 0 else side for side in window),
        ).transpose(1, 2)
        for given in ([x.double() for x in qkv], qkv)
    )
    bound = 2 * (unfused - exact).abs().max() + 1e-5
    for found in (ours, theirs):
        assert (found - exact).abs().max() <= bound
