"""Public reports of running out of memory get the cause that an engineer named from the thread."""

import re

import confidence
import pytest

from memlab.explain import CAUSES, explain_text, rules
from memlab.explain.rules import RULES

CASES = {case["id"]: case for case in confidence.corpus()}


@pytest.mark.few(87)
@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_of_a_public_report_is_right(name):
    case = CASES[name]
    assert explain_text(case["log"]).cause in (case["cause"], *case["acceptable"])


MOST_ROWS = 15  # of 80 columns; most answers have eight to eleven


@pytest.mark.few(112)
@pytest.mark.parametrize("name", CASES)
def test_the_answer_to_a_public_report_fits_a_screen(name):
    rows = repr(explain_text(CASES[name]["log"])).splitlines()
    assert len(rows) <= MOST_ROWS
    assert max(map(len, rows)) <= 80


def test_the_confidence_of_a_rule_is_counted():
    """Run tests/explain/confidence.py after a change of the rules or the reports."""
    written = {name: list(counts) for name, counts in rules.counts().items()}
    assert written == confidence.counted()


def test_the_page_shows_the_counts():
    page = confidence.PAGE.read_text(encoding="utf-8")
    assert confidence.written_table(page) == confidence.table()
    assert re.search(r"Counted on \d{4}-\d\d-\d\d", page)


def test_high_confidence_is_right_in_97_and_medium_in_80_of_100_reports():
    rows = [row.split("|")[1:-1] for row in confidence.table()[2:]]
    share = {word.strip(): int(right) / max(1, int(called)) for word, called, right, _ in rows}
    assert share["high"] >= 0.97
    assert share["medium"] >= 0.8
    assert share["any"] >= 0.95


def test_every_rule_has_a_report_of_its_own():
    examples = [rule.example for rule in RULES]
    assert len(examples) == len(set(examples))
    assert [name for name in examples if name not in CASES] == []
    assert {rule.cause for rule in RULES} <= CAUSES.keys()


def test_reports_name_known_causes_and_no_person():
    for case in CASES.values():
        assert case["cause"] in CAUSES, case["id"]
        assert not re.search(
            r"/home/(?!user\b|runner\b)\w+/|\\Users\\(?!user\b|Admin)\w+\\", case["log"]
        )
