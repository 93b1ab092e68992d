"""Trainings of tiny configs, written as config.json files. Nothing is downloaded."""

import json

import pytest

from memlab.transformers_models.sources import Source
from tests.transformers_models.configs import TINY, WITHOUT_TEXT


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def training_of(tmp_path):
    """Return a function from a model_type, and fields to change, to its training."""
    from memlab.transformers_models.tasks import Size
    from memlab.transformers_models.training import Training

    def make(model_type, seq_len=16, batch=2, **changes):
        folder = tmp_path / model_type
        folder.mkdir(exist_ok=True)
        fields = {**TINY[model_type], "model_type": model_type, **changes}
        (folder / "config.json").write_text(json.dumps(fields))
        text = None if model_type in WITHOUT_TEXT else seq_len
        return Training(Source(model_type, str(folder / "config.json")), Size(batch, text))

    return make
