"""Snapshot files: compatibility, rounding, and errors."""

import json
import struct

import pytest
import torch
from drifting import Small, go_on, trained
from safetensors.torch import load_file, save_file
from torch import nn

from memlab.ema import PostHocEMA, Snapshot, find_snapshots, synthesize
from memlab.ema.tensor_files import TensorFile, TensorWriter, create_file

STEP = 10**9 + 1  # too large for exact float32 or float16


def last_of(folder, sigma=0.05):
    return next(s for s in reversed(find_snapshots(folder)) if s.sigma == sigma)


# ------------------------------------------------------------------ the format


def test_the_safetensors_library_reads_our_files(tmp_path):
    model = Small()
    ema = trained(model, tmp_path, 10, snapshot_dtype=torch.float32)
    found = load_file(last_of(tmp_path).path)
    for name, average in ema.averages[0.05].items():
        assert torch.equal(found[name], average)
    for name in ("norm.running_mean", "norm.num_batches_tracked", "seen", "frozen"):
        assert torch.equal(found[name], model.state_dict()[name])
    assert found.keys() == model.state_dict().keys() - {"head.weight"}
    assert last_of(tmp_path).tied == {"head.weight": "embedding.weight"}


def test_files_of_the_safetensors_library_are_readable(tmp_path):
    tensors = {
        str(dtype): torch.arange(7).to(dtype).view(1, 7)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
    }
    save_file(tensors, tmp_path / "x.safetensors", {"step": "3"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.metadata == {"step": "3"}
    for name, tensor in tensors.items():
        assert file.places[name].shape == (1, 7)
        assert torch.equal(file.tensor(name), tensor.view(-1))


def test_empty_and_zero_dimensional_tensors_are_stored(tmp_path):
    specs = {"none": (torch.float32, (0, 3)), "one": (torch.int64, ()), "flag": (torch.bool, (1,))}
    with create_file(tmp_path / "x.safetensors", specs, {}) as file:
        file.write("one", 0, torch.tensor([7]))
        file.write("none", 0, torch.empty(0))
        file.write("flag", 0, torch.tensor([True]))
    found = load_file(tmp_path / "x.safetensors")
    assert found["none"].shape == (0, 3)
    assert found["one"] == 7
    assert found["flag"].item() is True


@pytest.mark.parametrize("step", [STEP, 0.1 + 0.2])
def test_the_clock_keeps_full_precision(step, tmp_path):
    ema = PostHocEMA(nn.Linear(2, 2), tmp_path, every=0.1)
    ema.update(step)
    ema.snapshot()
    found = last_of(tmp_path).step
    assert (found, type(found)) == (step, type(step))


def test_files_sort_by_time(tmp_path):
    trained(nn.Linear(2, 2), tmp_path, 120)
    names = sorted(path.name for path in tmp_path.glob("*"))
    assert [Snapshot.open(tmp_path / name).step for name in names[::2]] == list(range(10, 121, 10))


# ------------------------------------------------------------------ rounding


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.float32, 0.0)]
)
def test_rounding_is_at_most_half_a_step_of_the_dtype(dtype, step, tmp_path):
    ema = trained(nn.Linear(200, 100), tmp_path, 10, snapshot_dtype=dtype)
    exact = ema.averages[0.05]["weight"]
    found = load_file(last_of(tmp_path).path)["weight"]
    assert found.dtype == dtype
    assert ((found.float() - exact).abs() <= step * exact.abs() + 2**-24).all()


def test_int8_is_off_by_a_510th_of_a_blocks_range(tmp_path):
    ema = trained(nn.Linear(200, 100), tmp_path, 10, snapshot_dtype="int8")
    exact = ema.averages[0.05]["weight"].view(-1)
    snapshot = last_of(tmp_path)
    found = snapshot.read("weight", 0, 20_000)
    for start in range(0, 20_000, 256):
        block, back = exact[start : start + 256], found[start : start + 256]
        width = block.max() - block.min()
        assert (block - back).abs().max() <= 1.02 * width / 510  # the offset is a bfloat16
    assert torch.equal(snapshot.read("weight", 512, 1000), found[512:1000])


@pytest.mark.parametrize("dtype", [torch.float16, "int8"])
def test_a_tensor_of_several_chunks_is_complete(dtype, tmp_path):
    ema = trained(nn.Linear(600, 500), tmp_path, 10, snapshot_dtype=dtype)
    exact = ema.averages[0.05]["weight"].view(-1)
    found = last_of(tmp_path).read("weight", 0, 300_000)
    assert (found - exact).abs().max() < 0.01


@pytest.mark.parametrize(
    ("dtype", "bytes_of_average"),
    [
        (torch.float32, 4 * 20_100),
        (torch.float16, 2 * 20_100),
        ("int8", 20_000 + 4 * 79 + 4 * 100),  # 79 blocks; the bias is small and stays float32
    ],
)
def test_a_file_has_the_bytes_of_the_formula_and_a_header(dtype, bytes_of_average, tmp_path):
    trained(nn.Linear(200, 100), tmp_path, 10, snapshot_dtype=dtype)
    path = last_of(tmp_path).path
    header = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert header % 64 == 0
    assert header < 1024
    assert path.stat().st_size == header + bytes_of_average


