"""memlab's optimizers, loss scaling, checkpointing and offloading of DTensors, in ranks of gloo.

Two ranks have FSDP2 alone, also with its weights in host memory. Four have a mesh of two ranks of
tensor parallelism times two of FSDP2.
"""

from typing import Any

import pytest
from dtensor_ranks import ELEMENTWISE, REFUSING, TIME_OUT, all_results, results_of_a_mesh

from memlab.zero.launch import run_ranks

# Random numbers, and blocks of 256 elements, are those of a rank's shard.
ONLY_AS_SHARDS = ("Adam8bit", "Lion8bit", "MomentumSGD", "RoundedAdamW")
NAMES = [cls.__name__ for cls in ELEMENTWISE]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(all_results, 2, str(folder), timeout=TIME_OUT)


@pytest.fixture(scope="module")
def mesh_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(results_of_a_mesh, 4, str(folder), timeout=TIME_OUT)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["steps", "in host memory"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_uneven_shards_is_the_unsharded_step(name, kind, ranks):
    for rank in ranks:
        assert rank[kind][name]["as shards"]
        assert rank[kind][name]["as the whole"] or name in ONLY_AS_SHARDS


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_over_a_mesh_is_the_unsharded_step(name, mesh_ranks):
    for rank in mesh_ranks:
        assert rank["steps"][name]["as shards"]
        assert rank["steps"][name]["as the whole"] or name in ONLY_AS_SHARDS


@pytest.mark.parametrize("name", NAMES)
def test_training_continues_from_a_checkpoint_of_torch_distributed(name, ranks, mesh_ranks):
    found = [rank[kind][name] for rank in ranks for kind in ("steps", "in host memory")]
    found += [rank["steps"][name] for rank in mesh_ranks]
    assert [each["restored"] for each in found] == [True] * 8


def test_a_rank_holds_8_bit_state_of_its_shard_alone(ranks):
    for rank, rows in zip(ranks, (66, 65), strict=True):
        found = rank["steps"]["Adam8bit"]["bytes"]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert found[f"{moment}_codes"] == rows * 70
            assert found[f"{moment}_scales"] == 4 * 19  # ⌈66 · 70 / 256⌉ on both ranks


@pytest.mark.parametrize("name", [cls.__name__ for cls in REFUSING])
def test_optimizers_of_whole_matrices_refuse_dtensors_at_construction(name, ranks):
    for rank in ranks:
        assert rank["refusals"][name].startswith("got a DTensor of shape (")


def test_all_ranks_skip_a_step_that_overflowed_on_one(ranks, mesh_ranks):
    for rank in ranks + mesh_ranks:
        assert rank["overflowed"] == {"plain": (True, 4.0), "master weights": (True, 4.0)}


def test_checkpointing_and_offloading_activations_change_no_gradient(ranks, mesh_ranks):
    assert [rank["checkpointed"] for rank in ranks + mesh_ranks] == [True] * 6


def test_ranks_that_hold_the_same_weight_round_it_equally(ranks):
    for rank in ranks:
        assert rank["replicas"] == dict.fromkeys(("RoundedAdamW", "MomentumSGD", "rounding"), True)


def test_offloading_weights_or_optimizer_state_refuses_dtensors(ranks):
    takers = ("a streamed layer", "an offloaded optimizer", "a store")
    for rank in ranks:
        for message, name in zip(rank["refusals of offloading"], takers, strict=True):
            assert f"{name} takes plain tensors: use fully_shard" in message
