"""The meter on steps whose bytes can be computed by hand."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.internals.cycles import no_cycle_collection
from memlab.metering import folding
from memlab.trace import Trace

FLOAT = 4
ROWS, WIDE, NARROW = 64, 512, 256
KIB = 1024


def allocations(trace: Trace) -> list[int]:
    """Return the bytes of each allocation after the start, in order."""
    return [e.bytes for e in trace.events if e.bytes > 0 and e.phase != "before"]


def sizes(trace: Trace) -> list[int]:
    """Return the bytes of each event after the start, in order."""
    return [event.bytes for event in trace.events if event.phase != "before"]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, NARROW)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


PARAMETERS = FLOAT * (NARROW * WIDE + WIDE + WIDE * NARROW + NARROW)
STEP_COUNTERS = FLOAT * 4  # AdamW counts steps once per parameter


@pytest.fixture
def training():
    """Return (step, model, optimizer) for a perceptron on one batch."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(ROWS, NARROW)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


# ------------------------------------------------------------------ storages, not tensors


def test_a_view_does_not_allocate():
    x = torch.zeros(KIB)
    trace = memlab.measure(lambda: x.view(2, -1)[0].t().unsqueeze(0))
    assert allocations(trace) == []
    assert trace.peak_bytes == KIB * FLOAT


def test_an_in_place_operator_does_not_allocate():
    x = torch.zeros(KIB)
    assert allocations(memlab.measure(lambda: x.add_(1).mul_(2).relu_())) == []


def test_a_slice_keeps_the_whole_storage_alive():
    kept = []
    trace = memlab.measure(lambda: kept.append(torch.zeros(KIB)[:1]))
    assert trace.live_bytes == KIB * FLOAT


def test_an_empty_tensor_has_no_event():
    assert memlab.measure(lambda: torch.zeros(0)).events == ()


def test_a_storage_is_freed_when_its_last_tensor_dies():
    def step() -> None:
        x = torch.zeros(KIB)
        view = x.view(2, -1)
        del x
        torch.ones(1)  # the view keeps all of x alive here
        del view

    assert sizes(memlab.measure(step)) == [KIB * FLOAT, FLOAT, -FLOAT, -KIB * FLOAT]


def test_resize_counts_the_difference():
    x = torch.zeros(KIB)
    assert sizes(memlab.measure(lambda: x.resize_(3 * KIB))) == [2 * KIB * FLOAT]


def test_resizing_a_storage_outside_the_dispatcher_is_seen():
    x = torch.zeros(KIB)
    with memlab.meter() as running:
        x.add_(1)
        x.untyped_storage().resize_(0)
    assert running.trace.peak_bytes == KIB * FLOAT
    assert running.trace.live_bytes == 0


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    trace = memlab.measure(lambda: model(torch.zeros(1, 16)), model=model)
    assert trace.at_peak["parameters"] == 16 * 16 * FLOAT


def test_every_tensor_of_a_list_is_seen():
    xs = [torch.zeros(KIB), torch.zeros(KIB)]
    trace = memlab.measure(lambda: torch._foreach_add(xs, 1))
    assert allocations(trace) == [KIB * FLOAT] * 2
    assert trace.peak_bytes == 4 * KIB * FLOAT


def test_a_sparse_gradient_is_its_indices_and_its_values():
    embedding = nn.Embedding(100, 8, sparse=True)
    tokens = torch.tensor([1, 2, 3])
    trace = memlab.measure(lambda: embedding(tokens).sum().backward(), model=embedding)
    assert trace.at_end["gradients"] == 3 * 8 + 3 * 8 * FLOAT  # int64 indices, float values


# ------------------------------------------------------------------ categories


