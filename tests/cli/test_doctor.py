"""`memlab doctor`: one line per finding, and status 1 if one of them failed."""

import importlib.metadata
import shutil
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memlab.cli import doctor, machine
from memlab.model import PRESETS
from memlab.train import TECHNIQUES, combined
from memlab.units import format_bytes
from memlab.world.table import EVERY_CACHE, TABLE

GIB = 2**30


@pytest.fixture(scope="module", autouse=True)
def one_block():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], layers=1))
        yield


@pytest.fixture(scope="module")
def report(memlab_in, tmp_path_factory):
    return memlab_in(tmp_path_factory.mktemp("doctor"), "doctor")


def findings(name: str) -> list[tuple[bool | None, str]]:
    """Return the findings with this name."""
    return [(f.ok, f.text) for f in doctor._findings() if f.name == name]


def devices() -> list[tuple[str, bool | None, str]]:
    """Return the findings about devices only, which take no time."""
    return [tuple(finding) for finding in doctor._devices()]


@pytest.fixture
def cuda(no_accelerator, monkeypatch):
    """Two GPUs, as torch reports them."""
    properties = {0: ("H200", 100 * GIB, 140 * GIB), 1: ("RTX 4090", 20 * GIB, 24 * GIB)}

    def memory(device):
        return properties[device.index][1:]

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties[device.index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    return properties


# ------------------------------------------------------------------ this machine


def test_the_machine_that_runs_the_tests_passes(report):
    assert (report.status, report.err) == (0, "")
    assert "FAIL" not in report.out


@pytest.mark.parametrize("name", ["python", "torch", "host", "device", "meter", "techniques"])
def test_the_report_includes(report, name):
    assert name in [line[5:].split()[0] for line in report.out.splitlines()]


def test_every_line_begins_with_its_result(report):
    assert {line[:5] for line in report.out.splitlines()} == {"OK   ", "     "}


def test_the_versions_are_the_running_ones(report):
    assert f"OK   torch        {torch.__version__}, built for " in report.out


def test_the_dry_run_is_compared_with_the_real_step(report):
    peak = doctor._peak(combined("plain"), "cpu")
    assert f"OK   dry run      same peak as the real step, to the byte ({peak:,} B)" in report.out


def test_every_technique_runs(report):
    words = f"the plain step and all {len(TECHNIQUES) - 1} techniques work on cpu"
    assert f"OK   techniques   {words}" in report.out


# ------------------------------------------------------------------ devices


def test_the_world_of_a_script_is_printed(memlab_command):
    printed = memlab_command("doctor", "--world")
    assert printed.status == 0
    assert "\nos: remove, unlink, rmdir\n  remove: they would delete a real file" in printed.out
    assert "\ntorch.cuda: Event\n  event: it needs a driver" in printed.out
    words = printed.out.split()
    assert all(
        set(row.names) - {EVERY_CACHE} <= {each.rstrip(",") for each in words} for row in TABLE
    )


@pytest.mark.usefixtures("cuda")
def test_each_gpu_is_listed_with_its_memory_and_driver():
    assert devices() == [
        ("device", True, "cuda:0 H200, 100.00 GiB free of 140.00 GiB, driver for CUDA 12.8"),
        ("device", True, "cuda:1 RTX 4090, 20.00 GiB free of 24.00 GiB, driver for CUDA 12.8"),
    ]


def test_without_a_gpu_the_report_names_the_default_target(report):
    line = "     predictions  assume an A100 unless you pass --device cuda:rtx4090"
    assert line in report.out.splitlines()
    assert len(line) <= 80


@pytest.mark.parametrize(
    ("name", "capability", "text"),
    [
        ("NVIDIA H200", (9, 0), "cuda:h200: sm_90, workspace 32 MiB, cudnn attention"),
        ("Tesla T4", (7, 5), "cuda:t4: sm_75, workspace 8.12 MiB, efficient attention"),
        ("RTX 4070", (8, 9), "cuda:rtx4070: sm_89, workspace 8.12 MiB, flash attention"),
        ("RTX 4050", (8, 9), "cuda:sm_89: sm_89, workspace 8.12 MiB, flash attention"),
        ("GTX 1080", (6, 1), "cuda:sm_61: sm_61, workspace 8.12 MiB, efficient attention"),
        (
            "NVIDIA Thor",
            (11, 0),
            "assume an A100 unless you pass --device cuda:rtx4090; sm_110 is unknown",
        ),
    ],
)
def test_predictions_take_this_machines_gpu_for_a_target(cuda, monkeypatch, name, capability, text):
    cuda[0] = (name, *cuda[0][1:])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert doctor._predictions() == ("predictions", True, text)


def test_predictions_for_an_amd_gpu_ask_for_its_architecture(cuda, monkeypatch):
    cuda[0] = ("AMD Instinct MI300A", *cuda[0][1:])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert doctor._predictions().text.startswith("cuda:gfx942: gfx942, workspace 128 MiB")


@pytest.mark.usefixtures("cuda")
def test_rocm_has_no_cuda_driver_version(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "CUDA" not in devices()[0][2]


def test_apple_gpus_show_the_recommended_maximum(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "memory_of", lambda device: None)
    monkeypatch.setattr(doctor, "memory_of", lambda device: None)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    [(_, ok, text)] = devices()
    assert ok
    assert text.startswith("mps:0 Apple ")
    assert text.endswith("Metal recommends at most 12.00 GiB")


@pytest.mark.usefixtures("cuda")
def test_a_device_that_raises_fails(monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    assert devices()[0] == (
        "device",
        False,
        "RuntimeError: CUDA error: an illegal memory access",
    )


@pytest.mark.usefixtures("cuda")
def test_a_step_runs_on_the_accelerator_and_on_the_cpu(monkeypatch):
    tried = []
    monkeypatch.setattr(doctor, "_peak", lambda technique, device: tried.append(device) or 1)
    meters = [text.split(":")[0] for _, text in findings("meter")]
    assert meters == ["measured a training step on cpu", "measured a training step on cuda"]
    assert {"cpu", "cuda"} == set(tried)


@pytest.mark.parametrize("card", ["an NVIDIA GPU", "an AMD GPU", "an Intel GPU"])
def test_a_gpu_that_this_torch_was_not_built_for_fails(monkeypatch, card):
    monkeypatch.setattr(doctor, "_installed_gpu", lambda: card)
    monkeypatch.setattr(doctor, "_build", lambda: "the CPU")
    [(_, ok, text)] = devices()
    assert ok is False
    assert text == (
        f"{card} was found, but this torch cannot use it: it is built for the CPU; install a "
        f"build for this GPU"
    )


def test_a_driver_that_is_too_old_is_named(monkeypatch):
    def complain(check_available=False):
        warnings.warn(
            "CUDA initialization: The NVIDIA driver is too old\n(found 11040)", stacklevel=1
        )

    monkeypatch.setattr(torch.accelerator, "current_accelerator", complain)
    monkeypatch.setattr(doctor, "_installed_gpu", lambda: "an NVIDIA GPU")
    [(_, ok, text)] = devices()
    assert ok is False
    assert text.endswith("cannot use it: CUDA initialization: The NVIDIA driver is too old")


def test_a_machine_without_a_gpu_passes(monkeypatch):
    monkeypatch.setattr(doctor, "_installed_gpu", lambda: None)
    assert devices() == [("device", None, "no accelerator found; everything runs on the CPU")]


@pytest.mark.parametrize(
    ("there", "card"),
    [
        (["/dev/nvidiactl"], "an NVIDIA GPU"),
        (["nvidia-smi"], "an NVIDIA GPU"),
        (["/dev/kfd"], "an AMD GPU"),
        (["xpu-smi"], "an Intel GPU"),
        ([], None),
    ],
)
def test_a_gpu_is_recognized_by_its_driver(monkeypatch, there, card):
    monkeypatch.setattr(doctor, "Path", lambda path: SimpleNamespace(exists=lambda: path in there))
    monkeypatch.setattr(shutil, "which", lambda program: program if program in there else None)
    assert doctor._installed_gpu() == card


# ------------------------------------------------------------------ failures


@pytest.fixture
def fails(memlab_command, monkeypatch):
    """Return the FAIL lines of a broken machine. Only two techniques are tried."""

    def lines() -> list[str]:
        few = {name: TECHNIQUES[name] for name in ("plain", "autocast")}
        monkeypatch.setattr(doctor, "TECHNIQUES", few)
        outcome = memlab_command("doctor")
        assert outcome.status == 1
        return [line for line in outcome.out.splitlines() if line.startswith("FAIL")]

    return lines


def test_an_old_python_fails(fails, monkeypatch):
    monkeypatch.setattr(doctor, "LOWEST_PYTHON", (9, 9))
    [line] = fails()
    assert line.startswith("FAIL python       3.")
    assert line.endswith("; memlab needs 9.9 or newer")


def test_an_old_torch_fails(fails, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    [line] = fails()
    assert line.startswith("FAIL torch        2.9.1+cpu, built for ")
    assert line.endswith("; memlab needs 2.11 or newer")


def test_a_technique_that_fails_is_named_with_its_reason(fails, monkeypatch):
    def refuse(device):
        raise RuntimeError("no bfloat16 here\nand more")

    broken = replace(TECHNIQUES["autocast"], plugs={"around_forward": lambda: refuse})
    monkeypatch.setitem(TECHNIQUES, "autocast", broken)
    assert fails() == [
        "FAIL techniques   RuntimeError: failed on cpu: autocast (RuntimeError: no bfloat16 here)"
    ]


def test_a_dry_run_that_disagrees_fails(fails, monkeypatch):
    peaks = iter(range(1000, 9000))
    monkeypatch.setattr(doctor, "_peak", lambda technique, device: next(peaks))
    [line] = fails()
    assert line.startswith("FAIL dry run      RuntimeError: a dry run reports ")


def test_a_full_disk_fails(fails, monkeypatch):
    free = 5 * 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert fails() == [
        f"FAIL disk         {format_bytes(free)} free here; pictures need 100.00 MiB"
    ]


def test_an_optional_package_may_be_missing(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert findings("matplotlib") == [(None, "not installed; for pictures")]


@pytest.mark.parametrize(("value", "advised"), [("passive", False), ("active", True), (None, True)])
def test_spinning_threads_are_pointed_out(monkeypatch, value, advised):
    if value is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", value)
    monkeypatch.setattr(doctor, "_checked", lambda name, *_: doctor.Finding(name, True, ""))
    assert ("threads" in [finding.name for finding in doctor._findings()]) == advised


# ------------------------------------------------------------------ the machine


def test_the_cpus_free_memory_is_below_its_total():
    memory = machine.memory_of(torch.device("cpu"))
    assert memory is None or 0 < memory[0] < memory[1]


def test_a_device_that_does_not_report_its_memory_has_none(monkeypatch):
    def silent(device):
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", silent)
    assert machine.memory_of(torch.device("mps")) is None


@pytest.mark.parametrize(("threads", "name"), [(1, "1 thread"), (2, "2 threads")])
def test_the_cpu_is_named_by_its_threads(monkeypatch, threads, name):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert machine.name_of(torch.device("cpu")) == name


@pytest.mark.parametrize(
    ("version", "ok", "text"),
    [
        ("9.24.1", True, "9.24.1, chooses workspaces of predicted convolutions"),
        (None, None, "no cuDNN 9.11 or newer; a rule predicts the workspaces of convolutions"),
    ],
)
def test_it_says_whether_cudnn_can_be_asked(monkeypatch, version, ok, text):
    monkeypatch.setattr(doctor.cudnn, "version", lambda: version)
    assert doctor._cudnn() == ("cudnn", ok, text)
