"""An encoding whose file tiktoken cannot download is replaced by one of the same vocabulary."""

import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest

from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from memlab.world.data import StandIns
from memlab.world.data.tiktoken_encodings import WordEncoding
from memlab.world.isolation import Isolation

# tiktoken's functions. requests' ConnectionError is an OSError too.
TIKTOKEN = {
    "__init__.py": """
        from tiktoken.registry import get_encoding
        from tiktoken.model import encoding_for_model
        """,
    "model.py": """
        from tiktoken.registry import get_encoding
        def encoding_for_model(model_name):
            return get_encoding({"gpt-4": "cl100k_base"}[model_name])
        """,
    "registry.py": """
        import os, socket
        def get_encoding(encoding_name):
            if encoding_name in ("gpt2", "cl100k_base", "new_base"):
                if os.path.exists(os.path.join(os.environ["TIKTOKEN_CACHE_DIR"], encoding_name)):
                    return "the real one"
                socket.create_connection(("example.org", 443))
            raise ValueError(f"Unknown encoding {encoding_name}.")
        """,
}
STORY = """
    It was late. The old man who kept the lighthouse had gone to sleep, and none saw the ship
    when it came around the point; "She's too near," said the captain's daughter, who was eleven.
    """


@pytest.fixture
def tiktoken(tmp_path, monkeypatch):
    """A package without files, as tiktoken's without a network."""
    folder = tmp_path / "site-packages" / "tiktoken"
    folder.mkdir(parents=True)
    for name, text in TIKTOKEN.items():
        (folder / name).write_text(dedent(text))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if "tiktoken" in name}
    sys.modules.update({name: module for name, module in kept.items() if "memlab" in name})
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] == "tiktoken":
            sys.modules.pop(name)
    sys.modules.update(kept)


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_missing_encoding_is_replaced_by_one_of_its_vocabulary(tiktoken, is_imported):
    if is_imported:
        import_module("tiktoken")
    stand_ins = StandIns()
    with Isolation().active(), stand_ins.active():
        tiktoken = import_module("tiktoken")
        found = tiktoken.get_encoding("gpt2")
        assert (found.name, found.n_vocab, found.eot_token) == ("gpt2", 50_257, 50_256)
        assert tiktoken.encoding_for_model("gpt-4").n_vocab == 100_277
        assert tiktoken.get_encoding("gpt2").decode(found.encode(STORY)) == STORY
    assert list(stand_ins.notes()) == [
        "not on this machine: tiktoken's encoding gpt2; instead: tokens of up to 8 characters, of "
        "a vocabulary of 50,257",
        "not on this machine: tiktoken's encoding cl100k_base; instead: tokens of up to 8 "
        "characters, of a vocabulary of 100,277",
    ]


def test_an_encoding_in_tiktokens_cache_is_tiktokens(tiktoken, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "gpt2").write_text("")
    stand_ins = StandIns()
    with Isolation().active(), stand_ins.active():
        assert import_module("tiktoken").get_encoding("gpt2") == "the real one"
    assert not list(stand_ins.notes())


@pytest.mark.parametrize(("name", "error"), [("gpt3", ValueError), ("new_base", OSError)])
def test_an_unknown_encoding_fails_as_in_tiktoken(tiktoken, name, error):
    with Isolation().active(), StandIns().active(), pytest.raises(error):
        import_module("tiktoken").get_encoding(name)


@pytest.mark.parametrize(
    ("name", "size", "end"),
    [
        *(("gpt2", 50_257, 50_256), ("r50k_base", 50_257, 50_256), ("p50k_base", 50_281, 50_256)),
        *(("cl100k_base", 100_277, 100_257), ("o200k_base", 200_019, 199_999)),
    ],
)
def test_sizes_and_special_tokens_are_tiktokens(name, size, end):
    """The numbers are from tiktoken_ext/openai_public.py."""
    made = WordEncoding(name)
    assert (made.n_vocab, made.max_token_value, made.eot_token) == (size, size - 1, end)
    assert made.encode("a<|endoftext|>b", allowed_special="all")[1] == end
    assert max(made._special_tokens.values()) <= made.max_token_value


def test_special_tokens_are_encoded_only_where_the_script_allows_them():
    made = WordEncoding("gpt2")
    text = "one<|endoftext|> two"
    with pytest.raises(ValueError, match="disallowed special token"):
        made.encode(text)
    allowed = made.encode(text, allowed_special={"<|endoftext|>"})
    ordinary = made.encode(text, disallowed_special=())
    assert ordinary == made.encode_ordinary(text)
    assert [token == made.eot_token for token in allowed] == [False, True, False]
    assert made.eot_token not in ordinary
    assert made.decode(allowed) == made.decode(ordinary) == text
    assert made.encode_single_token("<|endoftext|>") == made.eot_token
    assert made.is_special_token(made.eot_token)


def test_texts_have_about_as_many_tokens_as_from_gpt2():
    """tiktoken 0.14 makes 57 tokens of the story."""
    assert len(WordEncoding("gpt2").encode(STORY)) == pytest.approx(57, rel=0.08)


def test_batches_and_arrays_hold_the_same_tokens():
    made = WordEncoding("o200k_base")
    texts = ["one two", "Привет, 你好 é"]
    each = [made.encode(text) for text in texts]
    assert made.encode_batch(texts, num_threads=2) == each == made.encode_ordinary_batch(texts)
    assert made.encode_to_numpy(texts[1]).tolist() == each[1]
    assert made.decode_batch(each) == texts


def test_the_same_texts_have_the_same_tokens_in_every_run():
    first, second = (WordEncoding("gpt2").encode(STORY) for _ in range(2))
    assert first == second


def test_ids_stay_in_the_vocabulary_when_all_are_in_use():
    made = WordEncoding("gpt2")
    ids = made.encode(" ".join(f"{number:x}" for number in range(200_000)))
    assert max(ids) < made.eot_token
    assert made.decode([50_255, made.eot_token]).endswith("<|endoftext|>")


def test_an_id_that_no_text_had_is_a_word():
    assert WordEncoding("gpt2").decode([7, 8]) == " word word"


SCRIPT = """
    import tiktoken, torch
    tokenizer = tiktoken.get_encoding("gpt2")
    ids = torch.tensor([tokenizer.encode("a text of five words", allowed_special="all")])
    assert ids.shape == (1, 5)
    model = torch.nn.Sequential(torch.nn.Embedding(tokenizer.n_vocab, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """


def test_a_script_trains_with_the_stand_in(tiktoken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(dedent(SCRIPT))
    found = run(launch_of(["train.py"]), device="cpu")
    assert found.steps == 2
    assert any("tiktoken's encoding gpt2" in note for note in found.notes)
