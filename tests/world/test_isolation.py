"""A script finds its own changes, and the machine has none of them."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from memlab.world.isolation import Isolation


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a file and a folder of two files, which must not change."""
    monkeypatch.chdir(tmp_path)
    Path("kept.txt").write_text("old")
    Path("data").mkdir()
    Path("data/a.txt").write_text("a")
    Path("data/b.txt").write_text("b")

    def tree():
        return {
            str(path.relative_to(tmp_path)): path.read_text() if path.is_file() else None
            for path in sorted(tmp_path.rglob("*"))
        }

    before = tree()
    yield tmp_path
    assert tree() == before


def test_a_written_file_is_found_again(folder):
    with Isolation().active():
        with open("new.txt", "w") as file:
            file.write("new")
        with open("new.txt") as file:
            assert file.read() == "new"
        assert Path("new.txt").read_text() == "new"
        assert os.path.exists("new.txt")
        assert "new.txt" in os.listdir()
        assert os.path.getsize(folder / "new.txt") == 3


def test_a_changed_file_keeps_its_old_content_outside(folder):
    with Isolation().active():
        with open("kept.txt", "a") as file:
            file.write(" and new")
        assert Path("kept.txt").read_text() == "old and new"
        Path("kept.txt").write_text("other")
        assert Path("kept.txt").read_text() == "other"


def test_new_folders_hold_new_files(folder):
    with Isolation().active():
        os.makedirs("out/run/1", exist_ok=True)
        Path("out/run/1/log").write_text("x")
        assert [str(path) for path in Path("out").rglob("log")] == ["out/run/1/log"]
        with pytest.raises(FileExistsError):
            os.mkdir("out")
        os.makedirs("data/more")
        assert sorted(os.listdir("data")) == ["a.txt", "b.txt", "more"]
        assert sorted(entry.name for entry in os.scandir("data")) == ["a.txt", "b.txt", "more"]


def test_deleted_and_renamed_files_are_gone_for_the_script_alone(folder):
    with Isolation().active():
        os.remove("kept.txt")
        assert not os.path.exists("kept.txt")
        with pytest.raises(FileNotFoundError):
            Path("kept.txt").read_text()
        os.rename("data/a.txt", "data/c.txt")
        os.mkdir("data/d")
        assert sorted(os.listdir("data")) == ["b.txt", "c.txt", "d"]
        assert Path("data/c.txt").read_text() == "a"
        shutil.rmtree("data")
        assert not os.path.exists("data/b.txt")
        Path("kept.txt").write_text("again")
        assert Path("kept.txt").read_text() == "again"


def test_a_folder_that_is_removed_and_made_anew_is_empty(folder):
    """As a script does that begins its run's folder anew: no old checkpoint is found."""
    with Isolation().active():
        shutil.rmtree("data")
        os.makedirs("data")
        assert (os.listdir("data"), os.path.exists("data/a.txt")) == ([], False)
        Path("data/new.txt").write_text("new")
        assert [path.name for path in Path("data").iterdir()] == ["new.txt"]
        os.chdir("data")
        assert os.listdir() == ["new.txt"]
        with pytest.raises(FileNotFoundError):
            Path("b.txt").read_text()
        os.chdir("..")


def test_a_temporary_file_may_replace_a_lasting_one(folder):
    with Isolation().active():
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("whole")
        os.replace(file.name, "kept.txt")
        assert Path("kept.txt").read_text() == "whole"


def test_written_files_are_copied_and_linked(folder):
    with Isolation().active():
        os.makedirs("out")
        Path("out/last").write_text("x")
        shutil.copy2("out/last", "out/copy")
        os.link("out/last", "out/link")
        os.symlink("last", "out/relative")
        os.symlink(os.path.abspath("out/last"), "out/absolute")
        assert {Path("out", name).read_text() for name in os.listdir("out")} == {"x"}
        assert len(os.listdir("out")) == 5
        with pytest.raises(FileExistsError):
            os.link("out/last", "out/copy")


def test_a_link_to_a_real_file_is_a_copy(folder):
    with Isolation().active():
        os.link("kept.txt", "link.txt")
        with open("link.txt", "a") as file:
            file.write(" and new")
        assert Path("kept.txt").read_text() == "old"


