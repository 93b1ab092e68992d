"""What a notebook's calls print, return and record, inside and outside a learner's folder."""

import textwrap
from contextlib import redirect_stdout
from dataclasses import replace
from fractions import Fraction
from io import StringIO

import numpy as np
import pytest
import torch

from memlab.course import days, exercise, gate, progress, reveal
from memlab.course import guess as guess_aloud
from memlab.course.exercises import Day, Exercise, equal
from memlab.trace import Event, Trace

KIB, MIB, GIB = 2**10, 2**20, 2**30
PLACE = ("aten.mm", "", "forward", "float32", (1,))


def check_double(answer) -> str:
    equal("double(3)", answer(3), 6)
    return "1 case"


def double(x):
    return 2 * x


DOUBLE = Exercise("7.1", "Double it", 5, 1, ("a", "b", "c"), double, check_double, ())
OK = "[ok] 7.1  1 case\n"
REFERENCE = (
    "[ ] 7.1 this is the reference, which replaced your answer; "
    "run the cell with your own answer first\n"
)
NOT_ATTEMPTED = "[ ] 7.1 not attempted: going on with the reference\n"


def right(x):
    return x + x


def wrong(x):
    return x


def stub(x):
    raise NotImplementedError("exercise 7.1, about 1 line")


def guess(id_: str, **quantities: float) -> None:
    """Record a guess without printing. Another test checks the printed line."""
    with redirect_stdout(StringIO()):
        guess_aloud(id_, **quantities)


@pytest.fixture(autouse=True)
def fresh_kernel(monkeypatch, tmp_path):
    """One exercise, no guesses, and a folder that `memlab start` did not make."""
    monkeypatch.setattr(gate, "_guesses", {})
    monkeypatch.setattr(gate, "exercise_of", {"7.1": DOUBLE}.__getitem__)
    monkeypatch.setattr(gate, "day", {7: Day((DOUBLE,), None)}.__getitem__)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A learner's folder."""
    progress.update(tmp_path, lambda p: None)
    return tmp_path


def restart_kernel(monkeypatch):
    monkeypatch.setattr(gate, "_guesses", {})


def trace(*events: tuple[int, str]) -> Trace:
    """Build a trace from (bytes, category); a free frees the last storage."""
    made = [Event(bytes_, 1, category, *PLACE) for bytes_, category in events]
    return Trace(tuple(made))


# ------------------------------------------------------------------ exercise


@pytest.mark.parametrize(
    ("answer", "given", "printed"),
    [
        (right, right, OK),
        (
            wrong,
            double,
            "[x] 7.1 double(3) gave 3, wanted 6. Going on with the reference. "
            "Hint: memlab hint 7.1\n",
        ),
        (stub, double, NOT_ATTEMPTED),
    ],
)
def test_exercise_prints_the_verdict_and_returns_a_right_answer(capsys, answer, given, printed):
    assert exercise("7.1", answer) is given
    assert capsys.readouterr().out == printed


def test_an_answer_may_call_the_reference_that_replaced_an_earlier_answer(monkeypatch):
    earlier = replace(DOUBLE, reference=textwrap.dedent)
    later = replace(DOUBLE, id="7.2", rebuilds=("textwrap",))
    monkeypatch.setattr(gate, "exercise_of", {"7.1": earlier, "7.2": later}.__getitem__)
    monkeypatch.setattr(gate, "day", {7: Day((earlier, later), None)}.__getitem__)
    dedent = exercise("7.1", stub)

    def calling_it(x):
        return 2 * x if dedent(" a") == "a" else x

    assert exercise("7.2", calling_it) is calling_it


def test_the_reference_does_not_count_as_an_answer(folder, capsys):
    answer = exercise("7.1", wrong)
    capsys.readouterr()
    assert exercise("7.1", answer) is double  # the same cell runs again
    assert capsys.readouterr().out == REFERENCE
    assert progress.read(folder).exercise("7.1") == progress.ExerciseProgress("wrong", checks=1)


