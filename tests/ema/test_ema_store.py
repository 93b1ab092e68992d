"""Averages in a store: equal to the bit, with at most two tensors in memory."""

import pytest
import torch
from drifting import drift
from torch import nn

import memlab
from memlab.ema import PostHocEMA, find_snapshots
from memlab.offload import DiskStore, HostStore
from memlab.offload.stores import StoreError

WIDTH, LAYERS = 64, 5
WEIGHT = 4 * WIDTH * WIDTH  # bytes of one layer's average


def a_model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def averages(ema):
    return [tensor.clone() for average in ema.averages.values() for tensor in average.values()]


def run(folder, steps=(1, 2, 5, 9), dtype=torch.float32, **settings):
    model = a_model(dtype)
    ema = PostHocEMA(model, folder, snapshot_every=5, **settings)
    for step in steps:
        drift(model, step)
        ema.update(step)
    return ema


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", [DiskStore, HostStore])
def test_stored_averages_equal_those_in_memory_to_the_bit(tmp_path, store, dtype):
    here, away = (
        run(tmp_path / "here", dtype=dtype),
        run(tmp_path / "away", dtype=dtype, store=store()),
    )
    assert here.nbytes == away.nbytes == 2 * LAYERS * WEIGHT
    assert all(map(torch.equal, averages(here), averages(away)))
    pairs = zip(find_snapshots(here.folder), find_snapshots(away.folder), strict=True)
    for one, other in pairs:
        for name, shape in one.shapes.items():
            numbers = shape[0] * shape[1]
            assert torch.equal(one.read(name, 0, numbers), other.read(name, 0, numbers))


def test_at_most_two_tensors_are_in_memory_and_none_between_updates(tmp_path):
    store, model = DiskStore(), a_model()
    kept = []
    trace = memlab.measure(
        lambda: kept.append(PostHocEMA(model, tmp_path, store=store)), model=model
    )
    weights = LAYERS * WEIGHT
    assert trace.live_bytes == weights
    assert trace.peak_bytes <= weights + 2 * WEIGHT
    ema = kept[0]
    ema.update(1)
    store.traffic.reset()
    trace = memlab.measure(lambda: ema.update(2), model=model)
    assert trace.live_bytes == weights
    assert trace.peak_bytes == weights + 2 * WEIGHT
    moved = 2 * LAYERS * WEIGHT
    assert (store.traffic.read, store.traffic.written) == (moved, moved)
    assert store.traffic.prefetched == moved - 2 * WEIGHT  # all except each average's first tensor


def test_a_dry_run_has_the_bytes_of_the_real_one(tmp_path):
    def measured():
        model = a_model()
        ema = PostHocEMA(model, tmp_path / "none", store=DiskStore())
        ema.update(1)
        return memlab.measure(lambda: ema.update(2), model=model).peak_bytes

    real = measured()
    with memlab.dry_run():
        assert measured() == real


def test_a_run_is_resumed_from_a_file_and_from_a_dict(tmp_path):
    whole = run(tmp_path / "whole", steps=(1, 2, 5, 9, 12), store=DiskStore())
    half = run(tmp_path / "half", store=DiskStore())
    model = a_model()
    for step in (1, 2, 5, 9):
        drift(model, step)
    drift(model, 12)
    for how in ("file", "dict", "from memory"):
        ema = PostHocEMA(
            model, tmp_path / "half", store=None if how == "from memory" else DiskStore()
        )
        if how == "file":
            ema.load(half.save())
        else:
            ema.load_state_dict(half.state_dict())
        ema.update(12)
        assert all(map(torch.equal, averages(ema), averages(whole))), how


def test_two_trackers_cannot_share_a_store(tmp_path):
    store = DiskStore()
    first = PostHocEMA(a_model(), tmp_path / "a", store=store)
    with pytest.raises(StoreError, match="use a separate store for each"):
        PostHocEMA(a_model(), tmp_path / "b", store=store)
    del first
    PostHocEMA(a_model(), tmp_path / "b", store=store)


def test_sharded_weights_are_an_error_that_names_them(tmp_path):
    model = a_model()
    ema = PostHocEMA(model, tmp_path)
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"got '0\.weight' without its elements.* before update"):
        ema.update(1)


def test_anything_else_than_a_store_is_an_error(tmp_path):
    with pytest.raises(TypeError, match=r"as the store; give a memlab\.offload\.DiskStore\(\)"):
        PostHocEMA(a_model(), tmp_path, store=str(tmp_path))


def test_an_average_keeps_its_tensors(tmp_path):
    average = PostHocEMA(a_model(), tmp_path, store=DiskStore()).averages[0.05]
    assert list(average) == [f"{n}.weight" for n in range(LAYERS)]
    assert len(average) == LAYERS
    with pytest.raises(KeyError, match="nobody"):
        average["nobody"]
    with pytest.raises(TypeError, match="keeps all of its tensors"):
        del average["0.weight"]
