"""The columns of a data set that is not there, as `--batch-like` describes them.

text=str:400                 texts of 400 words
label=int:2                  classes 0 and 1
input_ids=ids:1024           lists of 1,024 token ids
image=image:512x512          images, width x height; 512 is 512x512
values=float:10              lists of 10 numbers
messages=chat:400            conversations of a question and an answer with 400 words in all
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ROWS = 1000
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Columns:
    """Kind and size of each column, by name."""

    columns: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        return ", ".join(f"{name}={kind}:{size}" for name, (kind, size) in self.columns.items())

    def data_set(self, datasets: ModuleType, split: Any, streaming: bool) -> Any:
        """Return a data set of made-up rows: a dictionary of splits, or the split asked for."""
        if split is None:
            return datasets.DatasetDict({s: self._rows(datasets, streaming) for s in _SPLITS})
        if isinstance(split, (list, tuple)):
            return [self._rows(datasets, streaming) for _ in split]
        return self._rows(datasets, streaming)

    def _rows(self, datasets: ModuleType, streaming: bool) -> Any:
        made = {name: _KINDS[kind](size) for name, (kind, size) in self.columns.items()}
        rows = datasets.Dataset.from_dict(made)
        for name, (kind, size) in self.columns.items():
            if kind == "int":
                rows = rows.cast_column(name, datasets.ClassLabel(num_classes=int(size)))
            elif kind == "image":
                rows = rows.cast_column(name, datasets.Image())
        return rows.to_iterable_dataset() if streaming else rows


def columns_of(given: str) -> Columns:
    """Parse `--batch-like`. Raises ValueError for another form."""
    columns: dict[str, tuple[str, str]] = {}
    for part in given.split(","):
        name, _, described = part.partition("=")
        kind, _, size = described.partition(":")
        sizes = size.split("x")
        is_size = all(each.isdigit() and int(each) for each in sizes)
        if not name or kind not in _KINDS or not is_size or len(sizes) > 1 + (kind == "image"):
            raise ValueError(
                f"got {part!r} in --batch-like; give columns such as text=str:400, label=int:2, "
                f"input_ids=ids:1024, image=image:512x512, values=float:10 or messages=chat:400, "
                f"joined by commas"
            )
        columns[name.strip()] = kind, size
    return Columns(columns)


def _texts(size: str) -> list[str]:
    return [" ".join(["word"] * int(size))] * ROWS


def _classes(size: str) -> list[int]:
    return [number % int(size) for number in range(ROWS)]


def _ids(size: str) -> list[list[int]]:
    return [[1] * int(size)] * ROWS


def _images(size: str) -> list[Any]:
    from PIL import Image

    width, _, height = size.partition("x")
    return [Image.new("RGB", (int(width), int(height or width)))] * ROWS


def _floats(size: str) -> list[list[float]]:
    draw = random.Random(0).random
    return [[draw() for _ in range(int(size))]] * ROWS


def _chats(size: str) -> list[list[dict[str, str]]]:
    half = int(size) // 2
    question, answer = " ".join(["word"] * half), " ".join(["word"] * (int(size) - half))
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ] * ROWS


_KINDS: dict[str, Callable[[str], list[Any]]] = {
    "str": _texts,
    "int": _classes,
    "ids": _ids,
    "image": _images,
    "float": _floats,
    "chat": _chats,
}
