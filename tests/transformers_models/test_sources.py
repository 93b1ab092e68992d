"""A config is found by path, by folder, or in the Hugging Face cache. Nothing is downloaded."""

import json

import pytest

from memlab.transformers_models.sources import find_source

FIELDS = {"model_type": "gpt2"}


def test_a_file_and_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FIELDS))
    for given in (path, tmp_path):
        source = find_source(str(given))
        assert (source.name, source.path) == (str(given), str(path))
        assert source.fields() == FIELDS


def test_an_id_is_found_in_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache, commit = tmp_path / "hub", "0" * 40
    repository = cache / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(FIELDS))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    source = find_source("someone/small")
    assert (source.name, source.path) == ("someone/small", str(snapshot / "config.json"))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("someone/missing", "its config.json is not in the local Hugging Face cache"),
        ("no such thing", "there is no such file, folder or id on the Hub"),
        ("", "there is no such file, folder or id on the Hub"),
        ("nowhere.json", "there is no such file, folder or id on the Hub"),
    ],
)
def test_a_model_that_is_not_there_is_one_sentence(given, complaint, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=complaint):
        find_source(given)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match="it contains no config"):
        find_source(str(tmp_path))


def test_a_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="wanted a JSON object"):
        find_source(str(tmp_path)).fields()
