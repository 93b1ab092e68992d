"""Dry runs of scripts for an accelerator, compared with real steps on the CPU."""

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from traces import renumbered

import memlab
from memlab.dry_runs import fake_accelerator
from memlab.internals.replacing import replaced
from memlab.world.table import TABLE

DTYPES = (torch.bfloat16, torch.float16)
OLD_NAMES = pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def without_an_accelerator(monkeypatch) -> None:
    """Make every machine look like one without an accelerator."""
    for module in (torch.cuda, torch.xpu, torch.mps):
        monkeypatch.setattr(module, "is_available", lambda: False)


def same_as_on_the_cpu(make: Callable[[str], tuple[Callable[[], None], nn.Module]]) -> memlab.Trace:
    """Assert that the second step of `make` has equal events on CUDA, dry, and on the CPU."""
    step, model = make("cpu")
    step()
    real = memlab.measure(step, model=model)
    with memlab.dry_run():
        step, model = make("cuda")
        step()
        dry = memlab.measure(step, model=model)
    assert renumbered(dry) == renumbered(real)
    return dry


def training(forward: Callable[..., torch.Tensor], scaler=None, optimizer=torch.optim.SGD):
    """Return a builder of steps on a device that call forward(device, model, x)."""

    def make(device: str):
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 64)).to(device)
        steps = optimizer(model.parameters())
        scaling = torch.amp.GradScaler(device, enabled=scaler is not None)
        x = torch.randn(16, 32, device=device)

        def step() -> None:
            steps.zero_grad()
            loss = forward(device, model, x).float().square().mean()
            scaling.scale(loss).backward()
            scaling.step(steps)
            scaling.update()

        return step, model

    return make


# ------------------------------------------------------------------ autocast


def entered(autocast):
    def forward(device, model, x):
        with autocast(device):
            return model(x)

    return forward


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_for_cuda_allocates_like_the_cpus(dtype):
    trace = same_as_on_the_cpu(training(entered(lambda device: torch.autocast(device, dtype))))
    plain = same_as_on_the_cpu(training(lambda device, model, x: model(x)))
    assert renumbered(trace) != renumbered(plain)


def test_autocast_works_as_a_decorator():
    def forward(device, model, x):
        return torch.autocast(device, torch.bfloat16)(model)(x)

    same_as_on_the_cpu(training(forward))


@OLD_NAMES
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocasts_old_name_works(dtype):
    def autocast(device):
        old = torch.cuda.amp.autocast if device == "cuda" else torch.cpu.amp.autocast
        return old(dtype=dtype)

    with pytest.warns(FutureWarning, match="deprecated"):
        same_as_on_the_cpu(training(entered(autocast)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_recomputes_under_autocast(use_reentrant):
    def forward(device, model, x):
        with torch.autocast(device, torch.bfloat16):
            return checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)

    same_as_on_the_cpu(training(forward))


@pytest.mark.parametrize("cast_inputs", [None, torch.bfloat16, torch.float32])
def test_a_custom_function_runs_under_autocast(cast_inputs):
    def of(device):
        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type=device, cast_inputs=cast_inputs)
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.mT @ x

            @staticmethod
            @torch.amp.custom_bwd(device_type=device)
            def backward(ctx, gradient):
                (x,) = ctx.saved_tensors
                return x @ (gradient + gradient.mT)

        return Square

    def forward(device, model, x):
        with torch.autocast(device, torch.bfloat16):
            return of(device).apply(model(x))

    same_as_on_the_cpu(training(forward))


def product(x: torch.Tensor) -> torch.dtype:
    return (x @ x).dtype


def test_the_default_dtype_is_cudas():
    with memlab.dry_run():
        x = torch.ones(2, 2)
        with torch.autocast("cuda"):
            assert product(x) == torch.float16
        with torch.autocast("cuda", torch.bfloat16), torch.autocast("cuda"):
            assert product(x) == torch.bfloat16  # the enclosing region's dtype
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16


