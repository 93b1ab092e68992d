"""The light dispatch mode."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.metering.modes import LightMode, restore_mode_flags
from memlab.metering.registry import Registry
from memlab.metering.storages import StorageMeter


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


def test_a_fake_tensors_device_query_is_not_handled():
    with FakeTensorMode(), Recorder() as recorder:
        x = torch.ones(2)
        device = torch.nn.functional.linear(x, torch.ones(3, 2)).device
    assert device == torch.device("cpu")
    assert not any("prim" in operator for operator in recorder.operators)


@pytest.mark.parametrize(
    "function", [StorageMeter.handle, StorageMeter._record_birth, Registry._died]
)
def test_torch_compile_skips_the_meters_functions(function):
    """Inside a handler the mode is off, so Dynamo would otherwise compile the handler."""
    step = torch.compile(lambda x: x.sin().cos().tan(), backend="eager")
    memlab.measure(lambda: step(torch.ones(2)))
    compiled = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    assert compiled == []


def modes_that_overlap():
    """Start one thread's mode within another's, and end it later."""
    begun, ended = threading.Event(), threading.Event()

    def outer():
        with TorchDispatchMode():
            begun.set()
            ended.wait()

    def inner():
        begun.wait()
        mode = TorchDispatchMode()
        mode.__enter__()
        ended.set()
        first.join()
        mode.__exit__(None, None, None)

    first, second = threading.Thread(target=outer), threading.Thread(target=inner)
    first.start()
    second.start()
    second.join()


def test_modes_in_threads_leave_no_flag_set():
    """With a flag left set, torch would compile nothing any more."""
    with restore_mode_flags():
        modes_that_overlap()
        assert _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
