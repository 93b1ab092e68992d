"""`measure` and `meter`: notes, arguments and devices."""

import pytest
import torch
from torch import nn

import memlab


def test_a_note_names_layers_with_large_workspaces():
    quiet = memlab.measure(lambda: nn.Linear(4, 4)(torch.zeros(1, 4)))
    loud = memlab.measure(lambda: nn.Conv1d(4, 4, 3)(torch.zeros(1, 4, 9)))
    assert quiet.notes == ()
    assert len(loud.notes) == 1
    assert "kernel workspaces" in str(loud)


def test_only_the_requested_device_is_counted():
    step = lambda: (torch.zeros(1024, device="meta"), torch.zeros(16))  # noqa: E731
    assert memlab.measure(step, device="meta").peak_bytes == 4096
    assert memlab.measure(step, device="cpu").peak_bytes == 64


def test_the_trace_of_nothing_is_empty():
    trace = memlab.measure(lambda: None)
    assert trace.peak_bytes == trace.live_bytes == 0
    assert trace.at_peak == {}
    assert "0 B" in str(trace)


def test_the_step_runs_once():
    calls = []
    memlab.measure(lambda: calls.append(1))
    assert calls == [1]


def test_an_exception_in_the_step_propagates():
    with pytest.raises(KeyError, match="lost"):
        memlab.measure(lambda: {}["lost"])


def test_arguments_of_the_wrong_type_raise():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="got a generator as model"):
        memlab.measure(lambda: None, model=model.parameters())
    with pytest.raises(TypeError, match="got a Tensor as step"):
        memlab.measure(torch.zeros(1))
    with pytest.raises(TypeError, match="got a Linear as optimizer"):
        memlab.measure(lambda: None, optimizer=model)


def test_the_default_device_is_the_one_with_the_most_bytes():
    assert memlab.measure(lambda: torch.zeros(16)).device == "cpu"
    assert memlab.measure(lambda: torch.zeros(16, device="meta")).device == "meta"
