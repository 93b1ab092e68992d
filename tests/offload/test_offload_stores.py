"""Stores: values come back bit for bit, and traffic is counted exactly."""

import gc

import pytest
import torch
from torch import nn

import memlab
from memlab.offload import DiskStore, HostStore, StoreError
from memlab.offload.records import ALIGNMENT, Record, contiguous_tensors, make_record
from memlab.offload.stores import was_modified

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(params=[HostStore, DiskStore])
def store(request):
    """One store of each kind; disk stores use temporary folders."""
    return request.param()


# ------------------------------------------------------------------ records


def test_each_tensor_of_a_record_starts_at_a_multiple_of_the_alignment():
    tensors = [torch.empty(3), torch.empty(0), torch.empty(17, dtype=torch.uint8), torch.empty(1)]
    record = make_record(tensors, tensors)
    assert [spec.offset for spec in record.specs] == [0, 64, 64, 128]
    assert ALIGNMENT == 64
    assert (record.bytes, record.extent) == (12 + 17 + 4, 132)


def test_a_record_survives_conversion_to_plain_data():
    tensors = [torch.empty(3, 2, dtype=torch.bfloat16), torch.empty((), dtype=torch.int64)]
    record = make_record(tensors, tensors)
    assert Record.from_json(record.to_json()) == record


def test_a_non_contiguous_tensor_is_made_contiguous():
    transposed = torch.arange(6.0).view(2, 3).T
    (tensor,) = contiguous_tensors(transposed)
    assert tensor.is_contiguous()
    assert torch.equal(tensor, transposed)


# ------------------------------------------------------------------ put and get


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_comes_back_bit_for_bit(store, dtype):
    tensor = torch.randint(2, (7, 3)).to(dtype)
    store.put("x", tensor)
    back = store.get("x")
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_special_values_come_back_bit_for_bit(store):
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    store.put("x", tensor)
    assert torch.equal(store.get("x").view(torch.int32), tensor.view(torch.int32))


def test_lists_and_empty_tensors_come_back(store):
    tensors = [torch.randn(5), torch.empty(0, 4), torch.randn(2, 2, dtype=torch.float64)]
    store.put("xs", tensors)
    store.put("none", [])
    back = store.get("xs")
    assert [b.shape for b in back] == [t.shape for t in tensors]
    assert all(map(torch.equal, back, tensors))
    assert store.get("none") == []


def test_only_the_elements_of_a_view_are_stored(store):
    whole = torch.arange(12.0).view(3, 4)
    store.put("column", whole[:, 1])
    assert torch.equal(store.get("column"), torch.tensor([1.0, 5.0, 9.0]))
    assert store.traffic.written == 12


def test_put_copies_the_current_values(store):
    tensor = torch.ones(1000)
    for number in range(5):
        store.put(f"{number}", tensor.fill_(number))
    tensor.fill_(-1)
    for number in range(5):
        assert torch.equal(store.get(f"{number}"), torch.full((1000,), float(number)))


def test_a_second_put_replaces_the_first(store):
    store.put("x", torch.zeros(3))
    store.prefetch("x")
    store.put("x", torch.ones(4))
    assert torch.equal(store.get("x"), torch.ones(4))
    assert store.nbytes == 16


def test_modifying_a_loaded_tensor_does_not_change_the_store(store):
    store.put("x", torch.zeros(3))
    store.get("x").fill_(5)
    assert torch.equal(store.get("x"), torch.zeros(3))


def test_values_can_be_loaded_into_given_tensors(store):
    store.put("x", torch.arange(4.0))
    here = torch.empty(4)
    version = here._version
    store.prefetch("x", [here])
    assert store.get("x") is here
    assert torch.equal(here, torch.arange(4.0))
    assert here._version == version  # bypasses autograd


def test_a_given_tensor_of_another_shape_is_refused(store):
    store.put("x", torch.arange(4.0))
    with pytest.raises(ValueError, match=r"got tensors of .*\(5,\).* wanted .*\(4,\)"):
        store.get("x", [torch.empty(5)])


def test_deleted_keys_are_gone(store):
    for key in "abc":
        store.put(key, torch.ones(2))
    store.delete("b")
    store.discard("c")
    store.delete("never there")
    assert store.keys() == ["a"]
    assert "a" in store
    assert "b" not in store
    assert store.nbytes == 8
    with pytest.raises(KeyError, match="the store has no 'b'; put it before"):
        store.get("b")


# ------------------------------------------------------------------ traffic and memory


