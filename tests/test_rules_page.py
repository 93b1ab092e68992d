"""RULES.md says what the days' notebooks say: the same verdicts, and all of them."""

import json
import re
from pathlib import Path

from memlab.course.rules import RULES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "RULES.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| \*\*(\w+)\.\*\* (.*) \| \[day \d+\]\((.*)\) \| (.*) \| \*\*(.*)\*\* \|$", re.M
)


def printed(notebook: Path) -> str:
    """All that a notebook's cells print, in one line."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return " ".join("".join(output.get("text", "")) for output in outputs).replace("\n", " ")


def test_each_row_stands_in_the_notebook_that_it_names():
    rows = ROW.findall(PAGE)
    assert rows
    for rule, claim, notebook, measured, words in rows:
        verdict = f"Rule {rule}. {claim} Measured: {measured} Verdict: {words}"
        assert verdict in printed(ROOT / notebook)


def test_each_verdict_of_a_notebook_has_a_row():
    in_notebooks = [
        rule
        for notebook in sorted((ROOT / "solutions").glob("*.ipynb"))
        for rule in re.findall(r"Rule (\w+)\. ", printed(notebook))
    ]
    assert sorted(in_notebooks) == sorted(row[0] for row in ROW.findall(PAGE))


def test_each_rule_of_the_table_was_tried():
    assert {row[0] for row in ROW.findall(PAGE)} == set(RULES)


def test_each_claim_is_the_table_s():
    said = {rule: claim for rule, claim, *_ in ROW.findall(PAGE)}
    assert said == {name: f"{rule.claim} ({rule.guide})" for name, rule in RULES.items()}
