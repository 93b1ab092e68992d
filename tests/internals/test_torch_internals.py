"""memlab uses torch's private parts in one module only, and every one of them exists."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quick import together

from memlab.internals import torch_internals

ROOT = Path(__file__).parents[2]
HOME = Path(torch_internals.__file__)
# Files in memlab/reference only need torch, so two of them import a dispatch mode directly.
STANDALONE = ROOT / "memlab" / "reference"
FILES = sorted((ROOT / "memlab").rglob("*.py"))
OTHERS = [path for path in FILES if path != HOME and path.parent != STANDALONE]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each name that a file imports from torch."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from ((name, "") for name in names if name.split(".")[0] == "torch")


def private_uses(path: Path) -> Iterator[str]:
    """Yield the private torch names that a file imports or accesses."""
    for module, name in imported(path):
        if any(part.startswith("_") for part in f"{module}.{name}".split(".")):
            yield f"{module}.{name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" != node.attr[:2][-1]:
            words = ast.unparse(node).split(".")
            is_operator = words[:2] == ["torch", "ops"]  # operator names are part of PyTorch's IR
            if words[0] == "torch" and not is_operator and all(map(str.isidentifier, words)):
                yield ".".join(words)


# Of pipelines whose stages send each other the shapes, which torch 2.11 has not.
NEWER = ("_derive_grad_metas", "_StageBackwardMeta", "InferenceMode")


@together(("module", "name"), list(imported(HOME)))
def test_every_name_imported_from_torch_exists(module, name):
    is_newer = name in NEWER and torch.__version__ < "2.13"
    assert not name or is_newer or hasattr(importlib.import_module(module), name)


@together("path", OTHERS)
def test_no_other_module_uses_private_parts_of_torch(path):
    assert list(private_uses(path)) == []


def test_private_uses_finds_imports_and_expressions(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import torch\nimport torch._inductor\nfrom torch._C import Node\n"
        "from torch import nn, _disable_dynamo\nfrom torch.nn import Module\n"
        "torch.cuda.memory._snapshot()\ntorch.__version__\nself._own\nnn.Module().weight._version\n"
    )
    assert list(private_uses(path)) == [
        *("torch._inductor.", "torch._C.Node", "torch._disable_dynamo"),
        "torch.cuda.memory._snapshot",
    ]


# ------------------------------------------------------------------ memory snapshots


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_caching_allocators_take_the_arguments_that_snapshots_pass(device_type):
    memory = getattr(torch, device_type).memory
    inspect.signature(memory._record_memory_history).bind("all", stacks="python", max_entries=1)
    inspect.signature(memory._record_memory_history).bind(None)
    inspect.signature(memory._dump_snapshot).bind("file.pickle")
    assert torch_internals.has_snapshots(device_type)


@pytest.mark.parametrize("device_type", ["cpu", "mps", "privateuseone"])
def test_other_devices_have_no_snapshots(device_type):
    assert not torch_internals.has_snapshots(device_type)


def test_an_oom_observer_is_attached_when_cuda_starts(monkeypatch):
    attached, waiting = [], []
    name = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, name, attached.append, raising=False)
    monkeypatch.setattr(torch_internals, "call_when_cuda_starts", waiting.append)
    torch_internals.attach_oom_observer(print)
    assert attached == []
    [start] = waiting
    start()
    assert attached == [print]


def test_a_torch_without_cuda_has_no_oom_observer(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer", raising=False)
    monkeypatch.setattr(torch_internals, "call_when_cuda_starts", lambda do: 1 / 0)
    torch_internals.attach_oom_observer(print)


def test_an_object_of_a_thread_is_referenced_as_long_as_torch_has_it():
    """torch 2.11 takes no reference, and released the caller's: the process crashed later."""
    for _ in range(3):
        value = object()
        before = sys.getrefcount(value)
        torch_internals.stash_obj_in_tls("memlab's test", value)
        assert sys.getrefcount(value) == before + 1
        torch_internals.remove_obj_from_tls("memlab's test")
        assert sys.getrefcount(value) == before