def test_traffic_counts_each_move_once(store):
    store.put("x", [torch.empty(10), torch.empty(1, dtype=torch.uint8)])
    assert (store.traffic.written, store.traffic.read, store.traffic.prefetched) == (41, 0, 0)
    store.prefetch("x")
    store.prefetch("x")  # already prefetched
    assert (store.traffic.read, store.traffic.prefetched) == (41, 41)
    store.get("x")
    assert store.traffic.read == 41
    store.get("x")
    assert (store.traffic.read, store.traffic.prefetched) == (82, 41)
    assert str(store.traffic) == "41 B written, 82 B read, 41 B prefetched"
    store.traffic.reset()
    assert (store.traffic.written, store.traffic.read, store.traffic.prefetched) == (0, 0, 0)


def test_a_disk_store_frees_metered_memory():
    store, kept = DiskStore(), []

    def step():
        tensor = torch.ones(1000)
        kept.append(tensor)
        store.put("x", tensor)
        kept.clear()
        del tensor

    trace = memlab.measure(step)
    assert (trace.live_bytes, trace.peak_bytes) == (0, 4000)


def test_without_a_gpu_a_host_store_is_metered_memory():
    store = HostStore()
    trace = memlab.measure(lambda: store.put("x", torch.ones(1000)))
    assert (trace.live_bytes, trace.peak_bytes) == (4000, 8000)


def test_a_prefetched_tensor_uses_memory_from_the_prefetch_on():
    store = DiskStore()
    store.put("x", torch.ones(1000))
    assert memlab.measure(lambda: store.prefetch("x")).live_bytes == 4000


@pytest.mark.parametrize("buffers", [1, 3])
def test_a_disk_store_has_at_most_its_number_of_buffers(buffers):
    store = DiskStore(buffers=buffers)
    for number in range(10):
        store.put(f"{number}", torch.full((1000,), float(number)))
        assert store.buffer_bytes <= buffers * 4000
    store.flush()
    assert store.buffer_bytes == buffers * 4000
    store.put("larger", torch.ones(2000))
    assert store.buffer_bytes == (buffers - 1) * 4000 + 8000
    assert all(store.get(f"{number}")[0] == number for number in range(10))


@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_zero_buffers_are_refused(kind):
    with pytest.raises(ValueError, match="got 0 buffers; pass at least 1"):
        kind(buffers=0)


def test_a_host_store_lends_and_keeps_tensors_without_copying():
    store, tensor = HostStore(), torch.ones(3)
    store.keep("x", [tensor])
    assert store.lend("x")[0] is tensor
    assert store.traffic.written == store.traffic.read == 0
    assert torch.equal(store.get("x")[0], tensor)


# ------------------------------------------------------------------ dry runs


def test_a_dry_run_counts_traffic_and_moves_nothing(store, tmp_path):
    with memlab.dry_run():
        store.put("x", torch.ones(1000))
        assert store.keys() == ["x"]
        back = store.get("x")
        assert back.shape == (1000,)
        trace = memlab.measure(lambda: store.prefetch("x"))
    assert trace.live_bytes == 4000
    assert (store.traffic.written, store.traffic.read) == (4000, 8000)
    assert store.nbytes == 0
    if isinstance(store, DiskStore):
        assert store._folder is None


def test_a_dry_run_does_not_replace_real_values(store):
    store.put("x", torch.ones(3))
    with memlab.dry_run():
        store.put("x", torch.zeros(3))
        store.put("y", torch.zeros(3))
    store.delete("y")
    assert torch.equal(store.get("x"), torch.ones(3))


def test_a_value_put_only_in_a_dry_run_cannot_be_loaded(store):
    with memlab.dry_run():
        store.put("x", torch.zeros(3))
    with pytest.raises(KeyError, match="was put in a dry run, which has no values"):
        store.get("x")


# ------------------------------------------------------------------ modified sources


def test_a_modified_source_is_detected():
    tensor = torch.ones(3)
    sources = [(tensor, tensor._version)]
    assert not was_modified(sources)
    tensor.mul_(2)
    assert was_modified(sources)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_from_a_gpu_tensors_come_back_bit_for_bit_and_modified_ones_raise(kind):
    store = kind()
    tensor = torch.randn(2**20, device="cuda")
    store.put("x", tensor)
    store.put("y", tensor)
    tensor.mul_(2)
    for key in "xy":
        with pytest.raises(StoreError, match="was written to while it was copied"):
            store.get(key)
    store.put("z", tensor)
    store.prefetch("z")
    assert torch.equal(store.get("z"), tensor)


# ------------------------------------------------------------------ temporary folders


def test_a_temporary_folder_is_removed_with_its_store():
    store = DiskStore()
    store.put("x", nn.Parameter(torch.ones(2)))
    folder = store.folder
    assert folder.exists()
    del store
    gc.collect()
    assert not folder.exists()
