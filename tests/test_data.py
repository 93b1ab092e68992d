"""The bytes against small libraries on disk; the batches against slices of a counting tensor."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from memlab import data
from memlab.data import batches, source_bytes

COUNTING = torch.arange(100, dtype=torch.uint8)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """An empty folder in place of torch's source."""
    monkeypatch.setattr(data, "SOURCE", tmp_path)
    monkeypatch.setattr(data, "BUILD", tmp_path / "version.py")
    return tmp_path


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def text_of(data):
    return bytes(data.tolist()).decode()


def test_the_bytes_are_the_source_of_this_torch():
    first = Path(torch.__file__).with_name("_VF.py").read_bytes()
    assert first in bytes(source_bytes("256 KiB").tolist())


def test_the_bytes_are_one_row_of_the_wanted_length():
    data = source_bytes("64 KiB")
    assert (data.shape, data.dtype) == ((2**16,), torch.uint8)


def test_a_smaller_limit_is_the_beginning_of_a_larger_one():
    assert torch.equal(source_bytes(300_000)[:100_000], source_bytes(100_000))


def test_files_come_in_the_order_of_their_names_and_folders_after_files(library):
    write(library / "z", b="7", a="6")
    write(library / "email", b="5", a="4")
    write(library, d="3", b="1", c="2", a="0")
    assert text_of(source_bytes("1 KiB")) == "01234567"


def test_the_build_file_caches_and_other_files_are_skipped(library):
    write(library, a="ye", version="2.13.0+cpu")
    write(library / "email", version="s")
    write(library / "__pycache__", a="no")
    write(library / "email" / "__pycache__", a="no")
    (library / "a.pyc").write_text("no")
    (library / "LICENSE.txt").write_text("no")
    assert text_of(source_bytes("1 KiB")) == "yes"


def test_the_last_file_is_cut_at_the_limit(library):
    write(library, a="aaaa", b="bbbb")
    assert text_of(source_bytes(6)) == "aaaabb"


def test_files_beyond_the_limit_are_not_opened(library):
    write(library, a="aaaa")
    (library / "b.py").symlink_to(library / "missing")
    assert text_of(source_bytes(4)) == "aaaa"
    with pytest.raises(FileNotFoundError):
        source_bytes(5)


def test_a_small_library_gives_all_its_bytes(library):
    write(library, a="aaaa")
    assert text_of(source_bytes("1 GiB")) == "aaaa"


def test_a_torch_without_source_is_an_error_that_names_the_folder(library):
    with pytest.raises(ValueError, match=f"found no .py file in {library}.*; install torch"):
        source_bytes(1)


def test_a_limit_of_zero_is_an_error():
    with pytest.raises(ValueError, match="got a limit of '0 B'; give at least one byte"):
        source_bytes("0 B")


def test_a_target_is_the_next_token():
    tokens, targets = next(batches(COUNTING, batch=5, seq_len=7, seed=0))
    assert torch.equal(targets, tokens + 1)


def test_a_row_is_contiguous_in_the_data():
    tokens, _ = next(batches(COUNTING, batch=5, seq_len=7, seed=0))
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(7))


def test_tokens_and_targets_take_8_bytes_per_token_each():
    for tensor in next(batches(COUNTING, batch=5, seq_len=7, seed=0)):
        assert (tensor.shape, tensor.dtype) == ((5, 7), torch.int64)
        assert tensor.untyped_storage().nbytes() == 8 * 5 * 7


def test_every_start_occurs_up_to_the_one_whose_last_target_is_the_last_byte():
    stream = batches(COUNTING[:10], batch=4, seq_len=7, seed=0)
    starts = {int(row[0]) for tokens, _ in islice(stream, 50) for row in tokens}
    assert starts == {0, 1, 2}


def test_the_same_seed_gives_the_same_batches_and_another_others():
    first, again, other = (
        torch.stack([tokens for tokens, _ in islice(batches(COUNTING, 5, 7, seed), 10)])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_global_generator_is_not_used():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    next(batches(COUNTING, 5, 7, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_differ_and_are_endless():
    drawn = [tokens for tokens, _ in islice(batches(COUNTING, 5, 7, 0), 1000)]
    assert len(drawn) == 1000
    assert not torch.equal(drawn[0], drawn[1])


def test_data_of_one_window_gives_that_window():
    tokens, targets = next(batches(COUNTING[:8], batch=1, seq_len=7, seed=0))
    assert (tokens.tolist(), targets.tolist()) == ([[*range(7)]], [[*range(1, 8)]])


def test_data_that_is_too_short_is_an_error_at_the_call():
    wanted = "got 7 tokens of data, wanted at least 8 for seq_len=7 .*; read more data or shorten"
    with pytest.raises(ValueError, match=wanted):
        batches(COUNTING[:7], batch=1, seq_len=7, seed=0)


@pytest.mark.parametrize("data", [COUNTING.view(10, 10), COUNTING.float()])
def test_anything_else_than_1_d_integers_is_an_error(data):
    with pytest.raises(ValueError, match=r"got data of shape .* give a 1-D tensor of integers"):
        batches(data, batch=1, seq_len=7, seed=0)


@pytest.mark.parametrize(("batch", "seq_len"), [(0, 7), (1, 0)])
def test_an_empty_batch_is_an_error(batch, seq_len):
    with pytest.raises(ValueError, match=f"got batch={batch} and seq_len={seq_len}; give at least"):
        batches(COUNTING, batch, seq_len, seed=0)
