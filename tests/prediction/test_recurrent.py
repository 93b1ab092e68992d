"""Recurrent layers in a prediction: one cuDNN call, as in torch's code."""

import pytest
import torch
from torch import nn
from traces import WORKSPACE, births, predicted

from memlab.prediction.recurrent import RESERVE_NOTE, reserve_bytes

T, B, C, H = 7, 8, 128, 256
GATES = {nn.RNN: 1, nn.LSTM: 4, nn.GRU: 3}
KEPT = {nn.RNN: 1, nn.LSTM: 5, nn.GRU: 6}


@pytest.mark.parametrize(("mode", "reported"), [(2, 736_000_000), (3, 864_000_000)])
def test_the_reserve_has_the_size_that_cudnn_reported(mode, reported):
    """PyTorch issue 2895: 25,000 cells, H = 320, four layers, float32."""
    assert reserve_bytes(25_000, 320, 4, 1, mode, 4) == reported


def training(kind, *, amp=False, mode=torch.enable_grad, train=True, **options):
    """Return a function of a device: one step of one recurrent layer."""

    def step(device):
        layer = kind(C, H, device=device, **options).train(train)
        dtype = options.get("dtype", torch.float32)
        x = torch.zeros(T, B, C, device=device, dtype=dtype)
        with mode(), torch.autocast(device, torch.float16, enabled=amp):
            y, _ = layer(x)
        if y.requires_grad:
            y.backward(torch.ones_like(y))

    return step


def by_cudnn(trace) -> list[int]:
    return [count for count, _ in births(trace, "_cudnn_rnn")]


@pytest.mark.parametrize("kind", GATES)
def test_a_training_step_saves_output_and_reserve_and_has_one_gradient_buffer(kind):
    output, state = 4 * T * B * H, 4 * B * H
    states = [state] * (2 if kind is nn.LSTM else 1)
    weights = 4 * GATES[kind] * (H * C + H * H + 2 * H)
    reserve = 4 * T * B * H * KEPT[kind]
    forward, backward = [output, *states, reserve], [4 * T * B * C, *states, weights]
    trace = predicted(training(kind))
    assert by_cudnn(trace) == forward + backward
    assert RESERVE_NOTE in trace.notes
    assert trace.at_peak["gradients"] == weights


def test_packed_sequences_are_one_call_with_a_padded_reserve():
    lengths = [7, 7, 6, 5, 4, 3, 2, 1]

    def step(device):
        layer = nn.LSTM(C, H, device=device)
        x = torch.zeros(T, B, C, device=device, requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths))
        output, _ = layer(packed)
        output.data.backward(torch.ones_like(output.data))

    cells, states = sum(lengths), 2 * [4 * B * H]
    weights = 4 * GATES[nn.LSTM] * (H * C + H * H + 2 * H)
    forward = [4 * cells * H, *states, 4 * T * B * H * KEPT[nn.LSTM]]
    assert by_cudnn(predicted(step)) == [*forward, 4 * cells * C, *states, weights]


def test_layers_and_directions_share_one_reserve():
    trace = predicted(training(nn.LSTM, num_layers=2, bidirectional=True))
    assert 4 * T * B * H * 2 * (5 * 2 + 1) in by_cudnn(trace)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_no_reserve(mode):
    trace = predicted(training(nn.LSTM, mode=mode, train=False))
    assert by_cudnn(trace) == [4 * T * B * H, 4 * B * H, 4 * B * H]


def test_autocast_lowers_the_layer_without_caching_its_weights():
    trace = predicted(training(nn.GRU, amp=True))
    assert by_cudnn(trace)[:3] == [2 * T * B * H, 2 * B * H, 2 * T * B * H * 6]
    weights = [2 * count for count in (3 * H * C, 3 * H * H, 3 * H, 3 * H)]
    assert {size for size, dtype in births(trace, "_to_copy") if dtype == "float16"} >= {*weights}


def test_bfloat16_runs_step_by_step():
    trace = predicted(training(nn.LSTM, dtype=torch.bfloat16))
    assert by_cudnn(trace) == []
    assert births(trace, "mkldnn") == []
    assert trace.peak_bytes > WORKSPACE  # matmuls by cuBLAS