def test_an_interrupted_check_is_interrupted(folder):
    def endless(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exercise("7.1", endless)
    assert progress.read(folder) == progress.Progress()


def test_exercise_finds_the_courses_exercises(monkeypatch):
    monkeypatch.setattr(gate, "exercise_of", days.exercise_of)
    with pytest.raises(ValueError, match=r"^got exercise 1\.99; day 1 has 1\.1, "):
        exercise("1.99", right)


# ------------------------------------------------------------------ guess and reveal


def test_a_guess_is_shown_beside_the_measurement(capsys):
    guess("7.1", peak_mib=24)
    assert capsys.readouterr().out == ""
    reveal("7.1", trace((int(24.5 * MIB), "activations")))
    assert capsys.readouterr().out == "guessed 24.00 MiB · measured 24.50 MiB · gap +0.50 MiB\n"


@pytest.mark.parametrize(
    ("quantity", "guessed", "measured", "line"),
    [
        ("peak_bytes", 1000, 2500, "guessed 1,000 bytes · measured 2,500 bytes · gap +1,500 bytes"),
        ("peak_kib", 1, 1536, "guessed 1.00 KiB · measured 1.50 KiB · gap +0.50 KiB"),
        ("peak_mib", 2, MIB, "guessed 2.00 MiB · measured 1.00 MiB · gap -1.00 MiB"),
        ("peak_gib", 2, 8.25 * GIB, "guessed 2.00 GiB · measured 8.25 GiB · gap +6.25 GiB"),
        ("peak_tib", 1, 2**40, "guessed 1.00 TiB · measured 1.00 TiB · gap +0.00 TiB"),
        ("peak_kb", 1, 1500, "guessed 1.00 KB · measured 1.50 KB · gap +0.50 KB"),
        ("peak_mb", 1, 1_500_000, "guessed 1.00 MB · measured 1.50 MB · gap +0.50 MB"),
        ("peak_gb", 112, 107 * 10**9, "guessed 112.00 GB · measured 107.00 GB · gap -5.00 GB"),
        ("peak_tb", 1, 10**12, "guessed 1.00 TB · measured 1.00 TB · gap +0.00 TB"),
        ("slower_times", 2, 1.33, "guessed 2.00 × · measured 1.33 × · gap -0.67 ×"),
        ("saved_percent", 50, 12.5, "guessed 50.00 % · measured 12.50 % · gap -37.50 %"),
        ("mib", 1, MIB, "guessed 1.00 MiB · measured 1.00 MiB · gap +0.00 MiB"),
        ("peak_mib", 1.001, MIB, "guessed 1.00 MiB · measured 1.00 MiB · gap +0.00 MiB"),
        ("peak_kib", 0.0, 2**30, "guessed 0.00 KiB · measured 1,048,576.00 KiB · gap "
         "+1,048,576.00 KiB"),
    ],
)  # fmt: skip
def test_every_unit_has_its_format(capsys, quantity, guessed, measured, line):
    guess("7.1", **{quantity: guessed})
    reveal("7.1", **{quantity: measured})
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("quantity", "line"),
    [
        ("peak_kib", "measured 5.00 KiB · gap +4.00 KiB"),
        ("live_kib", "measured 3.00 KiB · gap +2.00 KiB"),
        ("activations_kib", "measured 4.00 KiB · gap +3.00 KiB"),
        ("gradients_kib", "measured 0.00 KiB · gap -1.00 KiB"),
    ],
)
def test_a_trace_supplies_its_peak_its_end_and_its_categories(capsys, quantity, line):
    step = trace((KIB, "parameters"), (4 * KIB, "activations"), (-2 * KIB, "activations"))
    guess("7.1", **{quantity: 1})
    reveal("7.1", step)
    assert capsys.readouterr().out == f"guessed 1.00 KiB · {line}\n"


def test_a_passed_quantity_overrides_the_trace(capsys):
    guess("7.1", peak_kib=1)
    reveal("7.1", trace((KIB, "parameters")), peak_kib=2 * KIB)
    assert "measured 2.00 KiB" in capsys.readouterr().out


