"""The attention kernels against the reference in float64, and their allocations."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from quick import quick, slow
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import memlab
from memlab import attention as plain
from memlab.attention import attention_reference
from memlab.compression import compressed_activations
from memlab.kernels import attention
from memlab.kernels.attention import Tiling, flash_attention
from memlab.model import GPT, PRESETS

B, H, D = 1, 2, 8
LENGTHS = [slow((33, 33)), slow((5, 33)), (33, 5), (1, 7), (7, 1)]
MASKS = [
    {"causal": causal, "alignment": alignment, "window": window}
    for causal, alignment, window in product(
        (False, True), ("top-left", "bottom-right"), (None, (3, 2), (0, None))
    )
]
BLIND = {"causal": True, "alignment": "bottom-right"}  # the first queries see no keys
TILES = {"square": (16, 16), "wide": (16, 32), "tall": (32, 16)}


@pytest.fixture
def small_tiles(monkeypatch, request):
    """Use small tiles, so that small inputs have many."""
    queries, keys = TILES[getattr(request, "param", "square")]
    for itemsize in (2, 4):
        tiling = (Tiling(queries, keys, 4, 2),) * 3
        monkeypatch.setitem(attention.TILINGS, (itemsize, 16), tiling)


def random_qkv(device, *, batch=B, heads=H, kv_heads=H, queries=33, keys=None, width=D, **options):
    options = {"dtype": torch.float32, "requires_grad": True} | options
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, queries), *((kv_heads, queries if keys is None else keys),) * 2
    drawn = [torch.randn(batch, h, t, width, generator=generator) for h, t in shapes]
    return [x.to(device, options["dtype"]).requires_grad_(options["requires_grad"]) for x in drawn]


def in_float64(qkv):
    return [x.detach().double().requires_grad_() for x in qkv]


def value_and_gradients(attend, q, k, v):
    out = attend(q, k, v)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator).to(q.device, q.dtype)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream.to(out.dtype))


def assert_exact(qkv, **settings):
    ours = value_and_gradients(partial(flash_attention, **settings), *qkv)
    expected = value_and_gradients(partial(attention_reference, **settings), *in_float64(qkv))
    for a, b in zip(ours, expected, strict=True):
        assert_close(a, b.float(), terms=16, summed=max(1, b.abs().max()))


# ------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("small_tiles", quick(["square"], TILES), indirect=True)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_output_and_gradients_match_the_reference(device, small_tiles, queries, keys):
    qkv = random_qkv(device, heads=1, kv_heads=1, queries=queries, keys=keys)
    for mask in MASKS:
        if (
            queries != keys or mask["alignment"] == "top-left"
        ):  # otherwise both alignments are equal
            assert_exact(qkv, **mask)


@pytest.mark.parametrize("small_tiles", quick(["wide"], ["wide", "tall"]), indirect=True)
@pytest.mark.parametrize("mask", [MASKS[4], MASKS[9]], ids=str)
def test_tiles_need_not_be_square(device, small_tiles, mask):
    assert_exact(random_qkv(device, heads=1, kv_heads=1, queries=80, keys=70), **mask)


@pytest.mark.parametrize("kv_heads", quick([2], [4, 2, 1]))
def test_heads_that_share_keys_sum_their_gradients(device, kv_heads):
    assert_exact(random_qkv(device, heads=4, kv_heads=kv_heads), causal=True)


@pytest.mark.parametrize("width", quick([1, 20, 100], [1, 16, 20, 64, 100, 128, 256]))
def test_every_head_dimension_works_with_its_tiles(device, width):
    qkv = random_qkv(device, heads=1, kv_heads=1, queries=150, keys=80, width=width)
    assert_exact(qkv, causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("causal", "width"), quick([(True, 8), (False, 64)], [(True, 8), (False, 64), (True, 128)])
)
def test_errors_are_at_most_twice_the_reference(device, causal, width, dtype):
    """FlashAttention's own criterion, relative to float64; three times for gradients."""
    qkv = random_qkv(device, queries=150, width=width, dtype=dtype)
    reference = partial(attention_reference, causal=causal)
    expected = value_and_gradients(reference, *in_float64(qkv))
    ours = value_and_gradients(partial(flash_attention, causal=causal), *qkv)
    naive = value_and_gradients(reference, *qkv)
    for factor, a, b, c in zip((2, 3, 3, 3), ours, naive, expected, strict=True):
        assert a.dtype == dtype
        assert 0 < (a - c).abs().max() <= factor * (b - c).abs().max() + 1e-5


