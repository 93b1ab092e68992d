"""Progress without a terminal, and tables wider than the terminal."""

import subprocess
import sys

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
        name *= 1 + 3 * wide  # 80 characters
        terminal.show_table(terminal.table_of({"name": ["x", name], "a": ["1", "22"]}))
    narrow = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert narrow[:3] == [
        "name                   a",
        "x                      1",
        f"{name[:20]}  22",
    ]
    assert narrow[3:] == ["name", "   a", "x", "   1", name, "  22"]


LONG = (
    "  bfloat16 momentum-sgd, QLoRA of rank 128 on wq,wk,wv,wo, selective-checkpointing, "
    "flash-attention, chunked loss, accumulation"
)
COLUMNS = {
    "recipe": ["full fine-tuning:", LONG, "+".join(["offloaded-activations"] * 8)],
    "allocated": ["", "≈ 1023.99 GiB", "1.00 B"],
    "reserved": ["", "1023.99 GiB", "2.00 B"],
    "left": ["", "lacks 1023.99 GiB", "3.00 B"],
    "time": ["", "1234.56 ×", "4.00 ×"],
    "batch up to": ["", "1,000,000+", "5"],
    "length up to": ["", "1,048,576+", "6"],
    "gathered": ["", "layers.10 + layers.11 + root", "7"],
}


def test_every_line_of_a_table_fits_80_columns_and_nothing_is_lost(capsys):
    terminal.show_table(terminal.table_of(COLUMNS))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = list(COLUMNS)
    cells += [cell for row in zip(*COLUMNS.values(), strict=True) for cell in row]
    printed, shown = "".join("".join(lines).split()), "".join("".join(cells).split())
    moved = shown.replace("recipe", "", 1)  # each name is above its figures
    assert sorted(printed) == sorted(shown)
    assert printed.startswith("recipeallocatedreserved")
    assert printed.removeprefix("recipe") == moved
    assert lines[lines.index("full fine-tuning:") + 1].startswith("  bfloat16 momentum-sgd, QLoRA")


def test_a_wide_table_has_one_line_per_row(capsys):
    with terminal.style(wide=True):
        terminal.show_table(terminal.table_of(COLUMNS))
    header, heading, long, other = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["recipe", "allocated"]
    assert heading.strip() == "full fine-tuning:"
    assert long.startswith(LONG)
    assert "≈ 1023.99 GiB" in long
    assert long.rstrip().endswith("layers.10 + layers.11 + root")
    assert other.startswith(COLUMNS["recipe"][2])
    terminal.show_table(terminal.table_of(COLUMNS))  # the style has ended
    assert len(capsys.readouterr().out.splitlines()) > 4


@pytest.mark.parametrize("name", ["[red]a.py", "a[/].py", "[link=b]", ":smile:.py", "a\\[b]"])
@pytest.mark.parametrize("wide", [True, False])
def test_markup_in_a_name_is_text(capsys, name, wide):
    long = f"{name} {'x' * 80}"
    with terminal.style(wide=wide):
        terminal.show_table(terminal.table_of({name: [name, long], "b": [name, name]}))
        terminal.note(name)
    assert capsys.readouterr().out.count(name) == 6


def test_progress_on_standard_error_is_escaped(capsys):
    terminal.announce("trying \x1b[31m[/]")
    assert capsys.readouterr() == ("", "trying \\x1b[31m[/]\n")


def test_with_json_only_documents_reach_standard_output(capfd):
    with terminal.style(as_json=True):
        terminal.echo("text")
        terminal.show_table(terminal.table_of(COLUMNS))
        terminal.note("written: a file")
        print("printed by a script")
        terminal.show_document({"a": 1})
    out, err = capfd.readouterr()
    assert out == '{\n "a": 1\n}\n'
    assert err == "written: a file\nprinted by a script\n"
    terminal.echo("text again")
    terminal.show_document({"a": 1})  # without --json, there are no documents
    assert capfd.readouterr() == ("text again\n", "")


def test_with_json_other_processes_print_to_standard_error(tmp_path):
    script = (
        "import subprocess, sys\n"
        "from memlab.cli import terminal\n"
        "with terminal.style(as_json=True):\n"
        "    print('from python')\n"
        "    subprocess.run(['echo', 'from a process'])\n"
        "    terminal.show_document({})\n"
        "    sys.stdout.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "{}\n")
    assert sorted(done.stderr.splitlines()) == ["from a process", "from python"]


def test_control_characters_in_a_file_name_do_not_reach_the_terminal(memlab_command, tmp_path):
    name = "\x1b]0;owned\x07log\x9b31m.txt"
    (tmp_path / name).write_text("CUDA out of memory. Tried to allocate 2.00 GiB")
    for arguments in (
        ("explain", name),
        ("explain", f"no{name}"),
        ("explain", name, "--out", name),
    ):
        outcome = memlab_command(*arguments)
        assert all(c.isprintable() or c == "\n" for c in outcome.out + outcome.err)
    explained = memlab_command("explain", name, "--out", "folder\x1b[31m")
    assert explained.status == 0
    assert "folder\\x1b[31m" in explained.out
    assert all(c.isprintable() or c == "\n" for c in explained.out)