def test_several_quantities_have_a_named_line_each(capsys):
    guess("7.1", peak_mib=1, optimizer_state_kib=..., slower_times=1.5)
    reveal("7.1", trace((MIB, "optimizer_state")), slower_times=3)
    assert capsys.readouterr().out.splitlines() == [
        "peak: guessed 1.00 MiB · measured 1.00 MiB · gap +0.00 MiB",
        "optimizer state: no guess · measured 1,024.00 KiB",
        "slower: guessed 1.50 × · measured 3.00 × · gap +1.50 ×",
    ]


def test_a_measurement_without_a_guess_is_shown(capsys):
    guess("7.1", peak_mib=1)
    reveal("7.1", peak_mib=MIB, live_mib=MIB)
    assert capsys.readouterr().out.splitlines() == [
        "peak: guessed 1.00 MiB · measured 1.00 MiB · gap +0.00 MiB",
        "live: no guess · measured 1.00 MiB",
    ]


@pytest.mark.parametrize("number", [..., None], ids=["dots", "no call"])
def test_a_missing_guess_is_shown(capsys, number):
    if number is not None:
        guess("7.1", peak_gib=number)
    reveal("7.1", trace((GIB, "activations")))
    assert capsys.readouterr().out == "no guess · measured 1.00 GiB\n"


def test_the_last_guess_counts(capsys):
    guess("7.1", peak_gib=1)
    guess("7.1", peak_mib=2)
    reveal("7.1", trace((MIB, "activations")))
    assert capsys.readouterr().out.startswith("guessed 2.00 MiB · measured 1.00 MiB")


def test_a_guess_is_only_compared_with_its_own_quantity(capsys):
    guess("7.1", peak_gib=1)
    reveal("7.2", trace((GIB, "activations")))
    assert capsys.readouterr().out == "no guess · measured 1.00 GiB\n"


@pytest.mark.parametrize("number", [np.float32(1.5), np.int64(2), Fraction(3, 2), True])
def test_every_kind_of_number_is_a_guess(capsys, number):
    guess("7.1", peak_gib=number)
    reveal("7.1", peak_gib=GIB)
    assert capsys.readouterr().out.startswith(f"guessed {float(number):.2f} GiB")


@pytest.mark.parametrize("number", ["2", None, 2j, [2], torch.tensor(2)])
def test_a_guess_must_be_a_number(number):
    with pytest.raises(TypeError, match=r"^got peak_gib=.*; give a number, such as peak_gib=1\.5"):
        guess("7.1", peak_gib=number)


@pytest.mark.parametrize("quantity", ["peak", "peak_GiB", "peakgib", "gib_peak"])
def test_a_quantity_without_a_unit_is_an_error_that_lists_the_units(quantity):
    with pytest.raises(ValueError, match=rf"^got {quantity}; .* such as peak_gib: .*mib.*percent"):
        guess("7.1", **{quantity: 1})


@pytest.mark.parametrize("call", [guess, reveal])
def test_an_invalid_id_is_an_error(call):
    with pytest.raises(ValueError, match=r"^got 'peak'; give the number of an exercise"):
        call("peak", peak_gib=1)


def test_an_invalid_guess_leaves_the_earlier_one(capsys):
    guess("7.1", peak_gib=1)
    with pytest.raises(TypeError):
        guess("7.1", peak_gib="2")
    reveal("7.1", peak_gib=GIB)
    assert capsys.readouterr().out.startswith("guessed 1.00 GiB")


@pytest.mark.parametrize("measured", [None, trace((1, "activations"))])
def test_a_missing_measurement_is_an_error_with_the_remedy(measured):
    guess("7.1", slower_times=2)
    with pytest.raises(ValueError, match=r"of slower_times; give reveal\(\.\.\., slower_times="):
        reveal("7.1", measured)


# ------------------------------------------------------------------ recording progress


def test_nothing_is_written_outside_a_learners_folder(tmp_path):
    exercise("7.1", right)
    guess("7.1", peak_gib=1)
    reveal("7.1", peak_gib=GIB)
    assert list(tmp_path.iterdir()) == []


