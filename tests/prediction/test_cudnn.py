"""Tests of memlab/prediction/cudnn.py and of what convolutions.py asks it.

Without cuDNN (`pip install memlab[cudnn]`) those that ask it are skipped.
"""

import csv
import json
from pathlib import Path

import pytest
import torch
from benchmark_scripts import script
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memlab
from memlab.configs.gpus import GPUS
from memlab.configs.targets import target_named
from memlab.prediction import convolutions, cudnn

aten = torch.ops.aten
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
ANSWERS = Path(__file__).with_name("cudnn_answers.csv")
OF_VERSION = "9.24"  # that made the answers

asks = pytest.mark.skipif(cudnn.version() is None, reason="no cuDNN 9.11 or newer is installed")


def workspaces(
    card, x, weight, *, stride=1, padding=0, groups=1, transposed=False, dtype="float32", last=False
):
    """The workspaces of forward, of the data gradient and of the weight gradient."""
    dims, layout = len(x) - 2, CHANNELS_LAST[len(x)] if last else torch.contiguous_format
    x, weight = (
        torch.empty(shape, device="meta", dtype=getattr(torch, dtype)).to(memory_format=layout)
        for shape in (x, weight)
    )
    options = [stride] * dims, [padding] * dims, [1] * dims, transposed, [0] * dims, groups
    y = aten.convolution.default(x, weight, None, *options)
    target = target_named(f"cuda:{card}")
    forward = convolutions.FORWARD, (x, weight, None, *options), y
    backward = convolutions.BACKWARD, (y, x, weight, None, *options, [True, True, False]), None
    sizes = [convolutions.scratch_bytes(*call, target) for call in (forward, backward)]
    return [sum(buffers) for kernels in sizes for buffers in kernels]


# ------------------------------------------------------------------ recorded on GPUs


@asks
@pytest.mark.parametrize("card", ["t4", "a100-40", "rtx3060", "rtx3090"])
@pytest.mark.parametrize(
    ("x", "weight", "forward", "data_gradient"),
    [
        ((1, 30, 256, 256), (16, 30, 3, 3), 82880, 50168),
        ((1, 16, 128, 128), (32, 16, 3, 3), 51328, 84032),
        ((1, 32, 64, 64), (64, 32, 3, 3), 205056, 204928),
    ],
)
def test_recorded_workspaces_of_a_cnn(card, x, weight, forward, data_gradient):
    """The snapshot of JasperSolt/EoR_NN (6686e9f), whose card is unknown but older than Hopper."""
    assert workspaces(card, x, weight, padding=1)[:2] == [forward, data_gradient]


@asks
@pytest.mark.parametrize(
    ("width", "reserved_gib"),
    [(1152, 5.52), (1280, 6.15), (1536, 7.4), (1920, 9.27), (2048, 9.9), (2176, 10.52)],
)
def test_reserved_figures_of_a_wide_convolution(width, reserved_gib):
    """The table of pytorch #123533: the last input is alive when the next one is made."""
    x = (1, 256, 2048, width)
    workspace = workspaces("a100-40", x, (256, 256, 3, 3), padding=1, dtype="float16")[0]
    column = 2 * 256 * 2048
    predicted = column * (width - 128) + 2 * column * width + workspace
    assert predicted / 2**30 + 0.02 == pytest.approx(reserved_gib, abs=0.006)  # printed to 0.01


@asks
def test_the_workspace_of_a_3d_convolution_is_the_copy_of_its_input():
    """pytorch #128947: a peak of "17G", of which the input has 7.99 and the output 1.00 GiB."""
    torch.backends.cudnn.deterministic = True
    try:
        forward, *_ = workspaces("a100-80", (1, 256, 4, 1090, 1922), (64, 256, 3, 3, 3))
    finally:
        torch.backends.cudnn.deterministic = False
    assert forward / 2**30 == pytest.approx(7.993, abs=0.001)


# ------------------------------------------------------------------ stored answers


def stored():
    with ANSWERS.open() as lines:
        for row in csv.DictReader(lines):
            options = json.loads(row["options"])
            x, weight = json.loads(row["x"]), json.loads(row["weight"])
            name = f"{row['card']}-{weight}-{options.get('dtype', 'float32')}"
            yield pytest.param(row["card"], x, weight, options, json.loads(row["bytes"]), id=name)


@pytest.mark.skipif(
    not (cudnn.version() or "").startswith(OF_VERSION),
    reason=f"the stored answers are those of cuDNN {OF_VERSION}",
)
@pytest.mark.parametrize(("card", "x", "weight", "options", "answer"), list(stored()))
def test_cudnn_answers_as_stored(card, x, weight, options, answer):
    assert workspaces(card, x, weight, **options) == answer


# ------------------------------------------------------------------ what torch asks


@asks
@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        ((8, 32, 28, 28), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
        ((8, 64, 28, 28), (128, 64, 1, 1), {}),
    ],
    ids=["torch's own depthwise kernels", "1 × 1, a matmul by cuBLASLt"],
)
def test_convolutions_that_cudnns_heuristics_do_not_decide_have_no_workspace(x, weight, options):
    assert workspaces("a100-40", x, weight, **options) == []


@asks
def test_without_tf32_cudnn_chooses_kernels_outside_tensor_cores():
    shapes = (32, 64, 56, 56), (64, 64, 3, 3)
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        exact = workspaces("a100-40", *shapes, padding=1)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    assert exact[0] < workspaces("a100-40", *shapes, padding=1)[0]


