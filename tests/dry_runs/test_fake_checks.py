"""Checks for fake tensors: False in libraries, the truth in torch."""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses import fake_tensor
from traces import predicted

import memlab

LIBRARY = """
import torch
from torch._subclasses.fake_tensor import FakeTensor

def by_its_own_import(x):
    return isinstance(x, FakeTensor)

def by_attribute(x):
    return isinstance(x, getattr(torch, "_subclasses").FakeTensor)

def by_import_in_the_function(x):
    from torch._subclasses import FakeTensor
    return issubclass(type(x), FakeTensor) or type(x) == FakeTensor
"""
WAYS = ("by_its_own_import", "by_attribute", "by_import_in_the_function")


@pytest.fixture
def library(monkeypatch):
    module = ModuleType("a_library")
    exec(LIBRARY, module.__dict__)
    monkeypatch.setitem(sys.modules, "a_library", module)
    return module


@pytest.mark.parametrize("way", WAYS)
def test_in_a_library_no_tensor_is_fake(library, way):
    answers = []
    with memlab.dry_run():
        answers.append(getattr(library, way)(torch.zeros(2)))
    predicted(lambda device: answers.append(getattr(library, way)(torch.zeros(2, device=device))))
    assert answers == [False, False]


def test_in_torch_the_check_is_true():
    with memlab.dry_run():
        x = torch.zeros(1, 1, 4, 4)
        assert torch._meta_registrations.device_hint(x) == "cpu"
        assert isinstance(x, fake_tensor.FakeTensor)


def test_all_names_are_restored(library):
    with memlab.dry_run():
        assert library.FakeTensor is not fake_tensor.FakeTensor
    assert library.FakeTensor is torch._subclasses.FakeTensor is fake_tensor.FakeTensor


def test_transformers_checks_give_the_answers_of_a_real_run():
    """Call every function in transformers that checks for tracing, compiling or recording."""
    checks = pytest.importorskip("transformers.utils.import_utils")
    words = ("tracing", "fake_tensor", "fx_proxy", "compiling", "exporting", "capturing", "jitting")
    asked = {
        name: function
        for name, function in vars(checks).items()
        if name.startswith("is_") and any(word in name for word in words)
    }
    assert {"is_tracing", "is_fake_tensor", "is_torchdynamo_compiling"} <= asked.keys()

    def answers(x):
        takes_a_tensor = {name: f.__code__.co_argcount > 0 for name, f in asked.items()}
        return {name: f(x) if takes_a_tensor[name] else f() for name, f in asked.items()}

    real, in_a_prediction = answers(torch.zeros(2)), {}
    with memlab.dry_run():
        assert answers(torch.zeros(2)) == real
    predicted(lambda device: in_a_prediction.update(answers(torch.zeros(2, device=device))))
    assert in_a_prediction == real
    assert not any(real.values())


def test_the_type_of_a_parameter_makes_a_parameter():
    """accelerate moves a parameter with `type(old)(new, requires_grad=...)`."""
    with memlab.dry_run():
        old = torch.nn.Linear(2, 2).weight
        made = type(old)(torch.ones(3), requires_grad=old.requires_grad)
        assert isinstance(made, torch.nn.Parameter)
        assert (made.shape, made.requires_grad) == ((3,), True)


def test_weights_that_accelerate_offloads_allocate_as_on_real_tensors():
    accelerate = pytest.importorskip("accelerate")

    def measured():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        return memlab.measure(lambda: model(torch.ones(2, 8)).sum(), model=model, device="cpu")

    real = measured()
    with memlab.dry_run():
        dry = measured()
    assert [event.bytes for event in real.events] == [event.bytes for event in dry.events]
