"""What a script loads and this machine lacks is replaced by something of the same size."""

import json
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from memlab.internals.imports import when_imported
from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from memlab.world.data import StandIns
from memlab.world.data.columns import columns_of, recording
from memlab.world.data.hub import UnavailableError
from memlab.world.data.word_tokenizer import template_of, words_tokenizer
from memlab.world.isolation import Isolation
from memlab.world.table import TABLE
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
    folder = tmp_path / "site-packages" / "torchvision"
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
    with Isolation().active(), stand_ins.active():
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained("someone/vit")
    assert (processor.size["height"], processor.size["width"]) == (48, 48)
    assert any("the processor of someone/vit" in note for note in stand_ins.notes())


def test_without_the_config_the_script_stops_with_what_to_pass(script):
    with pytest.raises(UnavailableError, match="pass --config someone/model=PATH"):
        run(script)


@pytest.mark.parametrize(
    "given",
    [
        *("", "text", "text=str", "text=str:0", "text=no:3", "image=image:5x", "text=str:4x4"),
        *("a=list", "a=list:3", "a=list:3:str", "a=list:str:3", "a=list:0:str:3", "a=list:²:str:3"),
        *("a.=str:3", ".a=str:3", "a..b=str:3", "audio=audio:5x5", "a=list:2:list:2"),
    ],
)
def test_wrong_columns_are_refused_in_one_sentence(given):
    with pytest.raises(ValueError, match="give columns such as"):
        columns_of(given)


@pytest.mark.parametrize(
    "given", ["a=str:3,a.b=str:4", "a.b=str:4,a=str:3", "a.b=int:2,a.b.c=ids:4"]
)
def test_a_column_is_of_one_kind_or_of_named_parts(given):
    with pytest.raises(ValueError, match=r"so leave a(\.b)?=\w+:\d out"):
        columns_of(given)


def test_columns_print_as_they_were_given():
    given = "text=str:400, label=int:2, image=image:64x32, chat=chat:10, a.b=list:2:int:9"
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


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_may_be_lists_and_dictionaries(streaming):
    datasets = pytest.importorskip("datasets")
    columns = columns_of(
        "tokens=list:20:str:1,tags=list:20:int:9,answers.text=list:1:str:3,"
        "answers.answer_start=list:1:int:40,translation.en=str:5,boxes=list:2:list:3:float:4"
    )
    rows = columns.data_set(datasets, "train", streaming)
    row = next(iter(rows))
    assert row["tokens"] == ["word"] * 20
    assert len(row["tags"]) == 20
    assert rows.features["tags"].feature.names == [str(number) for number in range(9)]
    assert row["answers"] == {"text": ["word word word"], "answer_start": [0]}
    assert row["translation"] == {"en": "word word word word word"}
    assert [[len(box) for box in boxes] for boxes in row["boxes"]] == [[4, 4, 4]] * 2


@pytest.mark.parametrize(("rate", "samples"), [(16_000, 24_000), (8_000, 12_000)])
def test_recordings_have_their_samples_at_the_rate_that_the_script_asks_for(rate, samples):
    datasets = pytest.importorskip("datasets")
    columns = columns_of("audio=audio:24000,label=int:3")
    with Isolation().active(), StandIns(columns=columns).active():
        rows = datasets.load_dataset("someone/speech", split="train")
        rows = rows.cast_column("audio", datasets.Audio(sampling_rate=rate))
        found = rows[5]["audio"]
    assert (found["sampling_rate"], found["array"].shape) == (rate, (samples,))


def test_a_recording_of_the_script_is_read_by_the_library():
    for value in (None, "a.wav", {"bytes": b"RIFF", "path": None}, {"bytes": None, "path": "a"}):
        assert recording(value, 16_000) is None


