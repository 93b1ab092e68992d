"""The code of each remedy runs: on tiny objects, or on stand-ins for packages that are not here."""

import ast
import gc
import inspect
import os
import re
import shlex
import subprocess
import warnings
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab.explain import explain_text
from memlab.explain.advice import DONE, in_words_of
from memlab.explain.findings import CAUSES
from memlab.explain.fixes import FRAMEWORKS, Fix
from memlab.explain.messages import Message
from memlab.explain.rules import RULES

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

CODES = {
    f"{cause.name}-{number}-{framework}": (framework, code)
    for cause in CAUSES.values()
    for number, fix in enumerate(cause.fixes)
    for framework, code in fix.code.items()
}
PYTHON = {name: pair for name, pair in CODES.items() if not pair[1].startswith("$ ")}
SHELL = {name: code for name, (_, code) in CODES.items() if code.startswith("$ ")}
NOT_HERE = (  # of trl, vLLM, Lightning, diffusers, TensorFlow, JAX, Ray, DeepSpeed
    *("GRPOConfig", "LLM", "llm", "pipe", "unet", "vae", "DiffusionPipeline", "AttnProcessor2_0"),
    *("tf", "jax", "PeftModel", "get_peft_model", "trainer", "tokenizer", "tokenizer_of"),
    *("task", "data", "deepspeed", "send"),
)


def fixes() -> list[Fix]:
    return [fix for cause in CAUSES.values() for fix in cause.fixes]


def names_for(framework: str, folder, code: str) -> dict[str, object]:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / ("data.npy" if "np.load" in code else "checkpoint")
    np.save(folder / "data.npy", np.zeros(3))
    if "torch.load" in code:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, path)
    of_torch = {
        **{"torch": torch, "nn": nn, "F": F, "np": np, "os": os, "gc": gc, "step": 1},
        **{"model": model, "x": x, "optimizer": optimizer, "path": path, "layer": model},
        **{"loss": model(x).sum(), "losses": [], "outputs": [], "output": model(x)},
        **{"total_loss": 0.0, "a": x, "b": x, "ids": torch.ones(1, 8, dtype=torch.long)},
        **{"q": x[None], "k": x[None], "v": x[None], "length": 70, "batch_size": 8, "name": "x"},
        **{"hidden": x, "lm_head": model, "labels": torch.tensor([1, 2]), "adapter": "x"},
        **{"dataset": [1, 2], "DataLoader": torch.utils.data.DataLoader, "loss_function": abs},
        **{"texts": ["x"], "prompt": "x", "Trainer": MagicMock()},
    }
    of_others = {
        "TrainingArguments": lambda **given: transformers.TrainingArguments(
            str(folder), use_cpu=True, **given
        ),
        "AutoModelForCausalLM": MagicMock(spec=transformers.AutoModelForCausalLM),
        "BitsAndBytesConfig": MagicMock(spec=transformers.BitsAndBytesConfig),
        "DataCollatorWithPadding": transformers.DataCollatorWithPadding,
        "Accelerator": MagicMock(spec=accelerate.Accelerator),
        "FullyShardedDataParallelPlugin": accelerate.FullyShardedDataParallelPlugin,
        "FullStateDictConfig": torch.distributed.fsdp.FullStateDictConfig,
        "LoraConfig": pytest.importorskip("peft").LoraConfig,
    }
    if "gradient_checkpointing_enable" in code or "generate" in code:
        of_torch["model"] = MagicMock(spec=transformers.LlamaForCausalLM)
    return of_torch | dict.fromkeys(NOT_HERE, MagicMock()) | of_others


@pytest.fixture
def no_gpu_is_asked(monkeypatch):
    """Functions that need a GPU must exist, and do nothing."""
    for owner, name in (
        (torch.cuda, "set_per_process_memory_fraction"),
        (torch.cuda, "set_device"),
        (torch.cuda, "empty_cache"),
        (torch.mps, "empty_cache"),
        (torch.multiprocessing, "set_sharing_strategy"),
    ):
        monkeypatch.setattr(owner, name, MagicMock(spec=getattr(owner, name)))


@pytest.mark.few(66)
@pytest.mark.parametrize("name", PYTHON)
def test_the_python_of_a_remedy_runs(name, tmp_path, monkeypatch, no_gpu_is_asked):
    framework, code = PYTHON[name]
    if "LOCAL_RANK" in code:
        monkeypatch.setenv("LOCAL_RANK", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(ast.parse(code), name, "exec"), names_for(framework, tmp_path, code))


