"""Every rule of thumb that the course puts on trial, and what came out: RULES.md.

    python benchmarks/rules.py

It runs the days' solutions as plain scripts (no Jupyter needed), collects the verdicts that they
reach, prints them as Markdown and writes RULES.md. The same verdicts stand in the days' notebooks,
and a test holds the two together.
"""

import re
import runpy
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import groupby
from pathlib import Path
from textwrap import shorten

from common import ROOT, circumstances, progress, set_environment, table

from memlab.course.rules import RULES, Verdict, verdicts
from memlab.internals.files import write_beside

PAGE = ROOT / "RULES.md"
RULES_IN_THE_GUIDES = 29
INTRODUCTION = """\
# Rules on trial

People size their training by rules of thumb. Five guides state {all} of them, some in several
parts; {tried} are tried here, each in the notebook of a day, with the code that measured it. Of
{verdicts} verdicts {wrong} are *wrong*, and most others hold only under a condition. The guides are
cited by their titles. GB are 10⁹ bytes here, as in the guides.

Measured on {where}, by `python benchmarks/rules.py`. Bytes are the same on every CPU.
"""


def main() -> None:
    set_environment()
    solutions = sorted((ROOT / "solutions").glob("day*.py"))
    with progress() as bar:
        for solution in bar.track(solutions, description="trials"):
            run(solution)
    text = page(verdicts)
    with write_beside(PAGE) as beside:
        beside.write_text(text, encoding="utf-8")
    print(text)


def run(solution: Path) -> None:
    """Run a day's solution without its prints and pictures; its verdicts are noted."""
    import matplotlib

    matplotlib.use("Agg")
    with redirect_stdout(StringIO()):
        runpy.run_path(str(solution))


def page(reached: Iterable[Verdict]) -> str:
    """The verdicts as a page of Markdown, by number."""
    reached = sorted(reached, key=lambda verdict: (number(verdict.rule), verdict.rule))
    here = circumstances()
    where = f"{here['device']}, torch {here['torch']}, memlab {here['memlab']}, {here['date']}"
    numbers = {number(verdict.rule) for verdict in reached}
    introduction = INTRODUCTION.format(
        all=RULES_IN_THE_GUIDES,
        tried="all" if len(numbers) == RULES_IN_THE_GUIDES else len(numbers),
        verdicts=len(reached),
        wrong=sum(verdict.words.startswith("wrong") for verdict in reached),
        where=where,
    )
    return introduction + overview(reached) + "".join(_sections(reached))


def overview(reached: Iterable[Verdict]) -> str:
    """A table of all verdicts, in three words at most."""
    rows = [
        (verdict.rule, shorten(RULES[verdict.rule].claim, 80, placeholder=" …"), in_short(verdict))
        for verdict in reached
    ]
    text = table(("rule", "claim", "verdict"), rows).replace("---:", "---")  # words go to the left
    return f"\n{text}\n"


def in_short(verdict: Verdict) -> str:
    """The verdict in three words at most: its first clause, where that is as short."""
    clause = re.split(r"[:;,]", verdict.words)[0].split(" (")[0]
    if len(clause.split()) <= 3:
        return clause
    return "holds under conditions" if clause.startswith("holds") else "wrong"


def _sections(reached: Iterable[Verdict]) -> Iterator[str]:
    """A heading for each day, and its verdicts."""
    for day, of_day in groupby(reached, key=lambda verdict: RULES[verdict.rule].day):
        (notebook,) = (ROOT / "solutions").glob(f"day{day:02}_*.ipynb")
        source = notebook.with_suffix(".py").read_text(encoding="utf-8")
        title = re.search(r"^# # (Day .*)$", source, re.M)[1]
        yield f"\n## [{title}]({notebook.relative_to(ROOT).as_posix()})\n"
        yield from map(entry, of_day)


def entry(verdict: Verdict) -> str:
    """What is said, what was measured, and what comes of it."""
    rule = RULES[verdict.rule]
    return (
        f"\n**{verdict.rule}.** {rule.claim} ({rule.guide})\n"
        f"- measured: {verdict.measured}\n"
        f"- verdict: **{verdict.words}**\n"
    )


def number(rule: str) -> int:
    """12 of "12b"."""
    return int(rule.rstrip("abcdefgh"))


if __name__ == "__main__":
    main()