def test_the_tokenizer_adds_the_special_tokens_of_the_models_own(tmp_path):
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stand_ins = StandIns(configs={"someone/bert": str(tmp_path / "config.json")})
    with Isolation().active(), stand_ins.active():
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained("someone/bert")("three words here", "and two")
    assert found["input_ids"] == [5, 0, 0, 0, 6, 0, 0, 6]  # <cls>, three words, <sep>, …
    assert found["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert list(stand_ins.notes())[-1] == (
        "not on this machine: the tokenizer of someone/bert; instead: tokens of one word each, "
        "with the special tokens of BertTokenizer"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("BertTokenizer", "RobertaTokenizer", "T5Tokenizer", "XLNetTokenizer", "CLIPTokenizer"),
        *("MBartTokenizer", "GPT2Tokenizer", "WhisperTokenizer", "DebertaV2Tokenizer"),
    ],
)
def test_texts_and_pairs_are_as_much_longer_as_with_the_models_own_tokenizer(name):
    real = getattr(import_module("transformers"), name)()
    made = words_tokenizer({}, template_of(real))
    for is_pair in (False, True):
        added = real.num_special_tokens_to_add(is_pair)
        assert made.num_special_tokens_to_add(is_pair) == added
        texts = ("one two", "three") if is_pair else ("one two three",)
        assert len(made(*texts)["input_ids"]) == 3 + added
    assert made([["one", "two"]], is_split_into_words=True).word_ids(0).count(None) == (
        real.num_special_tokens_to_add()
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("model_type", ["t5", "nllb-moe", "mbart"])
def test_a_tokenizer_of_special_tokens_alone_is_replaced(tmp_path, model_type):
    """transformers makes one if it finds no files; T5's has 103 special tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    stand_ins = StandIns(configs={"someone/model": str(tmp_path / "config.json")})
    with Isolation().active(), stand_ins.active():
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained("someone/model")("three words here")["input_ids"]
    added = sum("with the special tokens of" in note for note in stand_ins.notes())
    assert added == 1
    assert len(found) == 3 + {"t5": 1, "nllb-moe": 2, "mbart": 2}[model_type]


def test_a_model_resized_to_its_tokenizer_keeps_its_size(tmp_path):
    """As Alpaca's and QLoRA's scripts do, after they add a token for padding."""
    fields = {"model_type": "gpt2", "vocab_size": 1234, "n_embd": 8, "n_layer": 1, "n_head": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    stand_ins = StandIns(configs={"someone/model": str(tmp_path / "config.json")})
    with Isolation().active(), stand_ins.active():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained("someone/model")
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        model = AutoModelForCausalLM.from_pretrained("someone/model")
        model.resize_token_embeddings(len(tokenizer))
    assert model.get_input_embeddings().weight.shape == (1235, 8)


def test_without_a_tokenizer_class_the_note_says_that_no_special_tokens_are_added(script):
    found = run(script, device="cpu", configs={"someone/model": "config.json"})
    assert found.notes[-1].endswith("tokens of one word each, without special tokens")


@pytest.mark.parametrize(
    ("kind", "model_type"), [("ViTImageProcessor", "vit_mae"), ("AutoImageProcessor", "vit_mae")]
)
def test_a_processor_named_by_its_class_has_the_configs_size(tmp_path, kind, model_type):
    pytest.importorskip("PIL")
    config = {"model_type": model_type, "image_size": 48, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stand_ins = StandIns(configs={"someone/mae": str(tmp_path / "config.json")})
    with Isolation().active(), stand_ins.active():
        processor = getattr(import_module("transformers"), kind).from_pretrained("someone/mae")
    assert (processor.size["height"], processor.size["width"]) == (48, 48)
    assert list(stand_ins.notes()) == [
        "not on this machine: the processor of someone/mae; instead: its class's default settings"
    ]


def test_a_feature_extractor_named_by_its_class_has_its_default_settings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wav2vec2"}))
    stand_ins = StandIns(configs={"someone/speech": str(tmp_path / "config.json")})
    with Isolation().active(), stand_ins.active():
        from transformers import AutoFeatureExtractor, Wav2Vec2FeatureExtractor

        for kind in (AutoFeatureExtractor, Wav2Vec2FeatureExtractor):
            made = kind.from_pretrained("someone/speech")
            assert isinstance(made, Wav2Vec2FeatureExtractor)
            assert made.sampling_rate == 16_000
    assert len(list(stand_ins.notes())) == 1


REPLACED = sorted(
    {row.module.partition(".")[0] for row in TABLE} - sys.stdlib_module_names - {"numpy", "torch"}
)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", REPLACED)
def test_a_file_beside_the_script_with_a_librarys_name_is_the_scripts(tmp_path, monkeypatch, name):
    """Pytorch-UNet and PyTorch-GAN have an evaluate.py and a datasets.py of their own."""
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text("SIZE = 8\n")
    source = f"""
        import torch
        from {name} import SIZE
        model = torch.nn.Linear(SIZE, SIZE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(2, SIZE)).sum().backward()
            optimizer.step()
        """
    Path("train.py").write_text(dedent(source))
    assert run(launch_of(["train.py"]), device="cpu").notes == ()
