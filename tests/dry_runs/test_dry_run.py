"""Dry runs of training loops, compared with real runs."""

import copy
import gc
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from traces import renumbered, same_in_a_dry_run

import memlab


def linear_training(after_backward=lambda loss, model, optimizer: None, convert=lambda m: m):
    """Return a builder for `same_in_a_dry_run`: one linear layer with a test's additions."""

    def make():
        model = convert(nn.Linear(32, 48))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(16, 32, dtype=model.weight.dtype)

        def step() -> None:
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            after_backward(loss, model, optimizer)
            optimizer.step()

        return step, model

    return make


# ------------------------------------------------------------------ training loops


def test_a_dry_run_computes_nothing():
    with memlab.dry_run():
        x = torch.randn(2**30, 2**10)  # 4 TiB
        trace = memlab.measure(lambda: x * 2)
    assert trace.peak_bytes == 2 * 2**42


@pytest.mark.parametrize(
    "read",
    [
        lambda loss, *rest: loss.item(),
        lambda loss, *rest: f"{loss:.3f}",
        lambda loss, *rest: float(loss.detach()),
        lambda loss, *rest: bool(loss.isnan().any()),
        lambda loss, *rest: loss.detach().reshape(1).tolist(),
        lambda loss, *rest: int(loss.long()),
    ],
    ids=["item", "format", "float", "bool", "tolist", "int"],
)
def test_reading_a_value_works(read):
    same_in_a_dry_run(linear_training(read))


def test_an_unknown_value_is_finite_and_not_singular():
    with memlab.dry_run():
        loss = torch.randn(3).sum()
        assert loss.item() == 0.5
        assert f"{loss:.2f}" == "0.50"
        assert loss.long().item() == 1
        assert loss.isnan().item() is False
        assert torch.tensor(7).item() == 7  # literals are known


def test_gradients_are_assumed_finite():
    def clip(loss, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    same_in_a_dry_run(linear_training(clip))


def test_a_gradient_scaler_steps():
    def make():
        model = nn.Linear(32, 48)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler, x = torch.amp.GradScaler("cpu"), torch.randn(16, 32)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step, model

    trace = same_in_a_dry_run(make)
    assert trace.at_end["optimizer_state"] == (32 * 48 + 48) * 4  # it stepped, so momenta exist


def test_a_guard_against_non_finite_losses_passes():
    with memlab.dry_run():
        loss = torch.randn(3).sum()
        assert torch.isfinite(loss)
        assert loss.isfinite().all()
        assert torch.logical_and(torch.isfinite(loss), torch.isfinite(loss)).item() is True
        assert not loss.isnan().any()
        assert not torch.isinf(loss)


def test_an_unknown_array_has_the_right_shape():
    with memlab.dry_run():
        assert torch.randn(2, 3).numpy().tolist() == [[0.5] * 3] * 2
        assert torch.randint(9, (2,)).numpy().tolist() == [1, 1]
        assert torch.arange(2).numpy().tolist() == [0, 1]
        assert np.asarray(torch.randn(2, 3), dtype=np.float64).tolist() == [[0.5] * 3] * 2


def second_batch(data: torch.utils.data.Dataset, **settings) -> tuple[torch.Tensor, memlab.Trace]:
    loader = torch.utils.data.DataLoader(data, batch_size=4, **settings)
    batches = []

    def step() -> None:
        for (batch,) in loader:
            batches.append(batch * 2)

    step()
    return batches[-1], memlab.measure(step)


WORKERS = {"num_workers": 2, "persistent_workers": True, "timeout": 60, "prefetch_factor": 3}


@pytest.mark.parametrize("settings", [{"num_workers": 2}, WORKERS])
def test_a_data_loader_with_workers_loads_in_this_process(settings):
    with memlab.dry_run():
        data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
        batch, trace = second_batch(data, **settings)
    with memlab.dry_run():
        data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
        _, alone = second_batch(data)
    assert batch.shape == (4, 2)
    assert trace.peak_bytes == alone.peak_bytes
    (note,) = trace.notes
    assert re.search(r"test_dry_run.py:\d+ step: .* num_workers=2 loads in this process", note)
    assert not alone.notes


def test_a_data_loader_keeps_its_settings():
    loader = torch.utils.data.DataLoader([torch.zeros(1)], pin_memory=True, num_workers=1)
    with memlab.dry_run():
        next(iter(loader))
    assert (loader.num_workers, loader.pin_memory, loader.timeout) == (1, True, 0)


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float64),
        lambda m: m.to("cpu", torch.bfloat16),
        copy.deepcopy,
    ],
    ids=["half", "bfloat16", "to-dtype", "to-device", "deepcopy"],
)
def test_converting_a_model_works(convert):
    same_in_a_dry_run(linear_training(convert=convert))