def test_the_first_step_allocates_the_optimizer_state(training):
    step, model, optimizer = training
    first = memlab.measure(step, model=model, optimizer=optimizer)
    second = memlab.measure(step, model=model, optimizer=optimizer)
    state = 2 * PARAMETERS + STEP_COUNTERS
    assert not any(e.phase == "before" and e.category == "optimizer_state" for e in first.events)
    assert first.at_end["optimizer_state"] == second.at_end["optimizer_state"] == state
    assert second.live_bytes - second.at_end["inputs"] == 2 * PARAMETERS + state


def test_a_step_by_categories(training):
    """The peak is in AdamW's loop, where a weight's denominator takes two operators and the
    previous bias's denominator is still alive."""
    step, model, optimizer = training
    step()
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    assert trace.peak_phase == "optimizer"
    assert trace.at_peak == {
        "parameters": PARAMETERS,
        "gradients": PARAMETERS,
        "optimizer_state": 2 * PARAMETERS + STEP_COUNTERS,
        "inputs": ROWS * NARROW * FLOAT,
        "optimizer_temporaries": (2 * NARROW * WIDE + WIDE) * FLOAT,
    }


def test_activations_are_alive_when_backward_starts():
    model, x = Perceptron(), torch.randn(ROWS, NARROW)
    trace = memlab.measure(lambda: model(x).square().mean().backward(), model=model)
    before_and_after_gelu = 2 * ROWS * WIDE * FLOAT
    output, loss = ROWS * NARROW * FLOAT, FLOAT
    activations = [e for e in trace.events if e.category == "activations" and e.bytes > 0]
    assert sum(e.bytes for e in activations) == before_and_after_gelu + output + loss


def test_without_a_graph_there_are_no_activations():
    model, x = Perceptron(), torch.randn(ROWS, NARROW)
    with torch.no_grad():
        trace = memlab.measure(lambda: model(x).sum(), model=model)
    assert {e.category for e in trace.events} == {"parameters", "inputs", "forward_temporaries"}


def test_setting_gradients_to_none_frees_them(training):
    step, model, optimizer = training
    step()
    trace = memlab.measure(optimizer.zero_grad, model=model, optimizer=optimizer)
    assert trace.peak_bytes - trace.live_bytes == PARAMETERS


def test_a_gradient_has_its_category_from_its_allocation():
    """It is allocated as a backward temporary, and becomes `.grad` without a copy."""
    model = nn.Linear(NARROW, WIDE, bias=False)
    x = torch.randn(ROWS, NARROW)
    trace = memlab.measure(lambda: model(x).sum().backward())
    (gradient,) = [e for e in trace.events if e.category == "gradients"]
    assert gradient.operator == "aten.mm.default"
    assert gradient.bytes == NARROW * WIDE * FLOAT


def test_a_gradient_freed_within_backward_is_a_gradient():
    model = nn.Linear(NARROW, WIDE, bias=False)
    model.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    trace = memlab.measure(lambda: model(torch.randn(ROWS, NARROW)).sum().backward())
    assert [e.bytes for e in trace.events if e.category == "gradients"] == [
        NARROW * WIDE * FLOAT,
        -NARROW * WIDE * FLOAT,
    ]


def test_results_of_autograd_grad_are_gradients():
    model, kept = nn.Linear(NARROW, WIDE), []
    x = torch.randn(ROWS, NARROW)

    def step():
        return kept.extend(torch.autograd.grad(model(x).sum(), list(model.parameters())))

    trace = memlab.measure(step, model=model)
    assert trace.at_end["gradients"] == (NARROW * WIDE + WIDE) * FLOAT


def test_a_second_backward_adds_to_the_gradient_in_place():
    model, x = nn.Linear(NARROW, WIDE, bias=False), torch.randn(ROWS, NARROW)
    model(x).sum().backward()
    trace = memlab.measure(lambda: model(x).sum().backward(), model=model)
    assert trace.at_end["gradients"] == NARROW * WIDE * FLOAT


