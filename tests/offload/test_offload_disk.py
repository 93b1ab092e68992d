"""Disk stores: committed values survive, or an error explains why not."""

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
import zlib

import pytest
import torch
from torch import nn

from memlab.offload import DiskStore, HostStore, OffloadedOptimizer, StoreError, disk

THIS = sys.modules[__name__]  # the owner of claimed stores


@pytest.fixture
def folder(tmp_path):
    """A folder with a commit of step 3: two tensors."""
    with DiskStore(tmp_path / "state") as store:
        store.put("a", torch.arange(1000.0), lasting=True, about={"name": "a"})
        store.put("b", [torch.ones(3), torch.zeros(2)], lasting=True)
        store.put("c", torch.ones(5))
        store.claim("training", "ours", THIS)
        store.commit(3, {"seed": 5})
    return tmp_path / "state"


def is_intact(folder):
    """Return whether the commit is unchanged."""
    with DiskStore(folder) as store:
        return (
            (store.step, store.notes, store.keys()) == (3, {"seed": 5}, ["a", "b"])
            and store.about("a") == {"name": "a"}
            and torch.equal(store.get("a"), torch.arange(1000.0))
            and [t.tolist() for t in store.get("b")] == [[1, 1, 1], [0, 0]]
        )


def file_of(folder, key):
    content = json.loads((folder / "manifest.json").read_text().split("\n")[1])
    return folder / content["entries"][key]["file"]


# ------------------------------------------------------------------ commits


def test_the_next_start_has_the_commit_without_values_that_are_not_lasting(folder):
    assert is_intact(folder)


def test_the_next_start_drops_values_and_files_after_the_commit(folder):
    with DiskStore(folder) as store:
        store.put("a", torch.zeros(1000), lasting=True)
        store.put("d", torch.zeros(1000), lasting=True)
        store.delete("b")
        store.flush()
        assert len(list(folder.glob("state.*"))) == 4
    assert is_intact(folder)
    assert len(list(folder.glob("state.*"))) == 2


def test_a_rollback_drops_values_after_the_commit(folder):
    with DiskStore(folder) as store:
        store.put("a", torch.zeros(1000), lasting=True)
        store.prefetch("a")
        store.delete("b")
        store.rollback()
        assert torch.equal(store.get("a"), torch.arange(1000.0))
        assert store.keys() == ["a", "b"]
    assert is_intact(folder)


def test_a_second_commit_replaces_the_first(folder):
    with DiskStore(folder) as store:
        store.put("a", torch.zeros(2), lasting=True)
        store.delete("b")
        store.commit(4)
    with DiskStore(folder) as store:
        assert (store.step, store.keys()) == (4, ["a"])
    assert len(list(folder.glob("state.*"))) == 1


def test_other_files_in_the_folder_are_kept(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "state.of.affairs").write_text("mine")
    assert is_intact(folder)
    assert (folder / "notes.txt").exists()
    assert (folder / "state.of.affairs").exists()


# ------------------------------------------------------------------ errors


def test_a_store_in_use_by_this_process_is_refused(folder):
    with DiskStore(folder), pytest.raises(StoreError, match="is in use, by another process"):
        DiskStore(folder)
    assert is_intact(folder)


