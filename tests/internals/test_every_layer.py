"""Every layer of torch.nn has the same gradients with offloaded activations and checkpoints."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from every_layer import CALLS, outputs_of
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from memlab.checkpointing import MATMULS, Checkpoint, checkpoint, selective
from memlab.compression import compressed_activations
from memlab.internals.saved_tensors import _Unencoded
from memlab.internals.torch_internals import top_saved_tensors_hooks
from memlab.offload import HostStore, offloaded_activations

every_layer = pytest.mark.parametrize("name", CALLS)


def built(name: str) -> tuple[nn.Module, tuple]:
    """Return a layer with its inputs, always the same, and initialized if it is lazy."""
    assert CALLS[name] is not None, f"tests/every_layer.py has no row for torch.nn.{name}"
    build, inputs = CALLS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated layers, settings for speed
        layer, inputs = build(), inputs()
        if name.startswith("Lazy"):
            layer(*inputs)
    return layer, inputs


def gradients(
    name: str,
    around: Callable[[], AbstractContextManager] = nullcontext,
    run: Callable[..., object] = lambda layer, *inputs: layer(*inputs),
) -> list[Tensor | None]:
    """Return the gradients of a layer's inputs and weights, and its buffers after backward."""
    layer, inputs = built(name)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with around():
            outputs = outputs_of(run(layer, *inputs))
    given = [x for x in (*inputs, *layer.parameters()) if torch.is_tensor(x) and x.requires_grad]
    torch.manual_seed(2)
    upstream = [torch.randn_like(output) for output in outputs]
    found = torch.autograd.grad(outputs, given, upstream, allow_unused=True)
    return [*found, *layer.buffers()]


def same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return len(some) == len(others) > 0 and all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )


def offloaded() -> AbstractContextManager:
    return offloaded_activations(HostStore(), minimum=1)


@pytest.mark.few(51)
@every_layer
def test_offloading_does_not_change_the_gradients_of_a_layer(name):
    wanted = gradients(name)
    if name.startswith("RReLU"):  # torch's own offloading is wrong there
        with pytest.raises(RuntimeError, match="RReLU in training, whose noise torch saves"):
            gradients(name, offloaded)
        return
    assert same(gradients(name, save_on_cpu), wanted)
    assert same(gradients(name, offloaded), wanted)


CHECKPOINTS = {
    "checkpoint": checkpoint,
    "without early stop": Checkpoint(check="none", early_stop=False),
    "selective, nothing": selective(()),
    "selective, matmuls": selective(MATMULS),
    "selective, everything": selective(lambda operator: True),
}


@pytest.mark.few(20)
@every_layer
def test_a_checkpoint_does_not_change_the_gradients_of_a_layer(name):
    wanted = gradients(name)
    for kind, run in CHECKPOINTS.items():
        assert same(gradients(name, run=run), wanted), kind


@pytest.mark.few(51)
@every_layer
def test_compression_rounds_each_saved_tensor_of_a_layer_by_less_than_a_step(name):
    inner = None

    def pack(tensor: Tensor):
        base = tensor if tensor._base is None else tensor._base
        packed = inner[0](tensor)  # before the copy: it may hold what was saved earlier
        return packed, tensor.detach().clone(), _largest_error(base.detach())

    def unpack(saved) -> Tensor:
        packed, original, bound = saved
        tensor = inner[1](packed)
        if not isinstance(packed, _Unencoded):  # the layer may fill or update it after saving
            error = (tensor.double() - original.double()).abs() if tensor.is_floating_point() else 0
            assert torch.all(torch.as_tensor(error) <= bound)
            assert tensor.shape == original.shape
            assert tensor.is_floating_point() or torch.equal(tensor, original)
        return tensor

    def around():
        nonlocal inner
        context = compressed_activations(bits=8, min_numel=1)
        context.__enter__()
        inner = top_saved_tensors_hooks()
        context.__exit__(None, None, None)
        return saved_tensors_hooks(pack, unpack)

    found = gradients(name, around)
    assert all(gradient is None or gradient.isfinite().all() for gradient in found)


def _largest_error(base: Tensor) -> float:
    """One step of 8 bits over the whole range; round to nearest takes half of it."""
    if not base.is_floating_point() or not base.numel():
        return 0.0
    low, high = base.double().aminmax()
    return float(high.clamp(min=0) - low.clamp(max=0)) / 254 * (1 + 2**-5)
