"""Each day ends with its sources: papers, documentation, and the guides whose rules it tries."""

import re
from pathlib import Path

import pytest

from memlab.course.guides import GUIDES
from memlab.course.rules import NO_GUIDE, RULES

SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions").glob("day*.py"))
ARXIV = re.compile(r"https://arxiv\.org/abs/\d{4}\.\d{4,5}")
LINK = re.compile(r"\[([^]]+)\]\((\S+)\)")
ITEM = re.compile(r"^- (.+)$", re.M)


def sources_of(text: str) -> list[str]:
    """Return the items of the section "Sources", the last cell, each in one line."""
    *_, last = text.split("\n# %%")
    assert last.startswith(" [markdown]\n# ## Sources\n"), "the last cell is not Sources"
    prose = "\n".join(line.removeprefix("#").removeprefix(" ") for line in last.splitlines())
    return ITEM.findall(re.sub(r"\n +", " ", prose))


def complaints(items: list[str]) -> list[str]:
    """Return the items that cite nothing, or whose link to arXiv has another form."""
    guides = {str(guide) for guide in GUIDES}
    return [
        item
        for item in items
        if item not in guides
        and (
            not LINK.search(item)
            or any("arxiv" in url and not ARXIV.fullmatch(url) for _, url in LINK.findall(item))
        )
    ]


@pytest.fixture(params=SOLUTIONS, ids=lambda path: path.stem[:5])
def day(request):
    """A day's number and its sources."""
    path = request.param
    return int(path.stem[3:5]), sources_of(path.read_text(encoding="utf-8"))


def test_a_day_links_its_sources(day):
    _, items = day
    assert any(LINK.search(item) for item in items)
    assert complaints(items) == []


def test_a_day_cites_the_guides_whose_rules_it_tries_and_no_other(day):
    number, items = day
    titles = {guide.title for guide in GUIDES}
    tried = {rule.guide for rule in RULES.values() if rule.day == number} & titles
    cited = [guide.title for guide in GUIDES if str(guide) in items]
    assert set(cited) == tried
    linked = {title for item in items for title, _ in LINK.findall(item)}
    assert linked & titles <= tried


def test_every_rule_is_of_a_guide_that_is_cited_or_of_none():
    assert {rule.guide for rule in RULES.values()} == {*(guide.title for guide in GUIDES), NO_GUIDE}


def test_a_paper_has_the_same_words_on_every_day():
    words = {}
    for path in SOLUTIONS:
        for item in sources_of(path.read_text(encoding="utf-8")):
            for _, url in LINK.findall(item):
                words.setdefault(url, set()).add(item)
    assert len(words) > 40
    assert {url: found for url, found in words.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    "item",
    [
        "Chen et al. 2016",
        "Chen et al. 2016: [Sublinear memory](arxiv.org/1604.06174)",
        "Chen et al. 2016: [Sublinear memory](https://arxiv.org/pdf/1604.06174)",
        "Chen et al. 2016: [Sublinear memory](https://arxiv.org/abs/1604.06174v2)",
        "[Day 19: Memory Optimization]",
    ],
)
def test_an_item_without_a_link_or_with_another_form_is_found(item):
    good = "Chen et al. 2016: [Sublinear memory](https://arxiv.org/abs/1604.06174)"
    assert complaints([good, str(GUIDES[-1]), item]) == [item]


def test_a_day_without_sources_is_found():
    with pytest.raises(AssertionError, match="not Sources"):
        sources_of("# %% [markdown]\n# # Day 1\n\n# %%\nrunning_bill(1)\n")


def test_an_item_of_two_lines_is_one():
    text = "\n# %% [markdown]\n# ## Sources\n#\n# - Chen: [Sublinear\n#   memory](https://a.b)\n"
    assert sources_of(text) == ["Chen: [Sublinear memory](https://a.b)"]
