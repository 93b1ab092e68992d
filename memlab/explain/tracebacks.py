"""The rows of a log without what terminals, launchers and notebooks add to them, and its frames.

Tracebacks are Python's, IPython's and Colab's, rich's and typer's in boxes, pytest's, and a
debugger's, which begins with the innermost frame.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memlab.explain.frames import Frame
from memlab.explain.source_files import WIDEST_SOURCE

WIDEST_ROW = 4 * WIDEST_SOURCE  # characters that are searched for a frame
HEAD = "Traceback (most recent call last)"
DEBUGGER = "Exception has occurred"
_COLOUR = re.compile(r"\x1b?\[\d{1,3}(?:;\d{1,3}){0,5}m|\x1b\[[\d;?]{0,9}[A-Za-z]")
_LINK = re.compile(r"\[([^\[\]\n]{1,300})\]\(https?://[^()\n]{0,300}\)")  # Colab's and Jupyter's
_RANK = r"\[[a-z]{0,9}rank\d{1,5}\]:?"
_WRITER = re.compile(rf"({_RANK}|\[\d{{1,4}}\]:|\([\w.:= -]{{1,60}}pid=\d{{1,9}}[^()\n]{{0,60}}\))")
_PREFIX = re.compile(
    rf"[ \t]{{0,8}}(?:{_WRITER.pattern}|> ?|E {{3,9}}|\d{{1,4}}: |[|│┃║] ?|stderr: ?"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?\]?|\d\d-\d\d \d\d:\d\d:\d\d"
    r"|\[?(?:ERROR|INFO|WARNING|CRITICAL|DEBUG|error|info)\]?:?(?= )"
    r"|\[[\w./-]{1,60}\.py:\d{1,6}(?::\w{1,40})?\])"
)
_MOST_PREFIXES = 8
_BOX_END = re.compile(r"[ \t]{0,200}[│┃║|]$")
_FILE_LINE = re.compile(r'File ["“]([^"”\n]{1,500})["”], line (\d{1,9}), in (\S{1,200})')
_BROKEN_FILE_LINE = re.compile(r'^[ \t]{0,8}File "[^"\n]{1,500}("(, line ?\d{0,9}(, in?)?)?,?)?$')
_CELL = re.compile(r"^(?:Cell|Input) In ?\[(\d{1,6})\]")
_MODULE_FILE = re.compile(r"^File ([^\n:]{1,500}):(\d{1,9}), in ([\w.<>]{1,200})")
_OLD_FILE = re.compile(r"^(\S{1,500}) in (<cell line: \d{1,6}>|[\w.<>]{1,200})(?:\(|$)")
_BOX_FILE = re.compile(r"^(\S[^\n]{0,400}\.\w{1,6}):(\d{1,9}) in ?([\w.<>]{0,200})$")
_ARROW = re.compile(r"^-{1,20}> ?(\d{1,9}) (.{0,300})")
_BOX_ARROW = re.compile(r"^❱ ?(\d{1,9}) [│┃|]?[│┃ ]{0,99}(.{0,300})")
_PYTEST_CODE = re.compile(r"^> {2,99}(\S.{0,300})")
_PYTEST_FILE = re.compile(r"^(\S{1,400}\.py):(\d{1,9}): (?:\w{1,60}Error\b|in (\w{1,200}))?")


@dataclass(frozen=True)
class Line:
    """A frame of a traceback with its source line, outermost first in a traceback."""

    frame: Frame
    source: str

    def __str__(self) -> str:
        if not self.frame.filename:
            return self.source
        return f"{self.frame}: {self.source}" if self.source else str(self.frame)


class Row(NamedTuple):
    """A row of a log: who wrote it (a rank, a worker; "" if the row does not say), and the rest."""

    writer: str
    text: str
    raw: str


def rows_of(text: str) -> list[Row]:
    """Return the rows of a log without colours, boxes, quotation marks, times and levels."""
    plain = _COLOUR.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return [_row(_LINK.sub(r"\1", raw)) for raw in plain.split("\n")]


def _row(raw: str) -> Row:
    place, writer = 0, ""
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(raw, place)
        if match is None:
            break
        writer = writer or (match[1] or "").rstrip(":")
        place = match.end()
    text = _BOX_END.sub("", raw[place:]) if len(raw) < WIDEST_ROW else raw[place:]
    return Row(writer, text.rstrip() if place else text, raw)


def before(rows: Sequence[Row]) -> tuple[Sequence[Row], tuple[Line, ...]]:
    """Return the rows above the last traceback, and the traceback's lines."""
    start = next((n for n in range(len(rows) - 1, -1, -1) if HEAD in rows[n].text), None)
    if start is None:
        return rows, tuple(_lines(rows))
    return rows[:start], tuple(_lines(rows[start:]))


