"""The columns of a missing data set, as `--batch-like` describes them.

text=str:400                 texts of 400 words
label=int:2                  classes 0 and 1
input_ids=ids:1024           lists of 1,024 token ids
image=image:512x512          images, width x height; 512 is 512x512
audio=audio:16000            recordings of 16,000 samples, a second at 16 kHz
values=float:10              lists of 10 numbers
messages=chat:400            conversations of a question and an answer with 400 words in all
tokens=list:20:str:1         lists of 20 texts of one word; any kind may follow `list:20:`
translation.en=str:20        a column `translation` of dictionaries, with texts of 20 words as `en`
"""

import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

ROWS = 1000
_SPLITS = ("train", "validation", "test")
_LIST = "list"
_SAMPLING_RATE = 16_000  # Hz of audio
_EXAMPLES = (
    "text=str:400, label=int:2, input_ids=ids:1024, image=image:512x512, audio=audio:16000, "
    "values=float:10, messages=chat:400, tokens=list:20:str:1 or translation.en=str:20"
)


@dataclass(frozen=True)
class Columns:
    """The kind of each column, such as `str:400`, by name. A dot in a name nests it."""

    kinds: dict[str, str]

    def __str__(self) -> str:
        return ", ".join(f"{name}={kind}" for name, kind in self.kinds.items())

    def data_set(self, datasets: ModuleType, split: Any, streaming: bool) -> Any:
        """Return a data set of made-up rows: a dictionary of splits, or the split asked for."""
        if split is None:
            return datasets.DatasetDict({s: self._rows(datasets, streaming) for s in _SPLITS})
        if isinstance(split, (list, tuple)):
            return [self._rows(datasets, streaming) for _ in split]
        return self._rows(datasets, streaming)

    def _rows(self, datasets: ModuleType, streaming: bool) -> Any:
        nested = _nested(self.kinds)
        features = {name: _feature(datasets, each) for name, each in nested.items()}
        made = datasets.Dataset.from_dict({name: _values(each) for name, each in nested.items()})
        # as `cast` does, without its progress bar
        rows = datasets.Dataset(made.data.cast(datasets.Features(features).arrow_schema))
        return rows.to_iterable_dataset() if streaming else rows


def columns_of(given: str) -> Columns:
    """Parse `--batch-like`. Raises ValueError for another form."""
    kinds: dict[str, str] = {}
    for part in given.split(","):
        name, _, kind = (each.strip() for each in part.partition("="))
        if not all(name.split(".")) or not _is_kind(kind):
            raise ValueError(
                f"got {part!r} in --batch-like; give columns such as {_EXAMPLES}, joined by commas"
            )
        kinds[name] = kind
    for name in kinds:
        if inner := next((other for other in kinds if other.startswith(f"{name}.")), None):
            raise ValueError(
                f"got {name}={kinds[name]} beside {inner}={kinds[inner]} in --batch-like; a column "
                f"is either of one kind or of named parts, so leave {name}={kinds[name]} out"
            )
    return Columns(kinds)


def _is_kind(described: str) -> bool:
    """Return whether this is a kind and its size, such as `str:400` or `list:20:int:9`."""
    name, _, size = described.partition(":")
    if name == _LIST:
        count, _, element = size.partition(":")
        return _is_count(count) and _is_kind(element)
    sizes = size.split("x")
    return name in _KINDS and all(map(_is_count, sizes)) and len(sizes) <= 1 + (name == "image")


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _nested(kinds: dict[str, str]) -> dict[str, Any]:
    """Return the kinds with a dictionary of its parts for each column whose names have dots."""
    nested: dict[str, Any] = {}
    for name, kind in kinds.items():
        *groups, last = name.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = kind
    return nested


def _feature(datasets: ModuleType, kind: Any) -> Any:
    """Return the type that `datasets` has for a column."""
    if isinstance(kind, dict):
        return {name: _feature(datasets, part) for name, part in kind.items()}
    name, _, size = kind.partition(":")
    if name == _LIST:
        return _list_of(datasets, _feature(datasets, size.partition(":")[2]))
    return _KINDS[name].feature(datasets, size)


