"""Meshes by formula against dry runs of their scripts, and the scripts in real processes."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.planner.cards import card_named
from memlab.planner.mesh_script import mesh_script
from memlab.planner.meshes import (
    MOST_UNEVEN,
    Mesh,
    crosses_nodes,
    fullest,
    mesh_options,
    meshes,
    rank_bytes,
    sent_bytes,
)
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks
from memlab.zero.formulas import ring_elements
from tests.quick import quick

SHAPE = GPTConfig(32_000, 2_048, 4, 16, 8, 5_632, 2_048, tied=False)
SMALL = replace(PRESETS["tiny"], tied=False)
SIZES = {"sequences": 1, "seq_len": 2_048}
MESHES = [
    Mesh(data=8),
    Mesh(data=2, checkpointed=False),
    Mesh(data=2, tensor=4),
    Mesh(tensor=2, checkpointed=False),
    Mesh(data=2, pipeline=2),
    Mesh(pipeline=4, checkpointed=False),
    Mesh(data=2, tensor=2, pipeline=2),
    Mesh(data=2, context=2),
    Mesh(context=2, tensor=2, checkpointed=False),
    Mesh(2, 2, 2, 2),
]


@pytest.fixture
def predicted(tmp_path):
    """Predicts the first rank of a stage of a mesh's script."""

    def predict(mesh, stage=0):
        path = tmp_path / "train.py"
        path.write_text(mesh_script(SHAPE, mesh))
        rank = stage * mesh.gpus // mesh.pipeline
        launch = launch_of([str(path)]).with_ranks(mesh.gpus)
        return run_ranks(launch, (rank,), device="cuda:h100")[rank]

    return predict


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", quick(MESHES[:1] + MESHES[6:7], MESHES), ids=str)
def test_bytes_by_formula_are_within_5_percent_of_the_scripts_dry_run(predicted, mesh):
    """Pipelines of torch 2.15 have fewer receive buffers and no bfloat16 gradients beside the sums.

    The formula is up to 5.3 % above theirs.
    """
    bound = 0.053 if mesh.pipeline > 1 and torch.__version__ >= "2.15" else 0.05
    for stage in sorted({0, mesh.pipeline - 1}):
        outcome = predicted(mesh, stage)
        found = rank_bytes(SHAPE, mesh, **SIZES, workspace=64 * 2**20)[stage]
        assert found.total == pytest.approx(outcome.trace.peak_bytes, rel=bound)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", quick(MESHES[2:3], MESHES), ids=str)
def test_sent_bytes_by_formula_are_those_of_the_scripts_dry_run(predicted, mesh):
    """What tensor parallelism reduces of norms and losses is too little to be in the formula."""
    for stage in sorted({0, mesh.pipeline - 1}):
        sent = Counter()
        for transfer in predicted(mesh, stage).transfers:
            sent[transfer.kind] += transfer.bytes
        found = sent_bytes(SHAPE, mesh, stage, **SIZES)
        is_last = stage == mesh.pipeline - 1
        norms = 2 * mesh.blocks(SHAPE.layers, stage) + is_last
        losses = 3 * 4 * SIZES["seq_len"] // mesh.context * is_last
        # A pipeline adds gradients up in float32; from torch 2.15 on, so does each backward.
        element = 4 if mesh.pipeline > 1 or torch.__version__ >= "2.15" else 2
        small = 2 * ring_elements(element * SHAPE.hidden_size * norms, mesh.tensor)
        small += 2 * mesh.micro_batches * ring_elements(losses, mesh.tensor)
        assert sent.pop("all-reduce", 0) == small
        assert sum(sent.values()) == pytest.approx(sum(found.values()), rel=1e-3)
        assert sent["send"] == found["pipeline"]


@pytest.mark.filterwarnings("ignore")
def test_the_last_stage_is_predicted_without_the_others(tmp_path):
    """The script gives its stages' shapes, so that no rank waits for another one's."""
    path = tmp_path / "train.py"
    path.write_text(mesh_script(SMALL, Mesh(pipeline=4)))
    launch = launch_of([str(path)]).with_ranks(4)
    assert list(run_ranks(launch, (3,), device="cpu")) == [3]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(tensor=2), Mesh(pipeline=2)], ids=str)
