"""Tests of cuDNN's workspaces by rule (memlab/prediction/convolution_rule.py), as without cuDNN."""

import pytest
import torch
from torch import nn

import memlab
from memlab.allocator import simulate
from memlab.prediction import cudnn
from memlab.trace import Event

MIB = 2**20
BATCH, SIZE, CHANNELS = 8, 32, 16
COPY_BYTES = 4 * BATCH * CHANNELS * SIZE * SIZE  # one tensor of activations
WEIGHT_BYTES = 4 * CHANNELS * CHANNELS * 3 * 3
FORWARD, BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"


@pytest.fixture(autouse=True)
def no_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "library", lambda: None)


def predicted(
    kernel,
    *,
    channels=CHANNELS,
    dtype=torch.float32,
    layout=None,
    loss=torch.square,
    device="cuda",
    **options,
):
    """A predicted step of one convolution."""
    layout = layout or torch.contiguous_format

    def build():
        model = nn.Conv2d(channels, CHANNELS, kernel, **options).to(
            "cuda", dtype, memory_format=layout
        )
        x = torch.rand(BATCH, channels, SIZE, SIZE, device="cuda", dtype=dtype)
        x = x.to(memory_format=layout).requires_grad_()
        return lambda: loss(model(x)).sum().backward(), model, None

    return memlab.predict(build, device=device)


def workspaces(trace, operator):
    """The sizes of a convolution's workspaces in the measured step."""
    return [
        event.bytes
        for event in trace.events
        if event.category == "workspace" and event.operator == operator and event.bytes > 0
    ]


def test_a_convolution_copies_input_weight_and_output_to_channels_last():
    """On GPUs before Hopper, the weight is not copied in float32."""
    for device, copies in (
        ("cuda", 2 * COPY_BYTES),
        ("cuda:hopper", 2 * COPY_BYTES + WEIGHT_BYTES),
    ):
        trace = predicted(3, padding=1, device=device)
        assert workspaces(trace, FORWARD) == [copies]
        assert workspaces(trace, BACKWARD) == [copies] * 2  # input's and weight's gradient


def test_a_strided_convolution_copies_a_smaller_output():
    trace = predicted(3, stride=2, padding=1)
    assert workspaces(trace, FORWARD) == [COPY_BYTES + COPY_BYTES // 4]


def test_in_half_precision_backward_pads_channels_to_16_bytes():
    """Measured on an H200: 4 channels are copied as 8, in backward only."""
    trace = predicted(3, channels=4, padding=1, dtype=torch.bfloat16)
    padded_x, y = (2 * BATCH * channels * SIZE * SIZE for channels in (8, CHANNELS))
    weight = 2 * CHANNELS * 8 * 3 * 3
    assert workspaces(trace, FORWARD) == []
    assert workspaces(trace, BACKWARD) == [padded_x + y + weight] * 2


@pytest.mark.parametrize(
    ("kernel", "options", "copied"),
    [
        (3, {"groups": 4}, 4 * CHANNELS * 3 * 3),
        (1, {"stride": 2}, CHANNELS * CHANNELS),
    ],
    ids=["grouped", "1 × 1, strided"],
)
def test_in_half_precision_more_convolutions_copy_than_in_float32(kernel, options, copied):
    trace = predicted(kernel, dtype=torch.bfloat16, padding=kernel // 2, **options)
    pixels = SIZE * SIZE + (SIZE // options.get("stride", 1)) ** 2
    weight = 2 * 8 * CHANNELS * 3 * 3 if kernel == 3 else 2 * copied
    assert workspaces(trace, FORWARD) == [2 * BATCH * CHANNELS * pixels + weight]


@pytest.mark.parametrize(("kernel", "copied"), [(3, False), (7, True)])
def test_in_half_precision_large_kernels_copy_an_image_in_forward(kernel, copied):
    """Measured on an H200: the 3 channels are copied as 8."""
    trace = predicted(kernel, channels=3, padding=kernel // 2, dtype=torch.bfloat16)
    pixels, weight = BATCH * SIZE * SIZE, 8 * CHANNELS * kernel * kernel
    expected = [2 * (8 * pixels + CHANNELS * pixels + weight)]
    assert workspaces(trace, FORWARD) == (expected if copied else [])


def test_allocated_and_reserved_both_count_the_workspace():
    """As torch's counters do: torch allocates it through its caching allocator."""

    def build():
        convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False).cuda()
        x = torch.rand(BATCH, CHANNELS, SIZE, SIZE, device="cuda")
        return lambda: convolution(x), None, None

    with torch.no_grad():
        memory = memlab.predict(build).memory
    tensors, workspace = 2 * COPY_BYTES + WEIGHT_BYTES, 2 * COPY_BYTES
    assert memory.allocated_peak_bytes == tensors + workspace
    assert memory.reserved_peak_bytes >= memory.allocated_peak_bytes


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (1, {}),
        (3, {"groups": 2}),
        (3, {"groups": CHANNELS}),
        (3, {"channels": 3}),
        (3, {"layout": torch.channels_last}),
        (3, {"dtype": torch.float64}),
    ],
    ids=["1 × 1", "grouped", "depthwise", "image", "channels last", "float64"],
)
def test_other_convolutions_copy_nothing(kernel, options):
    trace = predicted(kernel, **options)
    assert workspaces(trace, FORWARD) == workspaces(trace, BACKWARD) == []


def test_backward_first_copies_a_gradient_in_another_layout():
    trace = predicted(1, loss=lambda output: output)  # the sum's gradient is one expanded element
    assert workspaces(trace, BACKWARD) == [COPY_BYTES]
    assert workspaces(trace, FORWARD) == []


def test_without_tf32_a_float32_convolution_copies_nothing():
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        trace = predicted(3)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    assert workspaces(trace, FORWARD) == []


def test_the_upper_bound_is_twice_the_copies_in_backward():
    trace = predicted(1)
    assert trace.memory.reserved_most_bytes > trace.memory.reserved_peak_bytes
    assert any(note.startswith("convolutions: ") for note in trace.notes)


def test_a_step_without_convolutions_has_no_upper_bound():
    def build():
        model = nn.Linear(8, 8).cuda()
        return lambda: model(torch.rand(8, 8, device="cuda")).sum().backward(), model, None

    assert memlab.predict(build).memory.reserved_most_bytes is None


@pytest.mark.parametrize(("operator", "fits"), [(FORWARD, True), ("aten.mm.default", False)])
def test_a_convolution_does_without_a_workspace_that_does_not_fit(operator, fits):
    size, facts = 30 * MIB, ("", "forward", "torch.uint8", (30 * MIB,))
    tensor = Event(size, 1, "activations", "aten.relu.default", *facts)
    workspace = Event(size, 2, "workspace", operator, *facts)
    events = (tensor, workspace, workspace._replace(bytes=-size))
    assert simulate(events, capacity_bytes=40 * MIB).fits is fits