def test_a_store_in_use_by_another_process_is_refused(folder):
    locking = (
        "import sys, filelock\n"
        "lock = filelock.FileLock(sys.argv[1]); lock.acquire()\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", locking, str(folder / "lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(StoreError, match="is in use, by another process"):
            DiskStore(folder)
        other.stdin.close()
    assert is_intact(folder)


def test_a_truncated_file_is_detected_at_the_start(folder):
    path = file_of(folder, "a")
    os.truncate(path, 3999)
    with pytest.raises(StoreError, match=r"'a' in .* is cut short: got 3,999 bytes of 4,000"):
        DiskStore(folder)
    path.unlink()
    with pytest.raises(StoreError, match=r"'a' should be in .*, which is missing; restore"):
        DiskStore(folder)


def test_a_file_truncated_later_is_detected_on_read(folder):
    with DiskStore(folder) as store:
        os.truncate(file_of(folder, "a"), 100)
        with pytest.raises(StoreError, match=r"'a' in .* is cut short: got 100 bytes of 4,000"):
            store.get("a")
        file_of(folder, "b").unlink()
        with pytest.raises(StoreError, match=r"'b' should be in .*, which is missing; restore"):
            store.get("b")


def test_a_closed_store_raises_an_error(folder):
    store = DiskStore(folder)
    committed = store.step
    store.close()
    for use in (
        lambda: store.get("a"),
        lambda: store.prefetch("b"),
        lambda: store.put("c", torch.ones(10)),
        lambda: store.commit(7),
    ):
        with pytest.raises(StoreError, match=r"the store in .* is closed; make another DiskStore"):
            use()
    store.delete("a")  # still allowed, as in late garbage collection
    store.flush()
    store.close()
    assert is_intact(folder)
    with DiskStore(folder) as again:
        assert again.step == committed


@pytest.mark.parametrize("byte", [0, 1999, 3999])
def test_a_flipped_bit_is_detected(folder, byte):
    path = file_of(folder, "a")
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    with DiskStore(folder) as store:
        with pytest.raises(StoreError, match=r"'a' in .* is damaged: its checksum is "):
            store.get("a")
        assert torch.equal(store.get("b")[0], torch.ones(3))


@pytest.mark.parametrize("damage", [lambda t: t.replace('"step": 3', '"step": 4'),
                                    lambda t: t[:-20], lambda t: ""])  # fmt: skip
def test_a_damaged_manifest_is_detected(folder, damage):
    path = folder / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(StoreError, match="is damaged: its checksum differs"):
        DiskStore(folder)


def forge(folder, change):
    """Change the manifest's content and write a valid checksum."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text().split("\n")[1])
    content = change(content) or content
    text = json.dumps(content)
    path.write_text(f"{zlib.crc32(text.encode())}\n{text}\n")


def entry(**changes):
    return lambda content: content["entries"]["a"].update(changes)


def content(**changes):
    return lambda content: content.update(changes)


FORGERIES = {
    "a file outside": entry(file="../victim.000001"),
    "an absolute file": entry(file="/victim.000001"),
    "the manifest as a file": entry(file="manifest.json"),
    "a file name without end": entry(file="state." + "9" * 1000),
    "a number as a file": entry(file=7),
    "two values in one file": lambda c: c["entries"]["a"].update(file=c["entries"]["b"]["file"]),
    "no file": lambda c: c["entries"]["a"].pop("file"),
    "no checksum": entry(crc32=None),
    "a negative size": entry(pieces=[[[-1000], "float32", 0]]),
    "a fractional size": entry(pieces=[[[1000.0], "float32", 0]]),
    "a true size": entry(pieces=[[[True], "float32", 0]]),
    "a negative offset": entry(pieces=[[[1000], "float32", -64]]),
    "an offset far away": entry(pieces=[[[1000], "float32", 2**40]]),
    "overlapping tensors": entry(pieces=[[[900], "float32", 0], [[100], "float32", 64]]),
    "a function as a dtype": entry(pieces=[[[1000], "load", 0]]),
    "an unknown dtype": entry(pieces=[[[1000], "float33", 0]]),
    "no tensors": entry(pieces=[]),
    "pieces of another form": entry(pieces=[3]),
    "a list as an entry": lambda c: c["entries"].update(a=[]),
    "entries of another form": content(entries=[]),
    "a negative step": content(step=-5),
    "an endless step": content(step=10**30),
    "a fractional step": content(step=2.5),
    "no step": lambda c: c.pop("step"),
    "no notes": lambda c: c.pop("notes"),
    "claims of another form": content(claims=[["a"]]),
    "a number as a claim": content(claims={"training": 5}),
    "another format": content(format="other"),
    "a list": lambda c: [c],
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_manifest_is_an_error_and_deletes_nothing(folder, change):
    victim = folder.parent / "victim.000001"
    victim.write_bytes(bytes(4000))
    forge(folder, change)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(StoreError, match=r"was not written by a DiskStore: it has "):
        DiskStore(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert victim.exists()


@pytest.mark.parametrize(
    "notes", [None, {}, {"groups": 3}, {"groups": []}, {"groups": [3]}, {"groups": [{}, {}]}]
)
def test_an_optimizer_refuses_forged_notes(tmp_path, notes):
    def training():
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        return OffloadedOptimizer(optimizer, DiskStore(tmp_path / "state"))

    offloaded = training()
    offloaded.commit()
    offloaded.store.close()
    forge(tmp_path / "state", content(notes=notes))
    again = training()
    with pytest.raises(StoreError, match="the last commit is not a state of this optimizer"):
        again.resume()
    with pytest.raises(StoreError, match="the last commit is not a state of this optimizer"):
        again.step()


def test_the_store_of_another_training_is_refused(folder):
    with DiskStore(folder) as store:
        store.claim("training", "ours", THIS)
        with pytest.raises(StoreError, match="holds a training of ours, wanted one of theirs"):
            store.claim("training", "theirs", THIS)
        with pytest.raises(StoreError, match="holds a training of something else"):
            store.claim("optimizer", "theirs", THIS)
    assert is_intact(folder)


@pytest.mark.parametrize("kind", [DiskStore, HostStore])
def test_two_optimizers_cannot_share_a_store(kind):
    store = kind()
    first, second = (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2))
    kept = OffloadedOptimizer(first, store)
    with pytest.raises(StoreError, match="has the optimizer of another OffloadedOptimizer; use"):
        OffloadedOptimizer(second, store)
    kept.remove()
    del kept
    OffloadedOptimizer(second, store)


def test_a_path_instead_of_a_store_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"pass a memlab\.offload\.DiskStore\(folder\)"):
        OffloadedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), str(tmp_path))


@pytest.mark.parametrize("name", ["state.000123", "manifest.json", ".manifest.7.json"])
def test_a_folder_with_foreign_files_is_refused_and_unchanged(tmp_path, name):
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(StoreError, match=f"has a {name} that no store has written; pass an empty"):
        DiskStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "somebody's"


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "state").write_text("somebody's")
    with pytest.raises(StoreError, match="is a file; pass a folder"):
        DiskStore(tmp_path / "state")


@pytest.fixture
def limit_file_size():
    """Return a function that sets the largest file that this process may write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_last_commit_intact(folder, limit_file_size):
    with DiskStore(folder) as store:
        limit_file_size(2000)
        store.put("a", torch.zeros(1000), lasting=True)
        with pytest.raises(StoreError, match=r"no room left; step 3 is intact. Free some space"):
            store.commit(4)
        with pytest.raises(StoreError, match="could not write 'a'"):
            store.commit(4)  # a second attempt fails too
        assert len(list(folder.glob("state.*"))) == 2  # no partial file
        limit_file_size(10**6)
        store.rollback()
        assert torch.equal(store.get("a"), torch.arange(1000.0))
    assert is_intact(folder)


def test_a_disk_too_full_for_the_manifest_leaves_the_last_commit_intact(folder, limit_file_size):
    with DiskStore(folder) as store:
        store.put("a", torch.zeros(2), lasting=True)
        store.flush()
        limit_file_size(100)
        with pytest.raises(StoreError, match=r"could not write the manifest .* step 3 is intact"):
            store.commit(4)
        limit_file_size(10**6)
    assert is_intact(folder)


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "there is no room left"),
                                               (errno.EIO, "Input/output error")])  # fmt: skip