def _values(kind: Any) -> list[Any]:
    """Return a column's values, one for each row."""
    if isinstance(kind, dict):
        parts = [_values(part) for part in kind.values()]
        return [dict(zip(kind, row, strict=True)) for row in zip(*parts, strict=True)]
    name, _, size = kind.partition(":")
    if name == _LIST:
        count, _, element = size.partition(":")
        return [[value] * int(count) for value in _values(element)]
    return _KINDS[name].values(size)


def _list_of(datasets: ModuleType, feature: Any) -> Any:
    kind = getattr(datasets, "List", None) or datasets.Sequence  # before datasets 4
    return kind(feature)


# ------------------------------------------------------------------ kinds


def _texts(size: str) -> list[str]:
    return [" ".join(["word"] * int(size))] * ROWS


def _classes(size: str) -> list[int]:
    return [number % int(size) for number in range(ROWS)]


def _ids(size: str) -> list[list[int]]:
    return [[1] * int(size)] * ROWS


def _images(size: str) -> list[dict[str, Any]]:
    from PIL import Image

    width, _, height = size.partition("x")
    file = io.BytesIO()
    Image.new("RGB", (int(width), int(height or width))).save(file, "PNG")
    return [{"bytes": file.getvalue(), "path": None}] * ROWS


def _floats(size: str) -> list[list[float]]:
    draw = random.Random(0).random
    return [[draw() for _ in range(int(size))]] * ROWS


def _chats(size: str) -> list[list[dict[str, str]]]:
    half = int(size) // 2
    question, answer = " ".join(["word"] * half), " ".join(["word"] * (int(size) - half))
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ] * ROWS


_SILENCE = "samples of silence"


def _recordings(size: str) -> list[dict[str, Any]]:
    """Return descriptions; `recording` makes the samples when a row is read."""
    return [{"bytes": json.dumps({_SILENCE: int(size)}).encode(), "path": None}] * ROWS


def recording(stored: Any, sampling_rate: int | None) -> dict[str, Any] | None:
    """Return the samples of a made-up recording at a rate in Hz, or None for any other recording.

    A kind's samples are at 16 kHz, so another rate has a number of samples in proportion.
    """
    import numpy as np

    data = stored.get("bytes") if isinstance(stored, dict) else None
    if not data or not data.startswith(json.dumps({_SILENCE: 0})[:-2].encode()):
        return None
    rate = sampling_rate or _SAMPLING_RATE
    count = json.loads(data)[_SILENCE] * rate // _SAMPLING_RATE
    return {"path": None, "array": np.zeros(count, np.float32), "sampling_rate": rate}


class _Kind(NamedTuple):
    """How a kind's column is made: its type in `datasets`, and its values, both of a size."""

    feature: Callable[[ModuleType, str], Any]
    values: Callable[[str], list[Any]]


def _value(dtype: str) -> Callable[[ModuleType, str], Any]:
    return lambda datasets, size: datasets.Value(dtype)


def _list_of_values(dtype: str) -> Callable[[ModuleType, str], Any]:
    return lambda datasets, size: _list_of(datasets, datasets.Value(dtype))


def _chat(datasets: ModuleType, size: str) -> Any:
    text = datasets.Value("string")
    return [{"role": text, "content": text}]


_KINDS = {
    "str": _Kind(_value("string"), _texts),
    "int": _Kind(lambda datasets, size: datasets.ClassLabel(num_classes=int(size)), _classes),
    "ids": _Kind(_list_of_values("int64"), _ids),
    "image": _Kind(lambda datasets, size: datasets.Image(), _images),
    "audio": _Kind(
        lambda datasets, size: datasets.Audio(sampling_rate=_SAMPLING_RATE), _recordings
    ),
    "float": _Kind(_list_of_values("float64"), _floats),
    "chat": _Kind(_chat, _chats),
}