def test_the_script_trains_on_two_processes(tmp_path, mesh):
    path = tmp_path / "train.py"
    path.write_text(mesh_script(SMALL, mesh, sequences=2, seq_len=32, steps=8))
    losses = [float(each) for each in re.findall(r"loss (\d+\.\d+)", started(path))]
    last = losses[-1]
    assert 5.2 < losses[0] < 6.2  # ln 256 is 5.55
    assert last < losses[0] - 0.3


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(pipeline=2)], ids=str)
def test_ranks_that_share_a_model_have_the_same_tokens(tmp_path, mesh):
    path = tmp_path / "train.py"
    text = mesh_script(SMALL, mesh, sequences=2, seq_len=32, steps=1)
    path.write_text(f"{text}print('tokens', batch.flatten()[:8].tolist(), flush=True)\n")
    found = re.findall(r"tokens (\[[\d, ]+\])", started(path))
    assert len(found) == 2
    assert len(set(found)) == 1


def started(path: Path, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", path]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        # gloo aborted a rank once in some hundred runs, on a busy machine; a script's own error is
        # an exit status.
        if "SIGABRT" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


@pytest.mark.parametrize(
    ("mesh", "most"),
    [
        (Mesh(data=2), 60),
        (Mesh(context=2), 60),
        (Mesh(pipeline=2), 72),
        (Mesh(tensor=2), 72),
        (Mesh(2, 2, 2, 2), 90),
    ],
)
def test_the_script_has_only_what_its_mesh_needs(mesh, most):
    text = mesh_script(SMALL, mesh)
    compile(text, "train.py", "exec")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= most
    assert ("Schedule1F1B" in text) == (mesh.pipeline > 1)
    assert ("parallelize_module" in text) == (mesh.tensor > 1)
    assert ("context_parallel" in text) == (mesh.context > 1)
    assert max(map(len, text.splitlines())) <= 110


def test_all_meshes_of_eight_gpus_divide_them():
    found = list(meshes(SHAPE, 8, 2_048))
    assert all(mesh.gpus == 8 for mesh in found)
    by_hand = {
        (data, tensor, pipeline, context)
        for data in (1, 2, 4, 8)
        for tensor in (1, 2, 4, 8)
        for pipeline in (1, 2, 4)  # of 4 layers
        for context in (1, 2, 4, 8)
        if data * tensor * pipeline * context == 8
    }
    assert {(m.data, m.tensor, m.pipeline, m.context) for m in found} == by_hand
    assert len(found) == 2 * len(by_hand)


def test_limits_of_a_mesh():
    wide = list(meshes(PRESETS["llama-3-405b"], 1_024, 8_192))
    assert max(mesh.tensor for mesh in wide) == 8
    for mesh in wide:
        assert -(-126 // mesh.pipeline) * mesh.pipeline <= MOST_UNEVEN * 126
        assert 8_192 % (mesh.context * mesh.tensor) == 0


@pytest.mark.parametrize(
    ("mesh", "between"),
    [
        (Mesh(data=8), ""),
        (Mesh(data=16), "data"),
        (Mesh(data=4, tensor=8, pipeline=2), "data pipeline"),
        (Mesh(data=1, tensor=2, context=4, pipeline=2), "pipeline"),
        (Mesh(tensor=2, context=8), "context data"),
    ],
    ids=str,
)
def test_groups_that_cross_nodes_by_hand(mesh, between):
    found = [name for name, crosses in crosses_nodes(mesh).items() if crosses and name]
    used = [name for name in found if name == "data" or getattr(mesh, name) > 1]
    assert used == between.split()


def test_the_fullest_stage_is_the_first_with_many_saved_and_the_last_with_many_words():
    deep = replace(SHAPE, layers=32, vocab_size=1_024)
    wide = replace(SHAPE, layers=4, vocab_size=128_000)
    mesh = Mesh(pipeline=4, checkpointed=False)
    assert fullest(rank_bytes(deep, mesh, **SIZES)).stage == 0
    assert fullest(rank_bytes(wide, mesh, **SIZES)).stage == 3


def test_options_are_sorted_by_time():
    found = mesh_options(SHAPE, 16, card_named("h100"), **SIZES)
    seconds = [option.seconds_per_token for option in found]
    assert seconds == sorted(seconds)
    assert len({option.mesh for option in found}) == len(found)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(tensor=16), "does not divide 8 key heads"),
        (Mesh(context=32, tensor=64), "does not divide"),
        (Mesh(context=3), "does not divide 2048 tokens by 6"),
        (Mesh(pipeline=5), "has more stages than the 4 layers"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(mesh, words):
    with pytest.raises(ValueError, match=words):
        mesh_script(SHAPE, mesh)


def test_models_that_the_script_does_not_have_are_refused():
    with pytest.raises(ValueError, match="got a model with biases"):
        mesh_script(replace(SHAPE, attention_biases=("query",)), Mesh())
    with pytest.raises(ValueError, match="divides a tied embedding between stages"):
        mesh_script(replace(SHAPE, tied=True), Mesh(pipeline=2))
