"""Verdicts on rules of thumb: their text, and the table of rules."""

import re
from itertools import groupby
from string import ascii_lowercase

import pytest

from memlab.course import days, rules, verdict
from memlab.course.rules import RULES, Rule, RuleVerdict


@pytest.fixture(autouse=True)
def reached(monkeypatch):
    """Two rules, and the verdicts reached in one test."""
    verdicts = []
    monkeypatch.setattr(rules, "verdicts", verdicts)
    monkeypatch.setattr(
        rules,
        "RULES",
        {"1a": Rule("Half is gone.", "A guide", 5), "2": Rule("Long " * 50, "A guide", 6)},
    )
    return verdicts


def test_a_rule_that_holds_is_printed_with_its_condition(reached, capsys):
    verdict("1a", True, "0.50 ×", condition="if all is kept", otherwise="never said")
    assert capsys.readouterr().out.splitlines() == [
        "Rule 1a. Half is gone. (A guide)",
        "Measured: 0.50 ×",
        "Verdict: holds if all is kept",
    ]
    assert reached == [RuleVerdict("1a", "holds if all is kept", "0.50 ×")]


def test_a_wrong_rule_is_printed_with_the_truth(reached, capsys):
    verdict("1a", False, "0.90 ×", condition="never said", otherwise="a tenth is")
    assert capsys.readouterr().out.endswith("\nVerdict: wrong: a tenth is\n")
    assert reached == [RuleVerdict("1a", "wrong: a tenth is", "0.90 ×")]


def test_a_rule_that_holds_without_a_condition_just_holds(reached, capsys):
    verdict("1a", True, "0.50 ×")
    assert capsys.readouterr().out.endswith("\nVerdict: holds\n")
    assert reached[0].words == "holds"


def test_verdicts_are_kept_in_order(reached):
    verdict("2", True, "first")
    verdict("1a", False, "second", otherwise="x")
    verdict("2", True, "third")
    assert [v.measured for v in reached] == ["first", "second", "third"]


def test_long_sentences_are_wrapped_without_losing_text(reached, capsys):
    verdict("2", True, "much " * 50, condition="if " * 80)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert max(map(len, lines)) <= 96
    assert reached == [RuleVerdict("2", f"holds {'if ' * 80}".strip(), "much " * 50)]


@pytest.mark.parametrize("rule", ["1", "3", 2, "1A"])
def test_an_unknown_rule_is_an_error_that_lists_the_rules(reached, rule):
    with pytest.raises(ValueError, match=f"^got rule {rule}; RULES has 1a, 2$"):
        verdict(rule, True, "0.50 ×")
    assert reached == []


# ------------------------------------------------------------------ the rules themselves


def test_every_rule_has_a_claim_and_a_day_of_the_course():
    known = days.numbers()
    assert all(rule.claim.endswith(".") and rule.day in known for rule in RULES.values())


def test_rules_are_sorted_and_their_parts_have_letters_from_a():
    parts = [re.fullmatch(r"([1-9]\d*)([a-z]?)", id_).groups() for id_ in RULES]
    assert parts == sorted(parts, key=lambda part: (int(part[0]), part[1]))
    for number, of_one in groupby(parts, key=lambda part: part[0]):
        letters = "".join(letter for _, letter in of_one)
        tried_again = ascii_lowercase[1 : 1 + len(letters)]
        all_parts = ascii_lowercase[: max(2, len(letters))]
        assert letters in ("", tried_again, all_parts), f"rule {number}"


def test_a_rule_that_does_not_hold_needs_the_truth():
    with pytest.raises(ValueError, match="give the true one, otherwise="):
        rules.verdict("2", False, "1 × and 2 ×")