def test_a_converted_parameter_stays_the_same_object():
    with memlab.dry_run():
        model = nn.Linear(4, 4)
        weight = model.weight
        assert model.bfloat16().weight is weight
        assert weight.dtype == torch.bfloat16


def test_the_cpu_replaces_devices():
    with memlab.dry_run():
        model = nn.Linear(4, 4).to("cuda")
        x = torch.randn(2, 4, device="cuda").cuda().to("cuda:1")
        model(x).sum().backward()
        assert model.weight.grad.device.type == "cpu"


@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch ≥ 2.13, whose order this is")
def test_one_hot_has_the_real_memory():
    tokens = torch.arange(5)
    real = memlab.measure(lambda: F.one_hot(tokens, 9))
    with memlab.dry_run():
        dry = memlab.measure(lambda: F.one_hot(tokens, 9))
    assert renumbered(real) == renumbered(dry)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: F.one_hot(x.long()),
        lambda x: nn.Embedding(4, 4, sparse=True)(x.long().abs()).sum().backward(),
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    ],
    ids=["mask", "nonzero", "unique", "one-hot", "sparse", "jagged"],
)
def test_a_shape_that_depends_on_values_raises_with_the_line(use):
    with memlab.dry_run(), pytest.raises(ValueError, match=r"^\S*test_dry_run.py:\d+ ") as caught:
        use(torch.randn(3))
    assert "\n" not in str(caught.value)


def test_dry_run_with_a_function_argument_raises():
    with pytest.raises(
        TypeError, match=r"got dry_run\(function\); it takes no positional arguments"
    ):
        memlab.dry_run(test_the_cpu_replaces_devices)


def test_boolean_masks_that_keep_the_shape_work():
    with memlab.dry_run():
        x = torch.randn(3, requires_grad=True)
        assert torch.where(x > 0, x, 0).shape == x.masked_fill(x > 0, 0).shape == (3,)


# ------------------------------------------------------------------ tensors from outside


def test_tensors_from_outside_are_converted():
    x = torch.randn(16, 32)
    with memlab.dry_run():
        model = nn.Linear(32, 48)
        trace = memlab.measure(lambda: model(x), model=model)
    assert trace.at_peak["inputs"] == 16 * 32 * 4


def test_a_storage_set_on_a_tensor_dies_with_the_tensor():
    with memlab.dry_run():
        x = torch.ones(100)
        storage = x.untyped_storage()
        gone = weakref.ref(storage)
        y = torch.empty(0).set_(storage)
        z = torch.empty(0).set_(storage, 8, (10,), (2,))
        assert y.shape == (100,)
        del x, y, z, storage
        gc.collect()
        assert gone() is None


def test_two_views_from_outside_share_their_storage():
    x = torch.randn(16, 32)
    with memlab.dry_run():
        trace = memlab.measure(lambda: x[:8].sum() + x[8:].sum())
    assert [e.bytes for e in trace.events if e.phase == "before"] == [16 * 32 * 4]


def test_a_model_from_outside_is_measured_and_unchanged():
    make = linear_training()
    step, model = make()
    step()
    real = memlab.measure(step, model=model)
    weight, gradient = model.weight.detach().clone(), model.weight.grad
    with memlab.dry_run():
        dry = memlab.measure(step, model=model)
    assert dry.at_peak == real.at_peak
    assert dry.peak_bytes == real.peak_bytes
    assert model.weight.grad is gradient
    assert torch.equal(model.weight, weight)
    step()  # the optimizer's state is real again


