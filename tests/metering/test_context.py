"""The module and phase of each operator."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.internals.threads import scope
from memlab.metering.context import Context, ModuleNames


def phases_of(step) -> list[tuple[str, str, str]]:
    """Return (operator, phase, module) for every operator in `step`."""
    seen = []
    context = Context(
        on_root=lambda module: None,
        on_first_step=lambda optimizer: None,
        on_step_end=lambda optimizer: None,
        on_backward_start=lambda: seen.append(("", "backward starts", "")),
        on_backward_end=lambda: seen.append(("", "backward ends", "")),
    )

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            phase = context.phase()
            seen.append((func.overloadpacket.__name__, phase, context.module()))
            return func(*args, **(kwargs or {}))

    with scope(), context.followed(), Watch():
        step()
    return seen


def test_a_step_has_the_phases_forward_backward_optimizer():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    phases = [phase for _, phase, _ in phases_of(step)]
    order = list(dict.fromkeys(phases))
    assert order == ["forward", "backward starts", "backward", "backward ends", "optimizer"]


def test_each_micro_batch_has_a_forward_and_a_backward():
    model = nn.Linear(3, 3)

    def step() -> None:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()

    names = [phase for _, phase, _ in phases_of(step)]
    assert names.count("backward starts") == names.count("backward ends") == 3


def test_clipping_and_a_manual_update_are_in_the_optimizer_phase():
    model = nn.Linear(3, 3)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    operators = phases_of(step)
    assert {phase for name, phase, _ in operators if name == "sub_"} == {"optimizer"}
    assert {phase for name, phase, _ in operators if "norm" in name} == {"optimizer"}


def test_validation_after_training_is_forward():
    model = nn.Linear(3, 3)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 3))

    assert phases_of(step)[-1] == ("addmm", "forward", "Linear")


def test_a_step_within_backward_is_in_the_optimizer_phase():
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda weight: optimizer.step())
    operators = phases_of(lambda: model(torch.ones(1, 3)).sum().backward())
    assert ("add_", "optimizer") in {(name, phase) for name, phase, _ in operators}


def test_a_backward_operator_belongs_to_the_module_that_made_its_node():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3))
    x = torch.ones(1, 3, requires_grad=True)
    operators = phases_of(lambda: model(x).exp().sum().backward())
    backward = [(name, module) for name, phase, module in operators if phase == "backward"]
    assert ("mul", "") in backward  # exp's gradient; exp is outside every module
    assert ("sigmoid_backward", "1") in backward
    assert [module for name, module in backward if name == "mm"] == ["2", "2", "0", "0"]


def test_a_module_that_raises_is_no_longer_running():
    class Failing(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    def step() -> None:
        try:
            Failing()(torch.ones(1))
        except ZeroDivisionError:
            torch.ones(1)

    assert phases_of(step)[-1] == ("ones", "forward", "")


def test_a_module_has_its_name_in_its_first_root():
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(nn.Sequential(inner))
    names = ModuleNames()
    names.add_root(outer)
    assert names.of(inner) == "0.0"
    assert names.owner_of(inner.weight) == "0.0"
    assert names.of(outer) == "Sequential"


def test_names_in_a_second_root_start_with_its_class():
    names, second = ModuleNames(), nn.Sequential(nn.Linear(2, 2))
    names.add_root(nn.Sequential(nn.Linear(2, 2)))
    names.add_root(second)
    assert names.of(second[0]) == "Sequential.0"