def below(rows: Sequence[Row]) -> tuple[Line, ...]:
    """Return the lines of a report that states the message first, without a traceback's head."""
    texts = [row.text for row in rows]
    end = next((n for n, text in enumerate(texts) if HEAD in text), len(rows))
    return tuple(_lines(rows[:end]))


def code_above(rows: Sequence[Row]) -> tuple[Line, ...]:
    """Return the code line right above a message whose traceback is cut off."""
    code = next((row for row in reversed(rows) if row.text.strip(" ~^\t")), None)
    if code is None or not re.match(r"[ \t]{2}", code.text) or not re.search(r"[(=]", code.text):
        return ()
    return (Line(Frame("", 0, ""), code.text.strip()[:WIDEST_SOURCE]),)


def reversed_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    """Return the lines of a traceback that begins with the innermost frame."""
    return tuple(reversed(tuple(_lines(rows))))


def _lines(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the frames of a traceback with their source lines."""
    place: tuple[str, str] | None = None  # (file, function) of a frame whose line follows
    for number in range(len(rows)):
        text = _unbroken(rows, number)
        bare = text.strip()
        if match := _FILE_LINE.search(text):
            yield Line(Frame(match[1], int(match[2]), match[3]), _source(rows, number + 1))
        elif match := _CELL.search(bare):
            place = (f"cell {match[1]}", "<module>")
        elif match := _MODULE_FILE.search(bare):
            place = (match[1], match[3])
        elif match := _BOX_FILE.search(bare):
            below = rows[number + 1].text.strip() if number + 1 < len(rows) else ""
            place = (match[1], match[3] or below)
        elif match := _OLD_FILE.search(bare):
            place = (match[1], match[2])
        elif place and (match := _ARROW.search(bare) or _BOX_ARROW.search(bare)):
            yield Line(Frame(place[0], int(match[1]), place[1]), match[2].strip())
            place = None


def _unbroken(rows: Sequence[Row], number: int) -> str:
    """Return a row; a frame that a terminal broke over rows is put together."""
    text = rows[number].text
    for below in rows[number + 1 : number + 3]:
        if len(text) > WIDEST_ROW or not _BROKEN_FILE_LINE.search(text):
            break
        text += below.text
    return text[:WIDEST_ROW]


def _source(rows: Sequence[Row], number: int) -> str:
    """Return the source line of a frame: the first row below that belongs to no frame."""
    if number < len(rows) and not {'"', "line"} & {rows[number - 1].text[-1:]}:
        text = rows[number].text
        if text[:10].lstrip().startswith("line ") and ", in " in text:
            number += 1  # the rest of a broken frame
    text = rows[number].text[:WIDEST_ROW] if number < len(rows) else ""
    return "" if re.match(r' {0,9}File ["“]', text) else text.strip()[:WIDEST_SOURCE]


def pytest_lines(rows: Iterable[Row]) -> Iterator[Line]:
    """Yield the lines that pytest writes around the message: the code above, its file below."""
    code = ""
    for row in rows:
        if match := _PYTEST_CODE.search(row.raw):
            code = match[1].strip()
        elif match := _PYTEST_FILE.search(row.text):
            yield Line(Frame(match[1], int(match[2]), match[3] or "<pytest>"), code)
