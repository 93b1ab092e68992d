"""A griffe extension: memlab's docstrings, which are plain text, as Markdown.

aligned lines           "Saves    4 bytes per weight" becomes a row of a table
statements of Python    become code
indented lines          stay as they are, as code
sections (Args:, …)     are left to griffe
other paragraphs        prose; characters that Markdown would read are escaped
"""

import ast
import html
import inspect
import re
from itertools import groupby
from typing import Any

import griffe

ALIGNED = re.compile(r"(\S(?:.*?\S)?) {2,}(\S.*)")
SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Attributes|Example):\s*\n")
CODE = re.compile(r"(`+[^`]+`+)")
EMPHASIS = re.compile(r"(?<!\S)(\*\w(?:[\w ]*\w)?\*)(?!\w)")
BULLET = re.compile(r"(- |\d+\. )")
FENCES = re.compile(r"\n```\n+```python\n")  # between statements and what they follow
STATEMENTS = (ast.Import, ast.ImportFrom, ast.Assign, ast.Call, ast.With, ast.For)


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each object that griffe finds, and adds the fields of tuples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(inspect.cleandoc(obj.docstring.value))

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstring of the package itself, which is no other object's member."""
        self.on_object(obj=pkg)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a NamedTuple the signature that it is called with."""
        if any(str(base).endswith("NamedTuple") for base in cls.bases):
            fields = [
                griffe.Parameter(
                    name,
                    annotation=field.annotation,
                    kind=griffe.ParameterKind.positional_or_keyword,
                    default=field.value,
                )
                for name, field in cls.members.items()
                if field.is_attribute and field.annotation is not None
            ]
            own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
            made = griffe.Function("__init__", parameters=griffe.Parameters(own, *fields))
            cls.set_member("__init__", made)


def markdown(text: str) -> str:
    parts = (paragraph(part) for part in re.split(r"\n[ \t]*\n", text))
    return FENCES.sub("\n\n", "\n\n".join(parts))


def paragraph(text: str) -> str:
    """Return one paragraph, which ends at an empty line, as Markdown."""
    lines = text.split("\n")
    if SECTION.match(text) or BULLET.match(text):
        return text
    if is_python(text):
        return as_code(text)
    if rows := table_rows(lines):
        return as_table(rows)
    groups = groupby(lines, key=lambda line: line.startswith(" "))
    return "\n\n".join(
        as_code("\n".join(group)) if indented else escaped("\n".join(group))
        for indented, group in groups
    )


def is_python(text: str) -> bool:
    """Whether the text is a call, an assignment or another statement, and no prose."""
    try:
        found = ast.parse(text).body
    except SyntaxError:
        return False
    return isinstance(getattr(found[0], "value", found[0]), STATEMENTS) if found else False


def table_rows(lines: list[str]) -> list[tuple[str, str]]:
    """Return the rows of aligned lines; none if the lines are not aligned."""
    rows: list[tuple[str, str]] = []
    column = 0  # where the text of the first row begins
    for line in lines:
        if rows and line.startswith("  "):  # goes on with the line before
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        elif match := ALIGNED.fullmatch(line):
            rows.append((match[1], match[2]))
            column = column or match.start(2)
        elif rows and line[column - 1 : column] == " " and line[column : column + 1].strip():
            rows.append((line[:column].rstrip(), line[column:]))  # a name as long as its column
        else:
            return []
    return rows


def as_table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th>{in_html(name)}</th><td>{in_html(value)}</td></tr>" for name, value in rows
    )
    return f'<table class="aligned"><tbody>{cells}</tbody></table>'


def as_code(text: str) -> str:
    lines = inspect.cleandoc(chr(10) + text)
    return f"```{'python' if is_python(lines) else 'text'}\n{lines}\n```"


def in_html(text: str) -> str:
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", html.escape(text, quote=False))


def escaped(text: str) -> str:
    """Return prose without Markdown but for `code` and *emphasis*."""
    parts = CODE.split(text)
    for n in range(0, len(parts), 2):
        words = EMPHASIS.split(parts[n])
        words[::2] = [
            re.sub(r"([\\*_>|\[\]#])", r"\\\1", part).replace("<", "&lt;") for part in words[::2]
        ]
        parts[n] = "".join(words)
    return "".join(parts)