def test_disabled_autocast_is_off():
    with memlab.dry_run(), torch.autocast("cuda", torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert product(torch.ones(2, 2)) == torch.float32
        assert product(torch.ones(2, 2)) == torch.bfloat16


def test_autocast_ends_after_an_exception():
    with memlab.dry_run():
        x = torch.ones(2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            with suppress(ZeroDivisionError), torch.autocast("cuda", torch.float16):
                raise ZeroDivisionError
            assert product(x) == torch.bfloat16
        assert product(x) == torch.float32
    assert not torch.is_autocast_enabled("cuda")


def test_one_autocast_object_can_be_entered_again():
    with memlab.dry_run():
        autocast, x = torch.autocast("cuda", torch.bfloat16), torch.ones(2, 2)
        for _ in range(2):
            with autocast:
                with autocast:
                    assert product(x) == torch.bfloat16
                assert product(x) == torch.bfloat16
            assert product(x) == torch.float32
    torch.set_autocast_enabled("cuda", False)  # torch leaves it on if one object is entered twice


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_that_torch_disabled_before_the_dry_run_raises():
    outside = torch.autocast("cuda", torch.bfloat16)
    with memlab.dry_run():
        with pytest.raises(
            ValueError, match=r"^\S*test_fake_accelerator.py:\d+ .*inside the dry run$"
        ):
            outside.__enter__()
        assert product(torch.ones(2, 2)) == torch.float32


def test_norms_and_softmax_keep_the_dtype_that_cuda_would_widen():
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    with memlab.dry_run(), torch.autocast("cuda", torch.bfloat16):
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        widened = {
            "layer_norm": nn.functional.layer_norm(x, (4,)),
            "softmax.int": x.softmax(-1),
            "pow.Tensor_Scalar": x.pow(2),
            "log": x.log(),
            "sum": x.sum(),
        }
    for name, result in widened.items():
        assert result.dtype == torch.bfloat16
        assert has_rule(f"aten::{name}", "AutocastCUDA")
        assert not has_rule(f"aten::{name}", "AutocastCPU")


def test_the_cpus_autocast_may_be_made_before():
    outside = torch.autocast("cpu", torch.bfloat16)
    with memlab.dry_run(), outside:
        assert product(torch.ones(2, 2)) == torch.bfloat16


# ------------------------------------------------------------------ loss scaling


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_for_cuda_scales(fused):
    def optimizer(parameters):
        return torch.optim.AdamW(parameters, fused=fused)

    def forward(device, model, x):
        with torch.autocast(device, torch.float16):
            return model(x)

    scaled = same_as_on_the_cpu(training(forward, scaler=True, optimizer=optimizer))
    plain = same_as_on_the_cpu(training(forward, optimizer=optimizer))
    assert len(scaled.events) > len(plain.events)


@OLD_NAMES
def test_the_gradient_scalers_old_name_is_enabled():
    with memlab.dry_run():
        with pytest.warns(FutureWarning, match="deprecated"):
            assert torch.cuda.amp.GradScaler().is_enabled()
        assert torch.amp.GradScaler("cuda").scale(torch.ones(2)).shape == (2,)
        assert not torch.amp.GradScaler("cuda", enabled=False).is_enabled()


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_a_scaler_that_torch_disabled_before_the_dry_run_raises():
    outside = torch.amp.GradScaler("cuda")
    with memlab.dry_run(), pytest.raises(ValueError, match="GradScaler for CUDA was made before"):
        outside.scale(torch.ones(2))


# ------------------------------------------------------------------ tensors and modules


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).to(0),
        lambda: torch.ones(3).to(device=1),
        lambda: torch.ones(3).cuda(0),
        lambda: torch.ones(3).xpu(),
        lambda: torch.ones(3, device=0),
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: torch.empty_like(torch.ones(3), device=0),
        lambda: nn.Linear(2, 2).to(0).weight,
        lambda: nn.Linear(2, 2).xpu().weight,
        lambda: nn.Linear(2, 2, device=0).weight,
        lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        lambda: torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
        lambda: torch.randn(3, generator=torch.Generator()),
    ],
)
def test_every_way_to_name_a_device_gives_the_cpu(make):
    with memlab.dry_run():
        assert make().device.type == "cpu"


def test_a_number_that_is_not_a_device_is_unchanged():
    with memlab.dry_run():
        assert torch.ones(2).to(torch.float64, True, False).dtype == torch.float64
        assert torch.full((3,), 7).shape == (3,)


