"""docs/PEERS.md matches the results, and README's verdicts RULES.md."""

import copy
import json
import re
from pathlib import Path

import pytest
from benchmark_scripts import script

ROOT = Path(__file__).parents[1]
peers = script("peers")

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "PEERS.md").read_text(encoding="utf-8")
RESULTS = json.loads((peers.RESULTS / peers.MEASURED_ON).read_text(encoding="utf-8"))


def test_the_page_contains_the_table_of_the_results():
    assert peers.table(RESULTS) in PAGE


def test_each_row_names_an_existing_script():
    scripts = re.findall(r"`(benchmarks/\w+\.py)`", peers.table(RESULTS))
    assert scripts
    assert all((ROOT / script).exists() for script in scripts)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("losses", "float32", "ways", "memlab", "peak_bytes"), 1),
        (("optim", "optimizers", "times", "2", "memlab Lion"), 3.0),
        (("zero", "processes", "rows", 3, "ratio", 1), 7.0),
        (("meter", "exactness", "rows", 0, "memlab"), 4),
    ],
)
def test_a_changed_result_changes_the_table(path, value):
    changed = copy.deepcopy(RESULTS)
    *parents, last = path
    parent = changed
    for key in parents:
        parent = parent[key]
    parent[last] = value
    assert peers.table(changed) != peers.table(RESULTS)


def test_the_readme_counts_the_verdicts_of_rules_md():
    page = (ROOT / "docs/RULES.md").read_text(encoding="utf-8")
    verdicts = re.findall(r"^- verdict: \*\*(wrong|holds)\b.*\*\*$", page, re.M)
    wrong = verdicts.count("wrong")
    assert f"of {len(verdicts)} verdicts {wrong} are *wrong*" in README
    assert not re.search(
        r"verdict: \*\*holds\*\*$", page, re.M
    )  # all other verdicts state a condition
