"""Changes from outside save what the same change in the script saves."""

import json
from pathlib import Path
from textwrap import dedent

import pytest
from torch import nn

from memlab.scripts.changes import (
    CHANGES,
    changes_for,
    combinations_of,
    sharded_bytes,
    together,
)
from memlab.scripts.late_logits import OtherUseError
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks
from memlab.scripts.running import run
from memlab.scripts.techniques import NotPossibleError
from tests.transformers_models.configs import TINY

SCRIPT = """
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint
    from memlab.losses import chunked_cross_entropy

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
                      for _ in range(4))
            self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(64, 8192)

        def forward(self, x):
            for block in self.blocks:
                x = CALL
            return RESULT

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        AROUND:
            loss = LOSS_OF(NAMEmodel(torch.randn(512, 64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
CHANGE_OF = {change.name: change for change in CHANGES}
TARGETS = "torch.zeros(512, dtype=int)"
PLAIN = {
    "CALL": "block(x)",
    "RESULT": "self.head(x)",
    "AROUND": "if True",
    "NAME": "",
    "LOSS_OF": "(lambda logits: logits.square().mean())",
}
CROSS_ENTROPY = f"(lambda logits: cross_entropy(logits, {TARGETS}))"
WEIGHTS = f"model.head.weight, {TARGETS}, bias=model.head.bias"
OWN = {
    "chunked loss": {
        "RESULT": "x",
        "LOSS_OF": f"(lambda hidden: chunked_cross_entropy(hidden, {WEIGHTS}))",
    },
    "checkpointing": {"CALL": "checkpoint(block, x, use_reentrant=False)"},
    "bfloat16 autocast": {"AROUND": "with torch.autocast('cpu', torch.bfloat16)"},
}


def filled(source=SCRIPT, **parts):
    for name, code in {**PLAIN, **parts}.items():
        source = source.replace(name, code)
    return source


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run_with(change=None, **parts):
        Path("train.py").write_text(dedent(filled(**parts)))
        return run(launch_of(["train.py"]), device="cpu", change=change)

    return run_with


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OWN)
def test_a_change_from_outside_has_the_peak_of_the_scripts_own(outcome, name):
    loss = {} if name == "bfloat16 autocast" else {"LOSS_OF": CROSS_ENTROPY}
    plain, ours = outcome(**loss), outcome(CHANGE_OF[name], **loss)
    own = outcome(**{**loss, **OWN[name]})
    assert ours.trace.peak_bytes == pytest.approx(own.trace.peak_bytes, rel=0.01)
    assert ours.trace.peak_bytes < plain.trace.peak_bytes


@pytest.mark.slow
def test_a_change_acts_from_the_first_step_on(tmp_path, monkeypatch):
    """Reserved memory has its peak in the first step, if that runs without the change."""
    monkeypatch.chdir(tmp_path)

    def reserved(change=None, call="model"):
        source = SCRIPT.replace("Net()", "Net().cuda()").replace("512, 64)", "512, 64).cuda()")
        Path("train.py").write_text(dedent(filled(source.replace("NAMEmodel", call))))
        return run(launch_of(["train.py"]), change=change).trace.reserved_bytes

    own = reserved(call="torch.autocast('cuda', torch.bfloat16)(model.__call__)")
    assert reserved(CHANGE_OF["bfloat16 autocast"]) == own < reserved()


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_fused_optimizer_from_outside_has_the_peak_of_the_scripts_own(
    tmp_path, monkeypatch, optimizer
):
    monkeypatch.chdir(tmp_path)
    made = f"torch.optim.{optimizer}(model.parameters(), lr=1e-3%s)"

    def outcome(change=None, arguments=""):
        source = SCRIPT.replace("Net()", "Net().cuda()").replace("512, 64)", "4, 64).cuda()")
        source = source.replace("torch.optim.AdamW(model.parameters())", made % arguments)
        Path("train.py").write_text(dedent(filled(source)))
        return run(launch_of(["train.py"]), change=change)

    plain, own = outcome(), outcome(arguments=", fused=True")
    changed = outcome(CHANGE_OF["fused optimizer"])
    assert changed.trace.peak_bytes == own.trace.peak_bytes
    assert any(f"fused {optimizer}" in note for note in own.trace.notes)
    is_tried = "fused optimizer" in [c.name for c in changes_for("cuda", plain.trace, ())]
    assert is_tried is (own.trace.peak_bytes < plain.trace.peak_bytes)


def test_an_8_bit_optimizer_shrinks_the_state(outcome):
    plain, ours = outcome(), outcome(CHANGE_OF["8-bit AdamW"])
    states = [each.trace.at_end["optimizer_state"] for each in (plain, ours)]
    assert states[1] < 0.3 * states[0]  # biases stay in 32 bits
    assert ours.steps == 2


@pytest.mark.slow
def test_changes_work_together(outcome):
    loss = {"LOSS_OF": CROSS_ENTROPY}
    plain = outcome(**loss)
    possible = changes_for("cpu", plain.trace, plain.models)
    from_the_start = [change for change in possible if change.name != "LoRA"]
    all_four = outcome(together(tuple(from_the_start)), **loss).trace
    alone = [outcome(each, **loss).trace.peak_bytes for each in from_the_start]
    assert all_four.peak_bytes < min(alone)


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


@pytest.mark.slow
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
        source = filled(SCRIPT.replace("optimizer =", SHARDED), CALL=call)
        Path("train.py").write_text(dedent(source))
        launch = launch_of(["train.py"]).with_ranks(4)
        return run_ranks(launch, (0,), device="cpu", change=change)[0]

    return run_with


@pytest.mark.slow
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
    code = CHANGE_OF["chunked loss"].lines("plain", outcome().models)
    assert "loss = chunked_cross_entropy(hidden, model.head.weight, targets)" in code


def test_small_logits_and_other_losses_are_not_chunked(outcome):
    with pytest.raises(OtherUseError, match="uses its logits in square"):
        outcome(CHANGE_OF["chunked loss"], LOSS_OF="(lambda logits: logits.square().mean())")
    with pytest.raises(NotPossibleError, match="no linear layer has 4,096 outputs or more"):
        CHANGE_OF["chunked loss"].apply(nn.Linear(4, 4095), [])


@pytest.mark.few(1)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_script_that_checkpoints_its_layers_is_not_checkpointed_again(outcome, use_reentrant):
    own = {"CALL": f"checkpoint(block, x.requires_grad_(), use_reentrant={use_reentrant})"}
    with pytest.raises(NotPossibleError, match="checkpoints its layers already"):
        outcome(CHANGE_OF["checkpointing"], **own)


def test_autocast_is_in_float16_where_bfloat16_is_emulated(outcome):
    plain = outcome()
    names = {
        device: [change.name for change in changes_for(device, plain.trace, plain.models)]
        for device in ("cuda", "cuda:t4", "cpu")
    }
    assert "bfloat16 autocast" in names["cuda"]
    assert names["cuda"] == names["cpu"]
    assert "bfloat16 autocast" not in names["cuda:t4"]
    assert "float16 autocast" in names["cuda:t4"]


def test_logits_that_a_name_holds_in_backward_can_be_released(outcome):
    """The loss does not need them, so the peak falls by exactly the logits."""
    loss = {"LOSS_OF": CROSS_ENTROPY}
    held, free = outcome(NAME="logits := ", **loss), outcome(**loss)
    offered = [
        [change.name for change in changes_for("cpu", found.trace, found.models)]
        for found in (held, free)
    ]
    assert "logits released" in offered[0]
    assert "logits released" not in offered[1]
    released = outcome(CHANGE_OF["logits released"], NAME="logits := ", **loss)
    assert held.trace.peak_bytes - released.trace.peak_bytes == 4 * 512 * 8192
    assert released.trace.peak_bytes == free.trace.peak_bytes


def test_combinations_have_lora_only_in_the_last():
    lora, checkpointing, loss = (
        CHANGE_OF[name] for name in ("LoRA", "checkpointing", "chunked loss")
    )
    released = CHANGE_OF["logits released"]
    found = combinations_of([checkpointing, lora, loss, released])
    assert found == [(checkpointing, loss), (checkpointing, lora, loss)]
    assert combinations_of([lora, checkpointing]) == [(lora, checkpointing)]
    assert combinations_of([lora]) == combinations_of([loss]) == combinations_of([]) == []
    assert combinations_of([checkpointing, loss]) == [(checkpointing, loss)]


def test_the_code_is_the_frameworks():
    checkpointing = CHANGE_OF["checkpointing"]
    assert checkpointing.lines("Trainer") == (
        "TrainingArguments(..., gradient_checkpointing=True)",
    )
    assert checkpointing.lines("accelerate") == checkpointing.lines("plain")


MIXED = {  # a loop whose framework has autocast's option, and the option
    "Trainer": (
        """
        import tempfile
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, num_attention_heads=2, **shape))
        rows = [{"input_ids": [1] * 64, "labels": [1] * 64}] * 8
        options = {"max_steps": 3, "report_to": "none", "per_device_train_batch_size": 2, OPTION}
        Trainer(model, TrainingArguments(tempfile.mkdtemp(), **options), train_dataset=rows).train()
        """,
        '"bf16": True',
    ),
    "accelerate": (
        """
        import torch
        from torch import nn
        from accelerate import Accelerator
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8192))
        accelerator = Accelerator(OPTION)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            logits = model(torch.randn(512, 64, device="cuda"))
            targets = torch.zeros(512, dtype=int, device="cuda")
            accelerator.backward(nn.functional.cross_entropy(logits, targets))
            optimizer.step()
            optimizer.zero_grad()
        """,
        'mixed_precision="bf16"',
    ),
    "Lightning": (
        """
        import torch
        from torch import nn

        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8192))

            def training_step(self):
                logits = self.net(torch.randn(512, 64, device="cuda"))
                targets = torch.zeros(512, dtype=int, device="cuda")
                return nn.functional.cross_entropy(logits, targets)

        module = Module().cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16, OPTION):
                loss = module.training_step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        "enabled=True",
    ),
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", MIXED)
def test_autocast_from_outside_has_the_peak_of_the_frameworks_option(
    tmp_path, monkeypatch, framework
):
    """Lightning's covers the loss, and accelerate's casts the outputs to float32."""
    if framework in ("Trainer", "accelerate"):
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    source, option = MIXED[framework]

    def peak_bytes(option, change=None):
        Path("train.py").write_text(dedent(source).replace("OPTION", option))
        return run(launch_of(["train.py"]), device="cuda", change=change).trace.peak_bytes

    off = "enabled=False" if framework == "Lightning" else ""
    plain, own = peak_bytes(off), peak_bytes(option)
    ours = peak_bytes(off, CHANGE_OF["bfloat16 autocast"])
    assert ours == pytest.approx(own, rel=0.001)
    assert abs(plain - own) > 0.01 * plain


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
    "plain": filled(),
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", LOOPS)
def test_the_framework_is_the_one_whose_loop_runs(tmp_path, monkeypatch, framework):
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(dedent(LOOPS[framework]))
    assert run(launch_of(["train.py"])).framework == framework
