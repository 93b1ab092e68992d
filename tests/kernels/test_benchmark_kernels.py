"""benchmarks/compiled_kernels.py reports compiled kernels and problems; the GPU races them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_scripts import script as part
from quick import slow

kernels = part("compiled_kernels")
gpu, jobs, kernel_jobs = part("gpu"), part("gpu_sections.jobs"), part("gpu_sections.kernel_jobs")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compiled_kernels.py"
FEW = ("Adam8bit, float32", "encode 8 bits", "loss in chunks")


def compiled(name="kernel", gpu=89, registers=40, spilled=0, shared=1024):
    return kernels.Compiled(name, gpu, registers, spilled, shared, "")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the compiler, not the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("gpu", [slow("8.0"), slow("8.6"), slow("8.9"), slow("9.0")])
def test_every_kernel_compiles_and_fits_without_a_gpu(gpu):
    completed = run("--gpu", gpu)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert f"compute capability {gpu}" in completed.stdout
    assert "No kernel spills registers, and all fit in shared memory." in completed.stdout


def test_an_unknown_gpu_is_refused_with_the_choices():
    completed = run("--gpu", "7.5")
    assert completed.returncode == 2
    assert "got 7.5; choose one of 8.0, 8.6, 8.9, 9.0, 12.0" in completed.stderr


def test_the_interpreter_is_refused(capsys):
    assert kernels.main(["--gpu", "8.9", "--case", "8 bits"]) == 2
    assert "unset it" in capsys.readouterr().err


def test_spills_and_oversized_kernels_are_reported():
    fine, spilled = compiled(), compiled(spilled=8)
    large = compiled(shared=100 * 1024)
    rows = [("fine", [fine]), ("dq", [spilled, large])]
    assert kernels.spilled(rows) == ["dq, 8.9: 8 bytes spilled"]
    assert kernels.too_large(rows) == ["dq, 8.9: 100.00 KiB of shared memory, limit 99.00 KiB"]


def test_every_kernel_has_a_case_and_a_race():
    for name in ("Adam8bit", "Lion8bit", "attention", "8 bits", "4 bits", "2 bits", "loss"):
        assert any(name in case for case in kernels.CASES), name
        assert any(name in race for race in kernel_jobs.RACES), name


@pytest.fixture
def races(monkeypatch):
    """Run a few races with a fake clock: 3 ms against the peer's 2 ms."""
    monkeypatch.setattr(kernel_jobs, "RACES", {name: kernel_jobs.RACES[name] for name in FEW})
    monkeypatch.setattr(part("gpu_sections.peers_sections"), "RACES", dict.fromkeys(FEW))
    clock = iter([0.003, 0.002, 0.004, 0.004] * len(FEW))
    kernel_jobs.rates.cache_clear()
    monkeypatch.setattr(kernel_jobs, "rates", lambda *_: {"bytes": 1e9, "operations": 1e9})
    monkeypatch.setattr(kernel_jobs, "seconds", lambda run, device: next(clock))


@pytest.mark.slow
def test_kernels_are_compared_with_production_and_hardware_limits(races, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    assert gpu.main(["--section", "kernels", "--quick", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "1 of 3 kernels meet their time goal" in told
    assert "; missed: Adam8bit, float32, loss" in told
    (kept,) = tmp_path.glob("*.json")
    section = json.loads(kept.read_text())["gpu"]["kernels"]
    assert section["Adam8bit, float32, time / peer"] == pytest.approx(1.5)
    assert section["Adam8bit, float32, error"] == 0
    assert section["encode 8 bits, error"] == 0


def test_a_wrong_kernel_has_an_error(monkeypatch):
    right = kernel_jobs.kernels().quantize_affine
    wrong = type(
        "Kernels",
        (),
        {
            "quantize_affine": staticmethod(lambda x, **how: right(x * 1.01, **how)),
            "dequantize_affine": staticmethod(kernel_jobs.kernels().dequantize_affine),
        },
    )
    monkeypatch.setattr(kernel_jobs, "kernels", lambda: wrong)
    assert kernel_jobs.RACES["encode 8 bits"]("cpu", True).error() > 0.1
