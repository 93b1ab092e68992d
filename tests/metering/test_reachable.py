"""Tensors alive during a step but not used by it."""

from functools import partial

import pytest
import torch
from torch import nn

import memlab
from memlab.metering.reachable import reachable

KIB = 1024
LEFT_OVER = torch.zeros(256)


def before(trace: memlab.Trace) -> dict[str, int]:
    """Return the bytes alive at the start of the step, by category."""
    found: dict[str, int] = {}
    for event in trace.events:
        if event.phase == "before":
            found[event.category] = found.get(event.category, 0) + event.bytes
    return found


class Trainer:
    """An object with a model, its optimizer and data."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        self.batches = [torch.zeros(64, 4) for _ in range(3)]

    def step(self) -> None:
        self.model(self.batches[0]).sum().backward()
        self.optimizer.step()


def test_unused_batches_are_inputs():
    batches = [torch.zeros(KIB) for _ in range(4)]
    trace = memlab.measure(lambda: batches[0] + 1)
    assert before(trace) == {"inputs": 4 * 4 * KIB}


def test_the_state_of_the_models_earlier_optimizer_counts():
    model = nn.Linear(4, 4, bias=False)  # 64 bytes
    model.trainer = [Trainer(model)]  # in a list, so not a submodule
    model.trainer[0].step()
    model.zero_grad()
    model.trainer.append(Trainer(model))
    trace = memlab.measure(model.trainer[1].step, model=model)
    assert before(trace) == {"parameters": 64, "optimizer_state": 64, "inputs": 6 * 1024}


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_dry_run_counts_the_same(is_dry):
    trainer = Trainer(nn.Linear(4, 4))
    if is_dry:
        with memlab.dry_run():
            trace = memlab.measure(trainer.step, model=trainer.model)
    else:
        trace = memlab.measure(trainer.step, model=trainer.model)
    assert before(trace) == {"parameters": 80, "inputs": 3 * 1024}


def test_an_unused_teacher_is_parameters_and_buffers():
    teacher = nn.BatchNorm1d(256)  # two weights, two statistics, a counter
    trace = memlab.measure(lambda: teacher)
    assert before(trace) == {"parameters": 2 * KIB, "buffers": 2 * KIB + 8}


def test_the_first_use_decides_the_category():
    weight, momentum = torch.zeros(256, requires_grad=True), torch.zeros(256)

    def step() -> None:
        weight.sum().backward()
        with torch.no_grad():
            weight.sub_(momentum.mul_(0.9))

    assert before(memlab.measure(step)) == {"parameters": KIB, "optimizer_state": KIB}


def test_tensors_of_an_earlier_dry_run_do_not_count():
    with memlab.dry_run():
        fake = torch.zeros(KIB)
    assert before(memlab.measure(lambda: fake)) == {}


def names_a_global() -> torch.Tensor:
    return LEFT_OVER


def calls_one_that_does() -> torch.Tensor:
    return names_a_global()


@pytest.mark.parametrize(
    "step",
    [names_a_global, calls_one_that_does, partial(torch.add, LEFT_OVER), lambda x=LEFT_OVER: x],
)
def test_a_functions_closure_defaults_and_globals_are_reached(step):
    assert any(found is LEFT_OVER for found in reachable([step]))


def test_python_modules_and_classes_are_not_searched():
    assert list(reachable([lambda: (torch, pytest, nn.Linear)])) == []


def test_an_attribute_is_not_a_global_of_the_same_name():
    assert list(reachable([lambda trainer: trainer.LEFT_OVER])) == []


def test_a_global_of_an_inner_function_is_reached():
    assert list(reachable([lambda: [LEFT_OVER + row for row in range(3)]])) == [LEFT_OVER]


def test_hooks_are_not_searched():
    """The hooks of one simulated rank lead to all other ranks."""
    others = torch.zeros(5)
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *args: others)
    model.weight.register_hook(lambda gradient: others)
    model.weight.register_post_accumulate_grad_hook(lambda weight: others)
    found = list(reachable([model]))
    assert any(each is model.weight for each in found)
    assert not any(each is others for each in found)
