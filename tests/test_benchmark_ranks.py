"""docs/RANKS.md matches the results."""

import copy
import json

import pytest
from benchmark_scripts import script

ranks = script("ranks")
RESULTS = json.loads((ranks.RESULTS / ranks.MEASURED_ON).read_text(encoding="utf-8"))["ranks"]


def test_the_page_is_that_of_the_results():
    assert ranks.DOCUMENT.read_text(encoding="utf-8") == ranks.page(RESULTS)


@pytest.mark.parametrize(("section", "name"), [("peaks", "predicted"), ("times", "ran")])
def test_another_result_changes_the_page(section, name):
    changed = copy.deepcopy(RESULTS)
    row = changed[section]["rows"][0]
    row[name] = [each + 1 for each in row[name]] if section == "peaks" else row[name] + 1
    assert ranks.page(changed) != ranks.page(RESULTS)


def test_no_predicted_peak_differs_from_a_real_one_by_more_than_a_percent():
    for row in RESULTS["peaks"]["rows"]:
        for real, predicted in zip(row["real"], row["predicted"], strict=True):
            assert real == pytest.approx(predicted, rel=0.01), row["what"]


def test_405b_on_1024_gpus_takes_less_than_two_minutes():
    [largest] = [row for row in RESULTS["times"]["rows"] if row["blocks"] == 8][:1]
    assert largest["ranks"] == 1024
    assert largest["seconds"] < 120
