"""The tracebacks of a log: Python's own, and IPython's, which notebooks print."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memlab.explain.frames import Frame
from memlab.explain.source_files import WIDEST_SOURCE

_HEAD = "Traceback (most recent call last)"
_FILE_LINE = re.compile(r'File "([^"\n]{1,500})", line (\d{1,9}), in (\S{1,200})')
_PREFIX = re.compile(r"^[ \t]{0,8}(?:\[[a-z]{0,9}rank\d{1,5}\]:?|\d{1,5}:|\|)?[ \t]{0,40}")
_CELL = re.compile(r"^(?:Cell|Input) In ?\[(\d{1,6})\]")
_MODULE_FILE = re.compile(r"^File ([^\n:]{1,500}):(\d{1,9}), in ([\w.<>]{1,200})")
_OLD_FILE = re.compile(r"^(\S{1,500}) in ([\w.<>]{1,200})(?:\(|$)")
_ARROW = re.compile(r"^-{1,20}> ?(\d{1,9}) (.{0,300})")


@dataclass(frozen=True)
class Line:
    """A frame of a traceback with its source line, outermost first in a traceback."""

    frame: Frame
    source: str

    def __str__(self) -> str:
        return f"{self.frame}: {self.source}" if self.source else str(self.frame)


def last(text: str, most_chars: int) -> tuple[str, tuple[Line, ...]]:
    """Return the text above its last traceback, and the traceback's lines.

    Of a traceback longer than `most_chars`, only its end is read.
    """
    start = text.rfind(_HEAD)
    if start < 0:
        return text, tuple(_lines(text[-most_chars:]))
    return text[:start], tuple(_lines(text[start:][-most_chars:]))


def _lines(text: str) -> Iterator[Line]:
    """Yield the frames of a traceback with their source lines."""
    rows = [row.rstrip("\r")[: 4 * WIDEST_SOURCE] for row in text.split("\n")]
    place: tuple[str, str] | None = None  # (file, function) of an IPython frame
    for number, row in enumerate(rows):
        if match := _FILE_LINE.search(row):
            below = rows[number + 1] if number + 1 < len(rows) else ""
            source = "" if _FILE_LINE.search(below) else _PREFIX.sub("", below).strip()
            yield Line(Frame(match[1], int(match[2]), match[3]), source[:WIDEST_SOURCE])
        elif match := _CELL.search(row):
            place = (f"cell {match[1]}", "<module>")
        elif match := _MODULE_FILE.search(row):
            place = (match[1], match[3])
        elif match := _OLD_FILE.search(row):
            place = (match[1], match[2])
        elif place and (match := _ARROW.search(row)):
            yield Line(Frame(place[0], int(match[1]), place[1]), match[2].strip())
            place = None
