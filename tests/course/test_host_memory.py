"""Anonymous memory: memory of a process without a file behind it."""

import ctypes
import gc
import os
import subprocess
import sys

import pytest
import torch

from memlab.course import host_memory
from memlab.course.host_memory import anonymous_bytes
from memlab.data import mapped_bytes

MIB = 2**20
LARGE = 64 * MIB
SLACK = 8 * MIB  # the interpreter's own allocations

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def give_back():
    """Return freed memory to the system. The C library may keep it for reuse."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(autouse=True)
def nothing_to_reuse():
    """Prevent the reuse of freed memory, which would not count as new."""
    give_back()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(MIB) * (LARGE // MIB))
    return path


@linux
def test_filled_memory_counts_until_the_tensor_is_freed():
    before = anonymous_bytes()
    filled = torch.ones(LARGE, dtype=torch.uint8)
    assert abs(anonymous_bytes() - before - LARGE) < SLACK
    del filled
    give_back()
    assert abs(anonymous_bytes() - before) < SLACK


@linux
def test_a_mapped_file_does_not_count_even_after_reading_it(file):
    before = anonymous_bytes()
    data = mapped_bytes(file)
    assert data.sum() > 0
    assert abs(anonymous_bytes() - before) < SLACK
    read = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    assert torch.equal(data, read)
    assert anonymous_bytes() - before > LARGE - SLACK


@linux
def test_private_writes_to_a_mapped_file_count(file):
    before = anonymous_bytes()
    data = mapped_bytes(file)
    data.fill_(7)
    assert abs(anonymous_bytes() - before - LARGE) < SLACK
    assert file.read_bytes()[:MIB] != bytes([7]) * MIB


@linux
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from 3.12, beside torch's threads
def test_pages_shared_with_a_child_count_once_in_all():
    filled = torch.ones(LARGE, dtype=torch.uint8)
    before = anonymous_bytes()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    own, its = anonymous_bytes(), anonymous_bytes(child)
    os.write(go[1], b".")
    os.waitpid(child, 0)
    assert own < before - LARGE / 2 + SLACK
    assert abs(own + its - before) < SLACK
    assert filled[0] == 1


@pytest.mark.parametrize("content", [None, "Rss: 5 kB\n", "header\nRss: 5 kB\n"])
def test_a_system_without_the_numbers_gives_none(monkeypatch, tmp_path, content):
    monkeypatch.setattr(host_memory, "PROCESSES", tmp_path)
    if content:
        (tmp_path / "17").mkdir()
        (tmp_path / "17" / "smaps_rollup").write_text(content)
    assert anonymous_bytes(17) is None


def test_the_three_kinds_of_own_memory_are_added(monkeypatch, tmp_path):
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "smaps_rollup").write_text(
        "55-7f ---p 00000000 00:00 0   [rollup]\nRss: 9 kB\nPss_Anon:   1 kB\nPss_File: 90 kB\n"
        "Pss_Shmem: 20 kB\nAnonymous: 4000 kB\nSwapPss: 300 kB\n"
    )
    monkeypatch.setattr(host_memory, "PROCESSES", tmp_path)
    assert anonymous_bytes(17) == 321 * 1024


def test_an_ended_process_gives_none():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert anonymous_bytes(gone.pid) is None


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="which is empty; give a file"):
        mapped_bytes(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        mapped_bytes(tmp_path / "missing")
