"""Compiled steps are metered as they run compiled; the oracle is the allocator's recording."""

import warnings
from collections import Counter

import pytest
import torch
from quick import quick
from torch import nn

import memlab
from memlab.dry_runs.fake_tensors import UNCOMPILED
from memlab.metering.profiler_recording import compare, record
from memlab.model import GPT, PRESETS


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory):
    """Use a fresh cache directory: a shared one may have code for another CPU."""
    with pytest.MonkeyPatch.context() as patch:
        # Inductor's precompiled headers belong to one ATEN_CPU_CAPABILITY; with another, compiling
        # fails.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        try:
            with warnings.catch_warnings(action="ignore"):
                torch.compile(torch.sin)(torch.ones(4))
        except Exception as error:
            pytest.skip(f"torch.compile does not work here: {str(error).strip().splitlines()[0]}")
        yield
        torch._dynamo.reset()


class Pointwise(nn.Module):
    """A dozen pointwise operators between two layers, which compile into one loop."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x):
        h = self.up(x)
        h = h.sin() * h.cos() + h.tanh() * h.sigmoid()
        h = h * h + h.exp().clamp(max=3)
        return self.down(h).square().mean()


class Broken(Pointwise):
    """A graph break in the middle."""

    def forward(self, x):
        h = self.up(x).sin().cos()
        torch._dynamo.graph_break()
        return self.down(h.tanh() * h).square().mean()


def trained(model, *inputs, **settings):
    """Return an SGD step on the compiled model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, **settings)

    def step():
        optimizer.zero_grad()
        compiled(*inputs).backward()
        optimizer.step()

    return step, model, optimizer


def pointwise():
    return trained(Pointwise(), torch.randn(512, 32))


def gpt():
    config = PRESETS["tiny"]
    tokens = torch.randint(config.vocab_size, (2, 64))
    return trained(GPT(config), tokens, tokens)


def graph_break():
    return trained(Broken(), torch.randn(512, 32))


def dynamic():
    return trained(Pointwise(), torch.randn(300, 32), dynamic=True)


def without_gradients():
    model, x = Pointwise(), torch.randn(512, 32)
    compiled = torch.compile(model)
    return torch.no_grad()(lambda: compiled(x)), model, None


def a_function():
    x = torch.randn(512, 32, requires_grad=True)
    function = torch.compile(lambda x: (x.sin() * x.cos()).tanh().sum())

    def step():
        x.grad = None
        function(x).backward()

    return step, None, None


@pytest.mark.parametrize(
    "build",
    quick(
        [pointwise, a_function],
        [pointwise, gpt, graph_break, dynamic, without_gradients, a_function],
    ),
)
def test_every_allocation_equals_the_compiled_codes(build):
    step, model, optimizer = compiled(build)
    before = record(step, warm_up=step)
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    found = compare(trace, before)
    scratch = Counter(e.bytes for e in before.events if e.kind == "scratch" and e.bytes > 0)
    assert (found.missing, found.unseen, found.excess) == ({}, {}, scratch)
    assert found.real_peak_difference == 0
    assert any(event.operator == "compiled code" for event in trace.events)
    after = record(step, warm_up=step)  # the meter leaves nothing behind
    assert [e._replace(address=0) for e in after.events] == [
        e._replace(address=0) for e in before.events
    ]


def test_compiled_buffers_have_categories():
    step, model, optimizer = compiled(pointwise)
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    assert trace.at_end["parameters"] == trace.at_end["gradients"] == weights
    assert trace.at_peak["activations"] > 0
    assert trace.at_peak["inputs"] == 512 * 32 * 4


@pytest.mark.parametrize("build", [pointwise, graph_break])
def test_compiling_during_a_measurement_does_not_change_it(build):
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        step, model, optimizer = build()
        first = memlab.measure(step, model=model, optimizer=optimizer)
    later = memlab.measure(step, model=model, optimizer=optimizer)
    assert first.peak_bytes == later.peak_bytes


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_dry_run_notes_that_it_runs_uncompiled(is_compiled):
    """Every allocation is as without torch.compile."""
    with memlab.dry_run():
        model, x = Pointwise(), torch.randn(512, 32)
        called = torch.compile(model) if is_compiled else model
        trace = memlab.measure(lambda: called(x).backward(), model=model)
    assert (UNCOMPILED in trace.notes) == is_compiled
    plain, x = Pointwise(), torch.randn(512, 32)
    assert trace.peak_bytes == memlab.measure(lambda: plain(x).backward(), model=plain).peak_bytes


def test_a_prediction_notes_it_too():
    trace = memlab.predict(pointwise)
    assert UNCOMPILED in trace.notes


def compiled(build):
    """Compile the step, ignoring the compiler's warnings."""
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        made = build()
        made[0]()
    return made
