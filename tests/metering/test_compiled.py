"""Compiled steps are metered as they run compiled; the oracle is the allocator's recording."""

import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from quick import quick
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.dry_runs.compiled import COMPILED, UNCOMPILED
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


class Checkpointed(Pointwise):
    """A recomputed layer with dropout, whose random state compiled code keeps."""

    def forward(self, x):
        h = checkpoint(lambda x: F.dropout(self.up(x).sin(), 0.5), x, use_reentrant=False)
        return self.down(h).square().mean()


def checkpointed():
    return trained(Checkpointed(), torch.randn(512, 32))


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


COMPILED_STEPS = quick(
    [pointwise, a_function],
    [pointwise, gpt, checkpointed, graph_break, dynamic, without_gradients, a_function],
)


@pytest.mark.slow
@pytest.mark.parametrize("build", COMPILED_STEPS)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("build", [pointwise, graph_break])
def test_compiling_during_a_measurement_does_not_change_it(build):
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        step, model, optimizer = build()
        first = memlab.measure(step, model=model, optimizer=optimizer)
    later = memlab.measure(step, model=model, optimizer=optimizer)
    assert first.peak_bytes == later.peak_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("build", COMPILED_STEPS)
def test_a_dry_run_counts_every_allocation_of_compiled_code(build):
    step, model, optimizer = compiled(build)
    real = memlab.measure(step, model=model, optimizer=optimizer)
    with memlab.dry_run():
        step, model, optimizer = build()
        step()
        dry = memlab.measure(step, model=model, optimizer=optimizer)
    assert any(note.startswith(COMPILED) for note in dry.notes)
    assert dry.peak_bytes == real.peak_bytes
    assert allocations(dry) == allocations(real)


def test_compiled_code_of_a_dry_run_is_forgotten_at_its_end():
    step, model, optimizer = compiled(pointwise)
    with memlab.dry_run():
        pointwise()[0]()
    assert memlab.measure(step, model=model, optimizer=optimizer).peak_bytes > 0


def test_a_dry_run_needs_no_cpp_compiler(monkeypatch):
    def fail():
        raise AssertionError("a C++ compiler was looked for")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", fail)
    with memlab.dry_run():
        step, model, optimizer = pointwise()
        trace = memlab.measure(step, model=model, optimizer=optimizer)
    assert [note[: len(COMPILED)] for note in trace.notes] == [COMPILED]


def test_a_prediction_counts_the_code_that_inductor_generates_for_the_gpu():
    trace = memlab.predict(pointwise)
    assert any(note.startswith(COMPILED) for note in trace.notes)
    saved = 512 * 256 * 4  # of a dozen pointwise operators, only the input
    assert trace.at_peak["activations"] < 3 * saved
    assert any(event.operator == "compiled code" for event in trace.events)


def test_buffers_of_generated_code_have_the_layers_that_fill_them():
    """Also where each of several layers is compiled by itself, and shares the code."""

    def regional():
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for _ in "ab"))
        for number in range(len(layers)):
            layers[number] = torch.compile(layers[number])
        x = torch.randn(512, 32)
        return lambda: layers(x).sum().backward(), layers, None

    for build, layers in ((pointwise, {"up", "down"}), (regional, {"0.0", "0.1", "1.0", "1.1"})):
        events = memlab.predict(build).events
        modules = {e.module for e in events if e.phase == "forward" and e.category != "rounding"}
        assert layers <= modules


def test_buffers_of_generated_code_have_the_users_lines():
    trace = memlab.predict(pointwise, lines=True)
    lines = {e.line for e in trace.events if e.operator == "compiled code" and e.line}
    files_and_functions = {(line.partition(":")[0], line.split()[-1]) for line in lines}
    assert {(Path(file).name, name) for file, name in files_and_functions} == {
        ("test_compiled.py", "forward")
    }


def test_a_prediction_counts_what_compiled_code_recomputes():
    trace = memlab.predict(checkpointed)
    assert any(note.startswith(COMPILED) for note in trace.notes)
    assert trace.at_peak["activations"] < 512 * 256 * 4 + 512 * 256  # the output and a mask


def test_what_cannot_be_compiled_is_counted_uncompiled(monkeypatch):
    """Every allocation is as without torch.compile."""

    def fail(*args):
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(torch._inductor.graph.GraphLowering, "codegen", fail)
    with memlab.dry_run():
        model, x = Pointwise(), torch.randn(512, 32)
        called = torch.compile(model)
        trace = memlab.measure(lambda: called(x).backward(), model=model)
    assert [note for note in trace.notes if note.startswith(UNCOMPILED) and "no lowering" in note]
    plain, x = Pointwise(), torch.randn(512, 32)
    assert trace.peak_bytes == memlab.measure(lambda: plain(x).backward(), model=plain).peak_bytes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_are_counted_uncompiled(backend):
    with memlab.dry_run():
        model, x = Pointwise(), torch.randn(512, 32)
        called = torch.compile(model, backend=backend)
        trace = memlab.measure(lambda: called(x).backward(), model=model)
    assert any(note.startswith(UNCOMPILED) for note in trace.notes)


def allocations(trace):
    return Counter(event.bytes for event in trace.events if event.bytes > 0)


def compiled(build):
    """Compile the step, ignoring the compiler's warnings."""
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        made = build()
        made[0]()
    return made
