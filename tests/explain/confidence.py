"""Count how often each rule of `memlab explain` is right on public reports, and write it down.

    python tests/explain/confidence.py

reads corpus.jsonl and writes memlab/explain/counts.json, from which a rule's confidence comes, and
the table in docs/EXPLAIN.md. test_explain_corpus.py checks that both are up to date.
"""

import json
import re
from collections import Counter, defaultdict
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from memlab.explain import rules
from memlab.explain.messages import read_log
from memlab.explain.rules import matching_rules, text_findings
from memlab.explain.text_causes import TextSituation

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus.jsonl")
PAGE = ROOT / "docs" / "EXPLAIN.md"
START, END = "<!-- confidence: made by tests/explain/confidence.py -->", "<!-- end -->"
WORDS = ("high", "medium", "low")


@cache
def corpus() -> tuple[dict[str, Any], ...]:
    rows = CORPUS.read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(row) for row in rows)


def is_right(case: dict[str, Any], cause: str) -> bool:
    return cause in (case["cause"], *case["acceptable"])


def counted() -> dict[str, list[int]]:
    """Return [right, called] of each rule that was the first to apply to a report.

    Rules are mended after they answered wrong. The miss still counts, so that a rule's confidence
    is that of a report nobody has seen: `missed_by` of a report names the rule.
    """
    found: dict[str, list[int]] = {}
    for case in corpus():
        rule, _ = next(matching_rules(TextSituation(read_log(case["log"]))))
        counts = found.setdefault(rule.example, [0, 0])
        counts[0] += is_right(case, rule.cause)
        counts[1] += 1
        if "missed_by" in case:
            found.setdefault(case["missed_by"], [0, 0])[1] += 1
    return dict(sorted(found.items()))


def table() -> list[str]:
    """Return the rows of the page's table."""
    right: Counter[str] = Counter()
    called: Counter[str] = Counter()
    causes = defaultdict(set)
    for case in corpus():
        first = text_findings(TextSituation(read_log(case["log"])))[0]
        word = first.word.split()[0]
        right[word] += is_right(case, first.cause.name)
        called[word] += 1
        causes[word].add(first.cause.name)
    rows = [
        f"| {word} | {called[word]} | {right[word]} | {right[word] / max(1, called[word]):.0%} |"
        for word in WORDS
    ]
    total, sum_right = sum(called.values()), sum(right.values())
    rows.append(f"| any | {total} | {sum_right} | {sum_right / total:.0%} |")
    titles = "| the answer says | public reports | with the right cause | share |"
    return [titles, "| --- | --- | --- | --- |", *rows]


def written_table(page: str) -> list[str]:
    inner = page.partition(START)[2].partition(END)[0]
    return [row for row in inner.splitlines() if row.startswith("|")]


def main() -> None:
    if not rules.COUNTS.is_relative_to(ROOT):
        raise SystemExit(f"got memlab of another checkout, {rules.COUNTS}; set PYTHONPATH")
    text = ",\n".join(f'  "{name}": {counts}' for name, counts in counted().items())
    rules.COUNTS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    rules.counts.cache_clear()
    page = PAGE.read_text(encoding="utf-8")
    block = "\n".join([START, "", f"Counted on {date.today().isoformat()}:", "", *table(), "", END])
    PAGE.write_text(re.sub(f"{START}.*?{END}", lambda _: block, page, flags=re.S), encoding="utf-8")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
