"""A script saves a checkpoint in a dry run, moves it, and loads it; the machine keeps none."""

import os
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import memlab
from memlab.dry_runs import known_values
from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from memlab.scripts.saved_files import redirected
from memlab.world.isolation import Isolation

safetensors_torch = pytest.importorskip("safetensors.torch")

BEGINNING = """
import os, shutil, torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(400, 500), nn.BatchNorm1d(500), nn.Linear(500, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 400, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SAVED = {
    "torch.save": """
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}
    os.makedirs("runs", exist_ok=True)
    torch.save({**state, "random": torch.get_rng_state()}, "runs/last.pt")
    del state
    shutil.copyfile("runs/last.pt", "runs/best.pt")
    os.replace("runs/last.pt", "runs/first.pt")
    assert sorted(os.listdir("runs")) == ["best.pt", "first.pt"]
    os.remove("runs/first.pt")
    found = torch.load("runs/best.pt", map_location=device, weights_only=True)
    weight = found["model"]["0.weight"]
    assert (weight.shape, weight.dtype, weight.device.type) == ((500, 400), torch.float32, device)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["random"].cpu())
    torch.Generator().set_state(found["random"].cpu())
    assert found["epoch"] == 7
    del found, weight
""",
    "a whole model": """
    torch.save(model, "model.pt")
    again = torch.load("model.pt", weights_only=False)
    assert [type(w) for w in again.parameters()] == [type(w) for w in model.parameters()]
    assert all(isinstance(weight, nn.Parameter) for weight in again.parameters())
    del again
""",
    "safetensors": """
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model, save_file, save_model
    save_file(model.state_dict(), "new.safetensors", metadata={"format": "pt"})
    os.rename("new.safetensors", "old.safetensors")
    model.load_state_dict(load_file("old.safetensors", device=device))
    with safe_open("old.safetensors", "pt", device=device) as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("1.num_batches_tracked").item() == 1
        assert file.get_slice("0.weight")[:5].shape == (5, 400)
    tied = nn.ModuleList([model, model[0]])
    save_model(tied, "old.safetensors")
    assert load_model(tied, "old.safetensors") == (set(), [])
    os.remove("old.safetensors")
    assert not os.path.exists("old.safetensors")
