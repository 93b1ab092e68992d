"""Files without checksums whose header is not what memlab writes are errors that name the file."""

import json
import struct

import pytest
import torch
from torch import nn

from memlab.ema import PostHocEMA, synthesize

NAME = "0.weight"


def model():
    return nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))


@pytest.fixture
def ema(tmp_path):
    ema = PostHocEMA(model(), tmp_path)
    for step in (1, 2):
        ema.update(step)
        ema.snapshot()
    ema.save()
    return ema


def forge(path, change):
    """Change a file's header and drop its checksums."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for checksum in ("xxh3", "xxh3_of_header"):
        del header["__metadata__"][checksum]
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def tensor(**changes):
    return lambda header: header[NAME].update(changes)


def metadata(**changes):
    return lambda header: header["__metadata__"].update(changes)


SNAPSHOTS = {
    "a negative offset": tensor(data_offsets=[-12800, 0]),
    "overlapping tensors": lambda h: h[NAME].update(data_offsets=h["1.weight"]["data_offsets"]),
    "three offsets": tensor(data_offsets=[0, 1, 2]),
    "fractional offsets": tensor(data_offsets=[0.0, 12800.0]),
    "an offset above 2**64": tensor(data_offsets=[2**64, 2**64 + 12800]),
    "a negative shape": tensor(shape=[-80, -80]),
    "a fractional shape": tensor(shape=[80.0, 80.0]),
    "a nested shape": tensor(shape=[[80], [80]]),
    "a huge shape": tensor(shape=[10**30, 0], data_offsets=[0, 0]),
    "a list as dtype": tensor(dtype=["F16"]),
    "integers as weights": tensor(dtype="I16"),
    "a missing tensor": lambda h: h.pop(NAME) and None,
    "an extra tensor": lambda h: h.update(extra=dict(h[NAME])),
    "codes without scales": lambda h: h.update({f"{NAME}#codes": h.pop(NAME)}),
    "a list as header": lambda h: b"[1, 2]",
    "a number as header": lambda h: b"7",
    "deep lists": lambda h: b"[" * 200_000,
    "deep objects": lambda h: b'{"a":' * 200_000,
    "invalid UTF-8": lambda h: b'{"\xff\xfe": 1}',
    "metadata of another form": lambda h: h.update(__metadata__=[]),
    "null as metadata": lambda h: h.update(__metadata__=None),
    "no run": lambda h: h["__metadata__"].pop("run") and None,
    "no step": lambda h: h["__metadata__"].pop("step") and None,
    **{f"step {step}": metadata(step=step) for step in
       ("0", "-1", "NaN", "1e400", "Infinity", '"3"', "true", "[" * 100_000, "os.system")},
    **{f"sigma {sigma}": metadata(sigma=sigma) for sigma in ("-1", "0", "NaN", "5", "[]")},
    "a number as followed": metadata(followed="3"),
    "nested followed": metadata(followed="[[1]]"),
    "an unknown followed": metadata(followed='["nothing"]'),
    "a number as tied": metadata(tied="3"),
    "a cycle of ties": metadata(tied='{"a": "b", "b": "a"}'),
    "checksums that are no JSON": metadata(xxh3="{", xxh3_of_header="0" * 16),
}  # fmt: skip


@pytest.mark.parametrize("change", SNAPSHOTS.values(), ids=SNAPSHOTS.keys())
def test_a_forged_snapshot_is_an_error(ema, change):
    path = max(ema.folder.glob("ema-*"))
    forge(path, change)
    with pytest.raises(ValueError, match=path.name):
        synthesize(ema.folder, 0.07)


STATES = {
    "another dtype": lambda h: h[f"0/{NAME}"].update(dtype="I32"),
    "another shape": lambda h: h[f"0/{NAME}"].update(shape=[6400]),
    "another name": lambda h: h.update({"0/other": h.pop(f"0/{NAME}")}),
    **{f"step {step}": metadata(step=step) for step in ("-1", "1e400", '"3"', "null")},
    "sigmas that are no JSON": metadata(sigmas="os.system"),
    "deep sigmas": metadata(sigmas="[" * 100_000),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES.keys())
def test_a_forged_state_is_an_error_and_changes_nothing(ema, change):
    path = ema.folder / "state.safetensors"
    forge(path, change)
    fresh = PostHocEMA(model(), ema.folder)
    before = fresh.state_dict()
    with pytest.raises(ValueError, match=path.name):
        fresh.load()
    after = fresh.state_dict()
    assert (after["step"], after["run"]) == (before["step"], before["run"])


def test_a_file_that_only_lacks_its_checksums_is_read(ema):
    wanted = synthesize(ema.folder, 0.07)
    forge(max(ema.folder.glob("ema-*")), lambda header: None)
    forge(ema.folder / "state.safetensors", lambda header: None)
    found = synthesize(ema.folder, 0.07)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    PostHocEMA(model(), ema.folder).load()
