"""The command line itself: its help, its errors, and terminals of every kind."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
import typer

from memlab import cli
from memlab.cli import app
from memlab.model import PRESETS
from memlab.train import TECHNIQUES

COMMANDS = ("measure", "plan", "train", "doctor")
QUICK = ("measure", "--model", "tiny", "--technique", "sgd", "--device", "cpu")


def words(text: str) -> str:
    """The text without the frames and line breaks that the terminal's width puts in."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


# ------------------------------------------------------------------ help


def test_without_arguments_it_shows_the_help(memlab_command):
    outcome = memlab_command()
    assert outcome.status == 2
    assert all(command in outcome.out for command in COMMANDS)


def test_help_names_every_command(memlab_command):
    outcome = memlab_command("--help")
    assert outcome.status == 0
    assert all(command in outcome.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(memlab_command, command):
    outcome = memlab_command(command, "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert f"Usage: memlab {command}" in outcome.out


def test_the_help_of_measure_says_what_each_technique_is(memlab_command):
    text = words(memlab_command("measure", "--help").out)
    assert all(f"{name}: {t.summary}" in text for name, t in TECHNIQUES.items())


def test_the_help_of_measure_names_every_preset(memlab_command):
    assert ", ".join(PRESETS) in words(memlab_command("measure", "--help").out)


def test_the_examples_of_the_help_can_be_typed(memlab_command):
    lines = memlab_command("measure", "--help").out.splitlines()
    examples = [line.split() for line in lines if line.strip().startswith("memlab measure --")]
    assert len(examples) == 4
    measure = typer.main.get_command(app).commands["measure"]
    for _, _, *arguments in examples:
        measure.make_context("measure", list(arguments))  # raises what the parser would


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mesure"], "got the command mesure; did you mean measure? There are measure, train, "),
        (["measure", "--btach", "3"], "got --btach; did you mean --batch? There are --model, "),
        (["measure", "--batch", "many"], "got --batch many; wanted a whole number from 1 to "),
        (["measure", "extra"], "got extra too many; memlab measure takes options alone"),
        (["measure", "--model"], "got --model without a value; give it one"),
    ],
)
def test_what_the_parser_rejects_ends_in_one_line_that_leads_on(in_one_line, arguments, message):
    line = in_one_line(*arguments)
    assert line.startswith(message)
    assert line.endswith(f"see memlab{' measure' * ('measure' in arguments)} --help")


def test_a_mistake_of_ours_is_not_made_to_look_like_one_of_the_user(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memlab", "doctor"])
    monkeypatch.setattr("memlab.cli.doctor.examine", lambda: [][0])
    with pytest.raises(IndexError):
        cli.main()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, typer.Abort])
def test_ctrl_c_is_one_line_however_the_parser_hands_it_on(
    memlab_command, monkeypatch, interruption
):
    def app(**settings):
        raise interruption

    monkeypatch.setattr(cli, "app", app)
    outcome = memlab_command("doctor")
    assert (outcome.status, outcome.err) == (130, "memlab: interrupted; nothing was written\n")


# ------------------------------------------------------------------ while torch is imported


@pytest.fixture
def interrupted_at_torch(tmp_path):
    """Runs `memlab` in a process of its own, in which Ctrl-C is pressed as soon as torch is
    imported: (status, out, err)."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}

    def run(*command: str) -> tuple[int, str, str]:
        process = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
        )
        return process.returncode, process.stdout, process.stderr

    return run


ENTRY_POINTS = (("-m", "memlab"), ("-c", "from memlab.cli import main; main()"))


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize(
    "arguments", [["doctor"], ["measure"], ["measure", "--help"], ["measure", "--script", "a.py:b"]]
)
def test_ctrl_c_while_torch_is_imported_is_one_line(interrupted_at_torch, entry, arguments):
    status, out, err = interrupted_at_torch(sys.executable, *entry, *arguments)
    assert (status, out, err) == (130, "", "memlab: interrupted; nothing was written\n")


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["doctor", "--help"], 0), (["mesure"], 2), ([], 2)]
)
def test_what_can_be_said_without_torch_does_not_wait_for_it(
    interrupted_at_torch, arguments, status
):
    got, out, err = interrupted_at_torch(sys.executable, "-m", "memlab", *arguments)
    assert got == status
    assert "memlab" in out + err  # the help, or what is wrong


# ------------------------------------------------------------------ terminals


def test_what_an_encoding_has_not_is_written_in_ascii(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    cli._print_what_the_terminal_can()
    stream.write("4 × 256 ██ ☃ é plain")
    stream.flush()
    assert stream.buffer.getvalue() == b"4 x 256 ## ? ? plain"


def test_what_an_encoding_has_is_written_as_it_is(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    cli._print_what_the_terminal_can()
    stream.write("4 × 256 █")
    stream.flush()
    assert stream.buffer.getvalue() == "4 × 256 #".encode("latin-1")


@pytest.fixture(scope="module")
def in_a_terminal(tmp_path_factory):
    """(standard output in a pipe, standard error in a terminal, folder) of a process of its own,
    whose encoding is ASCII."""
    pty = pytest.importorskip("pty")
    folder = tmp_path_factory.mktemp("terminal")
    terminal, standard_error = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "memlab", *QUICK],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=standard_error,
    )
    os.close(standard_error)
    shown = b"".join(all_of(terminal)).decode("ascii")  # read while it runs: a full one blocks it
    out, _ = process.communicate()
    assert process.returncode == 0, shown
    return out.decode("ascii"), shown, folder


def all_of(terminal: int) -> Iterator[bytes]:
    """What is written until nobody can write any more, which Linux reports as an error."""
    with suppress(OSError):
        while part := os.read(terminal, 4096):
            yield part
    os.close(terminal)


def test_a_process_of_its_own_writes_what_it_says_it_wrote(in_a_terminal):
    out, _, folder = in_a_terminal
    assert "written: work/measure.json" in out
    assert len(json.loads((folder / "work/measure.json").read_text())["rows"]) == 2


def test_standard_output_in_a_pipe_has_no_control_characters(in_a_terminal):
    out, _, _ = in_a_terminal
    assert [c for c in out if not c.isprintable() and c != "\n"] == []


def test_the_progress_bar_is_on_standard_error(in_a_terminal):
    out, err, _ = in_a_terminal
    assert "sgd: time" in err
    assert "sgd: time" not in out


def test_a_terminal_without_the_characters_gets_others(in_a_terminal):
    out, _, _ = in_a_terminal
    assert "tiny, 4 x 64 tokens" in out
    assert "%  ####" in out