@pytest.mark.parametrize("scale", quick([0.0, -1.0], [0.7, 0.0, -1.0]))
def test_the_scale_can_be_chosen(device, small_tiles, scale):
    assert_exact(random_qkv(device, kv_heads=1), scale=scale, causal=True)


def test_scores_in_the_thousands_do_not_overflow(device, small_tiles):
    q, k, v = (x.detach() for x in random_qkv(device))
    for scale in (1e3, -1e3):
        result = flash_attention(q, k, v, scale=scale)
        expected = attention_reference(*in_float64((q, k, v)), scale=scale)
        summed = (scale * q @ k.mT).abs().max() * v.abs().max()  # what a score rounds away
        assert_close(result, expected.float(), terms=2, summed=summed)


def test_a_query_without_keys_gives_zero_and_no_gradient(device, small_tiles):
    qkv = random_qkv(device, queries=40, keys=20)
    out, dq, *others = value_and_gradients(partial(flash_attention, **BLIND), *qkv)
    assert out[:, :, :20].eq(0).all()
    assert dq[:, :, :20].eq(0).all()
    assert all(x.isfinite().all() for x in (out, dq, *others))


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_empty_queries_or_keys_are_accepted(device, queries, keys):
    q, k, v = random_qkv(device, queries=queries, keys=keys)
    out, dq, dk, dv = value_and_gradients(flash_attention, q, k, v)
    assert torch.equal(out, torch.zeros_like(q))
    assert not any(x.any() for x in (dq, dk, dv))


def test_two_runs_give_the_same_bits(device):
    qkv = random_qkv(device, queries=80)
    attend = partial(flash_attention, causal=True)
    kernel, other = (value_and_gradients(attend, *qkv) for _ in range(2))
    assert all(map(torch.equal, kernel, other))


def test_every_tile_is_computed_for_any_number_of_concurrent_heads(
    device, small_tiles, monkeypatch
):
    qkv = random_qkv(device, batch=3, heads=2, queries=20)
    expected = value_and_gradients(flash_attention, *qkv)
    monkeypatch.setattr(attention, "CACHE_BYTES", 4 * 2 * 20 * D * 4)  # fits 4 of 6 heads
    assert all(map(torch.equal, value_and_gradients(flash_attention, *qkv), expected))


def test_lse_is_the_log_sum_exp_of_the_scaled_scores(device, small_tiles):
    q, k, v = random_qkv(device, queries=20, keys=18)
    for scale in (0.3, -0.3):
        *_, lse = flash_attention(q, k, v, scale=scale).grad_fn.saved_tensors
        assert_close(lse, (scale * q @ k.mT).logsumexp(-1))
    *_, lse = flash_attention(q, k, v, **BLIND).grad_fn.saved_tensors
    assert lse[:, :, :2].eq(math.inf).all()
    assert lse[:, :, 2:].isfinite().all()


# ------------------------------------------------------------------ layouts


def test_output_and_gradients_are_laid_out_like_the_inputs(device):
    tensors = [x.detach() for x in random_qkv(device, batch=2, queries=20)]
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors)
    assert_exact((q, k, v), causal=True)
    out, dq, dk, dv = value_and_gradients(flash_attention, q, k, v)
    assert out.stride() == dq.stride() == q.stride() != out.contiguous().stride()
    assert dk.stride() == dv.stride() == k.stride()


def test_any_strides_are_supported(device, small_tiles):
    q, k, v = (x.detach() for x in random_qkv(device, queries=20))
    q = q.mT.contiguous().mT  # tokens contiguous, head dimension strided
    k = k.repeat_interleave(2, dim=3)[..., ::2]
    v = v[:, :1].expand(-1, H, -1, -1)
    assert_exact([x.requires_grad_() for x in (q, k, v)], causal=True)


