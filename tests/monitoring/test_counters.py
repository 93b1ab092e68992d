"""The counters of each device, read without allocating."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_devices import GIB, FakeAllocator

from memlab.metering.storages import StorageMeter
from memlab.monitoring import counters
from memlab.monitoring.counters import Reading, counters_for, device_in_use

MIB = 2**20


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_a_caching_allocator_is_read_and_reset(monkeypatch, name):
    fake = FakeAllocator().install(monkeypatch, name)
    read = counters_for(torch.device(name, 0))
    fake.step(3 * GIB, kept=GIB)
    fake.retries, fake.ooms = 2, 1
    assert read.read() == Reading(GIB, 4 * GIB, 4 * GIB, retries=2, ooms=1)
    read.reset_peak()
    assert read.read().peak_bytes == GIB


def test_a_device_that_the_process_has_not_used_holds_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert counters_for(torch.device("cuda")).read() == Reading(0, 0, 0)


def test_the_capacity_leaves_out_what_others_use(monkeypatch):
    fake = FakeAllocator().install(monkeypatch)
    fake.allocate(4 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 24 * GIB))
    assert counters_for(torch.device("cuda")).capacity_bytes() == 14 * GIB


def test_a_driver_that_reports_no_free_memory_has_no_capacity(monkeypatch):
    def refuse(device):
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.xpu, "mem_get_info", refuse)
    assert counters_for(torch.device("xpu")).capacity_bytes() is None


# ------------------------------------------------------------------ MPS and others


@pytest.fixture
def metal(monkeypatch):
    """MPS's functions, with a GiB of tensors and three of Metal's."""
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * GIB)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16 * GIB)
    return monkeypatch


def test_mps_before_torch_2_13_counts_no_peak(metal):
    def refuse(device):
        raise RuntimeError("MPS has no statistics")

    metal.setattr(torch.accelerator, "memory_stats", refuse)
    read = counters_for(torch.device("mps"))
    assert not read.peak_is_exact
    read.reset_peak()
    assert read.read() == Reading(GIB, GIB, 3 * GIB)
    assert read.capacity_bytes() == 16 * GIB


def test_mps_since_torch_2_13_counts_a_peak(metal):
    fake = FakeAllocator()
    metal.setattr(torch.accelerator, "memory_stats", fake.flat_stats)
    metal.setattr(torch.accelerator, "reset_peak_memory_stats", fake.reset)
    fake.step(2 * GIB)
    read = counters_for(torch.device("mps"))
    assert read.peak_is_exact
    assert read.read().peak_bytes == 2 * GIB
    read.reset_peak()
    assert read.read().peak_bytes == GIB  # what Metal reports now


def test_another_accelerator_is_read_through_torch_accelerator(monkeypatch):
    fake = FakeAllocator()
    monkeypatch.setattr(torch.accelerator, "memory_stats", fake.flat_stats)
    fake.step(GIB, kept=MIB)
    assert counters_for(torch.device("mtia")).read() == Reading(MIB, GIB + MIB, GIB + MIB)


# ------------------------------------------------------------------ CPU

linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
SIZE = 64 * MIB  # far above what else may happen to the process


IN_A_NEW_PROCESS = """
import json, torch, memlab
from memlab.monitoring.counters import counters_for
SIZE = 64 * 2**20
read = counters_for(torch.device("cpu"))
level = lambda: read.read().allocated_bytes
read.reset_peak()
before = level()
x = torch.ones(SIZE, dtype=torch.uint8)
found = {"with": level() - before, "peak": read.read().peak_bytes - before}
del x
found["without"] = level() - before
read.reset_peak()
found["next peak"] = read.read().peak_bytes - before
monitor, kept = memlab.monitor("cpu"), []
monitor.step()
found["growth"] = []
for _ in range(3):
    kept.append(torch.ones(SIZE, dtype=torch.uint8))
    found["growth"].append(monitor.step().growth_bytes)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def changes():
    """What 64 MiB change in a new process: an older one may have as much free memory to reuse."""
    return json.loads(subprocess.check_output([sys.executable, "-c", IN_A_NEW_PROCESS], text=True))


@linux
def test_a_tensor_counts_as_long_as_it_lives(changes):
    assert changes["with"] == pytest.approx(SIZE, rel=0.1)
    assert changes["without"] < SIZE / 10


@linux
def test_the_peak_of_a_process_starts_over(changes):
    assert changes["peak"] == pytest.approx(SIZE, rel=0.1)
    assert changes["next peak"] < SIZE / 10


@linux
def test_a_monitor_sees_what_each_step_keeps(changes):
    assert changes["growth"] == pytest.approx([SIZE] * 3, rel=0.1)


@linux
def test_a_mapped_file_does_not_count(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(SIZE))
    read = counters_for(torch.device("cpu"))
    read.reset_peak()
    before = read.read()
    mapped = torch.from_file(str(path), size=SIZE, dtype=torch.uint8)
    assert int(mapped[::1024].max()) == 0  # touches every page
    after = read.read()
    assert after.allocated_bytes - before.allocated_bytes < SIZE / 10
    assert after.peak_bytes - before.peak_bytes < SIZE / 10


@linux
def test_a_kernel_that_keeps_its_peak_is_no_error(tmp_path):
    (tmp_path / "statm").write_text("100 50 10 1 0 5 0\n")
    (tmp_path / "status").write_text("Name:\tpython\n")
    read = counters.LinuxProcess(torch.device("cpu"), tmp_path)
    (tmp_path / "clear_refs").mkdir()
    read.reset_peak()
    page = read.read().allocated_bytes // 40
    assert read.read() == Reading(40 * page, 40 * page)


def test_a_container_has_less_than_the_machine(monkeypatch):
    monkeypatch.setattr(counters, "_control_group_limits", lambda: [GIB])
    assert counters.LinuxProcess(torch.device("cpu")).capacity_bytes() == GIB


def test_other_systems_report_resident_memory():
    read = counters.Process(torch.device("cpu")).read()
    assert read.allocated_bytes == read.peak_bytes > MIB


def test_without_psutil_the_highest_value_is_left(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    read = counters.Process(torch.device("cpu"))
    monkeypatch.setattr(counters, "_highest_resident_bytes", lambda: 5 * MIB)
    assert read.read() == Reading(5 * MIB, 5 * MIB)


def test_reading_allocates_no_tensor():
    read = counters_for(torch.device("cpu"))
    gc.collect()
    with StorageMeter() as meter:
        for _ in range(10):
            read.read()
            read.reset_peak()
    assert list(meter.changes()) == []


# ------------------------------------------------------------------ which device


def test_the_optimizers_parameters_say_which_device_is_in_use():
    weight = torch.zeros(3, device="meta", requires_grad=True)
    assert device_in_use(torch.optim.SGD([weight])) == torch.device("meta")


def test_an_accelerator_that_the_process_has_not_used_is_not_in_use(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_in_use() == torch.device("cpu")


def test_an_accelerator_that_the_process_uses_is_in_use(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert device_in_use() == torch.device("cuda", 3)
