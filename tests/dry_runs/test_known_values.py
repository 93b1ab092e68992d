"""Values that do not depend on random numbers or missing data are known in dry runs."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traces import renumbered, same_in_a_dry_run

import memlab
from memlab.dry_runs import known_values

MASK = torch.tensor([True, False, True, True])
LENGTHS = torch.tensor([3, 1, 2])


def changed_through_a_view():
    x = torch.zeros(2, 3)
    x[1:, 1:].view(-1).add_(torch.arange(2)).mul_(4)
    x.t()[0] = 7
    return x


def written_whole():
    x = torch.empty(3)
    x.copy_(torch.arange(3))
    torch.add(x, 1, out=x)
    return x


def written_through_numpy():
    x = torch.zeros(2)
    x.numpy()[1] = 5
    return x


def position_buckets():
    """A short version of T5's position buckets."""
    distance = torch.arange(9)[None] - torch.arange(5)[:, None]
    far = (distance.abs().float() / 2).clamp(min=1).log().to(torch.int64) + 2
    return torch.where(distance.abs() < 2, distance.abs(), far.clamp(max=3))


def rotary_table():
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 8, 2).float() / 8)
    angles = torch.outer(torch.arange(4).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()), -1)


READS = {
    "arange": lambda: torch.arange(5).tolist(),
    "one element": lambda: torch.arange(5)[3].item(),
    "drop path": lambda: [rate.item() for rate in torch.linspace(0, 0.1, 4)],
    "int": lambda: int(torch.tensor([2.9, 4.2]).sum()),
    "float": lambda: float(torch.full((), 3.0)),
    "bool": lambda: bool(torch.zeros(2).any()),
    "unknown to bool": lambda: bool((torch.arange(3) > 1).all()),
    "format": lambda: f"{torch.linspace(0, 1, 5)[3]:.2f}",
    "low precision": lambda: torch.tensor([1.5], dtype=torch.bfloat16).tolist(),
    "complex": lambda: torch.view_as_complex(torch.tensor([[1.0, 2.0]])).tolist(),
    "bits": lambda: torch.ones(1).view(torch.int32).item(),
    "array": lambda: torch.arange(4).numpy().tolist(),
    "asarray": lambda: np.asarray(torch.arange(3), dtype=np.float32).tolist(),
    "from an array": lambda: torch.from_numpy(torch.arange(3).numpy()).sum().item(),
    "view": lambda: changed_through_a_view().tolist(),
    "written whole": lambda: written_whole().tolist(),
    "written as an array": lambda: written_through_numpy().tolist(),
    "foreach": lambda: [x.item() for x in torch._foreach_add([torch.ones(())] * 2, 3)],
    "converted": lambda: torch.arange(3).float().half().tolist(),
    "cuda stands in": lambda: torch.arange(3).to("cpu").tolist(),
    "copied": lambda: torch.arange(3).clone().detach().contiguous().tolist(),
    "parameter": lambda: nn.LayerNorm(3).weight.tolist(),
    "counter": lambda: nn.BatchNorm1d(3).num_batches_tracked.item(),
    "buckets": lambda: position_buckets().tolist(),
    "rotary": lambda: rotary_table().tolist(),
    "causal": lambda: torch.ones(3, 3).tril().bool().tolist(),
    "empty": lambda: torch.cat([torch.tensor([]), torch.ones(1)]).tolist(),
    "no hits": lambda: torch.cat([torch.arange(3)[MASK[:3] & False], torch.ones(1)]).tolist(),
    "mask": lambda: torch.arange(4)[MASK].tolist(),
    "nonzero": lambda: MASK.nonzero().tolist(),
    "where": lambda: [x.tolist() for x in torch.where(MASK)],
    "unique": lambda: [x.tolist() for x in torch.unique(LENGTHS, return_counts=True)],
    "bincount": lambda: torch.bincount(LENGTHS).tolist(),
    "equal": lambda: (torch.equal(LENGTHS, LENGTHS), torch.equal(LENGTHS, LENGTHS + 1)),
    "one-hot": lambda: F.one_hot(LENGTHS).tolist(),
    "a batch's mask": lambda: (torch.arange(4)[None] < LENGTHS[:, None]).sum(1).tolist(),
    # results computed with unknown values still have the real size
    "size of a mask's choice": lambda: torch.randn(4, 2)[MASK].shape,
    "size of columns": lambda: torch.randn(2, 4)[:, MASK].shape,
    "size of two masks": lambda: torch.randn(2, 4)[torch.tensor([True, False]), MASK[0]].shape,
    "size of masked_select": lambda: torch.randn(2, 4).masked_select(MASK).shape,
    "repeated": lambda: torch.randn(3, 2).repeat_interleave(LENGTHS, 0).shape,
    "split": lambda: [x.shape for x in torch.randn(6, 2).split(LENGTHS.tolist())],
    "tensor_split": lambda: [x.shape for x in torch.randn(6, 2).tensor_split(LENGTHS.sort()[0])],
    "tensor_split by name": lambda: [
        x.shape for x in torch.tensor_split(torch.randn(6), tensor_indices_or_sections=LENGTHS[2])
    ],
    "slice": lambda: torch.randn(9)[: LENGTHS.max()].shape,
    "factory": lambda: torch.zeros(LENGTHS[0]).shape,
}


