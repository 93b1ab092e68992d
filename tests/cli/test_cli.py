"""The command line itself: help, errors, and all kinds of terminals."""

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

COMMANDS = ("measure", "plan", "train", "run", "doctor")
QUICK = ("measure", "--model", "tiny", "--technique", "sgd", "--device", "cpu")


def words(text: str) -> str:
    """Remove the terminal's frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


# ------------------------------------------------------------------ help


def test_help_names_every_command(memlab_command):
    outcome = memlab_command("--help")
    assert outcome.status == 0
    assert all(command in outcome.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(memlab_command, command):
    outcome = memlab_command(command, "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert f"Usage: memlab {command}" in outcome.out


def test_the_help_of_measure_describes_each_technique(memlab_command):
    text = words(memlab_command("measure", "--help").out)
    assert all(f"{name}: {t.summary}" in text for name, t in TECHNIQUES.items())


def test_the_help_of_measure_names_every_preset(memlab_command):
    assert ", ".join(PRESETS) in words(memlab_command("measure", "--help").out)


def test_the_examples_of_the_help_parse(memlab_command):
    lines = memlab_command("measure", "--help").out.splitlines()
    examples = [line.split() for line in lines if line.strip().startswith("memlab measure --")]
    assert len(examples) == 4
    measure = typer.main.get_command(app).commands["measure"]
    for _, _, *arguments in examples:
        measure.make_context("measure", list(arguments))  # raises the parser's errors


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mesure"], "got the command mesure; did you mean measure? Choose from measure, train, "),
        (["measure", "--btach", "3"], "got --btach; did you mean --batch? Choose from --model, "),
        (["measure", "--batch", "many"], "got --batch many; expected an integer from 1 to "),
        (["measure", "extra"], "got extra arguments extra; memlab measure takes only options"),
        (["measure", "--model"], "got --model without a value; give it one"),
    ],
)
def test_usage_errors_are_one_line_that_points_to_the_help(usage_error, arguments, message):
    line = usage_error(*arguments)
    assert line.startswith(message)
    assert line.endswith(f"see memlab{' measure' * ('measure' in arguments)} --help")


def test_a_bug_in_memlab_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memlab", "doctor"])
    monkeypatch.setattr("memlab.cli.doctor.examine", lambda: [][0])
    with pytest.raises(IndexError):
        cli.main()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, typer.Abort])
def test_ctrl_c_is_one_line_with_every_version_of_typer(memlab_command, monkeypatch, interruption):
    def app(**settings):
        raise interruption

    monkeypatch.setattr(cli, "app", app)
    outcome = memlab_command("doctor")
    assert (outcome.status, outcome.err) == (130, "memlab: interrupted; nothing was written\n")


# ------------------------------------------------------------------ while torch is imported


@pytest.fixture
def interrupted_at(tmp_path):
    """Run `memlab` in a separate process where importing a module acts like Ctrl-C. Return
    (status, out, err)."""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}

    def run(module: str, *command: str) -> tuple[int, str, str]:
        (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
        process = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
        )
        return process.returncode, process.stdout, process.stderr

    return run


ENTRY_POINTS = (("-m", "memlab"), ("-c", "from memlab.__main__ import main; main()"))


@pytest.mark.few(1)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize(
    "arguments", [["doctor"], ["measure"], ["measure", "--help"], ["measure", "--script", "a.py:b"]]
)
def test_ctrl_c_while_torch_is_imported_is_one_line(interrupted_at, entry, arguments):
    status, out, err = interrupted_at("torch", sys.executable, *entry, *arguments)
    assert (status, out, err) == (130, "", "memlab: interrupted; nothing was written\n")


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("module", ["typer", "rich"])
def test_ctrl_c_while_the_command_line_is_imported_is_one_line(interrupted_at, entry, module):
    status, out, err = interrupted_at(module, sys.executable, *entry, "doctor")
    assert (status, out, err) == (130, "", "memlab: interrupted; nothing was written\n")


@pytest.mark.few(1)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "--version", "plan --gpu list", "doctor"])
def test_a_full_disk_behind_the_output_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "memlab", *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
    sentence = "the output could not be written: No space left on device; send it elsewhere"
    assert (process.returncode, process.stderr) == (2, f"memlab: {sentence}\n")


# ------------------------------------------------------------------ terminals


def test_characters_outside_the_encoding_are_replaced_by_ascii(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    cli._replace_unencodable_characters()
    stream.write("4 × 256 ██ ☃ é plain")
    stream.flush()
    assert stream.buffer.getvalue() == b"4 x 256 ## ? ? plain"


def test_characters_of_the_encoding_are_kept(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    cli._replace_unencodable_characters()
    stream.write("4 × 256 █")
    stream.flush()
    assert stream.buffer.getvalue() == "4 × 256 #".encode("latin-1")


@pytest.fixture(scope="module")
def in_a_terminal(tmp_path_factory):
    """Run a separate process whose encoding is ASCII. Return its standard output from a pipe, its
    standard error from a terminal, and its folder."""
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
    shown = b"".join(all_of(terminal)).decode("ascii")  # read while it runs, or it would block
    out, _ = process.communicate()
    assert process.returncode == 0, shown
    return out.decode("ascii"), shown, folder


def all_of(terminal: int) -> Iterator[bytes]:
    """Read until the writer closes the terminal, which Linux reports as an error."""
    with suppress(OSError):
        while part := os.read(terminal, 4096):
            yield part
    os.close(terminal)


@pytest.mark.slow
def test_a_separate_process_writes_the_files_that_it_lists(in_a_terminal):
    out, _, folder = in_a_terminal
    assert "written: work/measure.json" in out
    assert len(json.loads((folder / "work/measure.json").read_text())["rows"]) == 2


def test_piped_output_has_no_control_characters(in_a_terminal):
    out, _, _ = in_a_terminal
    assert [c for c in out if not c.isprintable() and c != "\n"] == []


def test_the_progress_bar_is_on_standard_error(in_a_terminal):
    _, err, _ = in_a_terminal
    assert "sgd" in err


def test_an_ascii_terminal_gets_replacement_characters(in_a_terminal):
    out, _, _ = in_a_terminal
    assert "tiny, 4 x 64 tokens" in out
    assert "%  ####" in out
