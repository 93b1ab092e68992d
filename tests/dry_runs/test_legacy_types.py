"""Tensor types from before dtypes make, cast and check tensors of a prediction as on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Variable

import memlab

FLOATS = (torch.float32, "cuda")


def predicted(make) -> Any:
    """Return what `make` returns in a prediction, as (dtype, device) if it is a tensor."""
    found = []

    def build():
        made = make()
        is_tensor = isinstance(made, torch.Tensor)
        found.append((made.dtype, made.device.type) if is_tensor else made)
        return (lambda: None), None, None

    memlab.predict(build)
    return found[0]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.cuda.FloatTensor(2, 3), FLOATS),
        (lambda: torch.cuda.FloatTensor(), FLOATS),
        (lambda: torch.cuda.FloatTensor(torch.Size([2, 3])), FLOATS),
        (lambda: torch.cuda.FloatTensor([1.0, 2.0]), FLOATS),
        (lambda: torch.cuda.FloatTensor(np.zeros((2, 3))), FLOATS),
        (lambda: torch.cuda.FloatTensor(torch.zeros(3).cuda()), FLOATS),
        (lambda: torch.cuda.LongTensor([1, 2]), (torch.int64, "cuda")),
        (lambda: torch.cuda.HalfTensor(3), (torch.float16, "cuda")),
        (lambda: Variable(torch.cuda.FloatTensor(4, 1).fill_(1.0), requires_grad=False), FLOATS),
        (lambda: torch.zeros(2).type(torch.cuda.FloatTensor), FLOATS),
        (lambda: torch.zeros(2).type("torch.cuda.FloatTensor"), FLOATS),
        (lambda: torch.zeros(2).cuda().type(torch.FloatTensor), (torch.float32, "cpu")),
        (lambda: torch.zeros(2).cuda().type("torch.LongTensor"), (torch.int64, "cpu")),
        (lambda: torch.zeros(2).cuda().type(torch.float16), (torch.float16, "cuda")),
        (lambda: torch.zeros(2).type(torch.zeros(2).cuda().type()), FLOATS),
        (lambda: nn.Linear(2, 2).type(torch.cuda.FloatTensor).weight, FLOATS),
        (lambda: torch.zeros(2).cuda().new(3, 4), FLOATS),
        (lambda: torch.zeros(2).cuda().new([1, 2]), FLOATS),
        (lambda: torch.zeros(2).new(3, 4), (torch.float32, "cpu")),
        (lambda: torch.zeros(2).cuda().type(), "torch.cuda.FloatTensor"),
        (lambda: torch.zeros(2).half().type(), "torch.HalfTensor"),
        (lambda: torch.typename(torch.zeros(2).cuda()), "torch.cuda.FloatTensor"),
        (lambda: isinstance(torch.zeros(2).cuda(), torch.cuda.FloatTensor), True),
        (lambda: isinstance(torch.zeros(2).cuda(), torch.cuda.LongTensor), False),
        (lambda: isinstance(torch.zeros(2), torch.cuda.FloatTensor), False),
        (lambda: isinstance("text", torch.cuda.FloatTensor), False),
        (lambda: isinstance(torch.zeros(2).cuda(), torch.FloatTensor), False),
        (lambda: isinstance(torch.zeros(2).cuda().half(), torch.HalfTensor), False),
        (lambda: isinstance(torch.zeros(2), torch.FloatTensor), True),
        (lambda: isinstance(torch.zeros(2), torch.DoubleTensor), False),
        (lambda: torch.FloatTensor(2, 3), (torch.float32, "cpu")),
        (lambda: torch.Tensor(2, 3), (torch.float32, "cpu")),
        (lambda: torch.cuda.FloatTensor(1).fill_(3).item(), 3.0),
        (lambda: torch.cuda.FloatTensor([[1, 2], [3, 4]]).tolist(), [[1.0, 2.0], [3.0, 4.0]]),
        (lambda: torch.cuda.FloatTensor([[1, 2], [3, 4]]).shape, (2, 2)),
    ],
)
def test_an_accelerators_type_makes_tensors_there(make, expected):
    assert predicted(make) == expected


def test_a_type_allocates_the_bytes_of_its_elements():
    def build():
        return (lambda: torch.cuda.FloatTensor(256, 4).type(torch.cuda.HalfTensor)), None, None

    assert memlab.predict(build).peak_bytes == 256 * 4 * (4 + 2)


@pytest.fixture
def _defaults():
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.few(3)
@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize("kind", ["torch.cuda.DoubleTensor", torch.cuda.DoubleTensor])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2),
        lambda: torch.tensor([1.0]),
        lambda: nn.Linear(2, 2).weight,
        lambda: torch.zeros(2),
        lambda: torch.Tensor(2, 3),
        lambda: torch.Tensor([1.0]),
        lambda: nn.Parameter(torch.Tensor(2, 3)),
    ],
)
def test_a_default_type_sets_dtype_and_device(kind, make):
    def with_default():
        torch.set_default_tensor_type(kind)
        return make()

    assert predicted(with_default) == (torch.float64, "cuda")


@pytest.mark.usefixtures("_defaults")
def test_a_default_type_leaves_cpu_types_and_later_predictions_alone():
    def with_default():
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        return torch.FloatTensor(2)

    assert predicted(with_default) == (torch.float32, "cpu")
    torch.set_default_device(None)
    assert predicted(lambda: torch.Tensor(2)) == (torch.float32, "cpu")
    assert torch.Tensor(2, 3).shape == (2, 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_values_are_on_the_device_of_the_context(make):
    def in_context():
        with torch.device("cuda"):
            return make([1.0])

    assert predicted(in_context) == FLOATS
    assert predicted(lambda: make([1.0])) == (torch.float32, "cpu")


def test_a_type_kept_from_a_prediction_is_the_real_one():
    kept = predicted(lambda: torch.cuda.FloatTensor)
    assert kept is not torch.cuda.FloatTensor
    assert not isinstance(torch.zeros(2), kept)
    if not torch.cuda.is_available():
        with pytest.raises((TypeError, RuntimeError), match=r"not available|no NVIDIA driver"):
            kept(2)