def test_a_handwritten_optimizers_state_is_optimizer_state():
    model, momenta = nn.Linear(NARROW, WIDE), {}
    x = torch.randn(ROWS, NARROW)

    def step() -> None:
        model(x).sum().backward()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                momentum = momenta.setdefault(name, torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.1)
                weight -= 0.01 * momentum

    first, second = memlab.measure(step), memlab.measure(step)
    weights = (NARROW * WIDE + WIDE) * FLOAT
    assert first.at_end["optimizer_state"] == second.at_end["optimizer_state"] == weights


def test_a_batch_made_inside_the_step_is_an_input():
    model = nn.Linear(NARROW, WIDE)

    def step() -> None:
        tokens = torch.randint(9, (ROWS, NARROW))
        model(tokens.float() / 9).sum().backward()

    trace = memlab.measure(step, model=model)
    born = [e for e in trace.events if e.category == "inputs" and e.bytes > 0]
    assert [e.operator for e in born] == [
        "aten.randint.default",
        "aten._to_copy.default",
        "aten.div.Tensor",
    ]


def test_a_leaf_that_requires_a_gradient_is_a_parameter_without_a_module():
    image = torch.zeros(KIB, requires_grad=True)
    trace = memlab.measure(lambda: image.square().sum().backward())
    assert trace.at_end == {"parameters": KIB * FLOAT, "gradients": KIB * FLOAT}


def test_buffers_are_buffers():
    model = nn.BatchNorm1d(16)
    trace = memlab.measure(lambda: model(torch.randn(4, 16)), model=model)
    assert trace.at_end["buffers"] == 2 * 16 * FLOAT + 8  # running mean, variance; int64 counter


def test_recomputed_activations_are_backward_temporaries():
    model, x = Perceptron(), torch.randn(ROWS, NARROW, requires_grad=True)

    def step():
        return checkpoint(model, x, use_reentrant=False).sum().backward()

    trace = memlab.measure(step, model=model)
    recomputed = [e for e in trace.events if e.operator == "aten.gelu.default" and e.bytes > 0]
    assert [e.category for e in recomputed] == ["forward_temporaries", "backward_temporaries"]


def test_categories_sum_to_the_peak(training):
    step, model, optimizer = training
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    assert sum(trace.at_peak.values()) == trace.peak_bytes


def test_a_model_that_is_not_passed_is_found(training):
    step, model, optimizer = training
    step()
    handed = memlab.measure(step, model=model, optimizer=optimizer)
    assert memlab.measure(step).at_peak == handed.at_peak


# ------------------------------------------------------------------ modules and lines


def test_modules_are_named_in_forward_and_in_backward():
    model, x = Perceptron(), torch.randn(ROWS, NARROW, requires_grad=True)
    trace = memlab.measure(lambda: model(x).sum().backward(), model=model)
    modules = {(e.operator, e.phase): e.module for e in trace.events if e.bytes > 0}
    assert modules["aten.gelu.default", "forward"] == "Perceptron"
    assert modules["aten.gelu_backward.default", "backward"] == "Perceptron"
    made = [e.module for e in trace.events if e.phase == "backward" and e.bytes > 0]
    assert made.index("down") < made.index("Perceptron") < made.index("up")


def test_by_module_gives_each_gradient_to_the_module_of_its_parameter(training):
    step, model, optimizer = training
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    by_module = trace.by_module()
    assert by_module["up"]["gradients"] == (NARROW * WIDE + WIDE) * FLOAT
    assert by_module["down"]["optimizer_state"] == 2 * (WIDE * NARROW + NARROW) * FLOAT + 2 * FLOAT


def test_lines_are_in_user_code_and_optional():
    model, x = Perceptron(), torch.randn(ROWS, NARROW)
    assert all(e.line is None for e in memlab.measure(lambda: model(x), model=model).events)
    trace = memlab.measure(lambda: model(x), model=model, lines=True)
    (line,) = {e.line for e in trace.events if e.operator == "aten.gelu.default"}
    assert line.endswith(" forward")
    assert "test_storages.py:" in line


