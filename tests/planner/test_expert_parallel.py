"""Expert parallelism over several GPUs, by formula, against dry runs in plain torch."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from memlab.configs.mixtures import MIXTURES, MixtureConfig
from memlab.configs.shapes import GPTConfig
from memlab.planner.cards import card_named
from memlab.planner.expert_parallel import (
    ExpertMesh,
    crosses_nodes,
    degrees,
    dense_weights,
    dropped_share,
    expert_bytes,
    expert_meshes,
    largest_imbalance,
    seconds_per_token,
    sent_bytes,
)
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks
from tests.quick import quick

SCRIPT = Path(__file__).with_name("expert_training.py")
WORKSPACE = 64 * 2**20  # cuBLAS's, of forward and backward
FEW = MixtureConfig(
    GPTConfig(1_024, 1_024, 4, 16, 4, 3_584, 2_048, tied=False, custom_head_dim=64), 8, 2
)
WORDS = replace(FEW, dense=replace(FEW.dense, vocab_size=32_000))
WIDE = replace(FEW, dense=replace(FEW.dense, intermediate_size=8_192, seq_len=512))
BUSY = replace(FEW, dense=replace(FEW.dense, intermediate_size=8_192, layers=2))
MANY = MixtureConfig(
    GPTConfig(4_096, 1_024, 6, 16, 4, 768, 2_048, False, 1e6, 1e-6, 64, head_norms=True), 16, 4
)
FINE = MixtureConfig(
    GPTConfig(1_024, 1_024, 2, 16, 4, 512, 4_096, tied=False, custom_head_dim=64), 64, 8
)
CASES = [
    (FEW, ExpertMesh(8, 4), 2.0),
    (MANY, ExpertMesh(16, 4, checkpointed=False), 1.5),
    (FEW, ExpertMesh(8, 1), 1.0),
    (FEW, ExpertMesh(8, 1, checkpointed=False), 1.0),
    (FEW, ExpertMesh(8, 2), 1.0),
    (FEW, ExpertMesh(8, 2, checkpointed=False), 2.0),
    (FEW, ExpertMesh(8, 8), 3.0),
    (BUSY, ExpertMesh(8, 4), 2.75),
    (FEW, ExpertMesh(8, 8, checkpointed=False), 2.0),
    (WORDS, ExpertMesh(16, 8), 1.25),
    (WIDE, ExpertMesh(8, 1), 1.0),
    (WIDE, ExpertMesh(8, 8), 1.0),
    (MANY, ExpertMesh(16, 4), 1.5),
    (FINE, ExpertMesh(64, 8), 1.0),
    (FINE, ExpertMesh(64, 64), 8.0),
]


def names(case):
    return f"{case.experts} experts" if isinstance(case, MixtureConfig) else str(case)


def sizes_of(config):
    return {"sequences": 1, "seq_len": config.dense.seq_len}


def predicted(config, mesh, imbalance):
    dense = config.dense
    sizes = {
        "vocab": dense.vocab_size,
        "hidden": dense.hidden_size,
        "intermediate": dense.intermediate_size,
        "layers": dense.layers,
        "heads": dense.heads,
        "kv_heads": dense.kv_heads,
        "head_dim": dense.head_dim,
        "head_norms": dense.head_norms,
        "tokens": dense.seq_len,
        "experts": config.experts,
        "chosen": config.chosen,
        "ways": mesh.experts,
        "gpus": mesh.gpus,
        "checkpointed": mesh.checkpointed,
    }
    launch = launch_of([str(SCRIPT), json.dumps(sizes)]).with_ranks(mesh.gpus)
    assume = f"imbalance:{imbalance}"
    return run_ranks(launch, (0,), device="cuda:h100", assume=assume)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("config", "mesh", "imbalance"), quick(CASES[:2], CASES), ids=names)
def test_bytes_are_within_1_5_percent_of_a_dry_run_and_what_is_sent_is_exact(
    config, mesh, imbalance
):
    outcome = predicted(config, mesh, imbalance)
    found = expert_bytes(config, mesh, **sizes_of(config), imbalance=imbalance, workspace=WORKSPACE)
    assert found.total == pytest.approx(outcome.trace.peak_bytes, rel=0.015)
    at_peak = outcome.trace.at_peak
    weights, gathered = found.terms["weights"], found.terms["gathered weights"]
    assert 0.999 * weights <= at_peak["parameters"] <= 1.001 * (weights + gathered)
    assert found.terms["state"] == pytest.approx(at_peak["optimizer_state"], rel=1e-3)
    sent = Counter()
    for transfer in outcome.transfers:
        sent[transfer.kind] += transfer.bytes
    wanted = sent_bytes(config, mesh, **sizes_of(config), imbalance=imbalance)
    assert sent.pop("all-to-all", 0) == wanted["tokens"]
    # A router's rows are padded to the number of GPUs.
    assert sum(sent.values()) == pytest.approx(wanted["data"] + wanted["replicas"], rel=1e-3)


@pytest.mark.parametrize("config", [*MIXTURES.values(), FEW, MANY], ids=names)
def test_the_weights_of_all_parts_are_those_of_the_model(config):
    dense = config.dense
    blocks = dense.layers * (dense_weights(config) + config.experts * config.expert)
    ends = dense.hidden_size * (2 * dense.vocab_size + 1)
    assert blocks + ends == config.parameters


def test_degrees_divide_the_experts_and_the_gpus():
    assert degrees(FEW, 8) == [1, 2, 4, 8]
    assert degrees(FEW, 12) == [1, 2, 4]
    assert degrees(FEW, 7) == [1]
    assert degrees(MIXTURES["qwen3-30b-a3b"], 1_024)[-1] == 128
    assert len(list(expert_meshes(FEW, 12))) == 6


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("config", [FEW, MANY], ids=names)
def test_the_largest_imbalance_fits_and_one_more_token_does_not(config, checkpointed):
    mesh, sizes = ExpertMesh(16, 8, checkpointed), sizes_of(config)
    even = expert_bytes(config, mesh, **sizes).total
    most = expert_bytes(config, mesh, **sizes, imbalance=config.experts / config.chosen).total
    budget = (even + most) // 2
    found = largest_imbalance(config, mesh, budget, **sizes)
    tokens = sizes["seq_len"] * mesh.experts
    one_more = found + config.experts / (tokens * config.chosen)
    assert 1 < found < config.experts / config.chosen
    assert expert_bytes(config, mesh, **sizes, imbalance=found).total <= budget
    assert expert_bytes(config, mesh, **sizes, imbalance=one_more).total > budget
    assert largest_imbalance(config, mesh, most, **sizes) == config.experts / config.chosen
    assert largest_imbalance(config, mesh, even - 1, **sizes) is None
    assert largest_imbalance(config, mesh, even, **sizes, allowance=0.1) is None


def test_with_all_experts_on_each_gpu_imbalance_changes_nothing():
    alone, shared = ExpertMesh(8, 1), ExpertMesh(8, 8)
    totals = [
        [expert_bytes(FEW, mesh, **sizes_of(FEW), imbalance=k).total for k in (1.0, 2.0)]
        for mesh in (alone, shared)
    ]
    assert totals[0][0] == totals[0][1]
    assert totals[1][0] < totals[1][1]


def test_a_capacity_drops_what_is_above_it():
    """Of 8 experts' 800 copies, one gets 200 and may take 125."""
    assert dropped_share(FEW, 2.0) == pytest.approx(75 / 800)
    assert dropped_share(FEW, 1.25) == 0.0


def test_which_groups_are_on_several_nodes():
    assert crosses_nodes(ExpertMesh(8, 8)) == {"data": False, "replicas": False, "tokens": False}
    assert crosses_nodes(ExpertMesh(64, 8)) == {"data": True, "replicas": True, "tokens": False}
    assert crosses_nodes(ExpertMesh(16, 16)) == {"data": True, "replicas": False, "tokens": True}


def test_an_imbalance_takes_longer_and_an_all_to_all_between_nodes_too():
    card, config = card_named("h100"), MIXTURES["qwen3-30b-a3b"]
    sizes = {"sequences": 1, "seq_len": 4_096}

    def seconds(degree, imbalance=1.0):
        return seconds_per_token(config, ExpertMesh(64, degree), card, **sizes, imbalance=imbalance)

    assert seconds(8, 2.0) > seconds(8)
    assert seconds(16) > seconds(8)
