"""Tensor subclasses of other libraries in a dry run."""

import pytest
import torch
from torch import nn

import memlab
from memlab.internals.torch_internals import FakeTensor


class Halved(nn.Parameter):
    """A parameter that becomes half precision on its way to the GPU."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)

    def cuda(self, *args, **kwargs):
        self.data = self.data.cuda(*args, **kwargs).half()
        return self


def test_a_subclass_is_fake_and_keeps_its_methods():
    with memlab.dry_run():
        weight = Halved(torch.empty(10))
        assert isinstance(weight, Halved)
        assert type(weight).__name__ == "Halved"
        assert not weight.requires_grad
        assert (weight * 2).shape == (10,)
    assert isinstance(weight, FakeTensor)  # inside, the answer is False
    assert type(Halved(torch.empty(10))) is Halved


def test_a_module_uses_the_subclass_own_conversion():
    def build():
        layer = nn.Linear(32, 64, bias=False)
        layer.weight = Halved(layer.weight.data)
        layer.cuda()
        assert layer.weight.dtype == torch.float16
        return (lambda: layer(torch.ones(1, 32, device="cuda").half())), layer, None

    assert memlab.predict(build).at_peak["parameters"] == 2 * 32 * 64


@pytest.mark.parametrize("double", [False, True])
def test_four_bit_weights_have_their_bytes(double):
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def build():
        options = {"quant_type": "nf4", "compress_statistics": double}
        layer = bitsandbytes.nn.Linear4bit(512, 1024, False, torch.float16, **options).cuda()
        x = torch.ones(8, 512, device="cuda", dtype=torch.float16, requires_grad=True)
        return (lambda: layer(x).sum().backward()), layer, None

    sizes = [e.bytes for e in memlab.predict(build).events if e.phase == "before"]
    count = 512 * 1024
    assert count // 2 in sizes
    assert (count // 64 if double else 4 * count // 64) in sizes
    assert 2 * count not in sizes


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_optimizer_state_has_the_bytes_of_a_real_step(name):
    """torchao compiles its step; here it runs uncompiled, in both."""
    optim = pytest.importorskip("torchao.optim")

    def trace():
        layer = nn.Linear(128, 256, dtype=torch.bfloat16)
        optimizer = getattr(optim, name)(layer.parameters(), bf16_stochastic_round=True)

        def step():
            layer(torch.ones(8, 128, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return memlab.measure(step, model=layer, optimizer=optimizer)

    with torch.compiler.set_stance("force_eager"):
        real = trace()
        with memlab.dry_run():
            dry = trace()
    assert [event.bytes for event in dry.events] == [event.bytes for event in real.events]


def test_a_prediction_counts_the_parts_of_quantized_optimizer_state():
    optim = pytest.importorskip("torchao.optim")

    def build():
        layer = nn.Linear(128, 256, bias=False).cuda()
        optimizer = optim.AdamW8bit(layer.parameters())

        def step():
            layer(torch.ones(8, 128, device="cuda")).sum().backward()
            optimizer.step()

        return step, layer, optimizer

    codes, scales, codebook = 128 * 256, 4 * 128, 4 * 256
    assert memlab.predict(build).at_peak["optimizer_state"] == 2 * (codes + scales + codebook)