def test_the_arguments_of_transformers_trainer_exist():
    known = inspect.signature(transformers.Trainer).parameters
    calls = [code for _, code in PYTHON.values() if "preprocess_logits_for_metrics" in code]
    assert calls
    assert "preprocess_logits_for_metrics" in known


# Programs that a machine of tests lacks. docker's and mlx_lm's options were tried once with their
# own parsers; the others' were read in their documentation.
STUBS = (
    "nvidia-smi",
    "docker",
    "sudo",
    "vllm",
    "mlx_lm.lora",
    "accelerate",
    "wsl.exe",
    "cmake",
    "llama-server",
)


@pytest.mark.parametrize("name", SHELL)
def test_the_commands_of_a_remedy_run(name, tmp_path):
    for program in (*STUBS, "python", "free"):
        (tmp_path / program).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / program).chmod(0o755)
    for line in SHELL[name].splitlines():
        assert line.startswith("$ ")
        done = subprocess.run(["/bin/sh", "-c", line[2:]], env={"PATH": str(tmp_path)}, timeout=60)
        assert done.returncode == 0, line


def test_accelerate_knows_the_options_of_a_remedy():
    from accelerate.commands.launch import launch_command_parser

    lines = [line for code in SHELL.values() for line in code.splitlines() if "accelerate" in line]
    assert lines
    for line in lines:
        launch_command_parser().parse_args(shlex.split(line.removeprefix("$ accelerate launch")))


def test_the_words_of_another_backend_are_functions_of_its_torch():
    for backend in ("MPS", "XPU"):
        message = Message(backend, allocated=1)
        codes = [code for fix in fixes() for code in in_words_of(fix, message).code.values()]
        decide = [in_words_of(Fix(rule.decide), message).do for rule in RULES]
        assert not any("torch.cuda" in text for text in (*codes, *decide))
        names = re.findall(rf"torch\.{backend.lower()}\.(\w+)\(", "\n".join((*codes, *decide)))
        owner = getattr(torch, backend.lower())
        lacks = {"set_device"} if backend == "MPS" else set()  # a Mac has one GPU
        assert {name for name in names if not hasattr(owner, name)} == lacks


def test_a_remedy_on_mps_needs_no_package_of_cuda():
    message = "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB, max "
    message += "allowed: 18.13 GB). Tried to allocate 256.00 MB on private pool."
    frame = '  File "/lib/transformers/modeling_utils.py", line 9, in from_pretrained\n    x = y'
    first = explain_text(f"Traceback (most recent call last):\n{frame}\n{message}").findings[0]
    assert first.cause.name == "weights"
    assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO" in first.code
    assert not any("BitsAndBytes" in code for fix in first.fixes for code in fix.code.values())


def test_weights_that_fit_no_card_are_not_quantized_but_split():
    message = "CUDA out of memory. Tried to allocate 448.00 MiB (GPU 0; 23.65 GiB total capacity; "
    message += "23.10 GiB already allocated; 9.00 MiB free; 23.20 GiB reserved in total by PyTorch)"
    for name, do in (("Llama-2-70b-hf", "Split it"), ("Qwen2.5-32B", "Load the model in 16 or 4")):
        line = f'    model = AutoModelForCausalLM.from_pretrained("{name}")'
        frame = f'  File "run.py", line 9, in <module>\n{line}'
        first = explain_text(f"Traceback (most recent call last):\n{frame}\n{message}").findings[0]
        assert first.cause.name == "weights"
        assert first.todo[0].startswith(do)
        assert any(f"{name.removesuffix('-hf')} has " in row for row in first.evidence)


def test_code_fits_the_screen():
    rows = [row for _, code in CODES.values() for row in code.splitlines()]
    assert [row for row in rows if len(row) > 74] == []


def test_fixes_name_known_frameworks_and_conditions():
    assert {name for fix in fixes() for name in fix.code} <= set(FRAMEWORKS)
    assert {name for fix in fixes() for name in fix.unless} <= DONE.keys()


def test_a_batch_of_one_is_never_halved():
    message = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; "
    message += "21.10 GiB already allocated; 1.20 GiB free; 21.30 GiB reserved in total by PyTorch)"
    frame = '  File "train.py", line 9, in step\n    loss = model(x)'
    for size in ("batch_size=1", "per_device_train_batch_size: 1"):
        found = explain_text(f"{size}\nTraceback (most recent call last):\n{frame}\n{message}")
        assert not any("Halve the batch" in line for each in found.findings for line in each.todo)
