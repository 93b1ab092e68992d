"""`memlab plan`: from a model and a memory size to a command that runs; errors in one line."""

import json
import os
import re
import shlex
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from quick import slow

from memlab.configs.evidence import margin_share
from memlab.configs.gpus import GPUS
from memlab.model import PRESETS
from memlab.planner import search
from memlab.planner.formulas import training_bytes
from memlab.planner.recipes import Recipe
from memlab.units import format_bytes


@pytest.mark.slow
def test_the_command_that_is_printed_runs(memlab_command):
    """The recipes are predicted in separate processes, and the command trains for real."""
    planned = memlab_command("plan", "--model", "tiny", "--memory", "1GiB", "--recipes", "2")
    assert (planned.status, planned.err) == (0, "")
    commands = [line.strip() for line in planned.out.splitlines() if line.startswith("  memlab ")]
    assert len(commands) == 3  # without techniques, and two recipes
    trained = memlab_command(*shlex.split(commands[2])[1:], "--steps", "2", "--device", "cpu")
    assert (trained.status, trained.err) == (0, "")
    assert "peak" in trained.out


def test_recipes_show_what_they_need_and_the_smallest_miss_shows_what_it_lacks(
    by_formula, memlab_command, tmp_path
):
    outcome = memlab_command("plan", "--model", "llama-2-7b", "--memory", "24GB", "--full")
    assert outcome.status == 0
    assert "21.64 GiB left for PyTorch after the CUDA context and a margin\n" in outcome.out
    assert "bfloat16 lion8bit, checkpointing, step in backward" in outcome.out
    assert "The next faster recipe, " in outcome.out
    assert "≈" not in outcome.out
    numbers = json.loads((tmp_path / "work" / "plan.json").read_text())
    recipe, config = Recipe(precision="float32"), PRESETS["llama-2-7b"]
    needed = training_bytes(config, recipe, 1, 2048, target="cuda").peak_bytes
    assert numbers["bytes_as_it_is"] == needed
    assert (
        f"without techniques (float32 adamw): {format_bytes(needed)}, lacks "
        f"{format_bytes(needed - numbers['budget_bytes'])}" in " ".join(outcome.out.split())
    )
    assert all(len(line) <= 80 for line in outcome.out.splitlines() if "  memlab" not in line)
    assert numbers["options"][0]["missing_bytes"] < 0 < numbers["options"][-1]["missing_bytes"]
    assert [each["fits"] for each in numbers["options"]].count(False) == 1
    assert (tmp_path / "work" / "plan.png").stat().st_size > 10_000


def killed(kind):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_of_the_search_is_reported_in_one_line(usage_error, monkeypatch):
    monkeypatch.setattr(search, "_KindSearch", lambda query: killed)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    message = usage_error("plan", "--model", "5m", "--memory", "24GB")
    assert message.startswith("one of 2 processes that predict steps was ended by SIGKILL")


def test_an_unmodified_training_that_fits_is_reported(by_formula, memlab_command):
    outcome = memlab_command("plan", "--model", "5m", "--memory", "24GB")
    assert "without techniques (float32 adamw): 1" in outcome.out
    assert " MiB, fits\n" in outcome.out


@pytest.mark.slow
def test_nccls_buffers_are_named_where_there_is_more_than_one_gpu(by_formula, memlab_command):
    asked = ("plan", "--model", "5m", "--memory", "24GB")
    alone, together = (memlab_command(*asked, "--gpus", gpus) for gpus in ("1", "2"))
    words = "the table excludes NCCL's buffers: 24.00 MiB to 384.00 MiB for the rings"
    assert words in " ".join(together.out.split())
    assert "NCCL" not in alone.out


