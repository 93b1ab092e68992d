"""CUDA's autocast rules on CPU tensors, compared with torch's header and with dtypes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traces import WORKSPACE, births, predicted

import memlab
from memlab import Kernels
from memlab.prediction import autocast_lists
from tests.quick import quick

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


# Overloads with named dimensions, which torch 2.11 still had, and an operator that it did not list.
OLD_TORCH = torch.__version__ < "2.13"
since_2_13 = pytest.mark.skipif(OLD_TORCH, reason="needs torch ≥ 2.13, whose lists these are")


def listed(macro: str) -> set[str]:
    """Return a list in torch's header, as `name` or `name.overload`."""
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)[1]
    return {".".join(re.split(r",\s*", entry)) for entry in re.findall(r"_\(([\w, ]+)\)", body)}


@since_2_13
@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("LOWER_PRECISION_FP", autocast_lists.LOWER),
        ("FP32", autocast_lists.FLOAT32),
        ("FP32_SET_OPT_DTYPE", autocast_lists.FLOAT32_DTYPE),
        ("PROMOTE", autocast_lists.PROMOTE),
    ],
)
def test_the_lists_equal_torchs(macro, names):
    assert set(names) == listed(macro)


@since_2_13
def test_every_operator_with_a_rule_for_cuda_is_on_a_list():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    ours = {
        *(*autocast_lists.LOWER, *autocast_lists.FLOAT32, *autocast_lists.FLOAT32_DTYPE),
        *(*autocast_lists.APPENDS_DTYPE, *autocast_lists.PROMOTE, *autocast_lists.UNSUPPORTED),
        *autocast_lists.PACKED,
    }
    theirs = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")
    }
    below_others = {"cudnn_convolution", "cudnn_convolution_transpose"}
    same_on_cpus = {"linalg_matrix_sqrth"}  # float32; since torch 2.14
    assert theirs - ours - same_on_cpus == below_others


