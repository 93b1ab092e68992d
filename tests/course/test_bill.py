"""Each day's line of the bill is measured, and compared with the first."""

from functools import cache

import matplotlib.pyplot as plt
import pytest
from quick import quick

from memlab.course import bill, days, ledger, running_bill
from memlab.course.bill import SETTING
from memlab.course.exercises import Bill, Day
from memlab.model import PRESETS
from memlab.trace import Event, Trace

GIB = 2**30


def trace(bytes_: int) -> Trace:
    event = Event(bytes_, 1, "activations", "aten.mm", "", "forward", "float32", (1,))
    return Trace((event,))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Record which of four days are measured; their peaks are 8, 6, 10 and 1 GiB, none stored."""
    found = []
    monkeypatch.setattr(bill, "STORED", tmp_path / "bill.json")

    def day(number: int) -> Day:
        def measure() -> Trace:
            found.append(number)
            return trace({1: 8, 2: 6, 5: 10, 6: 1}[number] * GIB)

        return Day((), Bill(f"day {number}: new", measure))

    monkeypatch.setattr(days, "day", day)
    monkeypatch.setattr(days, "numbers", lambda: [1, 2, 5, 6])
    yield found
    plt.close("all")


def test_each_day_has_a_line_with_its_saving(measured, capsys):
    running_bill(5)
    assert capsys.readouterr().out.splitlines() == [
        "day 1: new: 8.00 GiB",
        "day 2: new: 6.00 GiB, 25.0% less",
        "day 5: new: 10.00 GiB, 25.0% more",
    ]
    assert measured == [1, 2, 5]


def test_a_stored_line_is_not_measured(measured, capsys):
    bill.store(bill.STORED)
    measured.clear()
    running_bill(5)
    assert measured == []
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "day 1: new: 8.00 GiB",
        "day 2: new: 6.00 GiB, 25.0% less",
        "day 5: new: 10.00 GiB, 25.0% more",
    ]


def test_a_bill_of_stored_lines_imports_no_days_checks(measured, monkeypatch, capsys):
    bill.store(bill.STORED)
    monkeypatch.setattr(days, "day", lambda number: pytest.fail(f"day {number} was imported"))
    running_bill(5)
    assert capsys.readouterr().out.splitlines()[-1] == "day 5: new: 10.00 GiB, 25.0% more"


def test_the_stored_labels_are_those_of_the_days():
    assert list(bill.written()) == [days.day(number).bill.label for number in days.numbers()]


@pytest.mark.parametrize("number", [7, 10, 12, 13, 17, 18, 19, 20, 21])
def test_a_day_that_changes_nothing_has_the_bill_of_the_day_before(number):
    before, now = (days.day(n).bill for n in (number - 1, number))
    assert now.measure is before.measure
    assert bill.stored(now).at_peak == bill.stored(before).at_peak


def test_the_last_bills_peak_is_the_optimizers():
    assert "optimizer_temporaries" in bill.stored(days.day(19).bill).at_peak


@cache
def at_peak(measure):
    """Measure a line once; some days share a function."""
    return measure().at_peak


@pytest.mark.parametrize(
    "number",
    quick([1], days.numbers()),
)
def test_the_stored_lines_equal_the_measured_ones(number):
    of_the_day = days.day(number).bill
    stored = bill.stored(
        Bill(of_the_day.label, lambda: pytest.fail("python -m memlab.course.build --bill"))
    )
    assert stored.at_peak == at_peak(of_the_day.measure)


def test_today_is_not_measured_again(measured, capsys):
    running_bill(2, today=trace(2 * GIB))
    assert capsys.readouterr().out.splitlines() == [
        "day 1: new: 8.00 GiB",
        "day 2: new: 2.00 GiB, 75.0% less",
    ]
    assert measured == [1]


def test_a_day_without_a_change_is_reported_as_the_same(measured, capsys):
    running_bill(2, today=trace(8 * GIB))
    assert capsys.readouterr().out.splitlines()[-1] == "day 2: new: 8.00 GiB, the same"


def test_the_first_day_saves_nothing(measured, capsys):
    running_bill(1, today=trace(3 * GIB))
    assert capsys.readouterr().out == "day 1: new: 3.00 GiB\n"
    assert measured == []


def test_the_figure_has_a_bar_for_each_line(measured, monkeypatch):
    drawn = []
    bill.store(bill.STORED)

    def breakdown(traces, *, title, room_for):
        assert list(room_for) == ["day 1: new", "day 2: new", "day 5: new", "day 6: new"]
        drawn.append(({label: t.peak_bytes // GIB for label, t in traces.items()}, title))
        return "the figure"

    monkeypatch.setattr("memlab.plot.breakdown", breakdown)
    assert running_bill(2) == "the figure"
    assert drawn == [({"day 1: new": 8, "day 2: new": 6}, "The running bill: 124m, 8 × 640 tokens")]


def test_every_day_has_a_different_label():
    labels = [days.day(number).bill.label for number in days.numbers()]
    assert len(set(labels)) == len(labels)
    assert all(
        label.startswith(f"day {number}: ")
        for label, number in zip(labels, days.numbers(), strict=True)
    )


def test_the_bill_starts_with_the_ledgers_formula():
    first = bill.stored(days.day(1).bill)
    wanted = ledger.start_of_backward_bytes(PRESETS[SETTING.model], SETTING.batch, SETTING.seq_len)
    assert first.peak_bytes == wanted == 8_522_099_136
