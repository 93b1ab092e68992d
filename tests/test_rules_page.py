"""RULES.md says what the days' notebooks say: the same verdicts, and all of them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from memlab.course.rules import RULES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/RULES.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^\*\*(\w+)\.\*\* (.*)\n- measured: (.*)\n- verdict: \*\*(.*)\*\*$", re.M)
DAYS = re.compile(r"^## \[Day (\d+): .*\]\((.*)\)$", re.M)


def entries() -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """The day, its notebook, and (rule, claim, measured, verdict) of each entry of the page."""
    _, *sections = re.split(r"^(?=## )", PAGE, flags=re.M)
    for section in sections:
        day, notebook = DAYS.match(section).groups()
        for entry in ENTRY.findall(section):
            yield int(day), notebook, entry


def printed(notebook: Path) -> str:
    """Everything that a notebook's cells print, in one line."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return " ".join("".join(output.get("text", "")) for output in outputs).replace("\n", " ")


def test_each_entry_stands_in_the_notebook_that_it_names():
    assert len(list(entries())) == PAGE.count("\n- verdict: ")
    for day, notebook, (rule, claim, measured, words) in entries():
        assert day == RULES[rule].day
        verdict = f"Rule {rule}. {claim} Measured: {measured} Verdict: {words}"
        assert verdict in printed(ROOT / "docs" / notebook)


def test_each_verdict_of_a_notebook_has_an_entry():
    in_notebooks = [
        rule
        for notebook in sorted((ROOT / "solutions").glob("*.ipynb"))
        for rule in re.findall(r"Rule (\w+)\. ", printed(notebook))
    ]
    assert sorted(in_notebooks) == sorted(entry[0] for *_, entry in entries())


def test_each_rule_of_the_table_was_tried():
    assert {entry[0] for *_, entry in entries()} == set(RULES)


def test_each_claim_is_the_table_s():
    said = {rule: claim for *_, (rule, claim, _, _) in entries()}
    assert said == {name: f"{rule.claim} ({rule.guide})" for name, rule in RULES.items()}


def test_the_wrong_ones_are_counted():
    verdicts = [words for *_, (_, _, _, words) in entries()]
    wrong = [words for words in verdicts if words.startswith("wrong")]
    assert f"Of {len(verdicts)} verdicts {len(wrong)} are *wrong*" in PAGE.replace("\n", " ")


def test_the_table_has_each_verdict_in_three_words_at_most():
    rows = re.findall(r"^\| (\w+) \| .* \| (.*) \|$", PAGE, re.M)[1:]
    verdicts = {rule: words for *_, (rule, _, _, words) in entries()}
    assert [rule for rule, _ in rows] == list(verdicts)
    for rule, short in rows:
        assert len(short.split()) <= 3
        assert short.startswith("wrong") == verdicts[rule].startswith("wrong")
