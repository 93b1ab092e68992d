"""On NVIDIA, AMD, Apple and Intel GPUs, memlab names the platform and reads its own counters.

No such GPU is here: torch's answers are replaced. The counters of the other platforms raise.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_devices import GIB, FakeAllocator

import memlab
from memlab.cli import choices, doctor, machine
from memlab.cli.errors import UsageError
from memlab.cli.requests import Request
from memlab.metering.devices import monitor_for
from memlab.monitoring import snapshots
from memlab.units import format_bytes

DAY_2 = Path(__file__).parents[2] / "solutions" / "day02_reading_the_meter.py"
CAPACITY, METALS_LIMIT, METALS_CACHE = 24 * GIB, 16 * GIB, GIB
COUNTERS = (
    *("memory_stats", "memory_stats_as_nested_dict", "memory_allocated", "memory_reserved"),
    *("reset_peak_memory_stats", "mem_get_info"),
    *("current_allocated_memory", "driver_allocated_memory", "recommended_max_memory"),
)


@dataclass(frozen=True)
class Platform:
    """A maker's GPU, as torch reports it."""

    card: str
    type: str
    build: str  # of torch, as doctor names it
    version: str | None  # the attribute of torch.version
    called: str  # what a user may call the device
    device: str  # doctor's line


MAKERS = {
    "NVIDIA": Platform(
        "NVIDIA H100 80GB HBM3",
        "cuda",
        "CUDA 13.0",
        "cuda",
        "nvidia",
        "cuda:0 NVIDIA H100 80GB HBM3, 24.00 GiB free of 24.00 GiB, driver for CUDA 13.0",
    ),
    "AMD": Platform(
        "AMD Instinct MI300X",
        "cuda",
        "ROCm 7.0",
        "hip",
        "ROCm",
        "cuda:0 AMD Instinct MI300X, 24.00 GiB free of 24.00 GiB",
    ),
    "Apple": Platform(
        "Apple arm64",
        "mps",
        "Metal",
        None,
        "metal",
        "mps:0 Apple arm64, Metal recommends at most 16.00 GiB",
    ),
    "Intel": Platform(
        "Intel(R) Data Center GPU Max 1550",
        "xpu",
        "XPU 20250302",
        "xpu",
        "intel",
        "xpu:0 Intel(R) Data Center GPU Max 1550, 24.00 GiB free of 24.00 GiB",
    ),
}


class FakeMetal(FakeAllocator):
    """The same counters behind MPS's functions. Metal holds a cache beside the tensors."""

    def install(self, monkeypatch: Any, name: str = "mps") -> "FakeMetal":
        monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: self.allocated)
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", self.driver_bytes)
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: METALS_LIMIT)
        return self

    def driver_bytes(self) -> int:
        return self.reserved + METALS_CACHE


def refuse(name: str) -> Any:
    def read(*arguments: Any) -> None:
        raise AssertionError(f"{name} was read, which is another platform's")

    return read


@pytest.fixture(params=MAKERS)
def maker(request, no_accelerator, monkeypatch):
    """A platform, whose answers replace torch's, and its allocator."""
    found = MAKERS[request.param]
    for name in ("cuda", "mps", "xpu"):
        for counter in COUNTERS:
            if hasattr(getattr(torch, name), counter):
                monkeypatch.setattr(
                    getattr(torch, name), counter, refuse(f"torch.{name}.{counter}")
                )
    allocator = FakeMetal() if found.type == "mps" else FakeAllocator(CAPACITY)
    allocator.install(monkeypatch, found.type)
    answer_as_torch(found, allocator, monkeypatch)
    return SimpleNamespace(name=request.param, gpu=found, allocator=allocator)


def answer_as_torch(found: Platform, allocator: FakeAllocator, monkeypatch: Any) -> None:
    """Replace what torch answers about the build, the device and its memory."""
    for name in ("cuda", "hip", "xpu"):
        version = found.build.split()[-1] if found.version == name else None
        monkeypatch.setattr(torch.version, name, version)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: found.type == "mps")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    module = getattr(torch, found.type)
    if found.type != "mps":
        monkeypatch.setattr(module, "get_device_name", lambda device: found.card)
        monkeypatch.setattr(module, "is_initialized", lambda: True)
        monkeypatch.setattr(module, "memory_stats", allocator.flat_stats)
        # A CUDA build attaches it to the device, and there is none.
        monkeypatch.setattr(snapshots, "attach_oom_observer", lambda observer: None)

    def memory(device=None):
        if found.type == "mps":
            raise RuntimeError("MPS reports no free memory")
        return allocator.mem_get_info(device)

    answers = {
        "current_accelerator": lambda check_available=False: torch.device(found.type),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "synchronize": lambda device=None: None,
        "get_memory_info": memory,
        "memory_stats": allocator.flat_stats,
        "reset_peak_memory_stats": allocator.reset,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer)


def test_doctor_names_the_build_and_the_card(maker):
    assert doctor._build() == maker.gpu.build
    assert [tuple(finding) for finding in doctor._devices()] == [("device", True, maker.gpu.device)]


