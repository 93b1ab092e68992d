"""Predictions for CUDA, compared with hand computations and with dry runs."""

import math
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from traces import WORKSPACE, births, peak_of_storages, predicted

import memlab
from memlab import Kernels
from memlab.allocator import simulate
from memlab.configs import evidence
from memlab.configs.targets import TARGETS
from memlab.dry_runs.fake_accelerator import StandIn
from memlab.metering import THREADS_NOTE
from memlab.prediction import accuracy
from memlab.trace import Trace

B, H, T, D = 2, 4, 64, 32


def rounded(count: int) -> int:
    """Return the block size for `count` bytes."""
    return -(-count // 512) * 512


def linear_training(optimizer=torch.optim.AdamW, device="cuda", after=lambda model: None):
    """Return a builder: one linear layer without a bias, 32 × 48."""

    def build():
        model = nn.Linear(32, 48, bias=False, device=device)
        steps = optimizer(model.parameters())
        x = torch.randn(16, 32, device=device)

        def step() -> None:
            steps.zero_grad()
            model(x).square().mean().backward()
            after(model)
            steps.step()

        return step, model, steps

    return build


# ------------------------------------------------------------------ eager training


class EagerBlock(nn.Module):
    """Eager attention and normalization, and a gated feed-forward layer."""

    def __init__(self, C: int, H: int, device: str) -> None:
        super().__init__()
        self.H = H
        self.qkv = nn.Linear(C, 3 * C, bias=False, device=device)
        self.out = nn.Linear(C, C, bias=False, device=device)
        self.up = nn.Linear(C, 4 * C, bias=False, device=device)
        self.down = nn.Linear(4 * C, C, bias=False, device=device)
        self.scale = nn.Parameter(torch.ones(C, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        q, k, v = self.qkv(normed).view(B, T, 3, self.H, C // self.H).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(C // self.H)
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        x = x + self.out((shares @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.silu(self.up(x)))


class PlainAdamW(torch.optim.Optimizer):
    """AdamW as in the paper, with two state tensors per parameter."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["m"] = torch.zeros_like(parameter)
                state["v"] = torch.zeros_like(parameter)
            state["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            parameter.mul_(1 - 1e-5)
            parameter.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-1e-3)


def eager_training(device: str):
    def build():
        blocks = [EagerBlock(40, 4, device) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(50, 40, device=device), *blocks)
        optimizer = PlainAdamW(model.parameters())
        tokens = torch.zeros(3, 17, dtype=torch.long, device=device)

        def step() -> None:
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()

        return step, model, optimizer

    return build


def of_the_dry_run(build) -> memlab.Trace:
    with memlab.dry_run():
        step, model, optimizer = build()
        step()
        return memlab.measure(step, model=model, optimizer=optimizer)


def kinds(events) -> list[tuple]:
    """Return sorted events without storage numbers, and without operators for old storages."""
    from_before = {event.storage for event in events if event.phase == "before"}
    known = [e._replace(operator="", shape=()) if e.storage in from_before else e for e in events]
    return sorted(event[:1] + event[2:] for event in known)


def test_eager_training_equals_the_dry_run_plus_rounding_and_workspaces():
    trace, dry = memlab.predict(eager_training("cuda")), of_the_dry_run(eager_training("cpu"))
    own = [e for e in trace.events if e.category not in ("rounding", "workspace")]
    assert kinds(own) == kinds(dry.events)
    held, alive, peak = {}, 0, 0
    for event in dry.events:
        before = held.get(event.storage, 0)
        held[event.storage] = before + event.bytes
        alive += rounded(held[event.storage]) - rounded(before)
        peak = max(peak, alive)
    assert trace.peak_bytes == peak + 2 * WORKSPACE


def test_the_trace_is_dry_for_cuda_and_its_categories_sum_to_the_peak():
    trace = memlab.predict(eager_training("cuda"))
    assert (trace.device, trace.dry) == ("cuda", True)
    assert sum(trace.at_peak.values()) == trace.peak_bytes
    assert "(cuda, dry run)" in str(trace)
    assert trace.notes[0].startswith("predicted for most cards with these kernels: attention")


# ------------------------------------------------------------------ history


def whole_run(build, steps: int):
    """Return a builder whose single step builds the training and runs all steps."""

    def run() -> None:
        step, *_ = build()
        for _ in range(steps):
            step()

    return lambda: (run, None, None)


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_reserved_memory_includes_earlier_steps(steps):
    build = eager_training("cuda")
    trace, whole = memlab.predict(build, steps=steps), memlab.predict(whole_run(build, steps))
    of_the_run = simulate(Trace(whole.events))
    assert trace.reserved_bytes == simulate(trace).reserved_bytes == of_the_run.reserved_bytes
    position = len(of_the_run.reserved) - len(of_the_step(trace))
    assert simulate(trace).reserved[-1] == of_the_run.reserved[-1]
    assert trace.memory.allocated_peak_bytes == max(of_the_run.allocated[position - 1 :])


def of_the_step(trace: memlab.Trace) -> list:
    return [event for event in trace.events if event.phase != "before"]


def test_the_step_starts_with_the_storages_that_the_history_leaves_alive():
    trace = memlab.predict(eager_training("cuda"))
    left = Trace(trace.history).alive()
    before = [e for e in trace.events if e.phase == "before" and e.category != "rounding"]
    assert sorted((e.storage, e.bytes) for e in left) == sorted(
        (e.storage, e.bytes) for e in before
    )


def test_unused_storages_from_an_earlier_step_count():
    def build():
        kept = []

        def step() -> None:
            kept.append(torch.ones(256, device="cuda") + 1)

        return step, None, None

    trace = memlab.predict(build, steps=3)
    assert [e.bytes for e in trace.events if e.phase == "before"] == [1024, 1024]
    assert trace.live_bytes == 3 * 1024


def test_parameters_and_state_without_module_and_optimizer_are_found_by_use():
    def build():
        weight = torch.randn(32, 32, device="cuda", requires_grad=True)
        moment = torch.zeros(32, 32, device="cuda")
        x = torch.randn(8, 32, device="cuda")

        def step() -> None:
            weight.grad = None
            (x @ weight).sum().backward()
            with torch.no_grad():
                moment.mul_(0.9).add_(weight.grad)
                weight.sub_(moment)

        return step, None, None

    before = [e for e in memlab.predict(build).events if e.phase == "before"]
    sizes = Counter((event.category, event.bytes) for event in before)
    assert sizes == {
        ("parameters", 4096): 1,
        ("optimizer_state", 4096): 1,
        ("gradients", 4096): 1,
        ("inputs", 1024): 1,
        ("workspace", WORKSPACE): 2,
    }


def test_every_block_with_its_rounding_is_a_multiple_of_512():
    events = memlab.predict(eager_training("cuda")).events
    alive = 0
    for event, following in pairwise(events):
        alive += event.bytes
        assert following.category == "rounding" or alive % 512 == 0


# ------------------------------------------------------------------ tensors on CUDA


def one_hot_of_a_cuda_tensor(x, labels):
    return (x - F.one_hot(labels, 30)).square().mean()


def ctc_with_lengths_on_the_cpu(x, labels):
    lengths = torch.full((8,), 20), torch.full((8,), 4)
    return F.ctc_loss(x.expand(20, 8, 30).log_softmax(2), labels.view(8, 1).expand(8, 4), *lengths)


LOSSES = [one_hot_of_a_cuda_tensor, ctc_with_lengths_on_the_cpu, F.multi_margin_loss]


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_cuda_tensors_stay_on_cuda(loss):
    def build(device="cuda"):
        layer = torch.nn.Linear(40, 30).to(device)
        x, labels = torch.randn(8, 40, device=device), torch.ones(8, dtype=torch.long).to(device)
        return lambda: loss(layer(x), labels).backward(), layer, None

    step, layer, _ = build("cpu")
    real = memlab.measure(step, model=layer).at_end["gradients"]
    predicted_bytes = memlab.predict(build, steps=1).at_end["gradients"]
    assert predicted_bytes == real == 4 * 41 * 30


def test_cpu_tensors_do_not_count_but_their_copies_on_cuda_do():
    def step(device):
        data = torch.zeros(1000, 64)
        return data[:10].to(device) * 2

    assert births(predicted(step)) == [(2560, "float32"), (2560, "float32")]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.cuda(),
        lambda x: x.to(0),
        lambda x: x.to("cuda:0", non_blocking=True),
        lambda x: x.to(torch.device("cuda")),
        lambda x: x.pin_memory().cuda(),
    ],
)
def test_every_way_to_move_a_tensor_copies_it_once(moved):
    def step(device):
        on_cuda = torch.zeros(1, device=device)
        assert moved(on_cuda) is on_cuda
        return moved(torch.zeros(100))

    assert births(predicted(step)) == [(4, "float32"), (400, "float32")]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda anchor: torch.tensor([1.0, 2.0], device="cuda"),
        lambda anchor: torch.tensor([1.0, 2.0], device=anchor.device),
        lambda anchor: torch.tensor([1.0, 2.0], device="cuda", requires_grad=True),
        lambda anchor: torch.as_tensor([1.0, 2.0], device="cuda"),
        lambda anchor: anchor.new_tensor([1.0, 2.0]),
    ],
)
def test_literals_are_copied_to_their_device(make):
    def step(device):
        anchor = torch.zeros(1, device=device)
        made = make(anchor)
        assert made.is_leaf
        assert made.device == anchor.device

    assert births(predicted(step)) == [(4, "float32"), (8, "float32")]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_single_value_is_copied_too(mode):
    def step():
        with mode():
            one = torch.tensor(1.0, device="cuda") * 2
            return torch.cat([torch.tensor([], device="cuda"), one.expand(2)])

    trace = memlab.predict(lambda: (step, None, None))
    assert births(trace) == [(4, "float32"), (4, "float32"), (8, "float32")]


def test_a_copy_to_the_cpu_does_not_count():
    assert births(predicted(lambda device: torch.zeros(100, device=device).cpu())) == [
        (400, "float32")
    ]


def test_a_moved_model_counts_once():
    def build():
        model = nn.Linear(8, 16).to("cuda")
        return lambda: model(torch.zeros(4, 8, device="cuda")), model, None

    assert memlab.predict(build).at_end["parameters"] == (8 * 16 + 16) * 4


def test_tensors_on_both_devices_in_one_operator_raise_with_the_line():
    def step(device):
        return torch.zeros(3, device=device) + torch.zeros(3)

    with pytest.raises(ValueError, match=r"test_prediction.py:\d+ step: aten.add.Tensor got"):
        predicted(step)


def test_a_cpu_scalar_works_with_a_tensor_on_cuda():
    trace = predicted(lambda device: torch.zeros(300, device=device) * torch.tensor(2.0))
    assert births(trace) == [(1200, "float32")] * 2


def test_optimizer_step_counters_stay_on_the_cpu():
    state = memlab.predict(linear_training()).at_end["optimizer_state"]
    assert state == 2 * 32 * 48 * 4


def test_capturable_step_counters_are_on_cuda():
    def optimizer(parameters):
        return torch.optim.AdamW(parameters, capturable=True)

    state = memlab.predict(linear_training(optimizer)).at_end["optimizer_state"]
    assert state == 2 * 32 * 48 * 4 + 4


def test_a_script_without_an_accelerator_counts_fully_except_step_counters():
    trace, named = memlab.predict(linear_training(device="cpu")), memlab.predict(linear_training())
    assert trace.peak_bytes == named.peak_bytes
    assert trace.at_end == named.at_end
    assert "puts nothing on an accelerator" in trace.notes[0]
    assert "puts nothing on an accelerator" not in named.notes[0]


def test_without_an_accelerator_capturable_step_counters_count_too():
    def optimizer(parameters):
        return torch.optim.AdamW(parameters, capturable=True)

    trace = memlab.predict(linear_training(optimizer, device="cpu"))
    assert trace.at_end["optimizer_state"] == 2 * 32 * 48 * 4 + 4


# ------------------------------------------------------------------ steps


def test_the_first_step_allocates_the_state_and_the_workspaces():
    first = memlab.predict(linear_training(), steps=1)
    second = memlab.predict(linear_training())
    before = [e.category for e in first.events if e.phase == "before"]
    assert before == ["parameters", "inputs"]
    made = [(e.operator, e.phase) for e in first.events if e.category == "workspace"]
    assert made == [("aten.mm.default", "forward"), ("aten.mm.default", "backward")]
    assert first.at_end == second.at_end
    assert [e.bytes for e in second.events if e.category == "workspace"] == [WORKSPACE] * 2
    assert {e.phase for e in second.events if e.category == "workspace"} == {"before"}


@pytest.mark.parametrize(
    ("width", "bias", "expected"),
    [(8, False, WORKSPACE), (8, True, WORKSPACE + 2**20), (1, True, WORKSPACE)],
)
def test_without_a_backward_pass_there_is_one_workspace_of_each_library(width, bias, expected):
    """cuBLASLt adds the bias inside the matmul, unless the weight is a vector."""

    def step(device):
        with torch.no_grad():
            return nn.Linear(8, width, bias, device=device)(torch.zeros(2, 8, device=device))

    assert predicted(step).at_end["workspace"] == expected


def test_dropout_without_dropping_returns_its_input():
    def step(device):
        x = torch.ones(1000, device=device, requires_grad=True)
        return F.dropout(x, 0.0, training=True).mul(2)

    assert [e.operator for e in predicted(step).events if e.bytes > 1000] == [
        "aten.ones.default",
        "aten.mul.Tensor",
    ]


def test_without_a_matmul_there_is_no_workspace():
    assert "workspace" not in predicted(lambda device: torch.zeros(9, device=device) * 2).at_end


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("device", "mib"),
    [("cuda:t4", 8.125), ("cuda:hopper", 32), ("cuda:h100", 32), ("cuda:8.6", 8.125)],
)
def test_the_workspaces_are_the_gpus(device, mib):
    trace = memlab.predict(linear_training(), device=device)
    assert trace.at_peak["workspace"] == 2 * mib * 2**20


def test_an_amd_gpu_has_larger_workspaces_and_a_note():
    def step(device):
        return torch.zeros(4, 16, device=device) @ torch.zeros(16, 2, device=device)

    trace = predicted(step, device="cuda:mi300x")
    assert trace.at_peak["workspace"] == 128 * 2**20
    assert any(note.startswith("never compared with an AMD GPU") for note in trace.notes)
    assert not any("AMD" in note for note in predicted(step).notes)


def test_a_gpu_without_cuda_is_predicted_like_most_cards_with_a_note():
    def step(device):
        return torch.zeros(4, 16, device=device) @ torch.zeros(16, 2, device=device)

    trace = predicted(step, device="cuda:m3-max-64")
    assert trace.at_peak == predicted(step).at_peak
    assert any(note.startswith("never compared with an Apple GPU") for note in trace.notes)


def test_a_prediction_for_a_gpu_names_it():
    [note, *_] = memlab.predict(linear_training(), device="cuda:3060").notes
    assert note.startswith("predicted for NVIDIA GeForce RTX 3060 with these kernels: attention")


# ------------------------------------------------------------------ optimizers


def gathered(choice: str, optimizer=torch.optim.AdamW) -> int:
    """Return the peak of the optimizer's temporaries for a linear layer with a bias."""

    def build():
        model = nn.Linear(32, 48, device="cuda")
        steps = optimizer(model.parameters())

        def step() -> None:
            model(torch.zeros(4, 32, device="cuda")).sum().backward()
            steps.step()

        return step, model, steps

    trace = memlab.predict(build, kernels=Kernels(optimizer=choice))
    alive = most = 0
    for event in trace.events:
        if event.category == "optimizer_temporaries":
            alive += event.bytes
            most = max(most, alive)
    return most


def test_adamw_has_one_temporary_per_parameter_at_once():
    assert gathered("auto") == gathered("foreach") == (32 * 48 + 48) * 4


def test_the_loop_has_one_temporary_at_a_time():
    def one_at_a_time(parameters):
        return torch.optim.AdamW(parameters, foreach=False)

    assert gathered("loop") == gathered("auto", one_at_a_time) == 2 * 32 * 48 * 4


def test_the_fused_kernel_has_no_temporaries():
    def fused(parameters):
        return torch.optim.AdamW(parameters, fused=True)

    assert gathered("fused") == gathered("auto", fused) == 0


def test_clipping_works_on_all_gradients_at_once():
    trace = memlab.predict(
        linear_training(after=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    )
    assert births(trace, "_foreach_norm") == [(4, "float32")]


# ------------------------------------------------------------------ kernels and notes


def test_layer_norm_saves_its_statistics_in_float32():
    def step(device):
        x = torch.zeros(6, 8, device=device, dtype=torch.bfloat16)
        return F.layer_norm(x, (8,))

    assert births(predicted(step), "layer_norm") == [
        (6 * 8 * 2, "bfloat16"),
        (6 * 4, "float32"),
        (6 * 4, "float32"),
    ]


def test_a_large_reduction_has_scratch_besides_its_result():
    def step(device):
        return torch.zeros(8192, 4096, device=device).sum(0)

    trace = predicted(step)
    scratch = [e.bytes for e in trace.events if e.category == "workspace"]
    assert scratch == [4 * 4096 * 54 * 128, 128, -4 * 4096 * 54 * 128, -128]
    assert trace.peak_bytes == 8192 * 4096 * 4 + 4096 * 4 + 4 * 4096 * 54 * 128 + 512


def test_a_gpu_with_fewer_and_smaller_multiprocessors_splits_a_reduction_less():
    def step(device):
        return torch.zeros(8192, 4096, device=device).sum(0)

    trace = predicted(step, device="cuda:rtx3060")
    scratch = [e.bytes for e in trace.events if e.category == "workspace"]
    assert scratch[0] == 4 * 4096 * 11 * 128  # 28 × 3 blocks among 8, in place of 108 × 4


def test_a_note_names_unknown_scratch():
    def step(device):
        q = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=device, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()

    note = "not counted: the scratch memory of cuDNN's attention in backward; the real peak can be"
    notes = predicted(step, kernels=Kernels(attention="cudnn")).notes
    assert f"{note} higher" in notes
    assert not any("scratch" in note for note in memlab.predict(linear_training()).notes)


def test_a_note_names_kernels_that_no_measured_step_used(monkeypatch):
    def step(device):
        x = torch.zeros(8, 8, device=device)
        F.rms_norm(F.dropout(x, 0.5), (8,))

    monkeypatch.setattr(accuracy, "confirmed_kernels", lambda: {"fused dropout"})
    assert "not yet confirmed by a GPU: fused RMSNorm" in predicted(step).notes


def test_a_note_has_the_errors_of_measured_steps_of_its_kind():
    def attention(device):
        q = torch.zeros(1, 8, 8, device=device)
        torch.bmm(torch.bmm(q, q.mT).softmax(-1), q)

    assert evidence.accuracy("transformers") in predicted(attention).notes

    def policy(device):
        torch.zeros(8, device=device).softmax(-1)

    assert evidence.accuracy("neither attention nor convolutions") in predicted(policy).notes

    def convolution(device):
        return F.conv2d(*(torch.zeros(1, 1, 8, 8, device=device) for _ in range(2)))

    assert evidence.accuracy("convolutions") in predicted(convolution).notes


def test_the_kinds_of_step_have_their_own_notes():
    def recurrent(device):
        nn.LSTM(8, 8).to(device)(torch.zeros(2, 2, 8, device=device))

    assert evidence.accuracy("recurrent layers") in predicted(recurrent).notes
    linear = memlab.predict(linear_training())
    assert evidence.accuracy("neither attention nor convolutions") in linear.notes

    def compiled(device):
        return torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(8, device=device))

    assert evidence.accuracy("compiled code") in predicted(compiled).notes


def test_fused_dropout_allocates_its_mask_before_its_output():
    def dropout(device):
        return F.dropout(torch.zeros(2048, device=device, requires_grad=True), 0.5)

    operator = "aten.native_dropout.default"
    events = [event for event in predicted(dropout).events if event.operator == operator]
    assert [event.bytes for event in events if event.bytes > 0] == [2048, 4 * 2048]


def test_autocast_casts_the_last_argument_first():
    def linear(device):
        with torch.autocast("cuda", torch.bfloat16):
            return nn.Linear(256, 512, device=device)(torch.zeros(1024, 256, device=device))

    casts = [e.bytes for e in predicted(linear).events if "_to_copy" in e.operator and e.bytes > 0]
    bias, weight, x = 2 * 512, 2 * 512 * 256, 2 * 1024 * 256
    assert casts == [bias, weight, x]


def test_a_device_can_be_a_torch_device_with_an_index():
    for device in (torch.device("cuda"), torch.device("cuda:0"), "cuda:0"):
        assert memlab.predict(linear_training(), device=device).memory == (
            memlab.predict(linear_training()).memory
        )


def test_a_note_mentions_gradients_from_other_threads():
    assert THREADS_NOTE not in memlab.predict(linear_training()).notes


def test_recomputation_in_a_checkpoint_uses_the_same_kernels():
    def step(device):
        q = torch.zeros(B, H, T, D, dtype=torch.bfloat16, device=device, requires_grad=True)

        def attend(q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

        checkpoint(attend, q, use_reentrant=False).sum().backward()

    made = births(predicted(step), "_flash_attention.default")
    assert made == 2 * [
        (B * H * T * D * 2, "bfloat16"),
        (B * H * T * 4, "float32"),
        (16, "uint64"),
        (8, "uint64"),
    ]


# ------------------------------------------------------------------ errors and side effects


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"build": 3}, TypeError, "got a int to predict"),
        ({"build": lambda: None}, TypeError, "returned a NoneType; return .step, model, optim"),
        ({"build": lambda: (1, None, None)}, TypeError, "returned a tuple"),
        ({"device": "cuda:turing"}, ValueError, "'cuda:turing'; use cuda, cuda:hopper, cuda:GPU"),
        ({"device": "cuda:rtx3061"}, ValueError, "; did you mean cuda:rtx3060. Use cuda, "),
        ({"steps": 0}, ValueError, "got steps=0; pass 1 or more"),
        ({"kernels": "flash"}, TypeError, r"got a str as kernels; pass memlab.Kernels"),
    ],
)
def test_invalid_arguments_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        memlab.predict(**{"build": linear_training(), **arguments})


def answers_of_the_cpu() -> list:
    """Return results that depend on everything that a prediction replaces."""

    def step() -> None:
        q = torch.zeros(B, H, T, D, requires_grad=True)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        F.dropout(F.rms_norm(x, (D,)), 0.5).sum().backward()
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            F.rms_norm((x @ x.mT).softmax(-1), (T,)).exp()
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.zeros(3)
        torch.optim.AdamW([parameter]).step()

    with memlab.dry_run():
        device = torch.zeros(1, device="cuda").device
        events = memlab.measure(step).events
    return [device, StandIn.device, [(e.bytes, e.operator, e.dtype) for e in events]]


def normalizing_without_gradients(device: str) -> None:
    with torch.inference_mode():
        F.rms_norm(torch.zeros(3, 8, device=device), (8,))


def test_nothing_is_left_behind():
    before = answers_of_the_cpu()
    for kernels in (Kernels(), Kernels(optimizer="fused"), Kernels(optimizer="loop")):
        memlab.predict(linear_training(), kernels=kernels)
        predicted(normalizing_without_gradients, kernels=kernels)
    assert answers_of_the_cpu() == before
    assert StandIn.device == "cpu"


def test_a_prediction_clears_cached_answers_first():
    answers_of_the_cpu()  # where RMSNorm is composite
    assert len(births(predicted(normalizing_without_gradients), "_fused_rms_norm")) == 2


def test_an_outside_optimizers_options_are_restored():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.zeros(2, 8)).sum().backward()
        optimizer.step()

    memlab.predict(lambda: (step, model, optimizer), kernels=Kernels(optimizer="fused"))
    assert optimizer.param_groups[0]["fused"] is None
    assert not optimizer.state


def test_nothing_is_left_behind_by_a_failing_step():
    before = answers_of_the_cpu()

    def step(device):
        with torch.autocast(device, torch.bfloat16):
            raise KeyError("in the step")

    with pytest.raises(KeyError, match="in the step"):
        predicted(step)
    assert answers_of_the_cpu() == before


def test_all_target_workspaces_are_a_multiple_of_the_block_size():
    assert all(target.workspace_bytes % 512 == 0 for target in TARGETS.values())


# ------------------------------------------------------------------ torch.func


def transformed(kind: str):
    """Return a builder: torch.func transforms of a small model with sizes in multiples of 512."""

    def build(device="cuda"):
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        x = torch.randn(16, 128, device=device)

        def loss(parameters, x):
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        steps = {
            "per-sample gradients": lambda: torch.func.vmap(
                torch.func.grad(loss), in_dims=(None, 0)
            )(parameters, x),
            "jacobian": lambda: torch.func.jacrev(loss)(parameters, x),
            "hessian": lambda: torch.func.hessian(loss, argnums=1)(parameters, x[:1]),
            "forward mode": lambda: torch.func.jvp(partial(loss, parameters), (x,), (x,)),
            "a module under vmap": lambda: torch.func.vmap(model)(x).sum().backward(),
        }
        return steps[kind], model, None

    return build


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # by torch's forward mode
@pytest.mark.parametrize(
    "kind",
    ["per-sample gradients", "jacobian", "hessian", "forward mode", "a module under vmap"],
)
def test_torch_func_transforms_have_the_bytes_of_a_dry_run(kind):
    with memlab.dry_run():
        step, model, _ = transformed(kind)("cpu")
        step()
        dry = memlab.measure(step, model=model)
    step, model, _ = transformed(kind)("cpu")
    step()
    assert memlab.measure(step, model=model).peak_bytes == dry.peak_bytes
    assert peak_of_storages(memlab.predict(transformed(kind))) == peak_of_storages(dry)


def test_a_model_found_inside_a_transform_is_named_and_counted():
    step, _, _ = transformed("per-sample gradients")("cpu")
    step()
    weights = {e.module for e in memlab.measure(step).events if e.category == "parameters"}
    assert weights == {"0", "2"}
