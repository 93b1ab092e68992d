"""Programs that a script starts and can have."""

import os
import subprocess
from pathlib import Path

import pytest

from memlab.world.isolation import Isolation

pytestmark = pytest.mark.skipif(os.name != "posix", reason="these are programs of Unix")


@pytest.fixture
def isolation(tmp_path, monkeypatch):
    """What a script tried to change in a folder, which keeps its one file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch")
    isolation = Isolation()
    with isolation.active():
        yield isolation
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert Path("train.py").read_text() == "import torch"


def by_words(command):
    return subprocess.run(command.split(), check=False).returncode


def by_shell(command):
    return subprocess.run(command, shell=True, check=False).returncode


def by_system(command):
    return os.waitstatus_to_exitcode(os.system(command))


@pytest.mark.parametrize("start", [by_words, by_shell, by_system])
def test_programs_make_files_that_the_script_finds(isolation, start):
    assert start("mkdir -p runs/first") == 0
    assert start("cp train.py runs/first/") == 0
    assert start("cp -r runs/first runs/second") == 0
    assert start("mv runs/second/train.py runs/moved.py") == 0
    assert start("touch runs/new") == 0
    assert start("ln -s moved.py runs/link.py") == 0
    assert Path("runs/link.py").read_text() == Path("runs/first/train.py").read_text()
    assert sorted(os.listdir("runs")) == ["first", "link.py", "moved.py", "new", "second"]
    assert start("rm -rf runs train.py") == 0
    assert not os.path.exists("runs")
    assert not os.path.exists("train.py")
    assert not isolation.processes


def test_a_shell_may_do_one_after_another_and_has_patterns(isolation):
    assert by_shell("mkdir runs && cp *.py runs; touch 'runs/a b'") == 0
    assert sorted(os.listdir("runs")) == ["a b", "train.py"]


def test_a_program_works_in_its_own_folder(isolation):
    os.mkdir("runs")
    subprocess.run(["touch", "new"], cwd="runs", check=True)
    assert os.listdir("runs") == ["new"]


@pytest.mark.parametrize("start", [by_words, by_shell, by_system])
def test_a_program_that_fails_ends_with_a_status_and_a_message(isolation, start, capfd):
    assert start("cp missing.py runs") == 1
    assert "No such file or directory: 'missing.py'" in capfd.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "cp --backup=all train.py b.py",
        "mkdir",
        "cp train.py $(hostname)",
        "cat train.py > b.py",
        "mkdir a && wget example.org",
        "git log | tee log",
        "git log | sort -o log",
        "git log | git push",
        "cp 'train.py b.py",
        "sed -i s/a/b/ train.py",
    ],
)
def test_what_memlab_cannot_do_does_not_start(isolation, command):
    with pytest.raises(FileNotFoundError, match="does not start programs"):
        by_shell(command)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("git log --oneline | sort | tee log", "tee"),
        ("git rev-parse HEAD || wget example.org", "wget"),
        ("cat a | /usr/bin/sed -i s/a/b/ b", "/usr/bin/sed"),
        ("uniq a b", "uniq"),
    ],
)
def test_a_refusal_names_the_program_that_is_not_permitted(isolation, command, program):
    with pytest.raises(FileNotFoundError, match=f"does not start programs: '{program}'"):
        by_shell(command)


def test_sequences_of_programs_that_only_read_start(isolation):
    command = "git rev-parse HEAD 2>/dev/null || echo unknown | sort -u"
    assert subprocess.check_output(command, shell=True, text=True).strip() == "unknown"
    assert not isolation.processes


def test_pipes_of_programs_that_only_read_start(isolation):
    command = "git rev-parse HEAD 2>&1 | grep repository | wc -l"
    assert subprocess.check_output(command, shell=True, text=True).strip() == "1"
    assert subprocess.check_output(["cat", "train.py"], text=True) == "import torch"
    assert not isolation.processes