def test_several_gpus_get_a_mesh_and_its_script(memlab_command, tmp_path):
    """The printed peak is the written script's, run as a rank."""
    asked = ("plan", "--model", "5m", "--memory", "24GB", "--gpus", "2", "--recipes", "2")
    outcome = memlab_command(*asked, "--wide")
    assert outcome.status == 0
    script = tmp_path / "work" / "train_mesh.py"
    assert f"torchrun --nproc-per-node 2 {Path('work', script.name)}" in outcome.out
    numbers = json.loads((tmp_path / "work" / "plan.json").read_text())
    best = numbers["options"][numbers["chosen"]]
    assert best["command"] == f"torchrun --nproc-per-node 2 {Path('work', script.name)}"
    assert best["settings"]["data"] * best["settings"].get("tensor", 1) == 2
    assert len(numbers["options"]) == 2
    peak = format_bytes(best["allocated_bytes"])
    assert f"  {peak}  " in outcome.out
    ran = memlab_command("run", "--ranks", "2", "--rank", "0", "--device", "cuda", str(script))
    assert f"allocated {peak}" in " ".join(ran.out.split())


@pytest.mark.slow
def test_meshes_that_do_not_fit_are_named(memlab_command):
    outcome = memlab_command("plan", "--model", "5m", "--memory", "700MiB", "--gpus", "2")
    assert outcome.status == 1
    assert "Nothing fits 700MiB: data " in " ".join(outcome.out.split())
    assert "torchrun" not in outcome.out


@pytest.mark.parametrize("words", [("--lora",), ("--optimizer", "lion8bit"), ("--device", "cpu")])
def test_memlabs_own_recipes_are_sharded_by_zero(by_formula, memlab_command, words):
    outcome = memlab_command("plan", "--model", "5m", "--memory", "24GB", "--gpus", "2", *words)
    assert "--zero " in outcome.out
    assert "train_mesh.py" not in outcome.out


def test_if_nothing_fits_the_status_is_one_and_the_output_suggests_changes(
    by_formula, memlab_command
):
    outcome = memlab_command("plan", "--model", "llama-3-405b", "--memory", "8GiB")
    assert outcome.status == 1
    assert "Nothing fits 8GiB: the smallest recipe tried" in " ".join(outcome.out.split())


def test_a_gpu_has_less_memory_than_advertised(by_formula, memlab_command):
    outcome = memlab_command("plan", "--model", "1b", "--gpu", "RTX 4090", "--lora")
    assert "rtx4090: 23.52 GiB, 22.80 GiB left for PyTorch after the CUDA context" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "24GB"], "got no --model; give one of tiny, "),
        (["--model", "25m"], "got no --memory; give it as 24GB, 24GiB or a GPU's name"),
        (["--model", "lama-2-7b", "--memory", "24GB"], "llama-2-7b"),
        (["--model", "25m", "--memory", "plenty"], "got 'plenty' as a memory"),
        (["--model", "25m", "--gpu", "rtx3061"], "got unknown GPU 'rtx3061'; did you mean rtx3060"),
        (["--model", "25m", "--gpu", "4060 Ti"], "give one of rtx4060ti-8 or rtx4060ti-16"),
        (["--model", "25m", "--gpu", "t4", "--margin", "2x"], "got a margin of '2x'; give a perc"),
        (["--model", "25m", "--memory", "twenty-four GB"], "got 'twenty-four GB' as a memory"),
        (["--model", "25m", "--memory", "24GB", "--gpus", "0"], "got --gpus 0; expected an int"),
        (["--model", "25m", "--memory", "24GB", "--batch", "0"], "got --batch 0; expected an int"),
        (["--model", "25m", "--memory", "24GB", "--seq", "9999"], "25m takes 1 to 512"),
        (["--model", "25m", "--memory", "24GB", "--optimizer", "adam"], "got --optimizer adam"),
        (["--model", "25m", "--memory", "24GB", "--precision", "half"], "got --precision half"),
        (
            ["--model", "25m", "--memory", "24GB", "--recipes", "0"],
            "got --recipes 0; expected an int",
        ),
        (
            ["--model", "25m", "--script", "a.py:b", "--memory", "1GiB"],
            "got --script together with",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, words, usage_error):
    assert words in usage_error("plan", *arguments)


