"""Dry runs draw the samples of a real run."""

import pytest
import torch
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

import memlab

SAMPLES = list(range(20))
SAMPLERS = {
    "shuffled": lambda: data.RandomSampler(SAMPLES),
    "with replacement": lambda: data.RandomSampler(SAMPLES, replacement=True),
    "subset": lambda: data.SubsetRandomSampler(SAMPLES),
    "weighted": lambda: data.WeightedRandomSampler([1.0] * 20, 20),
    "of a rank": lambda: DistributedSampler(SAMPLES, num_replicas=2, rank=1),
    "seeded": lambda: data.RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_equal_a_real_samplers(name):
    def drawn():
        torch.manual_seed(0)
        return list(SAMPLERS[name]())

    wanted = drawn()
    with memlab.dry_run():
        assert drawn() == wanted


def test_a_shuffled_data_set_gives_each_sample_once_without_a_note():
    with memlab.dry_run() as run:
        loader = data.DataLoader(SAMPLES, batch_size=8, shuffle=True)
        batches = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert sorted(sample for batch in batches for sample in batch) == SAMPLES
    assert run.notes() == ()


def test_random_number_generators_are_restored():
    generator = torch.Generator().manual_seed(3)
    loader = data.DataLoader(SAMPLES, shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    with memlab.dry_run():
        list(loader)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


def test_sampling_from_indices_made_in_the_dry_run_works():
    with memlab.dry_run():
        drawn = list(data.SubsetRandomSampler(torch.arange(4)))
    assert sorted(drawn) == [0, 1, 2, 3]