def test_doctor_checks_a_step_on_the_cpu_and_on_the_gpu(maker, monkeypatch):
    monkeypatch.setattr(doctor, "_checked", lambda name, *_: doctor.Finding(name, True, ""))
    monkeypatch.setattr(doctor, "_predictions", lambda: doctor.Finding("predictions", None, ""))
    names = [finding.name for finding in doctor._findings()]
    assert names.count("meter") == names.count("techniques") == 2


def test_a_prediction_for_this_gpu_is_offered_where_there_are_predictions(maker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    expected = {"NVIDIA": "cuda:h100: sm_90, ", "AMD": "cuda:mi300x: gfx942, "}
    assert doctor._predictions().text.startswith(expected.get(maker.name, "assume an A100 "))


def test_the_machine_is_described(maker):
    device = torch.device(maker.gpu.type, 0)
    assert machine.devices_present() == ["cpu", maker.gpu.type]
    assert machine.name_of(device) == maker.gpu.card
    assert machine.memory_of(device) == (None if maker.gpu.type == "mps" else (CAPACITY, CAPACITY))


def test_measure_takes_the_gpu_by_default_and_by_its_name(maker):
    for device in (None, maker.gpu.type):
        assert choices.choose_device(Request(device=device, dry=False)) == maker.gpu.type
    assert choices.choose_device(Request(device="cpu", dry=False)) == "cpu"


def test_measure_refuses_the_others_and_says_what_is_here(maker):
    for other in {"cuda", "mps", "xpu"} - {maker.gpu.type}:
        with pytest.raises(UsageError, match=f"this machine has cpu and {maker.gpu.type}"):
            choices.choose_device(Request(device=other, dry=False))


def test_measure_says_what_torch_calls_the_device(maker):
    wanted = f"torch calls it {maker.gpu.type}: use {maker.gpu.type}"
    with pytest.raises(UsageError, match=wanted):
        choices.choose_device(Request(device=maker.gpu.called, dry=False))
    other = "metal" if maker.gpu.type == "cuda" else "rocm"
    with pytest.raises(UsageError, match="this machine has cpu and"):
        choices.choose_device(Request(device=other, dry=False))


def test_the_default_batch_fits_the_gpus_free_memory(maker, monkeypatch):
    """Metal reports no free memory, so there the batch stays."""
    monkeypatch.setattr(choices, "_step_bytes", lambda setting: setting.batch * 6 * GIB)
    chosen = choices.choose_setting(Request(device=maker.gpu.type, dry=False))
    assert (chosen.device, chosen.batch) == (maker.gpu.type, 4 if maker.gpu.type == "mps" else 2)


def test_the_monitor_reads_the_platforms_counters(maker):
    allocator = maker.allocator
    allocator.allocate(GIB)  # a model
    monitor = memlab.monitor()
    monitor.step()
    allocator.step(3 * GIB, kept=GIB)
    step = monitor.step()
    reserved = allocator.reserved + METALS_CACHE * (maker.gpu.type == "mps")
    assert (step.peak_bytes, step.allocated_bytes) == (5 * GIB, 2 * GIB)
    assert (step.reserved_bytes, step.growth_bytes) == (reserved, GIB)
    assert f"2 steps on {maker.gpu.type}:0: peak 5.00 GiB" in str(monitor)


def test_a_step_is_metered_by_the_platforms_allocator(maker, monkeypatch):
    if maker.gpu.type == "cuda":  # its monitor also reads the history: tests/metering
        monitor = type(monitor_for(torch.device("cuda")))
        assert monitor.__name__ == "CudaMonitor"
        return
    monitor = monitor_for(torch.device(maker.gpu.type, 0))
    maker.allocator.allocate(GIB)
    monitor.start()
    maker.allocator.step(2 * GIB)
    stats = monitor.stop()
    assert (stats.allocated_at_start, stats.allocated_peak_bytes) == (GIB, 3 * GIB)
    in_use = {"mps": 3 * GIB + METALS_CACHE, "xpu": 3 * GIB}
    assert stats.used_bytes == in_use[maker.gpu.type]


def test_day_2s_cell_prints_the_platforms_numbers(maker, capsys):
    """The lesson's cell, with four steps that the allocator counts and no model."""
    maker.allocator.allocate(GIB)  # a model
    cells = DAY_2.read_text(encoding="utf-8").split("\n# %%")
    [cell] = [cell for cell in cells if "with memlab.monitor() as watching" in cell]
    built = []

    def four_steps() -> None:
        for _ in range(4):
            maker.allocator.step(GIB)
            names["watching"].step()

    def build(device_type):
        built.append(device_type)
        return four_steps, None

    names = {
        "torch": torch,
        "memlab": memlab,
        "build": build,
        "format_bytes": format_bytes,
        "simulated": SimpleNamespace(allocated_bytes=GIB, reserved_bytes=2 * GIB),
    }
    exec(cell.partition("\n")[2], names)
    printed = capsys.readouterr().out
    assert built == [maker.gpu.type]
    assert f"4 steps on {maker.gpu.type}:0: peak 2.00 GiB" in printed
    if maker.gpu.type == "mps":
        assert "Metal recommends at most 16.00 GiB" in printed
    else:
        assert "in use, by all processes: 2.00 GiB" in printed