""",
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda name: _written(BEGINNING + SAVED[name])


def _written(source):
    Path("train.py").write_text(dedent(source))
    return launch_of(["train.py"])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SAVED)
def test_saving_and_loading_allocate_in_a_dry_run_what_they_do_in_a_real_one(script, name):
    launch = script(name)
    real, dry = run(launch, real=True), run(launch, device="cpu")
    assert dry.steps == real.steps == 2
    assert dry.trace.peak_bytes == real.trace.peak_bytes > 0
    assert dry.trace.at_peak == real.trace.at_peak
    assert os.listdir() == ["train.py"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_is_loaded_onto_the_gpu_that_a_step_is_predicted_for(script, name):
    found = run(script(name))
    assert (found.steps, found.trace.device) == (2, "cuda")
    assert os.listdir() == ["train.py"]


TOKENIZER = """
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained("words")
    assert os.path.exists("words/tokenizer.json")
    assert AutoTokenizer.from_pretrained("words")("a")["input_ids"] == [1]
    os.replace("words/tokenizer.json", "words/t.json")
    assert Tokenizer.from_file("words/t.json").get_vocab_size() == 2
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("real", [False, True])
def test_a_saved_tokenizer_is_loaded_again(tmp_path, monkeypatch, real):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert run(_written(BEGINNING + TOKENIZER), real=real).steps == 2
    assert os.listdir() == ["train.py"]


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
heads = dict(num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 10
options = dict(use_cpu=not torch.cuda.is_available(), report_to=[])
arguments = TrainingArguments("out", save_steps=1, save_total_limit=1, **options)
Trainer(model, arguments, train_dataset=rows * 8).train()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_trainer_saves_a_checkpoint_before_its_second_step(tmp_path, monkeypatch, device):
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    found = run(_written(TRAINER), device=device)
    assert found.steps == 2
    assert ("write", "out/checkpoint-1") in found.attempts
    assert os.listdir() == ["train.py"]


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """A dry run whose checkpoints go to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    with memlab.dry_run(), Isolation().active(), redirected(real=False):
        yield


def test_a_placeholder_of_torch_save_is_small(saving):
    torch.save(torch.randn(10_000, 10_000), "large.pt")
    assert os.path.getsize("large.pt") < 10_000
    assert torch.load("large.pt").shape == (10_000, 10_000)


def test_a_view_and_its_base_share_their_memory_after_loading(saving):
    base = torch.randn(10, 10)
    torch.save([base, base[2:, 3]], "views.pt")
    base, view = torch.load("views.pt")
    assert (view.shape, view.stride(), view.storage_offset()) == ((8,), (10,), 23)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_small_tensors_in_safetensors_keep_their_known_values(saving):
    known, unknown = torch.arange(5, dtype=torch.bfloat16), torch.randn(5).half()
    flags = torch.randn(3) > 0
    tensors = {"known": known, "unknown": unknown, "flags": flags, "none": torch.empty(0, 2)}
    safetensors_torch.save_file(tensors, "small.safetensors")
    found = safetensors_torch.load_file("small.safetensors")
    assert found["known"].tolist() == [0, 1, 2, 3, 4]
    assert found["unknown"].tolist() == [0.5] * 5
    assert found["flags"].tolist() == [False] * 3
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }


def test_large_tensors_in_safetensors_stay_unknown(saving):
    large = torch.zeros(2**16, dtype=torch.float32)
    safetensors_torch.save_file({"a": large, "b": torch.ones(3)}, "large.safetensors")
    found = safetensors_torch.load_file("large.safetensors")
    assert not known_values.is_known(found["a"])
    assert found["b"].tolist() == [1, 1, 1]
    assert os.path.getsize("large.safetensors") > 4 * 2**16


def test_the_library_reads_a_placeholder_as_its_own_file(tmp_path):
    path = tmp_path / "saved.safetensors"
    with memlab.dry_run(), redirected(real=False):
        state = torch.nn.Linear(300, 400).state_dict()
        safetensors_torch.save_file(state, path, metadata={"step": "3"})
    found = safetensors_torch.load_file(path)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "weight": (400, 300),
        "bias": (400,),
    }


def test_tensors_that_safetensors_rejects_are_rejected(saving):
    weight = torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors_torch.save_file({"a": weight, "b": weight[:3]}, "shared.safetensors")
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors_torch.save_file({"a": weight.t()}, "transposed.safetensors")


def test_bytes_of_safetensors_have_the_tensors_shapes(saving):
    data = safetensors_torch.save({"a": torch.randn(300, 200)})
    assert len(data) > 4 * 300 * 200


@pytest.mark.filterwarnings("ignore:.torch.jit")  # of another category from 2.15 on
def test_a_scripted_module_is_loaded_as_it_was_saved(tmp_path, monkeypatch):
    """Its parameters are fake ones that move to the GPU and train."""
    monkeypatch.chdir(tmp_path)
    source = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400))
    LINES
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 300, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    saved = 'torch.jit.save(torch.jit.script(model), "m.pt"); model = torch.jit.load("m.pt")'
    found = [run(_written(source.replace("LINES", lines))) for lines in ("", saved)]
    assert found[0].trace.at_peak == found[1].trace.at_peak
    assert found[1].attempts == (("write", "m.pt"),)
    assert os.listdir() == ["train.py"]


@pytest.mark.filterwarnings("ignore:.torch.jit")  # of another category from 2.15 on
def test_a_dry_run_without_a_script_writes_no_scripted_module(tmp_path):
    with memlab.dry_run():
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()


def test_addresses_are_those_of_torch_after_the_dry_run():
    with memlab.dry_run(), redirected(real=False):
        first, second = torch.randn(4), torch.randn(4)
        assert first.data_ptr() != second.data_ptr()
        assert first[2:].data_ptr() == first.data_ptr() + 8
        assert torch.empty(0).data_ptr() == 0
    assert torch.empty(4, device="meta").untyped_storage().data_ptr() == 0