# ------------------------------------------------------------------ threads, exceptions, lifetimes


def test_tensors_freed_by_another_threads_backward_are_freed():
    model, x = Perceptron(), torch.randn(ROWS, NARROW)
    with memlab.meter(model) as running:
        loss = model(x).sum()
        alive = sum(e.bytes for e in memlab_events(running) if e.phase == "forward")
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    trace = running.trace
    assert alive > 2 * ROWS * WIDE * FLOAT
    assert trace.at_end == {
        "parameters": PARAMETERS,
        "gradients": PARAMETERS,  # from an unmetered thread, found at the end
        "inputs": ROWS * NARROW * FLOAT,
        "activations": FLOAT,  # the loss, which has a reference
    }
    assert "in its own thread" in str(trace)


def memlab_events(running: memlab.meter):
    """Return the events so far of a running meter."""
    return [c.record.event(c.bytes, c.phase) for c in running._storages.changes()]


def test_an_exception_in_the_step_leaves_a_trace_and_no_side_effects():
    model, x = Perceptron(), torch.randn(ROWS, NARROW)
    hooks = (
        len(module_hooks._global_forward_hooks),
        len(optimizer_hooks._global_optimizer_pre_hooks),
    )
    running = memlab.meter(model)

    def step() -> None:
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), running:
        step()
    assert allocations(running.trace)[0] == ROWS * WIDE * FLOAT
    assert hooks == (
        len(module_hooks._global_forward_hooks),
        len(optimizer_hooks._global_optimizer_pre_hooks),
    )
    assert "resize_" not in vars(torch.UntypedStorage)


def test_reading_a_trace_too_early_raises():
    with memlab.meter() as running, pytest.raises(RuntimeError, match="after the `with` block"):
        running.trace  # noqa: B018 - the property raises


def test_the_meter_keeps_nothing_alive():
    kept = []
    trace = memlab.measure(lambda: kept.append(torch.zeros(KIB)))
    deaths: list[bool] = []
    weakref.finalize(kept[0].untyped_storage(), deaths.append, True)
    kept.clear()
    assert deaths
    assert trace.live_bytes == KIB * FLOAT


