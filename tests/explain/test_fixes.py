"""The code of each remedy runs: on tiny objects, or on stand-ins for packages that are not here."""

import ast
import gc
import inspect
import os
import shlex
import warnings
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab.explain import explain_text
from memlab.explain.advice import DONE
from memlab.explain.findings import CAUSES
from memlab.explain.fixes import FRAMEWORKS, Fix

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
NOT_HERE = (  # of trl, vLLM, Lightning, diffusers, TensorFlow, JAX
    *("GRPOConfig", "LLM", "llm", "pipe", "unet", "vae", "DiffusionPipeline", "AttnProcessor2_0"),
    *("tf", "jax", "PeftModel", "get_peft_model", "trainer", "tokenizer", "tokenizer_of"),
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


@pytest.mark.parametrize("name", SHELL)
def test_the_commands_of_a_remedy_are_shell_lines(name):
    for line in SHELL[name].splitlines():
        assert line.startswith("$ ")
        assert shlex.split(line)


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