def test_a_file_in_a_folder_that_is_not_there_fails_as_outside(folder):
    with Isolation().active(), pytest.raises(FileNotFoundError):
        Path("nowhere/new.txt").write_text("")


def test_exclusive_creation_refuses_a_file_that_is_there(folder):
    with Isolation().active(), pytest.raises(FileExistsError):
        os.close(os.open("kept.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def test_imports_write_no_bytecode(folder, monkeypatch):
    before = sys.dont_write_bytecode
    with Isolation().active():
        assert sys.dont_write_bytecode
    assert sys.dont_write_bytecode == before


def test_connections_and_processes_are_refused_and_recorded():
    isolation = Isolation()
    with isolation.active():
        with pytest.raises(OSError, match="memlab run does not connect to example"):
            socket.create_connection(("example.org", 80))
        with pytest.raises(FileNotFoundError, match="memlab run does not start programs"):
            subprocess.run(["git", "push"])
        assert os.system("git status") == 127
        Path("new.txt").write_text("")
    assert list(isolation.notes()) == [
        "memlab kept the script from writing new.txt, connecting to example.org, starting git; "
        "--allow-writes permits it"
    ]


def test_services_are_off_inside_alone():
    assert os.environ.get("WANDB_MODE") is None
    with Isolation().active():
        assert os.environ["WANDB_MODE"] == "disabled"
    assert os.environ.get("WANDB_MODE") is None


def test_with_writes_allowed_nothing_is_redirected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Isolation().active(allow_writes=True):
        Path("new.txt").write_text("new")
    assert Path("new.txt").read_text() == "new"


def test_a_script_may_go_into_a_folder_that_it_made(folder):
    with Isolation().active():
        os.makedirs("out/run")
        os.chdir("out/run")
        assert Path.cwd() == folder / "out/run"
        assert Path("../../kept.txt").read_text() == "old"
        Path("log.txt").write_text("new")
        assert os.listdir(".") == ["log.txt"]
        os.chdir("../..")
        assert os.getcwd() == str(folder)
        assert Path("out/run/log.txt").read_text() == "new"
        assert sorted(os.listdir(b"data")) == [b"a.txt", b"b.txt"]
        os.chdir("data")
        assert sorted(os.listdir()) == ["a.txt", "b.txt"]
    assert Path.cwd() == folder


def test_a_database_is_a_file_too(folder):
    with Isolation().active():
        for _ in range(2):
            with sqlite3.connect("runs.db") as database:
                database.execute("create table if not exists losses (loss real)")
                database.execute("insert into losses values (1)")
            database.close()
        with sqlite3.connect("runs.db") as database:
            assert database.execute("select count(*) from losses").fetchone() == (2,)
        database.close()
        with sqlite3.connect(":memory:") as database:
            database.execute("create table a (b real)")


def test_sockets_within_the_machine_connect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Isolation().active(), socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        server.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("s")


@pytest.mark.parametrize(
    "start",
    [
        lambda: os.execvp("wget", ["wget", "example.org"]),
        lambda: os.spawnlp(os.P_WAIT, "wget", "wget", "example.org"),
        lambda: os.posix_spawn("/bin/wget", ["wget", "example.org"], {}),
        lambda: os.popen("wget example.org").read(),
    ],
)
def test_no_function_starts_a_program(folder, start):
    isolation = Isolation()
    with isolation.active(), pytest.raises(FileNotFoundError, match="does not start programs"):
        start()
    assert list(isolation.processes) == ["wget"]


def test_a_script_does_not_fork(folder):
    with Isolation().active(), pytest.raises(FileNotFoundError, match="'fork'"):
        os.fork()


def test_a_script_ends_itself_alone(folder):
    with Isolation().active(), pytest.raises(SystemExit) as caught:
        os._exit(3)
    assert caught.value.code == 3


def test_git_may_read(folder):
    """In a folder without a repository it fails, but it runs."""
    isolation = Isolation()
    with isolation.active():
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        assert "not a git repository" in done.stderr
        assert "not a git repository" in subprocess.getoutput("git status --short")
        for command in (
            ["git", "commit"],
            ["git", "log", "; rm x"],
            "git log > log",
            ["wget", "x"],
        ):
            with pytest.raises(FileNotFoundError):
                subprocess.run(command, shell=isinstance(command, str))
    assert isolation.processes == {"git": 3, "wget": 1}


def _popened(command):
    with os.popen(command, "r") as output:
        return output.read()


@pytest.mark.parametrize(
    "ask",
    [
        lambda: _popened("stty size"),
        lambda: _popened("stty size 2>/dev/null"),
        lambda: subprocess.check_output(["stty", "size"]).decode(),
        lambda: subprocess.check_output("stty size </dev/tty", shell=True, text=True),
        lambda: subprocess.run(["stty", "size"], capture_output=True, text=True).stdout,
        lambda: subprocess.run(["stty", "size"], stdout=subprocess.PIPE).stdout.decode(),
        lambda: subprocess.getoutput("stty size"),
        lambda: subprocess.getoutput("tput lines") + " " + subprocess.getoutput("tput cols"),
    ],
)
def test_the_size_of_the_terminal_is_answered_without_a_program(monkeypatch, ask):
    """Many scripts ask for it at import, for a progress bar."""
    monkeypatch.setenv("PATH", "")  # no program can start
    isolation = Isolation()
    with isolation.active():
        assert ask().split() == ["24", "80"]
    assert list(isolation.notes()) == []


def test_an_answer_is_printed_where_the_programs_output_would_be(folder, capsys):
    with Isolation().active():
        with open("size.txt", "w") as file:
            subprocess.run(["stty", "size"], stdout=file, check=True)
        assert Path("size.txt").read_text() == "24 80\n"
        assert subprocess.call(["hostname"]) == 0
    assert capsys.readouterr().out == f"{socket.gethostname()}\n"


@pytest.mark.parametrize(
    "command", ["stty -echo", "stty size; rm x", "stty size > x", "nvidia-smi"]
)
def test_other_commands_of_the_same_programs_are_refused(folder, command):
    with Isolation().active(), pytest.raises(FileNotFoundError, match="does not start programs"):
        subprocess.check_output(command, shell=True)


def test_tiktoken_finds_its_cache_in_the_machines_temporary_folder(monkeypatch):
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    expected = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    with Isolation().active():
        assert os.environ["TIKTOKEN_CACHE_DIR"] == expected
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", "elsewhere")
    with Isolation().active():
        assert "TIKTOKEN_CACHE_DIR" not in os.environ


def test_what_a_library_asks_for_is_refused_without_a_note(tmp_path, monkeypatch):
    """transformers and others look for nvidia-smi of their own accord."""
    library = tmp_path / "site-packages" / "looking.py"
    library.parent.mkdir()
    library.write_text("import subprocess\ndef look(): subprocess.run(['nvidia-smi'])\n")
    monkeypatch.syspath_prepend(library.parent)
    looking = import_module("looking")
    isolation = Isolation()
    with isolation.active(), pytest.raises(FileNotFoundError):
        looking.look()
    assert list(isolation.notes()) == []


def test_what_was_kept_from_the_script_is_shown_as_a_person_writes_it(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir("data")
    isolation = Isolation()
    with isolation.active():
        Path("new.txt").write_text("")
        os.makedirs(os.path.expanduser("~/.cache"))
        Path("/opt/new.txt").write_text("")
        tempfile.TemporaryFile(dir=".").close()  # first without a name
        os.utime("a.txt")
    assert [each for each in isolation.attempts() if not each[1].startswith("tmp")] == [
        ("write", "new.txt"),
        ("write", "~/.cache"),
        ("write", "/opt/new.txt"),
        ("change", "a.txt"),
    ]


def test_missing_files_that_the_script_itself_looked_for_are_named(folder):
    isolation = Isolation()
    with isolation.active():
        if not os.path.exists("runs"):
            os.mkdir("runs")
        assert not os.path.isfile("data/train.bin")
        with pytest.raises(FileNotFoundError):
            Path("meta.pkl").read_text()
        shutil.which("no_such_program")
        import_module("json.tool")
    assert next(isolation.notes()) == (
        "missing files that the script looked for: data/train.bin and 1 more"
    )
    assert list(isolation.missing) == ["runs", "data/train.bin", "meta.pkl"]
