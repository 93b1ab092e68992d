"""Help, hints, explanations and usage errors do not import torch, which takes seconds."""

import pickle
import subprocess
import sys

import pytest

PRINT_WHETHER_IMPORTED = """
import sys
from memlab.cli import main
sys.argv = ["memlab", *sys.argv[1:]]
try:
    main()
finally:
    print("torch" in sys.modules or "numpy" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("--version", 0),
        ("", 2),
        ("--help", 0),
        ("explain --help", 0),
        ("progress", 0),
        ("hint 1.2", 0),
        ("hint 1.9", 2),
        ("start 1 --no-open", 0),
        ("start 99", 2),
        ("plan", 2),
        ("plan --model 5x --memory 24GB", 2),
        ("plan --model 5m --memory 24XB", 2),
        ("plan --model 5m --gpu rtx9999", 2),
        ("plan --gpu list", 0),
        ("plan --model 5m --gpu rtx3060 --margin 2x", 2),
        ("plan --model 5m --memory 24GB --device tpu", 2),
        ("plan --model 5m --memory 24GB --precision float8", 2),
        ("plan --model 5m --memory 24GB --optimizer adan", 2),
        ("plan --model no/config.json --memory 24GB", 2),
        ("plan --modle 5m", 2),
        ("plan --model 5m --deepspeed ds.json --lora", 2),
    ],
)
def test_torch_is_not_imported(command, status, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_WHETHER_IMPORTED, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == status, ran.stderr
    assert ran.stderr.splitlines()[-1] == "False"


SNAPSHOT = pickle.dumps(
    {
        "segments": [],
        "device_traces": [
            [{"action": "alloc", "addr": 512 * n, "size": 512, "stream": 0} for n in range(1, 20)]
        ],
    }
)


@pytest.mark.parametrize(
    "content", [b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", SNAPSHOT]
)
@pytest.mark.parametrize("option", ["--json", "--memory=24GB"])
def test_explaining_imports_neither_torch_nor_numpy(content, option, tmp_path):
    (tmp_path / "file").write_bytes(content)
    test_torch_is_not_imported(f"explain file {option}", 0, tmp_path)


def test_measuring_does_import_torch(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_WHETHER_IMPORTED, *["measure", "--model", "5x"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.stderr.splitlines()[-1] == "True"


NOT_INSTALLED = """
import sys
sys.modules["torch"] = None  # an import raises ModuleNotFoundError
from memlab.cli import main
sys.argv = ["memlab", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", ["measure --model tiny", "doctor", "run train.py"])
def test_without_torch_a_command_says_what_to_install(command, tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    ran = subprocess.run(
        [sys.executable, "-c", NOT_INSTALLED, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "memlab: PyTorch is not installed; run pip install torch\n"
