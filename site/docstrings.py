"""A griffe extension: memlab's docstrings, which are plain text, as Markdown.

aligned lines           "Saves    4 bytes per weight" becomes a row of a table
indented lines          stay as they are, as code
sections (Args:, …)     are left to griffe
other paragraphs        prose; characters that Markdown would read are escaped
"""

import html
import inspect
import re
from itertools import groupby
from typing import Any

import griffe

ALIGNED = re.compile(r"(\S(?:.*?\S)?) {2,}(\S.*)")
SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Attributes|Example):\s*\n")
CODE = re.compile(r"(`+[^`]+`+)")
BULLET = re.compile(r"(- |\d+\. )")


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each object that griffe finds."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(inspect.cleandoc(obj.docstring.value))


def markdown(text: str) -> str:
    return "\n\n".join(paragraph(part) for part in re.split(r"\n[ \t]*\n", text))


def paragraph(text: str) -> str:
    """Return one paragraph, which ends at an empty line, as Markdown."""
    lines = text.split("\n")
    if SECTION.match(text) or BULLET.match(text):
        return text
    if rows := table_rows(lines):
        return as_table(rows)
    groups = groupby(lines, key=lambda line: line.startswith(" "))
    return "\n\n".join(
        as_code("\n".join(group)) if indented else escaped("\n".join(group))
        for indented, group in groups
    )


def table_rows(lines: list[str]) -> list[tuple[str, str]]:
    """Return the rows of aligned lines; none if the lines are not aligned."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        if rows and line.startswith("  "):  # goes on with the line before
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        elif match := ALIGNED.fullmatch(line):
            rows.append((match[1], match[2]))
        else:
            return []
    return rows


def as_table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th>{in_html(name)}</th><td>{in_html(value)}</td></tr>" for name, value in rows
    )
    return f'<table class="aligned"><tbody>{cells}</tbody></table>'


def as_code(text: str) -> str:
    return f"```text\n{inspect.cleandoc(chr(10) + text)}\n```"


def in_html(text: str) -> str:
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", html.escape(text, quote=False))


def escaped(text: str) -> str:
    parts = CODE.split(text)
    parts[::2] = [re.sub(r"([\\*_<>|\[\]#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