def noted(folder):
    """Return the records in the learner's file as plain data."""
    found = progress.read(folder)
    exercises = {id_: vars(record) for id_, record in found.exercises.items()}
    return {"exercises": exercises, "guesses": found.guesses}


@pytest.mark.parametrize(
    ("answer", "status", "checks"),
    [(right, "ok", 1), (wrong, "wrong", 1), (stub, "not attempted", 0)],
)
def test_a_check_is_recorded_in_a_learners_folder(folder, answer, status, checks):
    exercise("7.1", answer)
    assert noted(folder)["exercises"] == {"7.1": {"status": status, "checks": checks, "hints": 0}}


def test_a_guess_and_its_measurement_are_recorded_in_the_guesss_unit(folder):
    guess("7.1", peak_gib=2, live_mib=...)
    assert noted(folder)["guesses"] == {"7.1": {"peak_gib": {"guessed": 2}}}
    reveal("7.1", peak_gib=3 * GIB, live_mib=MIB)
    assert noted(folder)["guesses"] == {"7.1": {"peak_gib": {"guessed": 2, "measured": 3}}}


def test_dots_are_not_recorded_and_leave_an_earlier_guess(folder):
    guess("7.1", peak_gib=2)
    before = noted(folder)
    guess("7.1", peak_gib=...)
    reveal("7.1", peak_gib=GIB)
    assert noted(folder) == before


def test_a_guess_survives_a_kernel_restart(folder, monkeypatch, capsys):
    guess("7.1", peak_mib=24)
    restart_kernel(monkeypatch)
    reveal("7.1", trace((MIB, "activations")))
    assert capsys.readouterr().out == "guessed 24.00 MiB · measured 1.00 MiB · gap -23.00 MiB\n"
    assert noted(folder)["guesses"] == {"7.1": {"peak_mib": {"guessed": 24, "measured": 1}}}


def test_a_revealed_guess_can_be_revealed_again_after_a_restart(folder, monkeypatch, capsys):
    guess("7.1", peak_mib=24)
    for _ in range(2):
        reveal("7.1", trace((MIB, "activations")))
        restart_kernel(monkeypatch)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_recording_continues_after_an_unreadable_file(folder):
    (folder / progress.FILE).write_text("half of it")
    reveal("7.1", peak_gib=GIB)
    exercise("7.1", right)
    assert noted(folder)["exercises"]["7.1"]["status"] == "ok"
    assert (folder / "progress.unreadable-1.json").read_text() == "half of it"


def test_a_guess_in_another_byte_unit_is_compared_in_its_own_unit(capsys):
    guess("7.1", state_mib=2)
    reveal("7.1", state_kib=3 * MIB)
    assert capsys.readouterr().out == "guessed 2.00 MiB · measured 3.00 MiB · gap +1.00 MiB\n"


def test_times_is_not_a_byte_unit():
    guess("7.1", state_times=2)
    with pytest.raises(ValueError, match="got no measurement of state_times"):
        reveal("7.1", state_kib=3 * MIB)


def test_a_lesson_continues_if_nothing_can_be_recorded(folder, monkeypatch, capsys):
    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(progress, "update", full)
    assert exercise("7.1", right) is right
    assert (
        capsys.readouterr().out == f"{OK}(not recorded in progress.json: No space left on device)\n"
    )


def test_a_guess_is_printed_in_its_unit(capsys):
    guess_aloud("7.1", peak_gib=6.5, live_bytes=1000, share_percent=...)
    assert capsys.readouterr().out == "noted: peak 6.50 GiB\nnoted: live 1,000 bytes\n"


@pytest.mark.parametrize(
    ("numbers", "told"), [({}, "got no number; "), ({"peak_gib": -1}, "got peak_gib=-1; ")]
)
def test_a_guess_needs_a_valid_number(numbers, told):
    with pytest.raises(ValueError, match=told):
        guess("7.1", **numbers)


def test_a_guess_needs_an_existing_day(monkeypatch):
    monkeypatch.setattr(gate, "day", days.day)
    with pytest.raises(ValueError, match="got day 99; there"):
        guess("99.1", peak_gib=1)
