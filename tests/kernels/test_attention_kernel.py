"""The attention kernels against the reference in float64, and what they allocate."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from quick import quick
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
LENGTHS = [(33, 33), (5, 33), (33, 5), (1, 7), (7, 1)]
MASKS = [
    {"causal": causal, "alignment": alignment, "window": window}
    for causal, alignment, window in product(
        (False, True), ("top-left", "bottom-right"), (None, (3, 2), (0, None))
    )
]
BLIND = {"causal": True, "alignment": "bottom-right"}  # the first of many queries see nothing
FLOAT32 = 2e-6  # how far from float64, by the largest number or 1
TILES = {"square": (16, 16), "wide": (16, 32), "tall": (32, 16)}


@pytest.fixture
def small_tiles(monkeypatch, request):
    """Many tiles where the table's would be one."""
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
    wanted = value_and_gradients(partial(attention_reference, **settings), *in_float64(qkv))
    for a, b in zip(ours, wanted, strict=True):
        largest = max(1, b.abs().max())
        torch.testing.assert_close(a.double(), b, rtol=0, atol=FLOAT32 * largest)


# ------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("small_tiles", quick(["square"], TILES), indirect=True)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_value_and_gradients_are_those_of_the_reference(device, small_tiles, queries, keys):
    qkv = random_qkv(device, heads=1, kv_heads=1, queries=queries, keys=keys)
    for mask in MASKS:
        if queries != keys or mask["alignment"] == "top-left":  # else it is the same again
            assert_exact(qkv, **mask)


@pytest.mark.parametrize("small_tiles", quick(["wide"], ["wide", "tall"]), indirect=True)
@pytest.mark.parametrize("mask", [MASKS[4], MASKS[9]], ids=str)
def test_tiles_need_not_be_square(device, small_tiles, mask):
    assert_exact(random_qkv(device, heads=1, kv_heads=1, queries=80, keys=70), **mask)


@pytest.mark.parametrize("kv_heads", quick([2], [4, 2, 1]))
def test_heads_that_share_their_keys_add_up_their_gradients(device, kv_heads):
    assert_exact(random_qkv(device, heads=4, kv_heads=kv_heads), causal=True)


@pytest.mark.parametrize("width", quick([1, 20, 100], [1, 16, 20, 64, 100, 128, 256]))
def test_every_width_of_a_head_is_taken_with_the_tiles_of_its_own(device, width):
    qkv = random_qkv(device, heads=1, kv_heads=1, queries=150, keys=80, width=width)
    assert_exact(qkv, causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("causal", "width"), quick([(True, 8), (False, 64)], [(True, 8), (False, 64), (True, 128)])
)
def test_the_error_is_at_most_twice_that_of_the_reference(device, causal, width, dtype):
    """FlashAttention's own rule: beside float64, and three times for gradients."""
    qkv = random_qkv(device, queries=150, width=width, dtype=dtype)
    reference = partial(attention_reference, causal=causal)
    wanted = value_and_gradients(reference, *in_float64(qkv))
    ours = value_and_gradients(partial(flash_attention, causal=causal), *qkv)
    naive = value_and_gradients(reference, *qkv)
    for most, a, b, c in zip((2, 3, 3, 3), ours, naive, wanted, strict=True):
        assert a.dtype == dtype
        assert 0 < (a - c).abs().max() <= most * (b - c).abs().max() + 1e-5


@pytest.mark.parametrize("scale", quick([0.0, -1.0], [0.7, 0.0, -1.0]))
def test_the_scale_can_be_chosen(device, small_tiles, scale):
    assert_exact(random_qkv(device, kv_heads=1), scale=scale, causal=True)


def test_scores_in_the_thousands_do_not_overflow(device, small_tiles):
    q, k, v = (x.detach() for x in random_qkv(device))
    for scale in (1e3, -1e3):
        result = flash_attention(q, k, v, scale=scale)
        wanted = attention_reference(*in_float64((q, k, v)), scale=scale)
        torch.testing.assert_close(result.double(), wanted, rtol=0, atol=2e-3)


def test_a_query_that_sees_no_key_gets_zero_and_gives_no_gradient(device, small_tiles):
    qkv = random_qkv(device, queries=40, keys=20)
    out, dq, *others = value_and_gradients(partial(flash_attention, **BLIND), *qkv)
    assert out[:, :, :20].eq(0).all()
    assert dq[:, :, :20].eq(0).all()
    assert all(x.isfinite().all() for x in (out, dq, *others))


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys_are_no_error(device, queries, keys):
    q, k, v = random_qkv(device, queries=queries, keys=keys)
    out, dq, dk, dv = value_and_gradients(flash_attention, q, k, v)
    assert torch.equal(out, torch.zeros_like(q))
    assert not any(x.any() for x in (dq, dk, dv))