def test_errors_of_the_disk_are_reported(folder, monkeypatch, number, words):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    with DiskStore(folder) as store:
        monkeypatch.setattr(disk.os, "write", fails)
        store.put("a", torch.zeros(1000), lasting=True)
        with pytest.raises(StoreError, match=f"{words}; step 3 is intact"):
            store.flush()
        monkeypatch.undo()
        store.rollback()
    assert is_intact(folder)


def test_a_store_that_cannot_be_opened_names_its_folder(tmp_path, limit_file_size):
    limit_file_size(0)
    with pytest.raises(StoreError, match=r"could not open a store in .*state: .*; free some space"):
        DiskStore(tmp_path / "state")
    limit_file_size(10**6)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"could not open a store in .*file.*state"):
        DiskStore(tmp_path / "file" / "state")
    with DiskStore(tmp_path / "state") as store:  # nothing is left locked
        store.put("a", torch.ones(3))


# ------------------------------------------------------------------ failed steps


def a_training(store, hidden=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, OffloadedOptimizer(inner, store, sub_group=100, weights=True)


def a_step(model, optimizer):
    optimizer.zero_grad()
    torch.manual_seed(optimizer.steps)
    model(torch.randn(3, 10)).square().sum().backward()
    optimizer.step()


def weights_of(model):
    return [weight.detach().clone() for weight in model.parameters()]


def test_resume_undoes_a_step_that_fails_on_a_full_disk(tmp_path, limit_file_size):
    with DiskStore(tmp_path, buffers=1) as store:
        model, optimizer = a_training(store)
        a_step(model, optimizer)
        before = weights_of(model)
        limit_file_size(2000)
        with pytest.raises(StoreError, match="no room left; step 1 is intact"):
            a_step(model, optimizer)
        with pytest.raises(StoreError, match=r"a step failed \(StoreError\).* call resume\(\)"):
            optimizer.step()
        limit_file_size(10**6)
        assert optimizer.resume() == 1
        assert all(map(torch.equal, weights_of(model), before))
        a_step(model, optimizer)
    model, optimizer = a_training(DiskStore())
    after_two = [a_step(model, optimizer) for _ in range(2)] and weights_of(model)
    with DiskStore(tmp_path) as store:
        model, optimizer = a_training(store)
        assert optimizer.resume() == 2
        assert all(map(torch.equal, weights_of(model), after_two))


def test_a_folder_with_a_training_must_be_resumed(tmp_path):
    with DiskStore(tmp_path) as store:
        a_step(*a_training(store))
    with DiskStore(tmp_path) as store:
        model, optimizer = a_training(store)
        with pytest.raises(StoreError, match=r"holds step 1 of this training; call resume\(\)"):
            a_step(model, optimizer)


def test_a_folder_with_the_training_of_another_model_is_refused(tmp_path):
    with DiskStore(tmp_path) as store:
        a_step(*a_training(store))
    with DiskStore(tmp_path) as store:
        with pytest.raises(StoreError, match=r"AdamW of 481 weights .* wanted .* 601"):
            a_training(store, hidden=50)
        assert store.step == 1


def test_commit_every_makes_commits_rarer_than_steps(tmp_path):
    with DiskStore(tmp_path) as store:
        model, optimizer = a_training(store)
        optimizer.commit_every = 3
        weights = []
        for _ in range(5):
            a_step(model, optimizer)
            weights.append(weights_of(model))
        store.flush()
        sizes = sum(path.stat().st_size for path in tmp_path.glob("state.*"))
        one = sum(store._record(key).extent for key in list(store.keys()))
        assert sizes == 2 * one  # the third step's and the fifth's
    with DiskStore(tmp_path) as store:
        model, optimizer = a_training(store)
        assert optimizer.resume() == 3
        assert all(map(torch.equal, weights_of(model), weights[2]))


# ------------------------------------------------------------------ damaged files and leftovers


def test_verify_false_skips_the_checksums(tmp_path):
    with DiskStore(tmp_path / "store") as store:
        store.put("a", torch.arange(100.0), lasting=True)
        store.commit(1)
    [path] = (tmp_path / "store").glob("state.*")
    content = bytearray(path.read_bytes())
    content[4 * 50] ^= 1
    path.write_bytes(content)
    with DiskStore(tmp_path / "store") as store, pytest.raises(StoreError, match="is damaged: its"):
        store.get("a")
    with DiskStore(tmp_path / "store", verify=False) as store:
        assert (store.get("a") == torch.arange(100.0)).sum() == 99


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_the_next_store_removes_the_temporary_folder_of_a_killed_process(tmp_path, monkeypatch):
    lasting = DiskStore(tmp_path / "memlab-mine")  # has the prefix, but is not temporary
    lasting.close()
    code = (
        "import os, signal, torch; from memlab.offload import DiskStore\n"
        "store = DiskStore(); store.put('a', torch.ones(3)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with DiskStore() as store:
        store.put("a", torch.ones(3))
        assert sorted(tmp_path.iterdir()) == sorted([store.folder, tmp_path / "memlab-mine"])
    assert list(tmp_path.iterdir()) == [tmp_path / "memlab-mine"]
