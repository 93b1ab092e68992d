"""What a script loads and this machine lacks is replaced by something of the same size."""

import json
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from memlab.internals.imports import when_imported
from memlab.scripts.columns import columns_of
from memlab.scripts.data import StandIns
from memlab.scripts.hub import UnavailableError
from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from tests.transformers_models.configs import TINY

TORCHVISION = """
class VisionDataset:
    def __init__(self, root=None, transforms=None, transform=None, target_transform=None):
        self.root, self.transform, self.target_transform = root, transform, target_transform
        self.transforms = transforms

class MNIST(VisionDataset):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        super().__init__(root, transform=transform, target_transform=target_transform)
        self.train = train
        raise RuntimeError("Dataset not found. You can use download=True to download it")

    @property
    def class_to_idx(self):
        return {}

class ImageFolder(VisionDataset):
    def __init__(self, root, transform=None):
        raise FileNotFoundError(f"no class folders in {root}")
"""


@pytest.fixture
def torchvision(tmp_path, monkeypatch):
    """A package with data sets that cannot be loaded, as torchvision's without a network."""
    folder = tmp_path / "packages" / "torchvision"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "datasets.py").write_text(TORCHVISION)
    monkeypatch.syspath_prepend(str(folder.parent))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if "torchvision" in name}
    yield
    for name in ("torchvision", "torchvision.datasets"):
        sys.modules.pop(name, None)
    sys.modules.update(kept)


def test_a_missing_memory_mapped_file_is_zeros():
    stand_ins = StandIns()
    with stand_ins.active():
        tokens = np.memmap("data/train.bin", dtype=np.uint16, mode="r")
        assert (tokens.dtype, len(tokens), tokens[:10].sum()) == (np.uint16, 2**24, 0)
    assert list(stand_ins.notes()) == [
        "not on this machine: data/train.bin; instead: 16,777,216 zeros"
    ]


def test_a_memory_mapped_file_that_is_there_is_read(tmp_path):
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "train.bin")
    stand_ins = StandIns()
    with stand_ins.active():
        tokens = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
        assert tokens.sum() == 45
        assert isinstance(tokens, np.memmap)
    assert not list(stand_ins.notes())


def test_data_sets_of_torchvision_have_their_number_and_size_of_images(torchvision):
    pytest.importorskip("PIL")
    stand_ins = StandIns()
    with stand_ins.active():
        datasets = import_module("torchvision.datasets")
        training, test = (datasets.MNIST("data", train=train) for train in (True, False))
        image, target = training[13]
        assert (len(training), len(test)) == (60_000, 10_000)
        assert (image.size, image.mode, target) == ((28, 28), "L", 3)
        assert training.data.shape == (60_000, 28, 28)
        folder = datasets.ImageFolder("imagenet/train", lambda image: image.size)
        assert (len(folder), folder[0]) == (1_281_167, ((469, 400), 0))
    assert list(stand_ins.notes()) == [
        f"not on this machine: torchvision's {missing}; instead: {count} black images of {size}"
        for missing, count, size in (
            ("MNIST in data", "60,000", "28 × 28"),
            ("MNIST in data", "10,000", "28 × 28"),
            ("ImageFolder in imagenet/train", "1,281,167", "469 × 400"),
        )
    ]
    with pytest.raises(RuntimeError):
        datasets.MNIST("data")


def test_a_module_is_changed_when_it_is_imported_and_only_then(torchvision):
    seen = []
    with when_imported({"torchvision.datasets": lambda module: seen.append(module.__name__)}):
        assert not seen
        import_module("torchvision.datasets")
        assert seen == ["torchvision.datasets"]
    sys.modules.pop("torchvision.datasets")
    assert import_module("torchvision.datasets").__spec__.loader is not None
    assert seen == ["torchvision.datasets"]


HUB = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("someone/model")
assert model.name_or_path == model.config.name_or_path == "someone/model"  # trl reads it
tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path="someone/model")
assert tokenizer.mask_token_id is not None  # masked language modeling asks for it
assert tokenizer.model_max_length == model.config.max_position_embeddings
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.tensor([tokenizer("a text of five words")["input_ids"]])
assert ids.shape == (1, 5)
for _ in range(3):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(dedent(HUB))
    Path("config.json").write_text(json.dumps({"model_type": "mistral", **TINY["mistral"]}))
    return launch_of(["train.py"])


def test_a_models_weights_are_random_in_the_shapes_of_its_config(script):
    found = run(script, device="cpu", configs={"someone/model": "config.json"})
    [model] = found.models
    weights = sum(weight.numel() for weight in model.parameters())
    assert found.trace.at_peak["parameters"] == 4 * weights
    assert [note.split(";")[0] for note in found.notes if "not on this machine" in note] == [
        "not on this machine: the weights of someone/model",
        "not on this machine: the tokenizer of someone/model",
    ]


def test_a_processors_settings_are_its_classs_at_the_configs_size(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    config = {"model_type": "vit", "image_size": 48, "hidden_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stand_ins = StandIns(configs={"someone/vit": str(tmp_path / "config.json")})
    with stand_ins.active():
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained("someone/vit")
    assert (processor.size["height"], processor.size["width"]) == (48, 48)
    assert any("the processor of someone/vit" in note for note in stand_ins.notes())


def test_without_the_config_the_script_stops_with_what_to_pass(script):
    with pytest.raises(UnavailableError, match="pass --config someone/model=PATH"):
        run(script)


@pytest.mark.parametrize(
    "given", ["", "text", "text=str", "text=str:0", "text=no:3", "image=image:5x", "text=str:4x4"]
)
def test_wrong_columns_are_refused_in_one_sentence(given):
    with pytest.raises(ValueError, match="give columns such as"):
        columns_of(given)


def test_columns_print_as_they_were_given():
    given = "text=str:400, label=int:2, image=image:64x32, chat=chat:10"
    assert str(columns_of(given.replace(" ", ""))) == given


def test_one_size_of_an_image_is_a_square():
    pytest.importorskip("PIL")
    datasets = pytest.importorskip("datasets")
    rows = columns_of("image=image:8").data_set(datasets, "train", streaming=False)
    assert rows[0]["image"].size == (8, 8)


def test_rows_have_the_described_sizes():
    datasets = pytest.importorskip("datasets")
    columns = columns_of("text=str:40,label=int:3,ids=ids:7,messages=chat:9,values=float:2")
    rows = columns.data_set(datasets, None, False)["train"]
    assert len(rows[0]["text"].split()) == 40
    assert rows.features["label"].num_classes == 3
    assert (len(rows[0]["ids"]), len(rows[0]["values"])) == (7, 2)
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