def test_the_margin_is_shown_and_left_free(by_formula, memlab_command, tmp_path):
    arguments = ("plan", "--model", "5m", "--gpu", "rtx3060", "--recipes", "1")
    budgets = {}
    usual = f"a margin of {margin_share():.1%} (the largest underestimate for measured"
    for margin, words in ((None, usual), ("0", "no margin"), ("1GiB", "a margin of 1.00 GiB ")):
        given = ("--margin", margin) if margin else ()
        outcome = memlab_command(*arguments, *given)
        said = " ".join(outcome.out.split())
        assert f"after the CUDA context and {words}" in said
        numbers = json.loads((tmp_path / "work" / "plan.json").read_text())
        assert numbers["memory"]["total_bytes"] == 11_931 * 2**20
        budgets[margin] = numbers["budget_bytes"]
        assert numbers["margin_bytes"] == (11_931 - 616) * 2**20 - numbers["budget_bytes"]
    assert budgets["0"] - budgets["1GiB"] == 2**30
    assert budgets["1GiB"] < budgets[None] < budgets["0"] == (11_931 - 616) * 2**20


def test_python_takes_a_margin_too(by_formula):
    found = search.plan("5m", "24GB", count=1, margin="500MiB")
    less = search.plan("5m", "24GB", count=1, margin=600 * 2**20)
    assert found.budget_bytes == 24 * 10**9 - (616 + 500) * 2**20
    assert found.budget_bytes - less.budget_bytes == 100 * 2**20
    with pytest.raises(ValueError, match="got a margin of 'some'; give a percentage"):
        search.plan("5m", "24GB", count=1, margin="some")


def test_a_gpu_of_another_kind_is_planned_and_the_output_says_what_is_assumed(
    by_formula, memlab_command
):
    outcome = memlab_command("plan", "--model", "5m", "--gpu", "M3 Max 64GB", "--recipes", "1")
    said = " ".join(outcome.out.split())
    assert "m3-max-64: 48.00 GiB of 64 GB, the most that macOS recommends for the GPU" in said
    assert "never compared with an Apple GPU: the kernels and the allocator of an NVIDIA A1" in said
    assert all(len(line) <= 80 for line in outcome.out.splitlines() if "  memlab" not in line)


def test_a_memory_by_rule_is_marked(by_formula, memlab_command):
    outcome = memlab_command("plan", "--model", "5m", "--gpu", "4070", "--recipes", "1")
    assert "rtx4070: about 11.70 GiB of 12 GB, " in outcome.out
    assert "never compared" not in outcome.out


def test_the_list_has_every_gpu_by_vendor_in_80_columns(memlab_command):
    outcome = memlab_command("plan", "--gpu", "list")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = [line.split() for line in lines if line]
    titles = [row[0] for row in words if row[1:3] == ["sold", "as"]]
    assert titles == ["NVIDIA", "AMD", "Intel", "Apple"]
    assert [row[0] for row in words if row[0] in GPUS] == list(GPUS)
    rows = {row[0]: row[1:] for row in words}
    assert rows["rtx4090"] == ["24", "GB", "23.52", "1,008", "165.2", "82.6", "sm_89"]
    assert rows["rtx4070"][2:4] == ["≈", "11.70"]


def test_a_config_of_a_family_that_memlab_lacks_is_one_line(usage_error, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 768}))
    given = ("--model", "config.json", "--library", "memlab")
    said = usage_error("plan", *given, "--memory", "24GB")
    assert "bert" in said
    assert "llama" in said


