"""Write docs/RULES.md: the verdicts on the rules of thumb that the course tests.

    python benchmarks/rules.py

Collects the verdicts that the days' executed notebooks store, and writes them to docs/RULES.md.
Building a day (`python -m memlab.course.build 5`) measures its verdicts again.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase
from textwrap import shorten

from common import ROOT, circumstances, table

from memlab.course.notebooks import read
from memlab.course.rules import NO_GUIDE, RULES, RuleVerdict
from memlab.internals.files import write_beside

PAGE = ROOT / "docs" / "RULES.md"
RULES_IN_THE_GUIDES = 31
INTRODUCTION = """\
# Rules on trial

People size their training by rules of thumb. Five guides state {all} of them, some in several
parts. The course tests {tried} of them, each in a day's notebook, with the code that measures it.
It also tests {others} claims that no guide makes. Of {verdicts} verdicts {wrong} are *wrong*, and
most others hold only under a condition.

The guides are cited by title; [GUIDES.md](GUIDES.md) has their authors and addresses, and
where the course covers each of their items. A GB is 10⁹ bytes, as in the guides.

Measured by the days' notebooks; collected by `python benchmarks/rules.py` on {where}. Bytes are
the same on every CPU.
"""


VERDICT = re.compile(
    r"^Rule (\w+)\. .*?\nMeasured: (.*?)\nVerdict: (.*?)(?=\nRule |\n*\Z)", re.M | re.S
)


def main() -> None:
    paths = sorted((ROOT / "solutions").glob("day*.ipynb"))
    text = page(verdict for path in paths for verdict in stored(path))
    with write_beside(PAGE) as beside:
        beside.write_text(text, encoding="utf-8")
    print(text)


def stored(notebook: Path) -> Iterator[RuleVerdict]:
    """Yield the verdicts that a notebook's cells printed."""
    for cell in read(notebook)["cells"]:
        for output in cell.get("outputs", ()):
            for rule, measured, words in VERDICT.findall("".join(output.get("text", ()))):
                yield RuleVerdict(rule, " ".join(words.split()), " ".join(measured.split()))


def page(reached: Iterable[RuleVerdict]) -> str:
    """Return the verdicts as a Markdown page, sorted by rule."""
    reached = sorted(reached, key=lambda verdict: (number(verdict.rule), verdict.rule))
    here = circumstances()
    where = f"{here['device']}, torch {here['torch']}, memlab {here['memlab']}, {here['date']}"
    in_guides = [verdict for verdict in reached if RULES[verdict.rule].guide != NO_GUIDE]
    numbers = {number(verdict.rule) for verdict in in_guides}
    introduction = INTRODUCTION.format(
        all=RULES_IN_THE_GUIDES,
        tried="all" if len(numbers) == RULES_IN_THE_GUIDES else len(numbers),
        others=len(reached) - len(in_guides),
        verdicts=len(reached),
        wrong=sum(verdict.words.startswith("wrong") for verdict in reached),
        where=where,
    )
    return introduction + overview(reached) + "".join(_sections(reached))


def overview(reached: Iterable[RuleVerdict]) -> str:
    """Return a table of all verdicts, each in at most three words."""
    rows = [
        (verdict.rule, shorten(RULES[verdict.rule].claim, 80, placeholder=" …"), in_short(verdict))
        for verdict in reached
    ]
    text = table(("rule", "claim", "verdict"), rows).replace("---:", "---")  # align words left
    return f"\n{text}\n"


def in_short(verdict: RuleVerdict) -> str:
    """Return the verdict in at most three words: its first clause if that clause is short."""
    clause = re.split(r"[:;,]", verdict.words)[0].split(" (")[0]
    if len(clause.split()) <= 3:
        return clause
    return "holds under conditions" if clause.startswith("holds") else "wrong"


def _sections(reached: Iterable[RuleVerdict]) -> Iterator[str]:
    """Yield a heading and the verdicts for each day."""
    for day, of_day in groupby(reached, key=lambda verdict: RULES[verdict.rule].day):
        (notebook,) = (ROOT / "solutions").glob(f"day{day:02}_*.ipynb")
        source = notebook.with_suffix(".py").read_text(encoding="utf-8")
        title = re.search(r"^# # (Day .*)$", source, re.M)[1]
        yield f"\n## [{title}](../{notebook.relative_to(ROOT).as_posix()})\n"
        yield from map(entry, of_day)


def entry(verdict: RuleVerdict) -> str:
    """Return the claim, the measurement and the verdict."""
    rule = RULES[verdict.rule]
    return (
        f"\n**{verdict.rule}.** {rule.claim} ({rule.guide})\n"
        f"- measured: {verdict.measured}\n"
        f"- verdict: **{verdict.words}**\n"
    )


def number(rule: str) -> int:
    """Return the number of a rule: 12 for "12b"."""
    return int(rule.rstrip(ascii_lowercase))


if __name__ == "__main__":
    main()
