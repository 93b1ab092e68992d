"""Progress without a terminal, and tables wider than the terminal."""

import pytest

from memlab.cli import terminal


class Clock:
    """Advances by a fixed time at each call."""

    def __init__(self, seconds):
        self._seconds, self._now = seconds, 0.0

    def monotonic(self):
        self._now += self._seconds
        return self._now


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (0.1, ""),
        (1.0, "2 of 4: b\n4 of 4: d\n"),
        (3.0, "1 of 4: a\n2 of 4: b\n3 of 4: c\n4 of 4: d\n"),
    ],
)
def test_without_a_terminal_there_is_a_line_every_two_seconds(monkeypatch, capsys, seconds, lines):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 2.0)
    monkeypatch.setattr(terminal, "time", Clock(seconds))
    with terminal.progress(stages=4) as announce:
        for stage in "abcd":
            announce(stage)
    assert capsys.readouterr() == ("", lines)


def test_a_table_that_is_too_wide_has_each_name_above_its_figures(capsys):
    name = "a name of many words"
    for wide in (False, True):
        name *= 1 + 4 * wide
        terminal.show_table(terminal.table_of({"name": ["x", name], "a": ["1", "22"]}))
    narrow = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert narrow[:3] == [
        "name                   a",
        "x                      1",
        f"{name[:20]}  22",
    ]
    assert narrow[3:] == ["name", "   a", "x", "   1", name, "  22"]