def test_two_runs_give_the_same_bits(device):
    qkv = random_qkv(device, queries=80)
    attend = partial(flash_attention, causal=True)
    one, other = (value_and_gradients(attend, *qkv) for _ in range(2))
    assert all(map(torch.equal, one, other))


def test_every_tile_is_done_however_many_heads_run_at_once(device, small_tiles, monkeypatch):
    qkv = random_qkv(device, batch=3, heads=2, queries=20)
    wanted = value_and_gradients(flash_attention, *qkv)
    monkeypatch.setattr(attention, "CACHE_BYTES", 4 * 2 * 20 * D * 4)  # of 4 heads of the 6
    assert all(map(torch.equal, value_and_gradients(flash_attention, *qkv), wanted))


def test_what_is_kept_of_the_weights_is_the_log_sum_exp_of_the_scaled_scores(device, small_tiles):
    q, k, v = random_qkv(device, queries=20, keys=18)
    for scale in (0.3, -0.3):
        *_, lse = flash_attention(q, k, v, scale=scale).grad_fn.saved_tensors
        torch.testing.assert_close(lse, (scale * q @ k.mT).logsumexp(-1))
    *_, lse = flash_attention(q, k, v, **BLIND).grad_fn.saved_tensors
    assert lse[:, :, :2].eq(math.inf).all()
    assert lse[:, :, 2:].isfinite().all()


# ------------------------------------------------------------------ layouts


def test_the_result_and_the_gradients_are_laid_out_like_the_arguments(device):
    tensors = [x.detach() for x in random_qkv(device, batch=2, queries=20)]
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors)
    assert_exact((q, k, v), causal=True)
    out, dq, dk, dv = value_and_gradients(flash_attention, q, k, v)
    assert out.stride() == dq.stride() == q.stride() != out.contiguous().stride()
    assert dk.stride() == dv.stride() == k.stride()


def test_strides_of_all_kinds_are_read(device, small_tiles):
    q, k, v = (x.detach() for x in random_qkv(device, queries=20))
    q = q.mT.contiguous().mT  # a head's numbers apart, tokens side by side
    k = k.repeat_interleave(2, dim=3)[..., ::2]
    v = v[:, :1].expand(-1, H, -1, -1)
    assert_exact([x.requires_grad_() for x in (q, k, v)], causal=True)


def test_an_upstream_gradient_without_memory_of_its_own_is_read(device):
    qkv = random_qkv(device)
    [dv] = torch.autograd.grad(flash_attention(*qkv).sum(), qkv[2])  # expanded: strides of 0
    [wanted] = torch.autograd.grad(attention_reference(*qkv).sum(), qkv[2])
    torch.testing.assert_close(dv, wanted)


# ------------------------------------------------------------------ bytes


def kept_for_backward(*arguments, **settings):
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = flash_attention(*arguments, **settings)
    del out
    return sorted(x.untyped_storage().nbytes() for x in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_arguments_the_result_and_a_number_a_query(device, dtype):
    T = 50
    qkv = random_qkv(device, queries=T, kv_heads=1, dtype=dtype)
    q_bytes, k_bytes = B * H * T * D * dtype.itemsize, B * T * D * dtype.itemsize
    kept = kept_for_backward(*qkv, causal=True)
    assert kept == sorted([q_bytes, q_bytes, k_bytes, k_bytes, 4 * B * H * T])


def test_without_a_gradient_nothing_is_kept(device):
    assert kept_for_backward(*random_qkv(device, requires_grad=False)) == []


CASES = [
    {"queries": 70, "causal": True},
    {"queries": 40, "keys": 90, "kv_heads": 1, "dtype": torch.bfloat16, "window": (20, 0)},
]


@pytest.mark.parametrize("is_dry", [False, True], ids=["real", "dry"])
@pytest.mark.parametrize("case", CASES)
def test_the_result_its_gradients_and_two_numbers_a_query_are_all_that_is_made(
    device, case, is_dry
):
    of_tensors = {"queries", "keys", "kv_heads", "dtype"}
    tensors = {name: x for name, x in case.items() if name in of_tensors}
    settings = {name: x for name, x in case.items() if name not in of_tensors}

    def traced():
        q, k, v = random_qkv(device, **tensors)
        upstream = torch.ones_like(q)
        sizes = B * H * q.shape[2] * 4, *(x.numel() * x.itemsize for x in (q, k))
        step = lambda: flash_attention(q, k, v, **settings).backward(upstream)  # noqa: E731
        return memlab.measure(step), sizes

    trace, (numbers, q_bytes, k_bytes) = dry(traced) if is_dry else traced()
    made = [e.bytes for e in trace.events if e.bytes > 0 and e.phase != "before"]
    assert sorted(made) == sorted([q_bytes, numbers, numbers, q_bytes, k_bytes, k_bytes])
    before = sum(e.bytes for e in trace.events if e.phase == "before")
    assert trace.peak_bytes == before + 2 * numbers + 2 * q_bytes + 2 * k_bytes


def dry(function):
    with memlab.dry_run():
        return function()


# ------------------------------------------------------------------ in company


def loss_and_gradients(attend, device):
    torch.manual_seed(0)
    model = GPT(PRESETS["tiny"], attention=attend, dtype=torch.float32).to(device)
    tokens = torch.randint(256, (1, 65)).to(device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_a_model_takes_it_in_place_of_torchs(device):
    ours, theirs = (loss_and_gradients(a, device) for a in (flash_attention, attention_reference))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_prediction_goes_through_it():
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


def test_a_mode_sees_one_call_with_its_settings_as_of_torchs_own(device):
    qkv = random_qkv(device)
    expected = flash_attention(*qkv, causal=True, window=(3, 0), scale=0.5)
    with Seen() as seen:
        out = flash_attention(*qkv, causal=True, window=(3, 0), scale=0.5)
    assert seen.functions == [flash_attention]
    assert torch.equal(out, expected)


def test_activations_in_eight_bits_change_its_gradients_by_little(device):
    qkv = random_qkv(device, queries=64)

    def attend(q, k, v):
        with compressed_activations(bits=8, min_numel=1):
            return flash_attention(q * 1, k * 1, v * 1, causal=True)

    exact = value_and_gradients(partial(flash_attention, causal=True), *qkv)
    for a, b in zip(value_and_gradients(attend, *qkv)[1:], exact[1:], strict=True):
        assert 0 < (a - b).norm() / b.norm() < 0.02


def test_under_autocast_it_computes_with_what_torchs_attention_would_get(device):
    qkv = random_qkv(device)
    with torch.autocast(device.type, torch.bfloat16):
        ours = value_and_gradients(flash_attention, *qkv)
        assert F.scaled_dot_product_attention(*qkv).dtype == ours[0].dtype == torch.bfloat16
    halves = value_and_gradients(flash_attention, *(x.bfloat16() for x in qkv))
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, halves, strict=True))


