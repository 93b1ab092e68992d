"""CUDA's choice of kernels for composite operators, and the tensors that each kernel saves."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from traces import births, predicted

from memlab import Kernels
from memlab.configs.targets import TARGETS
from memlab.prediction.substitutes import Substitutes

B, H, T, D = 2, 4, 64, 32
BF16, F32 = torch.bfloat16, torch.float32


def chosen(
    dtype=BF16,
    *,
    shape=(B, H, T, D),
    key_shape=None,
    value_shape=None,
    mask=None,
    dropout_p=0.0,
    is_causal=False,
    enable_gqa=False,
    attention="auto",
    target="cuda",
) -> str:
    query = torch.empty(shape, dtype=dtype, device="meta")
    key = query.new_empty(key_shape or shape)
    value = query.new_empty(value_shape or key_shape or shape)
    policy = Substitutes(Kernels(attention=attention), TARGETS[target])
    return policy.choose(query, key, value, mask, dropout_p, is_causal, enable_gqa)


@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [
        ({}, "flash"),
        ({"dtype": torch.float16, "is_causal": True}, "flash"),
        ({"dtype": F32}, "efficient"),
        ({"dtype": torch.float64}, "math"),
        ({"mask": torch.ones(T, T)}, "efficient"),
        ({"shape": (B, H, T, 256)}, "flash"),
        ({"shape": (B, H, T, 264)}, "efficient"),
        ({"shape": (B, H, T, 257)}, "math"),
        ({"shape": (B, H, T, 20)}, "flash"),
        ({"shape": (B, H, T, 20), "dtype": F32}, "efficient"),
        ({"shape": (B, H, T, 22), "dtype": F32}, "math"),
        ({"shape": (B, H, T, 20), "mask": torch.ones(T, T)}, "math"),
        ({"key_shape": (B, H, 80, D), "is_causal": True}, "efficient"),
        ({"key_shape": (B, H, 80, D)}, "flash"),
        ({"value_shape": (B, H, T, 16)}, "efficient"),
        ({"key_shape": (B, 2, T, D)}, "math"),
        ({"key_shape": (B, 2, T, D), "enable_gqa": True}, "flash"),
        ({"key_shape": (B, 3, T, D), "enable_gqa": True}, "math"),
        ({"key_shape": (B, 2, T, D), "enable_gqa": True, "dtype": F32}, "math"),
        ({"shape": (H, T, D)}, "math"),
        ({"target": "cuda:hopper"}, "cudnn"),
        ({"target": "cuda:hopper", "dtype": F32}, "efficient"),
        ({"target": "cuda:hopper", "shape": (B, H, T, 136)}, "cudnn"),
        ({"target": "cuda:hopper", "shape": (B, H, T, 264)}, "efficient"),
        ({"target": "cuda:b200", "shape": (B, H, T, 136)}, "flash"),
        ({"target": "cuda:b200", "shape": (B, H, T, 192), "value_shape": (B, H, T, 128)}, "cudnn"),
        ({"target": "cuda:t4"}, "math"),  # bfloat16
        ({"target": "cuda:t4", "dtype": torch.float16}, "efficient"),
        ({"target": "cuda:t4", "dtype": torch.float16, "attention": "flash"}, "math"),
        ({"target": "cuda:t4", "dtype": torch.float16, "attention": "cudnn"}, "math"),
        ({"target": "cuda:t4", "dtype": torch.float16, "shape": (B, H, T, 20)}, "math"),
        ({"target": "cuda:t4", "dtype": F32, "shape": (B, H, T, 22)}, "efficient"),
        ({"target": "cuda:v100-16", "dtype": torch.float16, "is_causal": True}, "efficient"),
        ({"target": "cuda:rtx5090"}, "flash"),
        ({"target": "cuda:mi300x", "shape": (B, H, T, 512)}, "flash"),
        ({"target": "cuda:mi300x", "attention": "cudnn"}, "math"),
        ({"target": "cuda:rx7900xtx"}, "flash"),
        ({"target": "cuda:rx7900xtx", "shape": (B, H, T, 512)}, "math"),
        ({"target": "cuda:rx6800xt"}, "math"),
        ({"target": "cuda:p100-16", "dtype": torch.float16, "shape": (B, H, T, 20)}, "efficient"),
        ({"target": "cuda:m3-max-64"}, "flash"),
        ({"target": "cuda:hopper", "dropout_p": 0.1}, "flash"),
        ({"target": "cuda:hopper", "dropout_p": 0.125}, "cudnn"),
        ({"attention": "math"}, "math"),
        ({"attention": "efficient"}, "efficient"),
        ({"attention": "cudnn"}, "cudnn"),
        ({"attention": "flash", "dtype": F32}, "math"),
    ],
)
def test_attention_runs_the_kernel_that_torch_would_choose(arguments, kernel):
    assert chosen(**arguments) == kernel


@pytest.mark.parametrize(
    ("head_dim", "dropout_p", "kernel"),
    [(192, 0.1, "flash"), (224, 0.0, "efficient"), (256, 0.0, "flash"), (256, 0.1, "efficient")],
)
def test_flash_trains_large_heads_on_an_a100_but_not_on_every_card(head_dim, dropout_p, kernel):
    tensors = [torch.empty(B, H, T, head_dim, dtype=BF16, device="meta") for _ in range(3)]
    inputs = *tensors, None, dropout_p, False, False

    def chosen_on(device):
        return Substitutes(Kernels(), TARGETS[device]).choose(*inputs)

    assert chosen_on("cuda:sm_86") == "flash"  # without a gradient
    tensors[1].requires_grad_()
    assert chosen_on("cuda:a100-80") == "flash"
    assert {chosen_on(f"cuda:sm_{sm}") for sm in (86, 89, 120)} == {kernel}
    with torch.no_grad():
        assert chosen_on("cuda:sm_86") == "flash"


def test_a_transposed_head_rules_out_the_fused_kernels():
    tensors = [torch.empty(B, H, D, T, dtype=BF16, device="meta").mT for _ in range(3)]
    policy = Substitutes(Kernels(), TARGETS["cuda"])
    assert policy.choose(*tensors, None, 0.0, False, False) == "math"


def test_disabled_kernels_are_not_chosen():
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert chosen() == "efficient"
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen() == "math"


# ------------------------------------------------------------------ attention kernels


def attending(dtype=BF16, *, T=T, D=D, backward=False, **options):
    def step(device):
        q, k, v = (
            torch.zeros(B, H, T, D, dtype=dtype, device=device, requires_grad=True)
            for _ in range(3)
        )
        mask = options.pop("mask", None)
        mask = mask and torch.ones(T, T, dtype=torch.bool, device=device)
        y = F.scaled_dot_product_attention(q, k, v, mask, **options)
        if backward:
            y.backward(torch.zeros_like(y))

    return step


def test_flash_saves_a_row_of_statistics_and_two_seeds():
    assert births(predicted(attending(is_causal=True)), "attention") == [
        (B * H * T * D * 2, "bfloat16"),
        (B * H * T * 4, "float32"),
        (16, "uint64"),
        (8, "uint64"),
    ]


def test_flash_never_stores_the_scores():
    trace = predicted(attending(T=1024, is_causal=True))
    assert max(count for count, _ in births(trace)) == B * H * 1024 * D * 2


def test_math_stores_the_scores():
    trace = predicted(attending(T=1024), kernels=Kernels(attention="math"))
    assert max(count for count, _ in births(trace)) >= B * H * 1024 * 1024 * 2


def test_flash_pads_the_head_dimension_to_a_multiple_of_8():
    padded = births(predicted(attending(D=20)), "constant_pad_nd")
    assert padded == 3 * [(B * H * T * 24 * 2, "bfloat16")]


def test_efficient_saves_statistics_for_a_multiple_of_32_rows_and_seeds_on_the_cpu():
    assert births(predicted(attending(F32, T=50)), "attention") == [
        (B * H * 50 * D * 4, "float32"),
        (B * H * 64 * 4, "float32"),
    ]


def test_a_t4_never_runs_flash_attention():
    trace = predicted(attending(torch.float16, is_causal=True, backward=True), device="cuda:t4")
    assert not any("flash" in event.operator for event in trace.events)
    assert births(trace, "_efficient_attention.default") == [
        (B * H * T * D * 2, "float16"),
        (B * H * T * 4, "float32"),
    ]


def test_efficient_saves_no_statistics_without_gradients():
    def step(device):
        with torch.no_grad():
            q = torch.zeros(B, H, T, D, device=device)
            F.scaled_dot_product_attention(q, q, q)

    assert births(predicted(step), "attention") == [(B * H * T * D * 4, "float32")]


def test_a_bool_mask_is_converted_to_the_query_dtype():
    made = births(predicted(attending(mask=True)))
    assert (T * T * 2, "bfloat16") in made


def test_cudnn_saves_a_row_of_statistics_and_two_seeds():
    """In the order of allocation that was recorded on an H200."""
    assert births(predicted(attending(), device="cuda:hopper"), "attention") == [
        (8, "int64"),
        (8, "int64"),
        (B * H * T * D * 2, "bfloat16"),
        (B * H * T * 4, "float32"),
        (256, "uint8"),
    ]


def test_the_same_kernels_run_in_inference_mode():
    def step(mode):
        def run(device):
            with mode():
                q = torch.zeros(B, H, T, D, dtype=BF16, device=device)
                x = F.scaled_dot_product_attention(q, q, q, is_causal=True)
                F.rms_norm(F.dropout(x, 0.5), (D,))

        return run

    expected = births(predicted(step(torch.no_grad)))
    assert births(predicted(step(torch.inference_mode))) == expected
    assert len(expected) == 9  # the query, flash's four, dropout's two, RMSNorm's two


# ------------------------------------------------------------------ norms, dropout, softmax


def test_rms_norm_saves_one_element_per_row():
    def step(device):
        x = torch.zeros(6, 8, dtype=BF16, device=device, requires_grad=True)
        F.rms_norm(x, (8,), torch.ones(8, dtype=BF16, device=device)).sum().backward()

    trace = predicted(step)
    assert births(trace, "_fused_rms_norm.default") == [
        (6 * 8 * 2, "bfloat16"),
        (6 * 4, "float32"),
    ]
    copied_gradient = 6 * 8 * 2, "uint8"
    assert births(trace, "_fused_rms_norm_backward") == [(6 * 8 * 2, "bfloat16"), copied_gradient]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_with_a_weight_of_another_dtype_is_composite():
    def step(device):
        F.rms_norm(torch.zeros(6, 8, dtype=BF16, device=device), (8,), torch.ones(8, device=device))

    assert births(predicted(step), "_fused_rms_norm") == []
    assert births(predicted(step), "rsqrt") == [(6 * 4, "float32")]


def test_a_dropout_mask_has_one_byte_per_element():
    def step(device):
        F.dropout(torch.zeros(100, device=device), 0.5)

    assert births(predicted(step), "dropout") == [(100, "bool"), (400, "float32")]


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_has_no_mask(p, training):
    def step(device):
        F.dropout(torch.zeros(100, device=device), p, training)

    assert all(dtype != "bool" for _, dtype in births(predicted(step)))


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax])
def test_softmax_of_float16_under_autocast_casts_within_the_kernel(softmax):
    def step(device):
        with torch.autocast(device, torch.float16):
            softmax(torch.zeros(6, 8, dtype=torch.float16, device=device), -1)

    assert births(predicted(step)) == [(96, "float16"), (192, "float32")]


def test_softmax_of_bfloat16_under_autocast_casts_before():
    def step(device):
        with torch.autocast(device, BF16):
            F.softmax(torch.zeros(6, 8, dtype=BF16, device=device), -1)

    assert births(predicted(step)) == [(96, "bfloat16"), (192, "float32"), (192, "float32")]
