"""Broken output streams, deleted folders, arguments outside UTF-8, and async scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import slow

ROOT = Path(__file__).parents[2]
TRAINING = """
import os, sys, torch
def build():
    {first}
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return step, model, optimizer
"""
SHAPE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def in_a_process(folder: Path | str, *arguments: str | bytes) -> subprocess.CompletedProcess:
    """Run `python -m memlab` in a separate process."""
    command = [sys.executable, "-W", "default", "-m", "memlab", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        slow("sys.stdout.close()"),
        "os.close(1); os.close(2)",
        slow("sys.stdout = open(os.devnull, 'w')"),
    ],
)
def test_a_script_that_closes_or_replaces_its_output_does_not_silence_memlab(tmp_path, first):
    (tmp_path / "train.py").write_text(TRAINING.format(first=first))
    done = in_a_process(tmp_path, "measure", "--script", "train.py:build", "--out", "out")
    assert done.returncode == 0
    assert "peak 128 B in backward" in done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("async def build():\n    return None\n", "train.py:build is a coroutine (async def)"),
        (
            "async def step(): pass\ndef build(): return step, None, None\n",
            "the step that train.py:build returned is a coroutine",
        ),
    ],
)
def test_a_coroutine_is_refused_in_one_line_without_a_python_warning(tmp_path, source, words):
    (tmp_path / "train.py").write_text(source)
    done = in_a_process(tmp_path, "measure", "--script", "train.py:build")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert words in line


def test_a_vocabulary_smaller_than_256_is_refused_in_one_line(memlab_command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    done = memlab_command("train", "--model", "config.json", "--steps", 1, "--seq", 16)
    assert done.status == 2
    assert done.err.startswith(
        "memlab: got a vocabulary of 100 tokens in config.json; the training"
    )
    assert done.err.count("\n") == 1


def test_a_deleted_folder_is_refused_in_one_line(memlab_command, monkeypatch):
    def deleted() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", deleted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["memlab", "doctor"])
        from memlab.cli import main

        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="their paths are Unicode")
@pytest.mark.parametrize(
    "arguments", [["measure", "--model", b"\xff/config.json"], [b"\xff"], ["plan", b"--\xfe=1"]]
)
def test_an_argument_that_is_not_utf_8_is_refused_in_one_line(memlab_command, arguments):
    decoded = [os.fsdecode(argument) for argument in arguments]
    done = memlab_command(*decoded)
    assert done.status == 2
    assert "which is not UTF-8; rename the file or folder" in done.err
    assert done.err.count("\n") == 1