def test_a_config_of_a_known_family_is_planned(by_formula, memlab_command, tmp_path):
    fields = {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    outcome = memlab_command("plan", "--model", "config.json", "--memory", "16GiB")
    assert outcome.status == 0
    assert "494,032,768 parameters" in outcome.out
    assert "memlab train --model config.json" in outcome.out


SCRIPT = """
import torch
from torch import nn

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

def build():
    model, x = Deep().to("cuda"), torch.randn(32768, 256, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("memory", "status", "words"),
    [
        ("8GiB", 0, "It fits as it is"),
        ("1500MiB", 0, "layer.forward = partial(checkpoint, layer.forward)"),
        slow(("700MiB", 1, "No technique here makes it fit")),
    ],
)
def test_a_users_own_training_is_planned(memory, status, words, memlab_command, tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    outcome = memlab_command("plan", "--script", "own.py:build", "--memory", memory)
    assert (outcome.status, outcome.err) == (status, "")
    assert words in outcome.out
    assert all(len(line) <= 80 for line in outcome.out.splitlines() if line[:2] != "  ")  # no code


def test_a_margin_can_decide_whether_a_users_own_training_fits(memlab_command, tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    arguments = ("plan", "--script", "own.py:build", "--memory", "8GiB", "--margin", "6500MiB")
    outcome = memlab_command(*arguments)
    assert outcome.status == 0
    said = " ".join(outcome.out.split())
    assert "1.05 GiB left for PyTorch after the CUDA context and a margin of 6.35 GiB" in said
    assert "It fits as it is" not in said
    assert "layer.forward = partial(checkpoint, layer.forward)" in outcome.out


@pytest.mark.few(1)
@pytest.mark.parametrize(("memory", "is_tight"), [("8GiB", False), ("3400MiB", True)])
def test_a_step_that_fits_only_with_an_emptied_cache_gets_a_remark(
    memory, is_tight, memlab_command, tmp_path
):
    sizes = """    sizes = iter((24_000, 32_768))

    def step():
        x = torch.randn(next(sizes), 256, device="cuda")
"""
    (tmp_path / "own.py").write_text(SCRIPT.replace("    def step():\n", sizes))
    outcome = memlab_command("plan", "--script", "own.py:build", "--memory", memory)
    assert (outcome.status, outcome.err) == (0, "")
    assert "It fits as it is" in outcome.out
    assert ("requests again, which takes time" in " ".join(outcome.out.split())) == is_tight


@pytest.mark.slow
def test_a_plain_training_that_fits_gets_its_command(memlab_command):
    outcome = memlab_command("plan", "--model", "tiny", "--memory", "24GB", "--recipes", "1")
    plain = "memlab train --model tiny --dtype float32 --batch 1 --seq 64 --technique plain"
    assert f"\nwithout techniques:\n  {plain}\n" in outcome.out
    assert "4,096+" in outcome.out.split()  # no larger batch was tried
    lacking = memlab_command("plan", "--model", "5m", "--memory", "750MiB", "--recipes", "1")
    assert "\nwithout techniques:" not in lacking.out


def test_the_time_of_a_technique_is_estimated_for_a_gpu(memlab_command, tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    outcome = memlab_command("plan", "--script", "own.py:build", "--gpu", "rtx4090")
    assert "time" not in outcome.out.split()  # it fits, so there is nothing to compare
    outcome = memlab_command("plan", "--script", "own.py:build", "--memory", "1510MiB")
    plain, checkpointing = (line.split() for line in outcome.out.splitlines() if "×" in line)
    assert plain[-2:] == ["1.00", "×"]
    assert 1.1 < float(checkpointing[-2]) < 1.4  # recomputes one of two matmuls of each layer
    assert "time: estimated for rtx4060, relative to" in " ".join(outcome.out.split())
    assert " ".join(outcome.out.split()).count("note: predicted for most cards") == 1
    numbers = json.loads((tmp_path / "work/plan.json").read_text())
    before, after = (sum(row["estimated_seconds"].values()) for row in numbers["options"])
    assert f"{after / before:.2f}" == checkpointing[-2]


@pytest.mark.slow
def test_a_technique_that_cannot_be_applied_is_tried_once(memlab_command, tmp_path):
    twice = SCRIPT.replace(".mean().backward()", ".mean().backward(retain_graph=True)", 1)
    twice = twice.replace(
        "        optimizer.step()", "        model(x).mean().backward()\n        optimizer.step()"
    )
    (tmp_path / "own.py").write_text(f"{twice}\ntrain = build")
    outcome = memlab_command("plan", "--script", "own.py:train", "--memory", "617MiB")
    assert outcome.status == 1
    assert outcome.out.startswith("own.py:train: ")  # rich would turn :train: into an emoji
    lines = outcome.out.splitlines()
    failed = [above for above, line in pairwise(lines) if "failed" in line.split()]
    assert failed == ["lion8bit, step-in-backward"]
    assert " ".join(outcome.out.split()).count("got a second gradient") == 1


NO_LIST = """
import torch
from torch import nn

def build():
    model, x = nn.Linear(9000, 9000), torch.randn(16, 9000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer
"""


def test_a_model_without_layers_is_tried_without_checkpointing(memlab_command, tmp_path):
    (tmp_path / "own.py").write_text(NO_LIST)
    outcome = memlab_command(
        "plan", "--script", "own.py:build", "--memory", "740MiB", "--device", "cpu"
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.count("memlab cannot checkpoint this model from outside") == 1
    assert "\ncheckpointing" not in outcome.out  # no row tries it
    assert "no accumulation, no loss scaling" in " ".join(outcome.out.split())
    assert "time" not in outcome.out.split()  # a CPU has no time estimate
    assert 'optimizer = Lion8bit(groups, rounding="stochastic")' in outcome.out
    assert "optimizer = step_in_backward(optimizer)" in outcome.out


FLAT = """
import torch
from torch import nn

def build():
    pairs = [(nn.Linear(512, 512), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(4096, 512)).square().mean().backward()
        optimizer.step()

    return step, model, optimizer
"""


def test_a_technique_that_needs_more_memory_is_combined_last(memlab_command, tmp_path):
    """A ReLU's output is saved once for two layers; checkpointed, each layer saves its own."""
    (tmp_path / "own.py").write_text(FLAT)
    outcome = memlab_command(
        "plan", "--script", "own.py:build", "--memory", "20MiB", "--device", "cpu"
    )
    assert outcome.status == 1
    rows = [line for line in outcome.out.splitlines() if "lacks" in line]
    found = (re.match(r"(.+?) {2,}([\d.]+) MiB", row) for row in rows)
    needed = {match[1]: float(match[2]) for match in found}
    assert needed["checkpointing"] > needed["as it is"]
    assert list(needed) == [
        "as it is",
        "checkpointing",
        "offloaded-activations",
        "checkpointing, offloaded-activations",
    ]


def test_an_optimizer_without_an_8_bit_counterpart_stays(memlab_command, tmp_path):
    text = NO_LIST.replace("AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.1)")
    (tmp_path / "own.py").write_text(text)
    outcome = memlab_command(
        "plan", "--script", "own.py:build", "--memory", "617MiB", "--device", "cpu"
    )
    assert (outcome.status, outcome.err) == (1, "")
    assert "8bit" not in outcome.out
    assert "the optimizer is not replaced: memlab can only convert" in " ".join(outcome.out.split())


def test_a_script_needs_a_memory_and_has_no_model(usage_error, tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    assert "got no --memory" in usage_error("plan", "--script", "own.py:build")
    said = usage_error("plan", "--script", "own.py:build", "--memory", "lots")
    assert "got 'lots' as a memory" in said
    given = ("plan", "--script", "own.py:build", "--memory", "8GiB")
    assert "got a margin of '2x'; give a percentage" in usage_error(*given, "--margin", "2x")
    assert "got a margin of '8GiB', which leaves" in usage_error(*given, "--margin", "8GiB")
