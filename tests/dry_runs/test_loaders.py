"""Data sets in a prediction give real tensors, unless they hold fake ones."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import memlab
from memlab.internals.torch_internals import FakeTensor


class Numbers(Dataset):
    def __init__(self, data=None):
        self.data = torch.arange(6).view(3, 2).float() if data is None else data

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": 2 * self.data[index], "number": index}


def batches_of(make, device="cuda", **options):
    """The kinds of the batches' tensors in a prediction, and what the batches hold."""
    kinds, values = [], []

    def build():
        model = torch.nn.Linear(2, 2, device=device)
        loader = DataLoader(make(), batch_size=3, **options)

        def step():
            for batch in loader:
                x = batch["x"] if isinstance(batch, dict) else batch[0]
                kinds.append(type(x))
                values.append(x.tolist())
                model(x.to(device)).sum().backward()

        return step, model, None

    trace = memlab.predict(build, steps=1, device=device)
    return kinds, values, [event.bytes for event in trace.events if event.category == "inputs"]


VALUES = [[0, 2], [4, 6], [8, 10]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_from_outside_gives_real_tensors_and_the_copy_is_counted(workers):
    outside = Numbers()
    kinds, values, inputs = batches_of(lambda: outside, num_workers=workers)
    assert set(kinds) == {torch.Tensor}
    assert values[0] == VALUES
    assert inputs.count(3 * 2 * 4) == len(kinds)


def test_a_data_set_of_fake_tensors_gives_fake_ones():
    kinds, values, _ = batches_of(Numbers)
    assert all(issubclass(kind, FakeTensor) for kind in kinds)
    assert values[0] == VALUES
    kinds, _, inputs = batches_of(lambda: TensorDataset(torch.randn(3, 2)))
    assert all(issubclass(kind, FakeTensor) for kind in kinds)
    assert inputs.count(3 * 2 * 4) == len(kinds)


def test_a_default_device_makes_the_batches_of_fake_tensors():
    class Made(Numbers):
        def __getitem__(self, index):
            return {"x": torch.ones(2)}

    torch.set_default_device("cuda")
    try:
        kinds, _, _ = batches_of(lambda: Made(torch.empty(0)), generator=None)
    finally:
        torch.set_default_device(None)
    assert all(issubclass(kind, FakeTensor) for kind in kinds)


def test_a_data_sets_own_error_is_raised():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise KeyError(f"no row {index}")

    outside = Broken()
    with pytest.raises(KeyError, match="no row 0"):
        batches_of(lambda: outside)


def test_the_cpus_dry_run_counts_the_batches():
    outside = Numbers()
    with memlab.dry_run():
        [batch] = DataLoader(outside, batch_size=3)
    assert isinstance(batch["x"], FakeTensor)