@pytest.mark.parametrize(("number", "is_used"), [(91400, False), (91500, True)])
def test_torch_gives_3d_convolutions_in_half_precision_to_cudnn_from_9_15_on(
    monkeypatch, number, is_used
):
    monkeypatch.setattr(cudnn, "number", lambda: number)
    x, weight = (torch.empty(2, 8, 4, 4, 4, dtype=torch.bfloat16), torch.empty(8, 8, 3, 3, 3))
    options = [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1
    call = convolutions._call(
        convolutions.FORWARD, (x, weight, None, *options), x, target_named("cuda:a100")
    )
    assert convolutions._uses_cudnn(call) is is_used


@pytest.mark.skipif(torch.version.cuda is None, reason="only a CUDA build of torch knows cuDNN")
@asks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        ((8, 32, 28, 28), (64, 32, 3, 3), {}),
        ((8, 32, 28, 28), (32, 1, 3, 3), {"groups": 32}),
        ((8, 32, 28, 28), (64, 8, 3, 3), {"groups": 4}),
        ((8, 32, 28, 28), (32, 16, 3, 3), {"transposed": True, "stride": 2, "output_padding": 1}),
        ((8, 32, 28, 28), (32, 16, 3, 3), {"transposed": True, "output_padding": 1, "dilation": 2}),
        ((1, 8, 2**14, 2**15), (8, 8, 3, 3), {}),
        ((64, 32, 2**10, 2**10), (32, 1, 3, 3), {"groups": 32}),
        ((2, 8, 8, 8, 8), (8, 8, 3, 3, 3), {}),
        ((2, 8, 8, 8, 8), (8, 1, 3, 3, 3), {"groups": 8}),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_torch_gives_the_same_convolutions_to_cudnn(x, weight, options, last, dtype):
    """Dilated ones and bfloat16 are left out: without a GPU, torch says that cuDNN lacks them."""
    dims, layout = len(x) - 2, CHANNELS_LAST[len(x)] if last else torch.contiguous_format
    given = {"stride": 1, "dilation": 1, "output_padding": 0, "groups": 1, **options}
    stride, dilation, output_padding = ([given[k]] * dims for k in list(given)[:3])
    rest = stride, [1] * dims, dilation, given.get("transposed", False), output_padding
    rest = (*rest, given["groups"])
    with FakeTensorMode():
        x, weight = (
            torch.empty(shape, device="cuda", dtype=dtype, memory_format=layout)
            for shape in (x, weight)
        )
        chosen = torch._C._select_conv_backend(x, weight, None, *rest, None)
        y = aten.convolution.default(x, weight, None, *rest)
        target = target_named("cuda:a100-40")
        call = convolutions._call(convolutions.FORWARD, (x, weight, None, *rest), y, target)
        assert convolutions._uses_cudnn(call) is ("Cudnn" in str(chosen))


@asks
def test_a_prediction_says_which_version_chose_and_has_no_range_before_hopper():
    trace = predicted("cuda:a100-40")
    assert f"workspaces as cuDNN {cudnn.version()} chooses them" in convolution_note(trace)
    assert trace.memory.reserved_most_bytes is None


@asks
def test_with_benchmark_the_range_covers_all_plans():
    torch.backends.cudnn.benchmark = True
    try:
        trace = predicted("cuda:a100-40")
    finally:
        torch.backends.cudnn.benchmark = False
    assert trace.memory.reserved_most_bytes > trace.memory.reserved_peak_bytes


def test_without_cudnn_a_prediction_says_that_a_rule_decides(monkeypatch):
    monkeypatch.setattr(cudnn, "library", lambda: None)
    assert convolution_note(predicted("cuda:a100-40")).startswith(
        "convolutions: workspaces by a rule; cuDNN 9.11 or newer would tell them"
    )


def test_every_nvidia_gpu_since_turing_is_described_to_cudnn():
    recent = [
        gpu for gpu in GPUS.values() if gpu.arch.startswith("sm_") and gpu.capability >= (7, 5)
    ]
    assert len(recent) > 50
    for gpu in recent:
        assert json.loads(cudnn.described(gpu))["multiProcessorCount"] == gpu.multiprocessors


def predicted(device):
    def build():
        model = nn.Conv2d(32, 64, 3, padding=1).cuda()
        x = torch.rand(8, 32, 64, 64, device="cuda", requires_grad=True)
        return lambda: model(x).square().sum().backward(), model, None

    return memlab.predict(build, device=device)


def convolution_note(trace):
    (note,) = (note for note in trace.notes if note.startswith("convolutions: "))
    return note


# ------------------------------------------------------------------ held against an H200


def found_on_an_h200():
    benchmark = script("convolutions")
    return {line[0]: line[1:4] for line in benchmark.lines()}


def test_the_rule_gives_233_of_1026_workspaces_on_an_h200_to_the_byte():
    assert found_on_an_h200()["the rule"] == ("1026", "233", "63.7%")


@asks
def test_cudnn_gives_more_workspaces_on_an_h200_to_the_byte_than_the_rule():
    found = {name: int(exact) for name, (_, exact, _) in found_on_an_h200().items()}
    assert found[f"cuDNN {cudnn.version()}"] > 2 * found["the rule"]