DTYPES = {  # the result's dtype for bfloat16 and for float32 inputs
    "exp": (torch.exp, "float32", "float32"),
    "power": (lambda x: x**2, "float32", "float32"),
    "sum": (lambda x: x.sum(), "float32", "float32"),
    "sum in a dtype": (lambda x: x.sum(dtype=torch.bfloat16), "bfloat16", "bfloat16"),
    "norm": (lambda x: torch.norm(x), "float32", "float32"),
    "softmax": (lambda x: x.softmax(-1), "float32", "float32"),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), "float32", "float32"),
    "rms norm": (lambda x: F.rms_norm(x, (8,)), "bfloat16" if OLD_TORCH else "float32", "float32"),
    "loss": (lambda x: F.mse_loss(x, x), "float32", "float32"),
    "product": (lambda x: x @ x, "bfloat16", "bfloat16"),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), "bfloat16", "bfloat16"),
    "matrix and vector": (lambda x: torch.mv(x, x[0]), "bfloat16", "bfloat16"),
    "gelu": (F.gelu, "bfloat16", "float32"),
    "add": (lambda x: x + x, "bfloat16", "float32"),
    "promoted": (lambda x: torch.addcmul(x, x, x.float()), "float32", "float32"),
    "grid": (lambda x: F.avg_pool1d(x, 2), "bfloat16", "float32"),
    "only on the CPU's list": (lambda x: torch.trace(x), "bfloat16", "float32"),
    "a promoted matmul": (lambda x: torch.inner(x, x), "bfloat16", "float32"),
    "a composite of matmuls": (
        lambda x: torch.linalg.matrix_power(x, 3),
        "bfloat16",
        "bfloat16",
    ),
    "of no list": (lambda x: x.float().double().exp(), "float64", "float64"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", DTYPES)
def test_results_have_cudas_dtypes(case, mode):
    function, *expected = DTYPES[case]
    got = []

    def step(device):
        with mode(), torch.autocast(device, torch.bfloat16):
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.zeros(8, 8, dtype=dtype, device=device)
                got.append(str(function(x).dtype).removeprefix("torch."))

    predicted(step)
    assert got == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_allocates_the_same_bytes_in_either_mode(mode):
    def step(mode):
        def run(device):
            x = torch.zeros(4, 8, device=device)
            weight = nn.Parameter(torch.zeros(8, 8, device=device))
            with mode(), torch.autocast(device, torch.bfloat16):
                y = torch.inner(torch.einsum("ti,oi->to", x, weight), x)
                y = torch.linalg.matrix_power(y, 3)
                F.rms_norm(y.softmax(-1), (4,)).exp().sum()

        return run

    assert births(predicted(step(mode))) == births(predicted(step(torch.no_grad)))


def test_a_weights_cast_is_cached_until_autocast_ends():
    def step(device):
        weight = nn.Parameter(torch.zeros(8, 8, device=device))
        x = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
        with torch.autocast(device, torch.bfloat16):
            for _ in range(3):
                torch.einsum("ti,oi->to", x, weight)
        with torch.autocast(device, torch.bfloat16):
            torch.einsum("ti,oi->to", x, weight)

    assert births(predicted(step), "_to_copy") == [(128, "bfloat16")] * 2


def test_it_is_not_cached_if_the_cache_is_off():
    def step(device):
        weight = nn.Parameter(torch.zeros(8, 8, device=device))
        x = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            for _ in range(3):
                torch.einsum("ti,oi->to", x, weight)

    assert births(predicted(step), "_to_copy") == [(128, "bfloat16")] * 3


def _by_einsum(x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.einsum("ti,io->to", x, weight)  # only on CUDA's list


WEIGHTS = {
    "a parameter": lambda: nn.Parameter(torch.zeros(8, 8)),
    "a parameter made in inference mode": torch.inference_mode()(
        lambda: nn.Parameter(torch.zeros(8, 8))
    ),
    "frozen": lambda: torch.zeros(8, 8),
    "a view": lambda: nn.Parameter(torch.zeros(8, 8)).t(),
    "a view and a leaf": lambda: torch.zeros(9, 8)[:8].detach().requires_grad_(),
    "no leaf": lambda: nn.Parameter(torch.zeros(8, 8)) * 1,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("weight", quick(["a parameter", "frozen"], WEIGHTS))
def test_the_same_casts_are_cached_as_in_torch(weight, mode, cache_enabled):
    """The oracle is the CPU's own autocast, which uses the same cache rules."""

    def step(function, device):
        tensor = WEIGHTS[weight]()
        x = torch.zeros(8, 8, dtype=torch.bfloat16)
        with mode(), torch.autocast(device, torch.bfloat16, cache_enabled=cache_enabled):
            function(x, tensor)
            with torch.autocast(device, torch.bfloat16):  # the cache outlives it
                function(x, tensor)
            with torch.autocast(device, enabled=False):
                pass
            function(x, tensor)

    def casts(trace):
        return len(births(trace, "_to_copy"))

    real = casts(memlab.measure(lambda: step(torch.mm, "cpu")))
    for function in (torch.mm, _by_einsum):
        assert casts(predicted(lambda device, f=function: step(f, device))) == real


def test_operators_on_both_lists_share_one_cache():
    def step(device):
        weight = nn.Parameter(torch.zeros(8, 8, device=device))
        x = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
        with torch.autocast(device, torch.bfloat16):
            torch.einsum("ti,oi->to", x, weight)
            x @ weight

    assert births(predicted(step), "_to_copy") == [(128, "bfloat16")]


def test_a_cast_cached_under_no_grad_still_gets_a_gradient():
    def step(device):
        weight = nn.Parameter(torch.zeros(8, 8, device=device))
        x = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
        with torch.autocast(device, torch.bfloat16):
            with torch.no_grad():
                torch.einsum("ti,oi->to", x, weight)
            y = torch.einsum("ti,oi->to", x, weight)
        y.sum().backward()
        assert weight.grad.shape == weight.shape

    predicted(step)


def test_inference_keeps_one_cast_at_a_time():
    def step(device):
        first, second = (nn.Parameter(torch.zeros(256, 256, device=device)) for _ in range(2))
        x = torch.zeros(1, 256, dtype=torch.bfloat16, device=device)
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            x = torch.einsum("ti,oi->to", x, first)
            torch.einsum("ti,oi->to", x, second)

    weights, cast, row = 2 * 4 * 256**2, 2 * 256**2, 512
    assert predicted(step).peak_bytes - WORKSPACE == weights + cast + 2 * row


def test_the_cpus_list_can_be_selected():
    def step(device):
        with torch.autocast(device, torch.bfloat16):
            torch.zeros(8, dtype=torch.bfloat16, device=device).exp()

    assert births(predicted(step), "exp") == [(32, "float32")]
    assert births(predicted(step, kernels=Kernels(autocast="cpu")), "exp") == [(16, "bfloat16")]


def test_operators_that_cudas_autocast_rejects_raise_with_the_line():
    def step(device):
        with torch.autocast(device, torch.bfloat16):
            F.binary_cross_entropy(torch.ones(3, device=device), torch.ones(3, device=device))

    with pytest.raises(
        ValueError, match=r"test_autocast_lists.py:\d+ step: autocast does not support"
    ):
        predicted(step)


def test_outside_autocast_nothing_is_cast():
    def step(device):
        torch.zeros(8, dtype=torch.bfloat16, device=device).exp()
        with torch.autocast(device, torch.bfloat16, enabled=False):
            torch.zeros(8, 8, device=device) @ torch.zeros(8, 8, device=device)

    dtypes = [dtype for _, dtype in births(predicted(step)) if dtype != "uint8"]
    assert dtypes == ["bfloat16"] * 2 + ["float32"] * 3