def test_a_measurement_keeps_neither_the_model_nor_the_data_alive():
    def references(take: Callable[..., object]) -> list[weakref.ref]:
        model, data = nn.Linear(4, 4), [torch.ones(2, 4)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            model(data[0]).sum().backward()
            optimizer.step()

        take(step, model, optimizer)
        return [weakref.ref(held) for held in (model, data[0], optimizer, step)]

    references(lambda step, model, optimizer: step())  # torch keeps the first in a process alive
    with no_cycle_collection():
        kept = references(lambda step, *of: memlab.measure(step, model=of[0], optimizer=of[1]))
        assert [reference() for reference in kept] == [None] * 4


def test_one_meter_inside_another_sees_the_same(training):
    step, model, optimizer = training
    step()
    with memlab.meter(model, optimizer) as outer:
        inner = memlab.measure(step, model=model, optimizer=optimizer)
    assert inner.events == outer.trace.events


# ------------------------------------------------------------------ several steps


def test_two_equal_steps_have_equal_traces(training):
    step, model, optimizer = training
    step()
    first = memlab.measure(step, model=model, optimizer=optimizer)
    second = memlab.measure(step, model=model, optimizer=optimizer)
    assert not first.diff(second)


def test_the_difference_of_two_steps_is_a_leaked_loss_with_its_graph(training):
    _, model, _ = training
    x, losses = torch.randn(ROWS, NARROW), []

    def step() -> None:
        losses.append(model(x).sum())

    first = memlab.measure(step, model=model, lines=True)
    second = memlab.measure(step, model=model, lines=True)
    leaked = 2 * ROWS * WIDE * FLOAT + FLOAT  # saved by gelu and the next layer; the loss
    assert first.diff(second).bytes == leaked
    assert second.live_bytes - first.live_bytes == leaked
    assert "test_storages.py" in str(first.diff(second))


def test_the_saved_tensors_of_an_unused_graph_are_activations():
    model, x, kept = Perceptron(), torch.randn(ROWS, NARROW), []
    trace = memlab.measure(lambda: kept.append(model(x).sum()), model=model)
    assert trace.at_end["activations"] == 2 * ROWS * WIDE * FLOAT + FLOAT


def test_another_living_model_does_not_count(training):
    step, model, optimizer = training
    step()
    alone = memlab.measure(step, model=model, optimizer=optimizer)
    other, x = Perceptron(), torch.randn(ROWS, NARROW)
    memlab.measure(lambda: other(x).sum().backward(), model=other)
    beside = memlab.measure(step, model=model, optimizer=optimizer)
    assert beside.at_peak == alone.at_peak


# ------------------------------------------------------------------ effects of the meter


def test_a_gradient_with_two_sources_is_added_in_place():
    x = torch.randn(KIB, requires_grad=True)

    def step():
        return (torch.exp(x).sum() + torch.sin(x).sum()).backward()

    trace = memlab.measure(step)
    born = [e for e in trace.events if e.phase == "backward" and e.bytes == KIB * FLOAT]
    assert [e.operator for e in born] == ["aten.cos.default", "aten.mul.Tensor", "aten.mul.Tensor"]


def test_gathers_backward_scatters_in_place():
    x, index = torch.randn(8, KIB, requires_grad=True), torch.zeros(1, KIB, dtype=torch.long)
    trace = memlab.measure(lambda: x.gather(0, index).sum().backward())
    whole = [e.operator for e in trace.events if e.phase == "backward" and e.bytes == 8 * KIB * 4]
    assert whole == ["aten.new_zeros.default"]


def test_a_sum_in_a_users_hook_is_an_allocation():
    x = torch.randn(KIB, requires_grad=True)

    def step() -> None:
        y = x * 2
        y.register_hook(lambda gradient: gradient.add(1).add(2))
        y.sum().backward()

    operators = [e.operator for e in memlab.measure(step).events if e.phase == "backward"]
    assert operators.count("aten.add.Tensor") >= 2


def test_folding_is_correct_if_another_storage_dies_meanwhile(monkeypatch):
    """Python may collect cycles at any time, even while the meter handles an operator."""
    judge = folding.is_in_place_without_mode

    def collecting(*arguments) -> bool:
        gc.collect()
        return judge(*arguments)

    x, index = torch.randn(8, KIB, requires_grad=True), torch.zeros(1, KIB, dtype=torch.long)

    def step() -> None:
        cycle = [torch.ones(3 * KIB)]
        cycle.append(cycle)
        del cycle
        x.gather(0, index).sum().backward()

    monkeypatch.setattr(folding, "is_in_place_without_mode", collecting)
    with no_cycle_collection():
        trace = memlab.measure(step)
    changes = [e.bytes for e in trace.events if e.phase == "backward" and abs(e.bytes) > 4 * KIB]
    assert changes == [8 * KIB * 4, -3 * KIB * 4]


def test_an_unknown_storage_that_was_empty_before_the_step_is_new():
    """FSDP2 resizes a gathered weight's storage to 0, and back in the next step."""
    gathered = torch.zeros(KIB)
    gathered.untyped_storage().resize_(0)

    def step() -> None:
        gathered.untyped_storage().resize_(4 * KIB)
        gathered.fill_(1.0)
        gathered.untyped_storage().resize_(0)

    with memlab.meter() as running:
        step()
    assert [e.bytes for e in running.trace.events] == [4 * KIB, -4 * KIB]
    with memlab.dry_run():
        gathered = torch.zeros(KIB)
        gathered.untyped_storage().resize_(0)
        with memlab.meter() as dry:
            step()
    assert [e.bytes for e in dry.trace.events] == [4 * KIB, -4 * KIB]
