"""docs/GUIDES.md: each item of the guides has a place in the project, and the place exists."""

import re
from inspect import signature
from pathlib import Path
from typing import NamedTuple

import pytest

from memlab import cli
from memlab.course import days
from memlab.course.guides import GUIDES
from memlab.course.rules import RULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "GUIDES.md").read_text(encoding="utf-8")
EXERCISES = {each.id for number in days.numbers() for each in days.day(number).exercises}
BETWEEN = r", (?=rule |exercise |Day \d|`)"  # places; a heading may have a comma
NEEDS_A_GPU = "done; needs a GPU: "


class Item(NamedTuple):
    """A row of the page, and the title of its guide."""

    guide: str
    item: str
    places: tuple[str, ...]
    state: str


def items_of(page: str) -> list[Item]:
    """Return the page's rows."""
    found = []
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, rest = section.partition("\n")
        for item, where, state in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", rest, re.M)[2:]:
            found.append(Item(title, item, tuple(re.split(BETWEEN, where)), state))
    return found


def headings(day: int) -> list[str]:
    [source] = ROOT.glob(f"solutions/day{day:02}_*.py")
    return re.findall(r"^# ##+ (.+)$", source.read_text(encoding="utf-8"), re.M)


def exists(place: str) -> bool:
    """Return whether the project has a rule, an exercise, a section, a command or a file."""
    if found := re.fullmatch(r"rule (\w+)", place):
        return found[1] in RULES
    if found := re.fullmatch(r"exercise ([\d.]+)", place):
        return found[1] in EXERCISES
    if found := re.fullmatch(r"Day (\d+) \*(.+)\*", place):
        return int(found[1]) in days.numbers() and found[2] in headings(int(found[1]))
    if found := re.fullmatch(r"`memlab (\w+)( --[\w-]+)?`", place):
        command = getattr(cli, f"{found[1]}_command", None)
        option = (found[2] or "").strip(" -").replace("-", "_")
        return command is not None and (not option or option in signature(command).parameters)
    found = re.fullmatch(r"`([\w/]+\.\w+)`", place)
    return bool(found) and (ROOT / found[1]).is_file()


ITEMS = items_of(PAGE)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.title)
def test_each_guide_is_cited_and_has_its_items(guide):
    assert f"## {guide.title}\n\n{guide}\n" in PAGE
    assert sum(item.guide == guide.title for item in ITEMS) > 20


def test_each_place_exists():
    assert [
        (item.item, place) for item in ITEMS for place in item.places if not exists(place)
    ] == []


def test_each_rule_is_an_item_of_its_guide():
    placed = {(item.guide, place) for item in ITEMS for place in item.places}
    titles = {guide.title for guide in GUIDES}
    of_guides = {rule: of for rule, of in RULES.items() if of.guide in titles}
    assert len(of_guides) > 80
    assert [
        rule for rule, of in of_guides.items() if (of.guide, f"rule {rule}") not in placed
    ] == []


def test_each_item_is_done_or_says_what_is_left():
    for item in ITEMS:
        assert item.state == "done" or len(item.state) > len(NEEDS_A_GPU) + 10
        assert item.state == "done" or item.state.startswith(NEEDS_A_GPU)


def test_the_page_counts_its_items():
    left = sum(item.state.startswith(NEEDS_A_GPU) for item in ITEMS)
    words = " ".join(PAGE.split())
    assert f"each of their {len(ITEMS)} items" in words
    assert f"{left} items still need a measurement on a GPU" in words


@pytest.mark.parametrize(
    ("place", "there"),
    [
        ("rule 9a", True),
        ("rule 9z", False),
        ("exercise 5.2", True),
        ("exercise 5.9", False),
        ("Day 2 *Monitor the loop*", True),
        ("Day 2 *Monitor the clock*", False),
        ("Day 99 *Monitor the loop*", False),
        ("`memlab plan --deepspeed`", True),
        ("`memlab plan --shallowspeed`", False),
        ("`memlab train`", True),
        ("`memlab fly`", False),
        ("`memlab/units.py`", True),
        ("`memlab/unit.py`", False),
        ("somewhere", False),
    ],
)
def test_a_place_that_is_missing_is_found(place, there):
    assert exists(place) == there


def test_a_row_has_an_item_its_places_and_a_state():
    page = "## A\n\n| item | where | state |\n| --- | --- | --- |\n| x | rule 1, `b.py` | done |\n"
    assert items_of(page) == [Item("A", "x", ("rule 1", "`b.py`"), "done")]
