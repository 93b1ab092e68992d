"""Changes from outside save what the same change in the script saves."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from memlab.scripts.changes import (
    CHANGES,
    NotPossibleError,
    chunked_loss,
    logits_bytes,
    sharded_bytes,
    together,
)
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks
from memlab.scripts.running import run
from tests.transformers_models.configs import TINY

SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
                      for _ in range(4))
            self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(64, 8192)

        def forward(self, x):
            for block in self.blocks:
                x = CALL
            return self.head(x)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        AROUND:
            loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
CHANGE_OF = {change.name: change for change in CHANGES}
PLAIN = {"CALL": "block(x)", "AROUND": "if True"}
OWN = {
    "checkpointing": {"CALL": "checkpoint(block, x, use_reentrant=False)"},
    "bfloat16 autocast": {"AROUND": "with torch.autocast('cpu', torch.bfloat16)"},
}


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run_with(change=None, **parts):
        source = SCRIPT
        for name, code in {**PLAIN, **parts}.items():
            source = source.replace(name, code)
        Path("train.py").write_text(dedent(source))
        return run(launch_of(["train.py"]), device="cpu", change=change)

    return run_with


@pytest.mark.parametrize("name", OWN)
def test_a_change_from_outside_has_the_peak_of_the_scripts_own(outcome, name):
    plain, ours, own = outcome(), outcome(CHANGE_OF[name]), outcome(**OWN[name])
    assert ours.trace.peak_bytes == pytest.approx(own.trace.peak_bytes, rel=0.01)
    assert ours.trace.peak_bytes < plain.trace.peak_bytes


def test_an_8_bit_optimizer_shrinks_the_state(outcome):
    plain, ours = outcome(), outcome(CHANGE_OF["8-bit AdamW"])
    states = [each.trace.at_end["optimizer_state"] for each in (plain, ours)]
    assert states[1] < 0.3 * states[0]  # biases stay in 32 bits
    assert ours.steps == 2


def test_changes_work_together(outcome):
    from_the_start = [change for change in CHANGES if change.name != "LoRA"]
    all_three = outcome(together(tuple(from_the_start))).trace
    assert all_three.peak_bytes < min(outcome(each).trace.peak_bytes for each in from_the_start)


FINE_TUNING = """
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("someone/model")
    ADAPTERS
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.ones(2, 64, dtype=torch.int64)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
PEFTS = """
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    """


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from peft, of transformers' names
def test_lora_from_outside_has_the_bytes_of_pefts(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({"model_type": "mistral", **TINY["mistral"]}))

    def fine_tuned(adapters, change=None):
        Path("train.py").write_text(dedent(FINE_TUNING).replace("ADAPTERS", dedent(adapters)))
        configs = {"someone/model": "config.json"}
        return run(launch_of(["train.py"]), device="cpu", change=change, configs=configs).trace

    ours, own = fine_tuned("", CHANGE_OF["LoRA"]), fine_tuned(PEFTS)
    assert ours.at_peak == own.at_peak
    state = [trace.at_end["optimizer_state"] for trace in (ours, fine_tuned(""))]
    assert state[0] < state[1]
    with pytest.raises(NotPossibleError, match="adapters already"):
        fine_tuned(PEFTS, CHANGE_OF["LoRA"])


def test_lora_is_for_weights_from_a_file(outcome):
    with pytest.raises(NotPossibleError, match="weights from a file"):
        outcome(CHANGE_OF["LoRA"])


def test_each_gpu_holds_its_share_and_two_whole_layers(outcome):
    found = outcome()
    layer = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    rest = 4 * (64 * 8192 + 8192)
    held = found.trace.at_peak  # in backward, before the first gradient
    shared = held["parameters"] + held["optimizer_state"]
    assert (held["parameters"], "gradients" in held) == (4 * layer + rest, False)
    unshared = found.trace.peak_bytes - shared
    assert sharded_bytes(found.trace, found.models, 4) == unshared + shared // 4 + 2 * layer
    assert sharded_bytes(found.trace, (), 4) is None


SHARDED = """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer =
    """.strip()


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run_with(change=None, call="block(x)"):
        source = SCRIPT.replace("optimizer =", SHARDED).replace("CALL", call)
        Path("train.py").write_text(dedent(source.replace("AROUND", "if True")))
        launch = launch_of(["train.py"]).with_ranks(4)
        return run_ranks(launch, (0,), device="cpu", change=change)[0]

    return run_with


def test_the_layers_of_fsdp2_are_checkpointed_as_in_the_script(sharded):
    plain, ours = sharded(), sharded(CHANGE_OF["checkpointing"])
    own = sharded(call="checkpoint(block, x, use_reentrant=False)")
    assert ours.trace.peak_bytes == own.trace.peak_bytes < plain.trace.peak_bytes


def test_what_fsdp2_shards_is_not_sharded_again(sharded):
    found = sharded()
    assert sharded_bytes(found.trace, found.models, 4) is None
    with pytest.raises(NotPossibleError, match=r"torchao\.optim\.AdamW8bit does"):
        sharded(CHANGE_OF["8-bit AdamW"])


def test_the_chunked_loss_names_the_models_own_head(outcome):
    code = chunked_loss("plain", outcome().models)
    assert "loss = chunked_cross_entropy(hidden, model.head.weight, targets)" in code


def test_what_the_script_does_already_is_not_possible(outcome):
    with pytest.raises(NotPossibleError, match="uses autocast already"):
        outcome(CHANGE_OF["bfloat16 autocast"], **OWN["bfloat16 autocast"])


def test_tensors_of_vocabulary_size_at_the_peak_are_logits(outcome):
    found = outcome()
    logits = 4 * 512 * 8192  # and their square, and the gradients of both
    assert logits_bytes(found.trace, found.models) == 5 * logits
    assert logits_bytes(found.trace, ()) == 0


def test_the_code_is_the_frameworks():
    checkpointing = CHANGE_OF["checkpointing"]
    assert checkpointing.lines("Trainer") == (
        "TrainingArguments(..., gradient_checkpointing=True)",
    )
    assert checkpointing.lines("accelerate") == checkpointing.lines("plain")


LOOPS = {
    "Trainer": """
        import tempfile
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **shape))
        rows = [{"input_ids": [1] * 8, "labels": [1] * 8}] * 8
        options = {"max_steps": 3, "report_to": "none", "per_device_train_batch_size": 2}
        Trainer(model, TrainingArguments(tempfile.mkdtemp(), **options), train_dataset=rows).train()
        """,
    "accelerate": """
        import torch
        from accelerate import Accelerator
        model = torch.nn.Linear(8, 8)
        model, optimizer = Accelerator().prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            model(torch.randn(2, 8, device="cuda")).sum().backward()
            optimizer.step()
        """,
    "plain": SCRIPT.replace("CALL", "block(x)").replace("AROUND", "if True"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", LOOPS)
def test_the_framework_is_the_one_whose_loop_runs(tmp_path, monkeypatch, framework):
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(dedent(LOOPS[framework]))
    assert run(launch_of(["train.py"])).framework == framework