def test_a_model_from_meta_has_the_real_size():
    def make(device: str):
        model = nn.Linear(32, 48, device="meta").to_empty(device=device)
        x = torch.randn(16, 32, device=device)
        return lambda: model(x).sum().backward(), model

    same_as_on_the_cpu(make)


def test_pin_memory_returns_its_input():
    with memlab.dry_run():
        x = torch.ones(3)
        assert x.pin_memory() is x
        loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4, pin_memory=True)
        assert [batch.shape for (batch,) in loader] == [(4, 2)] * 2
        assert loader.pin_memory


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"amsgrad": True}])
def test_a_capturable_optimizer_allocates_as_on_a_device(settings, monkeypatch):
    def optimizer(parameters):
        return torch.optim.Adam(parameters, capturable=True, **settings)

    module = sys.modules["torch.optim.adam"]  # torch.optim has no attribute adam; for the real step
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **kwargs: ["cpu"])
    same_as_on_the_cpu(training(lambda device, model, x: model(x), optimizer=optimizer))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.Adadelta])
def test_capturable_optimizers_step(kind):
    with memlab.dry_run():
        model = nn.Linear(4, 4, device="cuda")
        optimizer = kind(model.parameters(), capturable=True)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert len(optimizer.state) == 2


def test_a_checkpoint_is_not_overwritten(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(torch.ones(2), path)
    with memlab.dry_run():
        torch.save(nn.Linear(4, 4).state_dict(), path)
    assert torch.load(path).tolist() == [1, 1]


# ------------------------------------------------------------------ torch.cuda and other backends


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: torch.cuda.synchronize(), None),
        (lambda: torch.cuda.synchronize("cuda:0"), None),
        (lambda: torch.cuda.set_device(1), None),
        (lambda: torch.cuda.current_device(), 0),
        (lambda: torch.cuda.empty_cache(), None),
        (lambda: torch.cuda.reset_peak_memory_stats(), None),
        (lambda: torch.cuda.memory_allocated(), 0),
        (lambda: torch.cuda.max_memory_allocated(0), 0),
        (lambda: torch.cuda.memory._record_memory_history(max_entries=9), None),
        (lambda: torch.cuda.nvtx.range_push("forward"), None),
        (lambda: torch.cuda.is_available(), False),
        (lambda: torch.cuda.device_count(), 0),
        (lambda: torch.cuda.is_bf16_supported(), True),
        (lambda: torch.xpu.synchronize(), None),
        (lambda: torch.mps.empty_cache(), None),
        (lambda: torch.cuda.Event(enable_timing=True).query(), True),
    ],
)
def test_functions_that_wait_or_count_do_nothing(call, answer):
    with memlab.dry_run():
        assert call() == answer


def test_streams_and_events_finish_at_once():
    with memlab.dry_run():
        side, x = torch.cuda.Stream(), torch.ones(3)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.cuda.device(0), torch.cuda.nvtx.range("copy"):
            y = x * 2
        y.record_stream(side)
        event = side.record_event(torch.cuda.Event())
        event.record()
        event.synchronize()
        torch.cuda.default_stream().wait_event(event)


def streams_of(step):
    """The streams of the storages that a step allocates, by their numbers of elements."""
    with memlab.dry_run():
        trace = memlab.measure(step)
    return {event.shape[0]: event.stream for event in trace.events if event.bytes > 0}


def test_a_storage_has_the_stream_that_was_current():
    def step():
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            inside = torch.empty(2)
            with torch.cuda.stream(other), torch.cuda.stream(side):
                again = torch.empty(3)
            with torch.cuda.stream(other):
                another = torch.empty(4)
            torch.cuda.set_stream(torch.cuda.default_stream())
            default = torch.empty(5)
        with torch.cuda.stream(None):
            unchanged = torch.empty(6)
        return inside, again, another, default, unchanged

    found = streams_of(step)
    assert found[2] == found[3] != 0
    assert found[4] not in (0, found[2])
    assert found[5] == found[6] == 0