@pytest.mark.few(11)
@pytest.mark.parametrize("name", READS)
def test_known_values_are_read(name):
    wanted = READS[name]()
    with memlab.dry_run() as run:
        assert READS[name]() == wanted
    assert run.notes() == ()


UNKNOWN = {
    "drawn": lambda: torch.rand(2),
    "permuted": lambda: torch.randperm(2).float(),
    "not written": lambda: torch.empty(2),
    "drawn into": lambda: torch.zeros(2).normal_(),
    "added to": lambda: torch.zeros(2) + torch.rand(2),
    "added to in place": lambda: torch.zeros(2).add_(torch.rand(2)),
    "added to a view": lambda: add_in_place(torch.zeros(2)),
    "a batch norm's mean": lambda: trained(nn.BatchNorm1d(2)).running_mean,
    "a dropped unit": lambda: F.dropout(torch.ones(2)),
    "an output of another library": lambda: torch.ops.memlab_test.kept(torch.zeros(2)),
    "an output written by another library": lambda: written_by_another(torch.zeros(2)),
    "more elements than are computed with": lambda: torch.zeros(known_values.BOUND + 1)[:2],
}


def add_in_place(x):
    x[1:] += torch.rand(1)
    return x


def trained(norm):
    norm(torch.randn(4, 2))
    return norm


def written_by_another(x):
    torch.ops.memlab_test.write(x)
    return x


@pytest.fixture
def another_library():
    library = torch.library.Library("memlab_test", "DEF")
    library.define("kept(Tensor x) -> Tensor")
    library.define("write(Tensor(a!) x) -> ()")
    library.impl("kept", lambda x: x.clone(), "CompositeExplicitAutograd")
    library.impl("write", lambda x: None, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_that_depend_on_unknown_ones_are_unknown(name, another_library):
    with memlab.dry_run():
        assert UNKNOWN[name]().double().tolist() in ([0.5, 0.5], [1, 1])


def test_overwriting_an_unknown_tensor_makes_it_known():
    with memlab.dry_run():
        assert torch.rand(2).zero_().tolist() == [0, 0]
        assert torch.rand(2).fill_(3).tolist() == [3, 3]
        x = torch.rand(4)
        x[:2] = 0
        assert x.tolist() == [0.5] * 4


def test_a_tensor_from_outside_is_read_but_not_changed():
    lengths, mask = torch.tensor([3, 1, 2]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    with memlab.dry_run():
        assert (lengths + 1).tolist() == [4, 2, 3]
        assert mask.sum(1).max().item() == 2
        other = lengths.view(3)
        lengths.add_(5)
        assert (lengths * 1).tolist() == [8, 6, 7]
        lengths.add_(torch.randint(9, (3,)))
        assert (lengths * 1).tolist() == [1, 1, 1]
        assert (other * 1).tolist() == [1, 1, 1]
        assert (lengths.view(3) * 1).tolist() == [1, 1, 1]
    assert lengths.tolist() == [3, 1, 2]


def test_a_large_data_set_from_outside_is_summed_up():
    tokens = torch.zeros(known_values.BOUND + 1, dtype=torch.int64)
    tokens[-1] = 9
    with memlab.dry_run():
        assert int(tokens.max()) + 1 == 10


def test_values_live_as_long_as_the_tensor():
    with memlab.dry_run():
        x = torch.arange(3)
        values = weakref.ref(known_values.real(x).untyped_storage())
        y = x[1:]
        del x
        assert y.tolist() == [1, 2]
        assert values() is not None
        del y
        gc.collect()
        assert values() is None


def test_a_scripts_random_numbers_do_not_change():
    state = torch.get_rng_state()
    with memlab.dry_run():
        torch.zeros(9).bernoulli_(0.5)
        F.dropout(torch.ones(9))
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------ steps


class Staged(nn.Module):
    """Widths computed from a tensor, as in RegNet, and drop path rates, as in timm."""

    def __init__(self) -> None:
        super().__init__()
        widths = (torch.arange(4) * 8.7 + 16).div(8, rounding_mode="floor").int() * 8
        widths, depths = torch.unique_consecutive(widths, return_counts=True)
        rates = [rate.item() for rate in torch.linspace(0, 0.3, int(depths.sum()))]
        layers, before = [], 5
        for width, depth in zip(widths.tolist(), depths.tolist(), strict=True):
            for _ in range(depth):
                layers += [nn.Linear(before, width), nn.ReLU(), nn.Dropout(rates.pop(0))]
                before = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def staged_step():
    model = Staged()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(7, 5)).square().mean().backward()
        optimizer.step()

    return step, model


def masked_step():
    """A padded batch from Python lists, with a loss on the real tokens only."""
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11)
    model = nn.Sequential(embedding, head)
    sequences = [[1, 2, 3, 4], [5], [6, 7]]
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True)

    def step() -> None:
        model.zero_grad()
        real = tokens != 0
        longest = int(real.sum(1).max())
        hidden = embedding(tokens[:, :longest])[real]
        F.cross_entropy(head(hidden), tokens[real]).backward()

    return step, model