def test_the_state_of_an_optimizer_from_outside_is_restored():
    model = nn.Linear(32, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    with memlab.dry_run():
        model(torch.randn(16, 32)).sum().backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    assert torch.equal(state["exp_avg"], before)
    assert not any(isinstance(value, FakeTensor) for value in state.values())
    assert state["step"].item() == 1


def test_converting_a_model_from_outside_raises():
    model = nn.Linear(4, 4)
    with (
        memlab.dry_run(),
        pytest.raises(ValueError, match="got Linear with real weights"),
    ):
        model.half()
    assert model.weight.dtype == torch.float32


# ------------------------------------------------------------------ begin and end


def test_everything_is_restored():
    apply = nn.Module._apply
    with memlab.dry_run():
        pass
    assert nn.Module._apply is apply
    assert type(torch.randn(2)) is torch.Tensor
    assert memlab.dry_run.active is None


def test_everything_is_restored_after_an_exception():
    apply = nn.Module._apply
    with pytest.raises(ZeroDivisionError), memlab.dry_run(), memlab.meter():
        raise ZeroDivisionError
    assert nn.Module._apply is apply
    assert type(torch.randn(2)) is torch.Tensor


def test_a_dry_run_inside_a_dry_run_raises():
    with memlab.dry_run(), pytest.raises(RuntimeError, match="already active"):
        memlab.dry_run().__enter__()


def test_a_meter_around_a_dry_run_counts_fake_bytes_too():
    with memlab.meter() as running, memlab.dry_run():
        torch.zeros(1024)
    assert running.trace.peak_bytes == 4096


def test_a_dry_run_continues_after_a_meter():
    with memlab.dry_run():
        memlab.measure(lambda: torch.zeros(4))
        assert torch.randn(3).sum().item() == 0.5


def test_real_and_dry_runs_of_one_model_do_not_count_each_others_storages():
    step, model = linear_training()()
    step()
    real = memlab.measure(step, model=model)
    with memlab.dry_run():
        dry = memlab.measure(step, model=model)
    gc.collect()
    again = memlab.measure(step, model=model)
    assert real.peak_bytes == dry.peak_bytes == again.peak_bytes


# ------------------------------------------------------------------ integers


def batches_by_slices(data, indices):
    """Random start and fixed length, as in nanoGPT."""
    return torch.stack([torch.as_tensor(data[i : i + 16]).float() for i in indices])


@pytest.mark.parametrize("data", [torch.zeros(1000), torch.zeros(1000).numpy()])
def test_a_slice_with_an_unknown_start_has_the_right_length(data):
    def make():
        model = nn.Linear(16, 8)

        def step() -> None:
            x = batches_by_slices(data, torch.randint(900, (4,)))
            y = batches_by_slices(data, (torch.randint(900, (4,)) * 2 - 4) // 2 + 1)
            model(x - y).sum().backward()

        return step, model

    same_in_a_dry_run(make)


@pytest.mark.parametrize(
    ("reckon", "wanted"),
    [
        (lambda i: i + 16, 17),
        (lambda i: 16 + i, 17),
        (lambda i: i - 3, -2),
        (lambda i: 16 - i, 15),
        (lambda i: i * 4, 4),
        (lambda i: (i + 9) // 2, 5),
        (lambda i: (i + 9) % 4, 2),
        (lambda i: -i, -1),
        (lambda i: i + i + i, 3),
        (lambda i: i.add(5, alpha=3), 16),
        (lambda i: (i + 4).to(torch.int32), 5),
        (lambda i: (i + 4).clone(), 5),
        (lambda i: i.max(), 1),
        (lambda i: i // 0, 1),
        (lambda i: i + torch.tensor(5), 6),
        (lambda i: torch.arange(9).sum() - i, 35),
    ],
)
def test_arithmetic_on_unknown_integers_starts_from_1(reckon, wanted):
    with memlab.dry_run():
        assert reckon(torch.randint(9, (4,))[2]).item() == wanted


def test_a_note_names_the_lines_that_read_an_integer():
    def of(read) -> tuple[str, ...]:
        model, x = nn.Linear(4, 4), torch.zeros(9, 4)
        with memlab.dry_run():
            lengths = torch.randint(2, 9, (3,))
            return memlab.measure(lambda: model(x[: read(lengths)]).sum().backward()).notes

    [note] = of(lambda lengths: lengths.max().item())
    assert note.startswith("test_dry_run.py:") or note.startswith("tests/dry_runs/test_dry_run.py:")
    assert "reads an integer from a tensor whose values are unknown in a dry run" in note
    assert of(lambda lengths: len(lengths)) == ()
    assert of(lambda lengths: 3 if lengths.sum().float().item() > 0 else 2) == ()


# ------------------------------------------------------------------ functions in backward


def test_hooks_in_backward_can_use_the_same_functions_as_a_step():
    said = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return (gradient.to("cuda") * 2).to(gradient.device)

    def make():
        model = nn.Linear(16, 8)
        model.weight.register_post_accumulate_grad_hook(
            lambda weight: said.append(f"{weight.grad.norm():.3f}")
        )

        def step() -> None:
            pack = {"pack_hook": lambda x: x, "unpack_hook": lambda x: x.cuda()}
            with torch.autograd.graph.saved_tensors_hooks(**pack):
                loss = Doubled.apply(model(torch.ones(4, 16))).square().sum()
            loss.backward()
            torch.autograd.grad(Doubled.apply(model(torch.ones(4, 16))).sum(), model.weight)

        return step, model

    with memlab.dry_run():
        step, model = make()
        step()
        memlab.measure(step, model=model)
    assert said == ["0.500", "0.500"]


@pytest.mark.parametrize("make", [torch.sparse_coo_tensor, torch.sparse.FloatTensor])
@pytest.mark.filterwarnings("ignore:.*parse:UserWarning")
def test_a_sparse_matrix_is_refused_in_a_sentence(make):
    """Graph networks make one of an adjacency matrix."""
    with memlab.dry_run(), pytest.raises(ValueError, match="makes a sparse tensor"):
        make(torch.zeros(2, 3, dtype=torch.int64), torch.ones(3), torch.Size([4, 4]))