def test_the_current_stream_equals_the_one_that_was_set():
    with memlab.dry_run():
        side = torch.cuda.Stream()
        torch.cuda.set_stream(side)
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        assert {side: 1}[torch.cuda.current_stream()] == 1
    with memlab.dry_run():
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("get_device_name", lambda: torch.cuda.get_device_name(0)),
        ("get_device_properties", lambda: torch.cuda.get_device_properties("cuda").total_memory),
        ("get_device_capability", lambda: torch.cuda.get_device_capability()),
        ("mem_get_info", lambda: torch.cuda.mem_get_info()),
        ("memory_summary", lambda: torch.cuda.memory_summary()),
        ("_dump_snapshot", lambda: torch.cuda.memory._dump_snapshot("work/snapshot.pickle")),
        ("elapsed_time", lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event())),
    ],
)
def test_functions_that_need_a_device_raise_with_the_line(name, ask):
    with (
        memlab.dry_run(),
        pytest.raises(ValueError, match=rf"^\S*test_fake_accelerator.py:\d+ .*{name}") as e,
    ):
        ask()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, pin_memory=True),
        lambda: torch.tensor([1.0] * 4, pin_memory=True),
        lambda: torch.zeros(4, pin_memory=True),
    ],
)
def test_pinned_memory_is_memory(make):
    with memlab.dry_run():
        assert make().shape == (4,)


def test_unknown_numbers_are_read_by_their_number():
    with memlab.dry_run():
        assert torch.randperm(10**6).tolist() == [1] * 10**6
        assert torch.randint(9, (2, 3)).tolist() == [[1, 1, 1], [1, 1, 1]]
        assert torch.rand(0, 3).tolist() == []


def test_the_scale_is_the_first_one():
    """No gradient is infinite, because there are no values."""
    with memlab.dry_run():
        weight = torch.ones(4, device="cuda", requires_grad=True)
        optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cuda", 2.0**10)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scaler.state_dict()["scale"] == 2.0**10
        assert torch.amp.GradScaler("cuda", enabled=False).get_scale() == 1.0


# ------------------------------------------------------------------ begin and end


def everything() -> list[object]:
    rows = [row for row in TABLE if row.stand_in in fake_accelerator.STAND_INS]
    rows = [row for row in rows if not row.module.startswith("torch.accelerator")]
    places = [place for row in rows if row.module in sys.modules for place in row.places()]
    return [getattr(owner, name) for owner, name in places]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_everything_is_restored(error):
    before = everything()
    with suppress(ZeroDivisionError), memlab.dry_run():
        during = everything()
        if error is not None:
            raise error
    assert all(new is not old for new, old in zip(during, before, strict=True))
    assert everything() == before
    assert "record_stream" not in vars(torch.Tensor)  # inherited


def test_replacements_before_an_error_are_undone():
    class Thing:
        there = also = 1

    def fail(real):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replaced({(Thing, "there"): lambda real: 2, (Thing, "also"): fail}).__enter__()
    assert Thing.there == 1


def test_a_real_accelerators_functions_are_not_replaced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a real one")
    with memlab.dry_run():
        assert torch.cuda.get_device_name() == "a real one"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA's scaler works")
@pytest.mark.parametrize("named", [False, True])
def test_a_scaler_scales_only_if_the_script_uses_an_accelerator(named):
    with memlab.dry_run():
        loss = torch.ones((), requires_grad=True)
        if named:
            loss = loss.to("cuda")
        scaler = torch.amp.GradScaler("cuda")
        assert (scaler.scale(loss) is not loss) == named
        assert scaler.is_enabled() == named


def test_a_list_of_tensors_becomes_a_tensor_of_their_values_if_these_are_known():
    with memlab.dry_run():
        known = torch.tensor([[torch.tensor(1.5), 2], [3, torch.tensor(4.0)]])
        assert (known.tolist(), known.dtype) == ([[1.5, 2.0], [3.0, 4.0]], torch.float32)
        assert torch.as_tensor([torch.arange(3)[i] for i in range(3)]).tolist() == [0, 1, 2]
        loss = torch.nn.Linear(4, 1)(torch.randn(8, 4)).mean()
        losses = torch.tensor([loss, loss])
        assert (losses.shape, losses.dtype, losses.mean().item()) == ((2,), torch.float32, 0.5)


def test_functions_that_do_nothing_are_not_the_same_one():
    """dynamo keeps a rule for each function of torch, and refuses one with two rules."""
    with memlab.dry_run():
        functions = [torch.cuda.synchronize, torch.cuda.set_device, torch.cuda.init]
        assert len(set(map(id, functions))) == 3
        assert not any(function(0) for function in functions)