def packed_step(batch_first, layer=nn.GRU):
    """Pack sequences, and unpack their gradient; torch reads the lengths for both."""
    model = nn.ModuleList([nn.Embedding(9, 3), layer(3, 4, batch_first=batch_first)])
    lengths = torch.tensor([5, 3, 3, 1])

    def step() -> None:
        model.zero_grad()
        x = model[0](torch.randint(9, (4, 5) if batch_first else (5, 4)))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=batch_first)
        padded, _ = nn.utils.rnn.pad_packed_sequence(model[1](packed)[0], batch_first=batch_first)
        padded.square().sum().backward()

    return step, model


def ctc_step():
    model = nn.Linear(6, 8)

    def step() -> None:
        model.zero_grad()
        log_probs = model(torch.randn(20, 3, 6)).log_softmax(-1)
        inputs, targets = torch.tensor([20, 15, 18]), torch.tensor([4, 7, 2])
        F.ctc_loss(log_probs, torch.randint(1, 8, (3, 9)), inputs, targets).backward()

    return step, model


def one_hot_step():
    model = nn.Linear(4, 4)

    def step() -> None:
        model.zero_grad()
        (model(torch.randn(3, 4)) * F.one_hot(torch.tensor([2, 0, 3]))).sum().backward()

    return step, model


def rollout_step():
    """Store arrays that share a tensor's memory, as in reinforcement learning."""
    model = nn.Linear(3, 4)

    def step() -> None:
        model.zero_grad()
        actions = [model(torch.randn(5, 3)).detach().numpy() for _ in range(3)]
        masks = [torch.ones(7).numpy() for _ in range(3)]
        model(torch.randn(9, 3)).sum().backward()
        del actions, masks

    return step, model


@pytest.mark.parametrize("make", [rollout_step, staged_step, masked_step, ctc_step, one_hot_step])
def test_a_step_whose_sizes_come_from_known_values_is_exact(make):
    if make is one_hot_step and torch.__version__ < "2.13":
        pytest.skip("needs torch ≥ 2.13, whose order this is")
    same_in_a_dry_run(make)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [(True,), (False,), (True, nn.LSTM)])
def test_a_step_of_packed_sequences_is_exact(options):
    """Two operators have other names, because torch writes the lengths in C++."""

    def bytes_of(trace):
        return [event.bytes for event in renumbered(trace)]

    step, model = packed_step(*options)
    real = memlab.measure(step, model=model)
    with memlab.dry_run() as run:
        step, model = packed_step(*options)
        dry = memlab.measure(step, model=model)
    assert bytes_of(dry) == bytes_of(real)
    assert run.notes() == ()


@pytest.mark.parametrize(
    "read",
    [
        lambda: nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.randint(1, 3, (2,))),
        lambda: torch.randn(6).tensor_split(torch.randint(1, 3, (2,))),
        lambda: F.one_hot(torch.randint(1, 3, (2,))),
        lambda: F.ctc_loss(
            torch.randn(9, 2, 4), torch.ones(2, 5).long(), LENGTHS[:2], torch.randint(1, 3, (2,))
        ),
    ],
    ids=["packed", "tensor_split", "one-hot", "ctc"],
)
def test_unknown_lengths_raise_with_the_line(read):
    with memlab.dry_run(), pytest.raises(ValueError, match=r"test_known_values\.py:\d+ <lambda>: "):
        read()


def test_known_values_do_not_count_as_memory_of_the_step():
    def make():
        model = nn.Linear(4, 4)

        def step() -> None:
            positions = torch.arange(9)
            table = rotary_table().sum()
            (model(torch.randn(3, 4)).sum() * table + positions.max()).backward()

        return step, model

    same_in_a_dry_run(make)
