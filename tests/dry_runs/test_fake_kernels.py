"""Operators with an incomplete fake version in torch: dry runs equal real runs exactly."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traces import peak_of_storages, renumbered

import memlab
from memlab.dry_runs.fake_kernels import lstm_workspace_bytes

# ------------------------------------------------------------------ recurrent layers


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize(("input_size", "hidden_size"), [(1, 1), (33, 65), (256, 64), (70, 512)])
def test_an_lstms_workspace_has_the_real_size(T, B, input_size, hidden_size):
    x, state = torch.zeros(T, B, input_size), torch.zeros(B, hidden_size)
    weights = [torch.zeros(4 * hidden_size, size) for size in (input_size, hidden_size)]
    biases = 2 * [torch.zeros(4 * hidden_size)]
    modes = (False, [], 2, hidden_size, 1, True, False, False, True)
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(x, *weights, *biases, state, state, *modes)
    assert lstm_workspace_bytes(T, B, input_size, hidden_size, 4) == workspace.numel()


def second_step(build) -> memlab.Trace:
    model, step = build()
    step()
    return memlab.measure(step, model=model)


def assert_a_dry_run_is_exact(build) -> None:
    real = second_step(build)
    with memlab.dry_run():
        dry = second_step(build)
    assert renumbered(dry) == renumbered(real)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_dry_run_of_a_recurrent_layer_is_exact(kind, options):
    def build():
        layer, x = kind(33, 65, **options), torch.randn(7, 5, 33)
        return layer, lambda: layer(x)[0].sum().backward()

    assert_a_dry_run_is_exact(build)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_dry_run_of_an_lstm_in_evaluation_is_exact(mode):
    def build():
        layer, x = nn.LSTM(33, 65).eval(), torch.randn(7, 5, 33)
        return layer, mode()(lambda: layer(x))

    assert_a_dry_run_is_exact(build)


# ------------------------------------------------------------------ grouped matmul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def experts(dtype: torch.dtype, out_features: int = 40, device: str = "cpu"):
    """Return a builder: 24 tokens routed to three experts with 16 inputs."""

    def build():
        weight = nn.Parameter(torch.zeros(3, out_features, 16, dtype=dtype, device=device))
        x = torch.zeros(24, 16, dtype=dtype, device=device, requires_grad=True)
        ends = torch.tensor([5, 5, 24], dtype=torch.int32, device=device)

        def step() -> None:
            F.grouped_mm(x, weight.mT, offs=ends).square().sum().backward()

        return nn.ParameterList([weight]), step

    return build


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dry_run_of_a_mixture_of_experts_is_exact(dtype):
    assert_a_dry_run_is_exact(experts(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prediction_of_a_mixture_of_experts_has_the_same_storages(dtype):
    def build():
        model, step = experts(dtype, out_features=256, device="cuda")()
        return step, model, None

    with memlab.dry_run():
        dry = second_step(experts(dtype, out_features=256))
    assert peak_of_storages(memlab.predict(build)) == dry.peak_bytes


SHAPES = [  # groups of rows, of the inner dimension, of columns, and a batch
    ((8, 16), (3, 16, 8), True),
    ((16, 8), (8, 32), True),
    ((3, 4, 16), (16, 8), True),
    ((3, 4, 16), (3, 16, 8), False),
]


@pytest.mark.parametrize(("first", "second", "has_groups"), SHAPES)
def test_grouped_matmuls_have_the_real_layout(first, second, has_groups):
    def product():
        ends = torch.tensor([3, 7, 8], dtype=torch.int32) if has_groups else None
        return F.grouped_mm(torch.zeros(first), torch.zeros(second), offs=ends)

    real = product()
    with memlab.dry_run():
        dry = product()
        assert (dry.shape, dry.stride()) == (real.shape, real.stride())


def test_rows_of_a_grouped_matmul_are_padded_to_16_bytes():
    def product():
        ends = torch.tensor([3, 7, 8], dtype=torch.int32)
        return F.grouped_mm(torch.zeros(8, 16), torch.zeros(3, 5, 16).mT, offs=ends)

    with memlab.dry_run():
        assert product().stride() == (8, 1)
    assert product().stride() == (8, 1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (torch.zeros(3, 16, 5), "rows of the second matrix of a grouped matmul are 20 bytes"),
        (torch.zeros(3, 12, 8), "as many columns as the second has rows"),
        (torch.zeros(1).expand(3, 16, 8), "has strides .0, 0, 0.; make its rows or columns"),
        (torch.zeros(3, 16, 8).double(), "use float32, float16 or bfloat16"),
    ],
)
def test_an_invalid_grouped_matmul_raises_with_the_line(second, message):
    ends = torch.tensor([3, 7, 8], dtype=torch.int32)
    with pytest.raises(RuntimeError):
        F.grouped_mm(torch.zeros(8, 16), second, offs=ends)
    with memlab.dry_run(), pytest.raises(ValueError, match=rf"test_fake_kernels.*{message}"):
        F.grouped_mm(torch.zeros(8, 16), second, offs=ends)


# ------------------------------------------------------------------ layer norm


def test_the_gradient_of_a_layer_norms_input_is_contiguous():
    """The end of Swin, where a permuted gradient would be copied before the matmul."""

    def build():
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))

        def step() -> None:
            images = model(torch.randn(2, 3, 3, 6)).permute(0, 3, 1, 2)
            F.adaptive_avg_pool2d(images, 1).square().sum().backward()

        return model, step

    assert_a_dry_run_is_exact(build)
