"""Day 7: what its checks tell a learner, and what the lesson claims."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from edited import verdict_on
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memlab
from memlab.checkpointing import checkpoint
from memlab.compression import compressed_activations
from memlab.course.bill import SETTING
from memlab.course.checks.day07 import bytes_kept, compress, decompress, unpack
from memlab.course.solutions import solution
from memlab.model import GPT, PRESETS
from memlab.quantize import dequantize_blockwise, quantize_blockwise
from memlab.reference.activation_compression import hooks, quantize
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

stochastic_round, pack = solution("7.2"), solution("7.3")


# ------------------------------------------------------------------ answers


@pytest.mark.slow
def test_a_key_that_two_tensors_share_is_not_taken_for_an_address():
    by_size = (
        ("known = weakref.WeakKeyDictionary()", "known = {}"),
        ("if storage not in known:", "if storage.nbytes() not in known:"),
        ("known[storage]", "known[storage.nbytes()]"),
    )
    verdict = verdict_on("7.5", *by_size)
    assert "one comes back with the other's values" in verdict.text
    assert "address" not in verdict.text


# ------------------------------------------------------------------ compared with the library


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("count", [256, 1000, 5 * 256 + 1])
def test_the_lessons_codes_are_the_librarys(bits, count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3 + 1
    kept, by_library = compress(x, bits), quantize_blockwise(x, bits=bits)
    assert torch.equal(kept.packed, by_library.codes)
    assert torch.equal(decompress(kept), dequantize_blockwise(by_library))
    assert sum(part.nbytes for part in kept[:3]) == by_library.nbytes


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_codes_come_back(bits):
    codes = torch.randint(2**bits, (1001,), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits, 1001), codes)


def test_stochastic_rounding_is_unbiased():
    """Five standard deviations of the mean of 100,000 draws."""
    steps = torch.linspace(0, 3, 13).repeat_interleave(100_000)
    rounded = stochastic_round(steps, torch.Generator().manual_seed(0))
    means = rounded.view(13, -1).mean(1)
    assert (means - torch.linspace(0, 3, 13)).abs().max() < 5 * 0.5 / 100_000**0.5


def test_the_levels_reach_the_maximum():
    groups = torch.randn(64, 256) * 10 + 100
    _, smallest, step = quantize(groups, 255)
    low, high = groups.aminmax(dim=1, keepdim=True)
    assert (smallest.float() <= low).all()
    assert (smallest.float() + 255 * step.float() >= high - 1e-5).all()


class TanhLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def test_the_lessons_count_of_bytes_is_the_meters():
    """The output and x, which the test holds, are not counted."""
    layer, x, seen = TanhLayer(), torch.randn(32, 64, requires_grad=True), []
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        layer(x)
    _, after = bytes_kept(seen, layer.parameters(), 8)
    seen.clear()
    outputs = []

    def forward():
        with saved_tensors_hooks(*hooks(layer.parameters(), compress, decompress)):
            outputs.append(layer(x))

    trace = memlab.measure(forward, model=layer)
    held = sum(e.bytes for e in trace.events if e.phase != "before") - outputs[0].nbytes
    assert held == after


# ------------------------------------------------------------------ claims of the lesson


def parts(config, call, around, batch, seq_len, dtype, device):
    model = GPT(config, dtype=dtype).to(device)
    for block in model.blocks:
        block.forward = partial(call, block.forward)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long).to(device)

    def step():
        optimizer.zero_grad()
        with around():
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()

    return step, model, optimizer


def predicted(layers, call, around):
    config = replace(PRESETS["llama-2-7b"], layers=layers)
    trace = memlab.predict(partial(parts, config, call, around, 1, 4096, torch.bfloat16, "cuda"))
    running = accumulate(e.bytes for e in trace.events if e.category == "activations")
    return max(running), trace.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("around", [nullcontext, compressed_activations])
@pytest.mark.parametrize("call", [lambda fn, x: fn(x), checkpoint])
def test_every_block_of_a_7b_model_adds_the_same_bytes(call, around):
    """The lesson measures models of two and three of the 32 blocks, or of one and two."""
    is_eight_bits_alone = call is not checkpoint and around is compressed_activations
    first = 2 if is_eight_bits_alone else 1
    one, two = (predicted(layers, call, around) for layers in (first, first + 1))
    all_of_them = predicted(32, call, around)
    more = 32 - first - 1
    assert all_of_them == tuple(b + more * (b - a) for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_eight_bits_instead_of_recomputation_have_a_higher_peak_than_day_6():
    """On two of the bill's eight sequences: the others are like the second."""
    setting, technique = replace(SETTING, batch=2), combined("accumulation+bfloat16")

    def in_eight_bits(checkpointed):
        def change(model):
            technique.change_model(model)
            for block in model.blocks[:checkpointed]:
                block.forward = partial(checkpoint, block.forward)

        around = replace(
            technique, change_model=change, around_forward=lambda device: compressed_activations()
        )
        return dry_trace(setting, around).peak_bytes

    nothing_again, eight_again, nine_again, all_again = map(in_eight_bits, (0, 8, 9, 12))
    assert [format_bytes(nothing_again), format_bytes(all_again)] == ["1.45 GiB", "1.37 GiB"]
    assert eight_again > nine_again == all_again  # there is room for three of the twelve
