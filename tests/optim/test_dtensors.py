"""memlab's optimizers and loss scaling of DTensors, as FSDP2 makes them, in two ranks of gloo."""

from typing import Any

import pytest
from dtensor_ranks import ELEMENTWISE, REFUSING, TIME_OUT, all_results

from memlab.zero.launch import run_ranks

# Random numbers, and blocks of 256 elements, are those of a rank's shard.
ONLY_AS_SHARDS = ("Adam8bit", "Lion8bit", "MomentumSGD", "RoundedAdamW")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(all_results, 2, str(folder), timeout=TIME_OUT)


@pytest.mark.parametrize("name", [cls.__name__ for cls in ELEMENTWISE])
def test_a_step_of_uneven_shards_is_the_unsharded_step(name, ranks):
    for rank in ranks:
        assert rank["steps"][name]["as shards"]
        assert rank["steps"][name]["as the whole"] or name in ONLY_AS_SHARDS


@pytest.mark.parametrize("name", [cls.__name__ for cls in ELEMENTWISE])
def test_training_continues_from_a_checkpoint_of_torch_distributed(name, ranks):
    assert all(rank["steps"][name]["restored"] for rank in ranks)


def test_a_rank_holds_8_bit_state_of_its_shard_alone(ranks):
    for rank, rows in zip(ranks, (66, 65), strict=True):
        found = rank["steps"]["Adam8bit"]["bytes"]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert found[f"{moment}_codes"] == rows * 70
            assert found[f"{moment}_scales"] == 4 * 19  # ⌈66 · 70 / 256⌉ on both ranks


@pytest.mark.parametrize("name", [cls.__name__ for cls in REFUSING])
def test_optimizers_of_whole_matrices_refuse_dtensors_at_construction(name, ranks):
    for rank in ranks:
        assert rank["refusals"][name].startswith("got a DTensor of shape (131, 70), of which each")


def test_all_ranks_skip_a_step_that_overflowed_on_one(ranks):
    for rank in ranks:
        assert rank["overflowed"] == {"plain": (True, 4.0), "master weights": (True, 4.0)}