def test_several_backward_passes_over_one_graph_agree(device):
    q, k, v = random_qkv(device)
    out = flash_attention(q, k, v).sum()
    first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, (q, k, v))))


# ------------------------------------------------------------------ what is refused


def test_a_second_derivative_is_refused_where_it_is_asked_for(device):
    q, k, v = random_qkv(device)
    [gradient] = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative: .* use attention_reference"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("shapes", "settings", "wanted"),
    [
        (((4, 6, 8),) * 3, {}, r"got q \(4, 6, 8\), .*; give q as \(B, H, Tq, D\)"),
        (((1, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {}, "the same B and D"),
        (((1, 4, 6, 8), (1, 3, 6, 8), (1, 3, 6, 8)), {}, "4 query heads cannot share 3 key/val"),
        (((1, 4, 6, 257),) * 3, {}, "of width 257, .* use memlab.attention.flash_attention"),
        (((1, 4, 6, 8),) * 3, {"dropout": 0.1}, "dropout=0.1.*memlab.attention.flash_attention"),
        (((1, 4, 6, 8),) * 3, {"alignment": "top"}, "got alignment='top'; choose"),
        (((1, 4, 6, 8),) * 3, {"window": (-1, 0)}, r"got window=\(-1, 0\); give how many"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(shapes, settings, wanted):
    with pytest.raises(ValueError, match=wanted):
        flash_attention(*map(torch.zeros, shapes), **settings)


def test_float64_and_dtypes_that_differ_are_refused():
    q, k, v = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    with pytest.raises(ValueError, match=r"got torch.float64.*memlab.attention.flash_attention"):
        flash_attention(*in_float64((q, k, v)))
    with pytest.raises(ValueError, match=r"v in torch.bfloat16; give all of them in one dtype"):
        flash_attention(q, k, v.bfloat16())


def test_it_takes_what_memlabs_other_flash_attention_takes_but_for_the_tile():
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


@pytest.mark.parametrize("capability", quick([89], [80, 86, 89, 90]))
def test_no_register_is_spilled_and_shared_memory_suffices(compiled, capability):
    made = compiled(COMPILED.format(capability=capability))
    names = ["flash_forward", "flash_dq", "flash_dkdv"]
    assert [(one["name"], one["spilled"]) for one in made] == [(name, 0) for name in names * 2]


def test_what_is_too_far_apart_for_32_bits_is_copied_and_nothing_else_is():
    near = torch.empty(1, 2, 64, 8).mT  # (1, 2, 8, 64): strides of 8 numbers and of 1
    far = torch.empty(1, device="meta").as_strided((1, 2, 64, 8), (0, 0, 1, 2**23))
    assert attention._with_int32_offsets(near) is near
    assert attention._with_int32_offsets(far).is_contiguous()