def test_a_weight_beyond_float16_is_an_error_but_infinity_is_kept(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = 1e5
    ema = PostHocEMA(model, tmp_path)
    ema.update(1)
    with pytest.raises(ValueError, match=r"got 100000 in 'weight', and float16 ends at 65504"):
        ema.snapshot()
    assert list(tmp_path.iterdir()) == []
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    broken = PostHocEMA(model, tmp_path)
    broken.update(1)
    assert load_file(broken.snapshot()[0])["weight"].isnan().any()


@pytest.mark.parametrize("dtype", ["float16", torch.int64, None])
def test_an_unsupported_dtype_is_an_error(dtype, tmp_path):
    with pytest.raises(ValueError, match="for snapshots; give"):
        PostHocEMA(nn.Linear(2, 2), tmp_path, snapshot_dtype=dtype)


# ------------------------------------------------------------------ atomic


def test_an_interrupted_snapshot_leaves_the_old_file(tmp_path, monkeypatch):
    ema = trained(nn.Linear(2, 2), tmp_path, 10)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("memlab.ema.tensor_files.TensorWriter.write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ema.snapshot()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ------------------------------------------------------------------ one step for every tensor


def test_a_snapshot_interrupted_between_two_tensors_is_not_written(tmp_path, monkeypatch):
    ema = trained(Small(), tmp_path, 10)
    go_on(ema.model, ema, 11, 15)
    before = {path.name for path in tmp_path.iterdir()}
    proper, written = TensorWriter.write, []

    def write(self, name, start, elements):
        if name == "hidden.weight":
            raise KeyboardInterrupt
        written.append(name)
        proper(self, name, start, elements)

    monkeypatch.setattr(TensorWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        ema.snapshot()
    assert "embedding.weight" in written
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_file_that_ends_between_two_tensors_is_an_error(tmp_path):
    trained(Small(), tmp_path, 10)
    snapshot = last_of(tmp_path)
    content = snapshot.path.read_bytes()
    ends = {place.offset for place in snapshot.file.places.values() if place.nbytes}
    assert len(ends) == len(Small().state_dict()) - 1  # the tied weight is stored once
    for end in ends:
        snapshot.path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"is not a whole safetensors file"):
            synthesize(tmp_path, 0.05)


def test_a_tensor_of_another_step_in_a_file_is_an_error(tmp_path):
    trained(Small(), tmp_path, 20)
    first, second = (s for s in find_snapshots(tmp_path) if s.sigma == 0.05)
    place = second.file.places["hidden.weight"]
    assert first.file.places["hidden.weight"] == place
    mixed = bytearray(second.path.read_bytes())
    part = slice(place.offset, place.offset + place.nbytes)
    mixed[part] = first.path.read_bytes()[part]
    second.path.write_bytes(mixed)
    with pytest.raises(ValueError, match=r"damaged: the checksum of its tensor 'hidden\.weight'"):
        synthesize(tmp_path, 0.07)
    synthesize(tmp_path, 0.07, only="embedding")  # other tensors are readable


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_snapshot_is_an_error(kept, tmp_path):
    trained(nn.Linear(20, 20), tmp_path, 10)
    path = last_of(tmp_path).path
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"truncated.* restore a copy"):
        synthesize(tmp_path, 0.05)


def test_a_snapshot_with_extra_bytes_is_an_error(tmp_path):
    trained(nn.Linear(20, 20), tmp_path, 10)
    with open(last_of(tmp_path).path, "ab") as file:
        file.write(b"?")
    with pytest.raises(
        ValueError, match=r"has 1,\d+ bytes and is not a whole safetensors file .*too long"
    ):
        synthesize(tmp_path, 0.05)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        [1, 2],
    ],
)
def test_an_invalid_header_is_an_error(entry, tmp_path):
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        TensorFile(tmp_path / "x")


def test_another_kind_of_file_is_an_error(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "ema-1.safetensors")
    with pytest.raises(ValueError, match="of format None, wanted 'memlab ema 1'"):
        synthesize(tmp_path, 0.05)
    with pytest.raises(ValueError, match=r"could not read .*nothing\.safetensors"):
        synthesize([tmp_path / "nothing.safetensors"], 0.05)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="got no snapshots in "):
        synthesize(tmp_path, 0.05)


def mixed(one, other):
    return [*find_snapshots(one), *find_snapshots(other)]


def test_snapshots_of_two_models_are_an_error(tmp_path):
    trained(nn.Linear(2, 2), tmp_path / "a", 10)
    trained(nn.Linear(2, 3), tmp_path / "b", 20)
    with pytest.raises(
        ValueError, match=r"is of another model than .* give snapshots of one model"
    ):
        synthesize(mixed(tmp_path / "a", tmp_path / "b"), 0.05)


def test_snapshots_with_fewer_trained_weights_are_an_error(tmp_path):
    trained(nn.Linear(2, 2), tmp_path / "a", 10)
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    trained(frozen, tmp_path / "b", 20)
    with pytest.raises(ValueError, match="is of another model than "):
        synthesize(mixed(tmp_path / "a", tmp_path / "b"), 0.05)


def test_snapshots_of_two_runs_are_an_error(tmp_path):
    trained(nn.Linear(2, 2), tmp_path / "a", 10)
    trained(nn.Linear(2, 2), tmp_path / "b", 20)
    with pytest.raises(ValueError, match=r"is of another run than .* give snapshots of one run"):
        synthesize(mixed(tmp_path / "a", tmp_path / "b"), 0.05)


def test_snapshots_with_two_clocks_are_an_error(tmp_path):
    model = nn.Linear(2, 2)
    ema = trained(model, tmp_path, 10)
    ema.clock = "images"
    go_on(model, ema, 11, 20)
    with pytest.raises(ValueError, match=r"clock .* got 'images', wanted 'steps'"):
        synthesize(tmp_path, 0.05)
