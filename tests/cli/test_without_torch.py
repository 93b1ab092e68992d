"""Help, hints, explanations and usage errors do not import torch, which takes seconds."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

ANSWER = """
import contextlib, io, json, sys
from memlab.cli import main
for line in json.load(sys.stdin):
    sys.argv, out, err, status = ["memlab", *line.split()], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    imported = bool({"torch", "numpy"} & {name for name, module in sys.modules.items() if module})
    print(json.dumps([status, out.getvalue(), err.getvalue(), imported]))
"""


def answers(
    commands: list[str], folder: Path, before: str = ""
) -> list[tuple[int, str, str, bool]]:
    """Run the commands one after another in a new process. Return the status and output of each,
    and whether torch or numpy was imported until then."""
    ran = subprocess.run(
        [sys.executable, "-c", before + ANSWER],
        input=json.dumps(commands),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]


COMMANDS = ("explain", "doctor", "start", "check", "hint", "diff", "progress", "reset")
STATUSES = {
    "--version": 0,
    "": 0,
    "--help": 0,
    **{f"{command} --help": 0 for command in COMMANDS},
    "progress": 0,
    "hint 1.2": 0,
    "hint 1.9": 2,
    "start 1 --no-open": 0,
    "start 99": 2,
    "plan": 2,
    "plan --model 5x --memory 24GB": 2,
    "plan --model 5m --memory 24XB": 2,
    "plan --model 5m --gpu rtx9999": 2,
    "plan --gpu list": 0,
    "plan --model 5m --gpu rtx3060 --margin 2x": 2,
    "plan --model 5m --memory 24GB --device tpu": 2,
    "plan --model 5m --memory 24GB --precision float8": 2,
    "plan --model 5m --memory 24GB --optimizer adan": 2,
    "plan --model no/config.json --memory 24GB": 2,
    "plan --modle 5m": 2,
    "mesure": 2,
    "plan --model 5m --deepspeed ds.json --lora": 2,
    "explain message --json": 0,
    "explain message --memory=24GB": 0,
    "explain snapshot --json": 0,
    "explain snapshot --memory=24GB": 0,
}

SNAPSHOT = pickle.dumps(
    {
        "segments": [],
        "device_traces": [
            [{"action": "alloc", "addr": 512 * n, "size": 512, "stream": 0} for n in range(1, 20)]
        ],
    }
)


def test_neither_torch_nor_numpy_is_imported(tmp_path):
    (tmp_path / "message").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    (tmp_path / "snapshot").write_bytes(SNAPSHOT)
    found = answers(list(STATUSES), tmp_path)
    wrong = [
        (command, answer)
        for (command, status), answer in zip(STATUSES.items(), found, strict=True)
        if (answer[0], answer[-1]) != (status, False)
    ]
    assert wrong == []


def test_measuring_does_import_torch(tmp_path):
    [(_, _, _, imported)] = answers(["measure --model 5x"], tmp_path)
    assert imported


def test_without_torch_a_command_says_what_to_install(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    commands = ["measure --model tiny", "doctor", "run train.py"]
    not_installed = 'import sys\nsys.modules["torch"] = None  # an import raises an error'
    refused = 2, "", "memlab: PyTorch is not installed; run pip install torch\n", False
    assert answers(commands, tmp_path, before=not_installed) == [refused] * len(commands)
