"""Distributed training in one process: dry runs have the bytes of real runs."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from traces import renumbered

import memlab
from memlab.trace import Event

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch uses torch.jit.script here
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture
def _one_rank(tmp_path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters())


def zero(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(model)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)


def fsdp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def build(
    wrap: Callable[..., tuple[nn.Module, torch.optim.Optimizer]],
    *,
    zero_first: bool = False,
    device: str = "cpu",
) -> tuple:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 8))
    model, optimizer = wrap(model.to(device))
    batch = torch.randn(32, 128, device=device)

    def step() -> None:
        if zero_first:
            optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()

    return step, model, optimizer


def measured(
    wrap: Callable, *, is_dry: bool, steps_before: int = 2, zero_first: bool = False
) -> memlab.Trace:
    with memlab.dry_run() if is_dry else nullcontext():
        step, model, optimizer = build(wrap, zero_first=zero_first)
        for _ in range(steps_before):
            step()
        return memlab.measure(step, model=model, optimizer=optimizer)


def of_tensors(trace: memlab.Trace) -> list[Event]:
    """Return the events without small integers, such as ranks and step counters."""
    return [event._replace(storage=0) for event in renumbered(trace) if abs(event.bytes) > 16]


@pytest.mark.few(1)
@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("wrap", [ddp, zero, fsdp])
def test_a_dry_run_equals_the_real_step(wrap):
    real, dry = measured(wrap, is_dry=False), measured(wrap, is_dry=True)
    assert of_tensors(dry) == of_tensors(real)


@pytest.mark.usefixtures("_one_rank")
def test_sharded_gradients_are_freed_by_zero_grad():
    """A DTensor from inside the dry run is not mistaken for one from outside."""
    real, dry = (
        measured(fsdp, is_dry=is_dry, steps_before=1, zero_first=True) for is_dry in (False, True)
    )
    assert of_tensors(dry) == of_tensors(real)


@pytest.mark.few(4)
@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(("wrap", "copies"), [(ddp, 4), (zero, 4), (fsdp, 3)])
def test_between_steps_the_bucket_is_alive_but_no_gathered_weight(wrap, copies, is_dry):
    """Weights, AdamW's two moments, the batch and DDP's bucket, which only C++ owns."""
    before = [e for e in measured(wrap, is_dry=is_dry).events if e.phase == "before"]
    weights = sum(event.bytes for event in before if event.category == "parameters")
    assert sum(e.bytes for e in before if e.bytes > 16) == copies * weights + 4 * 32 * 128


@pytest.mark.usefixtures("_one_rank")
def test_fake_tensors_for_shape_inference_do_not_count():
    """DTensor runs each optimizer operator on fake tensors the first time."""
    for is_dry in (False, True):
        first, later = (measured(fsdp, is_dry=is_dry, steps_before=count) for count in (0, 1))
        assert abs(first.peak_bytes - later.peak_bytes) <= 64


@pytest.mark.few(1)
@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("wrap", [ddp, zero, fsdp])
def test_a_prediction_has_the_same_weights_and_states(wrap):
    def before(trace: memlab.Trace) -> list[int]:
        return sorted(
            event.bytes
            for event in trace.events
            if event.phase == "before"
            and event.category in ("parameters", "optimizer_state")
            and event.bytes > 16
        )

    predicted = memlab.predict(lambda: build(wrap, device="cuda"), steps=3)
    assert before(predicted) == before(measured(wrap, is_dry=True))


@pytest.mark.usefixtures("_one_rank")
def test_ddp_takes_the_device_ids_that_a_script_for_gpus_gives():
    def with_ids(model):
        model = DistributedDataParallel(model.to("cuda"), device_ids=[0], output_device=0)
        return model, torch.optim.AdamW(model.parameters())

    def events(wrap):
        with memlab.dry_run():
            step, model, optimizer = build(wrap)
            return renumbered(memlab.measure(step, model=model, optimizer=optimizer))

    assert events(with_ids) == events(ddp)
