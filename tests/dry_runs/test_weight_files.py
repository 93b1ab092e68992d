"""Files of weights in a dry run: the shapes of the file, without its bytes."""

import json
import os
import struct

import pytest
import torch
from torch import nn

import memlab
from memlab.dry_runs import known_values
from memlab.internals.torch_internals import FakeTensor

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

LARGE, SMALL = (512, 1024), (3,)  # more and fewer bytes than known_values.BOUND


@pytest.fixture
def tensors():
    return {
        "half": torch.randn(LARGE).half(),
        "counter": torch.tensor([4, 5, 6]),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 3),
    }


@pytest.fixture
def path(tmp_path, tensors):
    safetensors_torch.save_file(tensors, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def facts(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", 0])
def test_a_file_gives_fake_tensors_in_its_shapes_and_dtypes(path, tensors, device, backend):
    with memlab.dry_run():
        read = safetensors_torch.load_file(path, device=device, backend=backend)
        assert facts(read) == facts(tensors)
    assert all(isinstance(tensor, FakeTensor) for tensor in read.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_part_of_a_tensor_is_read(path, device):
    with memlab.dry_run(), safetensors.safe_open(path, "pt", device=device) as file:
        assert sorted(file.keys()) == ["counter", "half", "none", "scalar"]
        part = file.get_slice("half")
        assert part.get_shape() == list(LARGE)
        assert part[:5, ::2].shape == (5, 512)
        assert file.get_tensor("half").shape == LARGE


def test_small_tensors_have_their_values_and_large_ones_do_not(path):
    with memlab.dry_run():
        read = safetensors_torch.load_file(path)
        assert read["counter"].tolist() == [4, 5, 6]
        assert read["scalar"].item() == 7
        assert not known_values.is_known(read["half"])


def test_a_file_larger_than_any_memory_is_opened(tmp_path):
    count = 2**40
    path = tmp_path / "large.safetensors"
    header = json.dumps({"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    os.truncate(path, 8 + len(header) + 2 * count)  # a file with a hole
    with memlab.dry_run():
        assert safetensors_torch.load_file(path)["w"].shape == (count,)


def test_another_framework_gets_the_real_values(path, tensors):
    numpy = pytest.importorskip("safetensors.numpy")
    with memlab.dry_run():
        read = numpy.load_file(path)
    assert (read["half"] == tensors["half"].numpy()).all()


def test_a_broken_file_raises_the_librarys_own_error(path, tmp_path):
    os.truncate(path, path.stat().st_size - 1)
    with memlab.dry_run():
        with pytest.raises(safetensors.SafetensorError, match="not fully covered"):
            safetensors_torch.load_file(path, device="cuda")
        with pytest.raises(FileNotFoundError, match="No such file"):
            safetensors_torch.load_file(tmp_path / "absent", device="cuda")


def test_files_are_read_as_before_after_a_dry_run(path, tensors):
    before = safetensors.safe_open, os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    with memlab.dry_run():
        kept = safetensors.safe_open  # as a module imported now keeps it
    assert (safetensors.safe_open, os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")) == before
    assert torch.equal(safetensors_torch.load_file(path)["half"], tensors["half"])
    assert type(kept(path, "pt", device="cuda")) is safetensors.safe_open


@pytest.mark.parametrize("value", [None, "0"])
def test_the_setting_of_transformers_is_restored(monkeypatch, value):
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with memlab.dry_run():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == value


# ------------------------------------------------------------------ torch.load


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.requires_grad_])
def test_a_weight_in_a_file_still_needs_a_gradient(tmp_path, kind):
    saved = kind(torch.ones(3))
    torch.save(saved, tmp_path / "weights.pt")
    with memlab.dry_run():
        read = torch.load(tmp_path / "weights.pt", map_location="cuda")
        assert isinstance(read, nn.Parameter) is isinstance(saved, nn.Parameter)
        assert read.requires_grad
