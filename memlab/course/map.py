"""docs/COURSE.md and its drawing: the days, what each needs, and what you can do after it.

    python -m memlab.course.map

Titles, questions, minutes and abilities come from the lessons' first cells.
"""

import re
from typing import NamedTuple

from memlab.course import days, notebooks

PAGE = days.ROOT / "docs" / "COURSE.md"
DRAWING = days.ROOT / "docs" / "drawings" / "course.svg"
# The days that a day builds on; Day 1 comes before all of them.
NEEDS: dict[int, tuple[int, ...]] = {
    **{6: (5,), 7: (5,), 9: (8,), 12: (8,), 13: (12,), 14: (5, 8), 15: (8,), 16: (5, 9, 11)},
    **{17: (3, 16), 18: (13,), 19: (4,), 20: (9,), 21: (10, 11)},
}
AFTERWARDS = {
    r"\bAfter today,? ": "",
    r"\bToday you build\b": "you have built",
    r"\bToday you learn\b": "you have learned",
    r"\bAfterwards,? you\b": "You",
}
PARTS = {
    "Foundations": range(1, 4),
    "Activations and precision": (4, 5, 6, 7, 10, 11, 19, 21),
    "Optimizer state": (8, 9, 15, 20),
    "Beyond one GPU's memory": (12, 13, 14, 18),
    "Putting it together": (16, 17),
}
INTRODUCTION = """\
# The course on one page

Begin with Day 1. After it, follow the lines to the right: a day needs only the days to its left.
`memlab start 5` opens Day 5, and `memlab progress` shows what you have done."""


class Summary(NamedTuple):
    """What the first cell of a lesson says."""

    title: str
    minutes: int
    ability: str  # "you can say …", without a period


def summary_of(number: int) -> Summary:
    """Return a lesson's summary; raise ValueError if its first cell lacks a part of it."""
    _, text = notebooks.cells(days.notebook(number))[0]
    words = " ".join(text.split())
    title = re.search(r"^# Day \d+: (.*)$", text, re.M)
    minutes = re.search(r"About (\d+) minutes", words)
    ability = re.search(r"\*\*.*?\*\* (.*?)\.? About \d+ minutes", words)
    if not (title and minutes and ability):
        raise ValueError(f"the first cell of day {number} lacks its title, minutes or abilities")
    return Summary(title[1], int(minutes[1]), _afterwards(ability[1]))


def _afterwards(text: str) -> str:
    """Return the sentences as they read after the day."""
    for before, after in AFTERWARDS.items():
        text = re.sub(before, after, text)
    introduction, _, items = text.partition(": - ")  # a list, on one line
    return f"{introduction} {items.replace(' - ', '; ')}" if items else text


def markdown() -> str:
    """Return the page."""
    known = days.numbers()
    tables = [_table(name, [day for day in of if day in known]) for name, of in PARTS.items()]
    picture = f"![Each day and the days that it builds on](drawings/{DRAWING.name})"
    return "\n\n".join([INTRODUCTION, picture, *tables]) + "\n"


def drawing() -> str:
    """Return the map as SVG: a column for each number of days that a day builds on."""
    needs = _all_needs()
    columns: dict[int, int] = {}
    rows: dict[int, int] = {}
    for day in days.numbers():
        columns[day] = 1 + max((columns[before] for before in needs.get(day, ())), default=-1)

    def mean_row(day: int) -> float:
        return sum(rows[before] for before in needs[day]) / len(needs[day]) if day in needs else 0

    for column in range(max(columns.values()) + 1):
        of_column = sorted((day for day in columns if columns[day] == column), key=mean_row)
        rows.update({day: row for row, day in enumerate(of_column)})
    at = {day: (20 + 250 * columns[day], 20 + 62 * rows[day]) for day in columns}
    size = 250 * (max(columns.values()) + 1), 62 * (max(rows.values()) + 1) + 20
    shapes = [_arrow(at[before], at[day]) for day in needs for before in needs[day]]
    shapes += [_box(day, *place) for day, place in at.items()]
    return "\n".join([_SVG.format(width=size[0], height=size[1]), *shapes, "</svg>"]) + "\n"


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">
<rect width="{width}" height="{height}" rx="12" fill="white"/>"""


def _arrow(begin: tuple[int, int], end: tuple[int, int]) -> str:
    (x, y), (to_x, to_y) = (begin[0] + 200, begin[1] + 21), (end[0], end[1] + 21)
    middle = (x + to_x) // 2
    path = f"M{x} {y} C{middle} {y} {middle} {to_y} {to_x} {to_y}"
    return f'<path d="{path}" fill="none" stroke="#8895a7" stroke-width="1.5"/>'


def _box(day: int, x: int, y: int) -> str:
    title = summary_of(day).title
    return (
        f'<rect x="{x}" y="{y}" width="200" height="42" rx="6" fill="#e8f0fe" stroke="#3465a4"/>'
        f'<text x="{x + 8}" y="{y + 17}" font-size="12" fill="#3465a4">Day {day}</text>'
        f'<text x="{x + 8}" y="{y + 34}" font-size="13" fill="#1b2733">{title}</text>'
    )


def _all_needs() -> dict[int, tuple[int, ...]]:
    return {day: NEEDS.get(day, (1,)) for day in days.numbers() if day > 1}


def _table(name: str, of_part: list[int]) -> str:
    lines = [f"## {name}", "", "| day | needs | minutes | after it |", "| --- | --- | ---: | --- |"]
    for day in of_part:
        title, minutes, ability = summary_of(day)
        link = f"[{title}](../solutions/{days.notebook(day).name})"
        needs = ", ".join(map(str, _all_needs().get(day, ()))) or "–"
        lines.append(f"| {day}. {link} | {needs} | {minutes} | {ability} |")
    return "\n".join(lines)


if __name__ == "__main__":
    DRAWING.parent.mkdir(exist_ok=True)
    for path, text in ((PAGE, markdown()), (DRAWING, drawing())):
        path.write_text(text, encoding="utf-8")