def test_an_expanded_upstream_gradient_is_supported(device):
    qkv = random_qkv(device)
    [dv] = torch.autograd.grad(
        flash_attention(*qkv).sum(), qkv[2]
    )  # an expanded gradient with strides of 0
    [expected] = torch.autograd.grad(attention_reference(*qkv).sum(), qkv[2])
    assert_close(dv, expected)


# ------------------------------------------------------------------ bytes


def saved_bytes(*arguments, **settings):
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = flash_attention(*arguments, **settings)
    del out
    return sorted(x.untyped_storage().nbytes() for x in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_saves_the_inputs_the_output_and_one_value_per_query(device, dtype):
    T = 50
    qkv = random_qkv(device, queries=T, kv_heads=1, dtype=dtype)
    q_bytes, k_bytes = B * H * T * D * dtype.itemsize, B * T * D * dtype.itemsize
    saved = saved_bytes(*qkv, causal=True)
    assert saved == sorted([q_bytes, q_bytes, k_bytes, k_bytes, 4 * B * H * T])


def test_nothing_is_saved_without_gradients(device):
    assert saved_bytes(*random_qkv(device, requires_grad=False)) == []


CASES = [
    {"queries": 70, "causal": True},
    {"queries": 40, "keys": 90, "kv_heads": 1, "dtype": torch.bfloat16, "window": (20, 0)},
]


@pytest.mark.parametrize("is_dry", [False, True], ids=["real", "dry"])
@pytest.mark.parametrize("case", CASES)
def test_only_output_gradients_and_two_values_per_query_are_allocated(device, case, is_dry):
    tensor_options = {"queries", "keys", "kv_heads", "dtype"}
    tensors = {name: x for name, x in case.items() if name in tensor_options}
    settings = {name: x for name, x in case.items() if name not in tensor_options}

    def traced():
        q, k, v = random_qkv(device, **tensors)
        upstream = torch.ones_like(q)
        sizes = B * H * q.shape[2] * 4, *(x.numel() * x.itemsize for x in (q, k))
        step = lambda: flash_attention(q, k, v, **settings).backward(upstream)  # noqa: E731
        return memlab.measure(step), sizes

    trace, (row_bytes, q_bytes, k_bytes) = dry(traced) if is_dry else traced()
    allocated = [e.bytes for e in trace.events if e.bytes > 0 and e.phase != "before"]
    assert sorted(allocated) == sorted([q_bytes, row_bytes, row_bytes, q_bytes, k_bytes, k_bytes])
    before = sum(e.bytes for e in trace.events if e.phase == "before")
    assert trace.peak_bytes == before + 2 * row_bytes + 2 * q_bytes + 2 * k_bytes


def dry(function):
    with memlab.dry_run():
        return function()


# ------------------------------------------------------------------ combinations


def loss_and_gradients(attend, device):
    torch.manual_seed(0)
    model = GPT(PRESETS["tiny"], attention=attend, dtype=torch.float32).to(device)
    tokens = torch.randint(256, (1, 65)).to(device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_a_model_can_use_it_instead_of_torchs(device):
    ours, theirs = (loss_and_gradients(a, device) for a in (flash_attention, attention_reference))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)


def test_a_prediction_supports_it():
    def build():
        model = GPT(PRESETS["tiny"], attention=flash_attention)
        tokens = torch.zeros(1, 64, dtype=torch.long)
        return lambda: model(tokens, tokens).backward(), model, None

    assert memlab.predict(build).peak_bytes > 0


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_one_call_with_its_settings(device):
    qkv = random_qkv(device)
    expected = flash_attention(*qkv, causal=True, window=(3, 0), scale=0.5)
    with Seen() as seen:
        out = flash_attention(*qkv, causal=True, window=(3, 0), scale=0.5)
    assert seen.functions == [flash_attention]
    assert torch.equal(out, expected)


def test_eight_bit_activations_barely_change_its_gradients(device):
    qkv = random_qkv(device, queries=64)

    def attend(q, k, v):
        with compressed_activations(bits=8, min_numel=1):
            return flash_attention(q * 1, k * 1, v * 1, causal=True)

    exact = value_and_gradients(partial(flash_attention, causal=True), *qkv)
    for a, b in zip(value_and_gradients(attend, *qkv)[1:], exact[1:], strict=True):
        assert 0 < (a - b).norm() / b.norm() < 0.02


def test_autocast_casts_inputs_as_for_torchs_attention(device):
    qkv = random_qkv(device)
    with torch.autocast(device.type, torch.bfloat16):
        ours = value_and_gradients(flash_attention, *qkv)
        assert F.scaled_dot_product_attention(*qkv).dtype == ours[0].dtype == torch.bfloat16
    halves = value_and_gradients(flash_attention, *(x.bfloat16() for x in qkv))
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, halves, strict=True))


