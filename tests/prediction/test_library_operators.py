"""Operators of libraries, whose fake kernels are Python functions that make their results."""

import pytest
import torch
from torch import nn

import memlab

# Ways to make a result like x in a fake kernel.
WAYS = {
    "empty_like": torch.empty_like,
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    "zeros, device by name": lambda x: torch.zeros(x.shape, dtype=x.dtype, device="cuda"),
    "full, device by index": lambda x: torch.full(x.shape, 0.5, dtype=x.dtype, device="cuda:0"),
    "empty_strided": lambda x: torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device=x.device
    ),
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype, device=x.device),
    "full_like": lambda x: torch.full_like(x, 1.0, device=x.device),
    "new_empty": lambda x: x.new_empty(x.shape, device=x.device),
    "new_zeros": lambda x: x.new_zeros(x.shape, device=x.device),
    "arange": lambda x: torch.arange(x.numel(), dtype=x.dtype, device=x.device).view(x.shape),
    "tensor": lambda x: torch.tensor(0.5, device=x.device).expand(x.shape).contiguous(),
    "to": lambda x: torch.empty(x.shape, dtype=x.dtype).to(x.device),
    "cuda": lambda x: torch.empty(x.shape, dtype=x.dtype).cuda(),
}


def scaled(x, weight):
    return x * weight


def keep(ctx, inputs, output):
    torch.zeros(3, device=inputs[0].device)
    ctx.save_for_backward(*inputs)


def gradients(ctx, upstream):
    x, weight = ctx.saved_tensors
    return upstream * weight, torch.zeros(weight.shape, device=x.device)


@pytest.fixture
def library():
    with torch.library._scoped_library("memlab_tests", "FRAGMENT") as made:
        yield made


def define(library, name, like=None, meta=None):
    """Register an operator as a library does, whose fake kernel calls `like`, or whose kernel for
    meta tensors calls `meta`."""
    library.define(f"{name}(Tensor x, Tensor weight) -> Tensor")
    library.impl(name, scaled, "CPU")
    if meta:
        library.impl(name, lambda x, weight: meta(x), "Meta")
    name = f"memlab_tests::{name}"
    if like:
        torch.library.register_fake(name, lambda x, weight: like(x), lib=library)
    torch.library.register_autograd(name, gradients, setup_context=keep, lib=library)


def building(name, device="cuda"):
    operator = getattr(torch.ops.memlab_tests, name)

    def build():
        layer, weight = nn.Linear(256, 256, device=device), torch.ones(256, device=device)
        x = torch.randn(64, 256, device=device)
        weight.requires_grad_()

        def step():
            operator(layer(x), weight).square().mean().backward()

        return step, layer, None

    return build


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_fake_kernel_may_make_its_result_in_any_way(library, way):
    define(library, "plain", torch.empty_like)
    define(library, "other", WAYS[way])
    plain, other = (memlab.predict(building(name)) for name in ("plain", "other"))
    assert (other.device, other.peak_bytes, other.reserved_bytes) == (
        *("cuda", plain.peak_bytes, plain.reserved_bytes),
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS)
def test_a_dry_run_calls_the_same_fake_kernels(library, way):
    define(library, "other", WAYS[way])
    step, model, _ = building("other", "cpu")()
    with memlab.dry_run():
        built = building("other")()
        dry = memlab.measure(*built[:1], model=built[1])
    assert dry.peak_bytes == memlab.measure(step, model=model).peak_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["empty_like", "empty", "zeros_like", "full_like", "new_empty"])
def test_a_meta_kernel_may_make_its_result_like_its_argument(library, way):
    define(library, "plain", torch.empty_like)
    define(library, "other", meta=WAYS.get(way, torch.zeros_like))
    plain, other = (memlab.predict(building(name)) for name in ("plain", "other"))
    assert other.peak_bytes == plain.peak_bytes


for_the_cpu = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch for CUDA fails with the driver's error"
)


@pytest.mark.parametrize(
    "meta",
    [
        pytest.param(None, id="missing"),
        pytest.param(WAYS["zeros, device by name"], id="device by name", marks=for_the_cpu),
        pytest.param(WAYS["full, device by index"], id="device by index", marks=for_the_cpu),
    ],
)
def test_an_operator_without_a_usable_fake_kernel_is_named_with_its_line(library, meta):
    """torch.compile refuses them, too: a kernel for meta tensors may make only those."""
    define(library, "other", meta=meta)
    line = r"test_library_operators.py:\d+ step: memlab_tests.other.default"
    with pytest.raises(ValueError, match=f"{line} has no fake kernel, or one that makes"):
        memlab.predict(building("other"))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch ≥ 2.13 with Triton's functions")
def test_a_triton_operator_may_make_its_result_by_device():
    triton_op = pytest.importorskip("tests.prediction.own_triton_operator").doubled

    def build():
        x = torch.randn(64, 256, device="cuda")

        def step():
            triton_op(x)

        return step, None, None

    assert memlab.predict(build).peak_bytes == 2 * 64 * 256 * 4
