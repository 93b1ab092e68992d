"""Every table of `memlab plan` and `memlab measure` fits 80 columns, with the longest names."""

import pytest

from memlab.cli import report, terminal
from memlab.cli.plan_report import Section, columns_of
from memlab.cli.plan_script import _options as script_options
from memlab.cli.ranks import RankRow, columns
from memlab.cli.rows import Row
from memlab.cli.script_search import ScriptSearch
from memlab.cli.script_sizes import Limits
from memlab.planner.measuring import Measured
from memlab.planner.options import Option
from memlab.planner.outside import ORDER, Attempt, Places
from memlab.planner.recipes import recipes, usual_kinds
from memlab.trace import DeviceMemory, Event, Trace
from memlab.train import COMBINATIONS, TECHNIQUES
from memlab.transformers_models.planning import Choice

HUGE = 1_099_000_000_000  # 1023.5 GiB, the most characters below a TiB
MEASURED = Measured(HUGE, HUGE, {"parameters": HUGE}, "backward", False, None)


@pytest.fixture
def widths(capsys):
    """Print a table; return the widths of its lines, after checking that --wide has all rows."""

    def of(table) -> list[int]:
        rows = table.row_count
        with terminal.style(wide=True):
            terminal.show_table(table)
        assert len(capsys.readouterr().out.splitlines()) == rows + 1
        terminal.show_table(table)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > rows
        return [len(line.rstrip()) for line in lines]

    return of


def option(recipe, budget: int, seconds: float) -> Option:
    times = {"compute": seconds}
    return Option(recipe, HUGE, budget, MEASURED, times, largest_batch=4096, longest=2**20)


def table(options, heading="", **how):
    return terminal.table_of(columns_of([Section(options, options[0], heading)], **how))


def test_plans_of_models(widths):
    ways = [recipe for kind in usual_kinds() for recipe in recipes(kind, sequences=64, gpus=4096)]
    longest = sorted(set(ways), key=lambda recipe: -len(recipe.words))[:60]
    assert len(longest[0].words) > 80
    options = [
        option(recipe, budget, seconds=9.99 * n)
        for n, recipe in enumerate(longest, start=1)
        for budget in (2 * HUGE, 0)
    ]
    assert max(widths(table(options, heading="full fine-tuning"))) <= 80


def test_plans_of_transformers_models(widths):
    groups = Choice(rank=1024, targets="q_proj,k_proj,v_proj,o_proj", attention="eager").groups()
    options = [
        option(recipe, budget, seconds=123.0)
        for group in groups
        for recipe in group
        for budget in (0, 2 * HUGE)
    ]
    assert max(widths(table(options, named=lambda each: str(each.recipe)))) <= 80


def trace(reserved: int | None = HUGE) -> Trace:
    event = Event(HUGE, 1, "activations", "", "", "optimizer", "float32", ())
    return Trace((event,), memory=DeviceMemory(reserved_peak_bytes=reserved), dry=True)


def test_plans_of_scripts(widths):
    attempts = [Attempt(wrappers, Places(("layers",), True)) for wrappers in ORDER]
    rows = [Row(each.name, trace(), estimated_time_ratio=123.45) for each in attempts]
    needed = {row.name: HUGE for row in rows}
    limits = Limits(10**6, 2**20)
    found = ScriptSearch(rows, needed, attempts[-1], Places(), None, {}, limits)
    for budget in (0, 2 * HUGE):
        assert max(widths(table(script_options(found, budget), title="with"))) <= 80


NAMES = (*TECHNIQUES, *COMBINATIONS, "checkpointing+flash-attention+chunked-loss+lion8bit+autocast")


@pytest.mark.parametrize("reserved", [None, HUGE])
def test_measurements(widths, reserved):
    rows = [Row(name, trace(reserved), 1234.5, (123.45,), 1.2e-10) for name in NAMES]
    assert max(widths(report.table(rows))) <= 80


def test_ranks(widths):
    gathered = ("layers.100", "layers.101", "root")
    rows = [
        RankRow(
            f"{name}, stage 3", trace(), 1.0, states_bytes=HUGE, sent_bytes=HUGE, gathered=gathered
        )
        for name in NAMES
    ]
    assert max(widths(report.table(rows, columns(rows)))) <= 80
