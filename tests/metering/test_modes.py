"""The light dispatch mode."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.metering.modes import LightMode


class Recorder(LightMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = []

    def handle(self, func, types, args, kwargs):
        self.operators.append(str(func))
        return func(*args, **kwargs)


def test_every_operator_is_handled():
    with Recorder() as recorder:
        torch.ones(2) + 1
    assert recorder.operators == ["aten.ones.default", "aten.add.Tensor"]


def test_asking_a_fake_tensor_for_its_device_is_no_operator():
    with FakeTensorMode(), Recorder() as recorder:
        x = torch.ones(2)
        device = torch.nn.functional.linear(x, torch.ones(3, 2)).device
    assert device == torch.device("cpu")
    assert not any("prim" in operator for operator in recorder.operators)
