"""What is compiled before, inside and after a measurement trains as without memlab."""

import gc
import warnings
from types import FunctionType

import pytest
import torch
from torch import nn

import memlab

BACKEND = "aot_eager"  # traces as for Inductor, and needs no C++ compiler


def model_and_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8))
    return model, torch.randn(4, 8)


def trained(compiled: bool = True):
    """Return a model with its gradients after one step, and the step."""
    model, x = model_and_input()
    run = torch.compile(model, backend=BACKEND, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()

    step()
    return model, step


def with_measure(body):
    memlab.measure(body)


def with_meter(body):
    with memlab.meter():
        body()


def with_predict(body):
    memlab.predict(lambda: (body, None, None))


def with_dry_run(body):
    with memlab.dry_run():
        body()


def with_monitor(body):
    with memlab.monitor():
        body()


def with_budget(body):
    with memlab.budget("1 GiB"):
        body()


TOOLS = [with_measure, with_meter, with_predict, with_dry_run, with_monitor, with_budget]


@pytest.fixture(autouse=True)
def fresh():
    with warnings.catch_warnings(action="ignore"):
        import torch._inductor.cudagraph_trees  # torch warns about itself
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.few(1)
@pytest.mark.parametrize("tool", TOOLS)
def test_models_compiled_before_inside_and_after_have_gradients_of_uncompiled_ones(tool):
    wanted = [p.grad for p in trained(compiled=False)[0].parameters()]

    def check(parameters):
        for parameter, gradient in zip(parameters, wanted, strict=True):
            assert torch.equal(parameter.grad, gradient)

    _, earlier = trained()
    inside = []
    tool(lambda: (inside.append(trained()[0]), earlier()))
    if tool not in (with_predict, with_dry_run):  # else the gradients are fake
        check(inside[0].parameters())
    assert all(p.grad is not None for p in inside[0].parameters())
    check(trained()[0].parameters())
    with torch._dynamo.config.patch(error_on_recompile=True):
        earlier()
        check(trained()[0].parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("tool", [with_measure, with_meter, with_budget])
def test_models_train_after_the_first_one_was_compiled_inside(tool):
    torch.ops.aten.linear.default._dispatch_cache.clear()  # as in a new process
    tool(trained)
    torch._dynamo.reset()  # else the next model runs the first one's code
    assert all(p.grad is not None for p in trained()[0].parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_compiled_step_leaves_nothing_of_memlab_compiled(tool):
    _, step = trained()
    compiled = torch.compile(step, backend=BACKEND)
    tool(compiled)
    tool(compiled)
    cached = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    found = [
        each.__code__
        for each in gc.get_objects()
        if type(each) is FunctionType and (each.__module__ or "").startswith("memlab.")
    ]
    assert [code for code in found if cached(code)] == []
    assert all(p.grad is not None for p in trained()[0].parameters())


# ------------------------------------------------------------------ inside a compiled function


def eager_step():
    model, x = model_and_input()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    return step, model, optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # of 2.11
def test_measuring_inside_a_compiled_function_gives_the_bytes_of_outside():
    def measured():
        step, model, optimizer = eager_step()
        return memlab.measure(step, model=model, optimizer=optimizer)

    def predicted():
        return memlab.predict(eager_step)

    inside = []

    def function(x):
        inside.append(measured())
        inside.append(predicted())
        return x * 2

    outside = measured(), predicted()
    torch.compile(function, backend=BACKEND)(torch.ones(3))
    for got, wanted in zip(inside, outside, strict=True):
        assert list(map(described, got.events)) == list(map(described, wanted.events))


def described(event):
    return event._replace(storage=0, line=None)


@pytest.mark.parametrize("name", ["meter", "budget", "dry_run"])
def test_a_block_inside_a_compiled_function_is_refused_in_a_sentence(name):
    def function(x):
        with getattr(memlab, name)(*["1 GiB"] * (name == "budget")):
            return x * 2

    with pytest.raises(RuntimeError) as refused:
        torch.compile(function, backend=BACKEND)(torch.ones(3))
    assert str(refused.value) == (
        f"got memlab.{name} inside a function under torch.compile; call the compiled function "
        f"inside `with memlab.{name}(...)` instead"
    )
    assert torch.equal(
        torch.compile(lambda x: x * 2, backend=BACKEND)(torch.ones(3)), 2 * torch.ones(3)
    )


@pytest.mark.parametrize("name", ["measure", "meter", "predict", "dry_run", "monitor", "budget"])
def test_with_fullgraph_the_error_says_what_to_do(name):
    def function(x):
        getattr(memlab, name)(*[None] * (name in ("measure", "predict", "budget")))
        return x * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="memlab measures a compiled function"):
        torch.compile(function, backend=BACKEND, fullgraph=True)(torch.ones(3))


def test_a_monitor_inside_a_compiled_function_finds_the_steps():
    step, *_ = eager_step()
    found = []

    def function(x):
        with memlab.monitor() as monitor:
            step()
        found.append(monitor.num_steps)
        return x * 2

    torch.compile(function, backend=BACKEND)(torch.ones(3))
    assert found == [1]