def test_repeated_backward_passes_agree(device):
    q, k, v = random_qkv(device)
    out = flash_attention(q, k, v).sum()
    first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, (q, k, v))))


# ------------------------------------------------------------------ invalid input


def test_a_second_derivative_is_refused(device):
    q, k, v = random_qkv(device)
    [gradient] = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative: .* use attention_reference"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("shapes", "settings", "expected"),
    [
        (((4, 6, 8),) * 3, {}, r"got q \(4, 6, 8\), .*; give q as \(B, H, Tq, D\)"),
        (((1, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {}, "the same B, and q and k the same D"),
        (
            ((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 4)),
            {},
            "8 and one of 4 for v, .* use memlab.attention.flash_attention",
        ),
        (((1, 4, 6, 8), (1, 3, 6, 8), (1, 3, 6, 8)), {}, "4 query heads cannot share 3 key/val"),
        (
            ((1, 4, 6, 257),) * 3,
            {},
            "a head dimension of 257, .* use memlab.attention.flash_attention",
        ),
        (((1, 4, 6, 8),) * 3, {"dropout": 0.1}, "dropout=0.1.*memlab.attention.flash_attention"),
        (((1, 4, 6, 8),) * 3, {"alignment": "top"}, "got alignment='top'; choose"),
        (((1, 4, 6, 8),) * 3, {"window": (-1, 0)}, r"got window=\(-1, 0\); give how many"),
    ],
)
def test_invalid_input_is_refused_with_a_message(shapes, settings, expected):
    with pytest.raises(ValueError, match=expected):
        flash_attention(*map(torch.zeros, shapes), **settings)


def test_float64_and_mixed_dtypes_are_refused():
    q, k, v = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    with pytest.raises(ValueError, match=r"got torch.float64.*memlab.attention.flash_attention"):
        flash_attention(*in_float64((q, k, v)))
    with pytest.raises(ValueError, match=r"v in torch.bfloat16; give all of them in one"):
        flash_attention(q, k, v.bfloat16())


def test_arguments_are_those_of_the_readable_version_without_tile():
    names = [plain.flash_attention.__kwdefaults__, flash_attention.__kwdefaults__]
    assert names[0] == names[1] | {"tile": 256}


# ------------------------------------------------------------------ compiled

COMPILED = """
import memlab.kernels.attention as attention

def heads(count, width):
    return torch.empty(2, count, 512, width, dtype=torch.bfloat16, device="meta").requires_grad_()

with compiled_for({capability}) as made:
    for width in (64, 128):
        q, k, v = heads(8, width), heads(4, width), heads(4, width)
        out = attention.flash_attention(q, k, v, causal=True)
        out.backward(torch.empty_like(out))
for one in made:
    assert one.shared_bytes <= SHARED_BYTES[{capability}], one
report(made)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", quick([89], [80, 86, 89, 90]))
def test_no_register_is_spilled_and_shared_memory_fits(compiled, capability):
    allocated = compiled(COMPILED.format(capability=capability))
    names = ["flash_forward", "flash_dq", "flash_dkdv"]
    assert [(kernel["name"], kernel["spilled"]) for kernel in allocated] == [
        (name, 0) for name in names * 2
    ]


def test_only_tensors_beyond_32_bit_offsets_are_copied():
    near = torch.empty(1, 2, 64, 8).mT  # (1, 2, 8, 64): strides of 1 and 8
    far = torch.empty(1, device="meta").as_strided((1, 2, 64, 8), (0, 0, 1, 2**23))
    assert attention._with_int32_offsets(near) is near
    assert attention._with_int32_offsets(far).is_contiguous()
