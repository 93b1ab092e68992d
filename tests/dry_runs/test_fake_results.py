"""A repeated fake result equals the first one."""

import pytest
import torch
import torch.nn.functional as F

import memlab
from memlab.dry_runs.fake_results import FakeResults
from memlab.metering.dry import DryRun
from memlab.trace import Event, Trace

aten = torch.ops.aten


def recipes() -> dict:
    return DryRun.active._results._recipes


def facts(tensor: torch.Tensor) -> tuple:
    shared = tensor.untyped_storage()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), shared.nbytes()


CASES = {
    "elementwise": lambda x: x + 1,
    "transposed": lambda x: x.mT * 2,
    "view": lambda x: x[1:, ::2],
    "several views": lambda x: x.split(2, dim=1)[1],
    "unsafe view": lambda x: aten._unsafe_view(x, (2, 12)),
    "tuple": lambda x: F.layer_norm(x, (6,)),
    "list": lambda x: torch._foreach_mul([x, x.double()], 2)[1],
    "in place": lambda x: x.clone().mul_(2),
    "twice the same argument": lambda x: x.clone().add_(x),
    "in place with itself": lambda x: (y := x.clone()).add_(y),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)).conj() * 1j),
    "factory": lambda x: torch.zeros(3, 4, dtype=torch.int8),
}


@pytest.mark.parametrize("run", CASES.values(), ids=CASES)
def test_a_repeated_result_has_the_metadata_of_the_first_and_of_a_real_one(run):
    real = run(torch.randn(4, 6))
    with memlab.dry_run():
        first = run(torch.randn(4, 6))
        count = len(recipes())
        again = run(torch.randn(4, 6))
        assert len(recipes()) == count
        assert facts(first) == facts(again) == facts(real)


def test_a_repeated_view_shares_its_own_arguments_storage():
    with memlab.dry_run():
        x, y = torch.randn(4, 6), torch.randn(4, 6)
        x.view(24)
        view = y.view(24)
        assert view.untyped_storage()._cdata == y.untyped_storage()._cdata
        assert view._base is y


def test_a_repeated_result_is_a_new_storage_each_time():
    with memlab.dry_run():
        x = torch.randn(4, 6)
        results = [x + 1 for _ in range(3)]
        assert len({result.untyped_storage()._cdata for result in results}) == 3


@pytest.mark.parametrize(("number", "dtype"), [(1, torch.int64), (1.0, torch.float32)])
def test_numbers_that_compare_equal_keep_their_own_result_type(number, dtype):
    with memlab.dry_run():
        x = torch.zeros(200_000, dtype=torch.int64)
        _ = x * 1, x * 1.0
        assert (x * number).dtype is dtype


def test_a_change_of_the_default_dtype_changes_repeated_results():
    with memlab.dry_run():
        assert torch.empty(3).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.empty(3).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def renumbered(events: tuple[Event, ...]) -> list[Event]:
    numbers: dict[int, int] = {}
    return [e._replace(storage=numbers.setdefault(e.storage, len(numbers))) for e in events]


def trained() -> Trace:
    def build():
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(2, 32, 64)

        def step():
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step, model, optimizer

    return memlab.predict(build)


def test_a_prediction_with_repeated_results_is_the_same(monkeypatch):
    repeated = trained()
    monkeypatch.setattr(FakeResults, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    computed = trained()
    assert renumbered(repeated.events) == renumbered(computed.events)
    assert renumbered(repeated.history) == renumbered(computed.history)
    assert repeated.memory == computed.memory


def fake_kernels(run) -> int:
    """Return how often `run` reaches torch's own fake kernels."""
    count, mode = 0, DryRun.active._fake_mode
    real = mode.dispatch

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        return real(*args, **kwargs)

    mode.dispatch = counting
    try:
        run()
    finally:
        del mode.dispatch
    return count


def test_a_loop_over_a_buffer_repeats_the_results_of_its_first_element():
    """A script of reinforcement learning stores thousands of steps this way."""
    with memlab.dry_run():
        buffer, values = torch.zeros(100, 4), torch.randn(4)

        def step(index):
            buffer[index] = values + torch.tensor([float(index)] * 4)
            return (buffer[index] * 2).sum().item()

        step(0), step(1)
        assert fake_kernels(lambda: [step(index) for index in range(2, 100)]) == 0
        assert facts(buffer[7]) == facts(torch.zeros(100, 4)[7])
        assert facts(buffer[7, 1:]) == (torch.float32, (3,), (1,), 29, 1600)


@pytest.mark.parametrize("index", [3, -1, 0])
@pytest.mark.parametrize("start", [0, 2])
def test_an_element_lies_where_a_real_one_does(index, start):
    real = torch.zeros(6, 5, 4)[start:, 1:].mT
    with memlab.dry_run():
        fake = torch.zeros(6, 5, 4)[start:, 1:].mT
        for dim in range(3):
            for place in (0, index):
                assert facts(fake.select(dim, place)) == facts(real.select(dim, place))


def test_an_index_out_of_range_is_an_error_in_a_dry_run_too():
    with memlab.dry_run():
        x = torch.zeros(3, 2)
        _ = x[0]
        with pytest.raises(IndexError, match="index"):
            x[3]


def test_literals_keep_their_own_values():
    with memlab.dry_run():
        assert [torch.tensor([n, 2.0]).tolist() for n in (1.0, 5.0)] == [[1, 2], [5, 2]]
        assert torch.tensor(7).item() == 7
        assert torch.zeros(4)[torch.tensor([True, False, True, True])].shape == (3,)
