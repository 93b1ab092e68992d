"""Weights that torch.hub, torchvision and timm would download are random, of the model's shapes."""

import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import hub, nn
from torch.utils import model_zoo

import memlab
from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from memlab.world.data import StandIns
from memlab.world.data.hub import UnavailableError
from memlab.world.isolation import Isolation

URL = "https://example.org/models/small-0123abcd.pth"

TORCHVISION = {
    "torchvision/__init__.py": "",
    "torchvision/models.py": """
        import enum
        from torch import nn
        from torch.hub import load_state_dict_from_url

        class Small_Weights(enum.Enum):
            DEFAULT = "https://example.org/models/small-0123abcd.pth"

            def get_state_dict(self, *args, **kwargs):
                return load_state_dict_from_url(self.value, *args, **kwargs)

        def small(*, weights=None):
            model = nn.Linear(64, 8)
            if weights is not None:
                model.load_state_dict(Small_Weights.DEFAULT.get_state_dict(check_hash=True))
            return model
        """,
}
TIMM = {
    "timm/__init__.py": "from timm.models._builder import create_model",
    "timm/models/__init__.py": "",
    "timm/models/_builder.py": """
        from torch import nn
        from torch.hub import load_state_dict_from_url

        def load_pretrained(model, pretrained_cfg=None, filter_fn=None):
            weights = load_state_dict_from_url(pretrained_cfg["url"])
            model.load_state_dict({"weight": weights["proj"].flatten(1), "bias": weights["bias"]})

        def create_model(name, pretrained=False):
            model = nn.Linear(64, 8)
            config = {"architecture": name, "url": "https://example.org/models/vit.pth"}
            if pretrained:
                load_pretrained(model, pretrained_cfg=config)
            return model
        """,
}
TRAINING = """
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Write packages that replace installed ones on import, and nothing in torch.hub."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    (tmp_path / "scripts").mkdir()
    monkeypatch.chdir(tmp_path / "scripts")
    names = ("torchvision", "timm")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(names)}

    def write(files):
        for path, source in files.items():
            place = tmp_path / "site-packages" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(dedent(source))
        monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    yield write
    for name in [name for name in sys.modules if name.startswith(names)]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def notes(packages):
    """The sentences about used stand-ins, in an isolated dry run."""
    stand_ins = StandIns()
    with memlab.dry_run(), Isolation().active(), stand_ins.active():
        yield lambda: [note.removeprefix("not on this machine: ") for note in stand_ins.notes()]


def shapes(tensors):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def script(source):
    Path("train.py").write_text(dedent(source) + TRAINING)
    return launch_of(["train.py"])


@pytest.mark.few(1)
@pytest.mark.parametrize("runs", [1, 2])
def test_torchvisions_weights_are_random_in_every_run(packages, runs):
    packages(TORCHVISION)
    launch = script("import torch, torchvision.models as models\nmodel = models.small(weights=1)")
    for _ in range(runs):
        found = run(launch, device="cpu")
        assert found.trace.at_peak["parameters"] == 4 * (64 * 8 + 8)
        assert found.notes[-1] == (
            "not on this machine: the weights of small-0123abcd.pth; instead: random weights"
        )


def test_modules_imported_before_the_run_get_random_weights_too(packages):
    packages(TORCHVISION)
    models = import_module("torchvision.models")
    stand_ins = StandIns()
    with Isolation().active(), stand_ins.active():
        assert models.small(weights="DEFAULT").weight.shape == (8, 64)
    assert len(list(stand_ins.notes())) == 1
    assert models.load_state_dict_from_url is hub.load_state_dict_from_url


def test_timms_model_keeps_its_random_weights(packages):
    packages(TIMM)
    launch = script("import timm, torch\nmodel = timm.create_model('vit_tiny', pretrained=True)")
    found = run(launch, device="cpu")
    assert found.trace.at_peak["parameters"] == 4 * (64 * 8 + 8)
    assert found.notes[-1] == (
        "not on this machine: the weights of timm's vit_tiny; instead: random weights"
    )


@pytest.mark.parametrize("load", [hub.load_state_dict_from_url, model_zoo.load_url])
def test_a_urls_weights_have_the_shapes_of_the_model_that_loads_them(notes, load):
    load = getattr(hub if load.__module__ == "torch.hub" else model_zoo, load.__name__)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = shapes(model.state_dict())
    assert str(model.load_state_dict(load(URL))) == "<All keys matched successfully>"
    assert shapes(model.state_dict()) == before
    assert notes() == ["the weights of small-0123abcd.pth; instead: random weights"]


@pytest.mark.usefixtures("notes")
def test_weights_may_be_picked_renamed_and_removed_before_they_are_loaded():
    model = nn.Linear(3, 4)
    weights = hub.load_state_dict_from_url(URL)["model"]["encoder"]
    del weights["head.weight"]
    weights.pop("head.bias")
    assert weights.pop("head.bias", None) is None
    model.load_state_dict(weights)
    model.load_state_dict({name.replace("module.", ""): w for name, w in weights.items()})
    weights["bias"] = torch.ones(4)
    model.load_state_dict(weights)
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        model.load_state_dict({**weights, "weight": torch.ones(4, 3), "bias": torch.ones(5)})


def test_loading_copies_the_weights_to_the_files_device_and_frees_them(packages):
    source = """
        import torch
        model = torch.nn.Linear(64, 8)
        model.load_state_dict(torch.hub.load_state_dict_from_url("https://example.org/a.pth"))
        """
    trace = run(script(source), device="cpu", steps=1).trace
    copied = [event.bytes for event in trace.events if event.line == "train.py:4 <module>"]
    assert copied == [4 * 64 * 8, 4 * 8, -4 * 64 * 8, -4 * 8]
    assert trace.at_peak["parameters"] == 4 * (64 * 8 + 8)


def test_without_missing_weights_an_empty_state_dict_is_refused():
    with StandIns().active(), pytest.raises(RuntimeError, match="Missing key"):
        nn.Linear(3, 4).load_state_dict({})


def test_weights_that_are_on_the_machine_are_loaded(packages, tmp_path):
    place = tmp_path / "torch" / "hub" / "checkpoints" / "small-0123abcd.pth"
    place.parent.mkdir(parents=True)
    torch.save({"weight": torch.full((4, 3), 7.0), "bias": torch.zeros(4)}, place)
    stand_ins = StandIns()
    model = nn.Linear(3, 4)
    with Isolation().active(), stand_ins.active():
        model.load_state_dict(hub.load_state_dict_from_url(URL))
    assert model.weight.unique().tolist() == [7]
    assert not list(stand_ins.notes())


def test_a_repository_that_is_not_on_the_machine_stops_the_script_with_what_to_do(notes):
    with pytest.raises(UnavailableError, match=r"call torch.hub.load\('someone/net:v1', 'big'\)"):
        hub.load("someone/net:v1", "big", pretrained=True)
    assert notes() == []


def test_a_repository_that_is_on_the_machine_makes_its_model(packages, tmp_path):
    place = tmp_path / "torch" / "hub" / "someone_net_main"
    place.mkdir(parents=True)
    (place / "hubconf.py").write_text(
        "import torch\ndef big(width):\n    return torch.nn.Linear(width, 2)\n"
    )
    (tmp_path / "torch" / "hub" / "trusted_list").write_text("someone_net\n")
    with Isolation().active(), StandIns().active():
        assert hub.load("someone/net", "big", 5).weight.shape == (2, 5)
        assert hub.load(str(place), "big", source="local", width=6).weight.shape == (2, 6)


def test_pytorchs_vision_repository_has_the_models_of_torchvision(packages):
    packages(TORCHVISION)
    stand_ins = StandIns()
    with Isolation().active(), stand_ins.active():
        model = hub.load("pytorch/vision:v0.10.0", "small", weights="DEFAULT", trust_repo=True)
        with pytest.raises(UnavailableError, match="code is in the repository pytorch/vision"):
            hub.load("pytorch/vision", "nothing")
    assert model.weight.shape == (8, 64)
    assert next(stand_ins.notes()) == (
        "not on this machine: the repository pytorch/vision; instead: small of torchvision"
    )
