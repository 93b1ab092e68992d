"""What a script may do to the machine: 80 ways to change it, and the command around them."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from quick import together

from memlab.world import landlock

SCRIPT = Path(__file__).with_name("attempts.py")
NAMES = [
    line.split("(")[0].split("=")[0].strip().removeprefix("def ")
    for line in SCRIPT.read_text("utf-8").partition("define(\n")[2].splitlines()
    if line.startswith("    ") and "=lambda: " in line
] + ["sqlite_attach", "profiler"]
# What functions that memlab replaces in Python cannot see.
IN_C = {
    *("file_io", "io_open", "creat", "tar", "bz2", "torch_script", "profiler", "sqlite_uri"),
    *("sqlite_attach", "fchmod", "fchown", "utime_of_open", "unix_socket", "c_system", "kill"),
    *("posix_open", "posix_unlink", "posix_rmdir", "posix_rename", "posix_truncate"),
    *("posix_chmod", "posix_chown", "posix_utime", "posix_setxattr", "posix_mkfifo"),
    *("posix_mkdir", "posix_symlink", "posix_hard_link", "posix_spawn", "tcp_in_c"),
    *("udp_message", "unlink_beneath"),
    *("symlink_in_c", "linked_unlink", "linked_mkdir", "linked_rename", "linked_open"),
}
SOCKETS = ("tcp", "tcp_in_c", "udp", "udp_message")
DRY = ("run", "--device", "cpu")
confines = pytest.mark.skipif(
    landlock.abi() < landlock.SIGNALS, reason="this kernel's Landlock does not cover all of it"
)
MAIN = "from memlab.__main__ import main; main()"
WITHOUT_LANDLOCK = f"from memlab.world import landlock; landlock.abi = lambda: 0\n{MAIN}"


def prepare(folder):
    """Make what an attempt may change."""
    (folder / "full").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name in ("kept", "full/inner"):
        (folder / name).write_text("old content")
    (folder / "link").symlink_to("kept")


def state(folder):
    """Return all that can be seen of the files in a folder."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        seen = path.lstat()
        content = path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        attributes = os.listxattr(path, follow_symlinks=False)
        of_file = (seen.st_mode, seen.st_uid, seen.st_nlink, seen.st_mtime_ns)
        found[str(path.relative_to(folder))] = (*of_file, content, attributes)
    return found


class Attempted:
    """What a script's attempts left."""

    def __init__(self, folder, *command):
        self.box = folder / "box"
        repository = folder / "repository"
        repository.mkdir()
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in ("init -q -b main", "commit -q --allow-empty -m first", "branch other"):
            subprocess.run([*git, *words.split()], check=True, cwd=repository)
        for name in NAMES:
            prepare(self.box / name)
            if name.startswith("git_"):
                shutil.copytree(repository, self.box / name / "repository")
        self.before = {name: state(self.box / name) for name in NAMES}
        victim = subprocess.Popen(["sleep", "1000"])
        with ExitStack() as stack:
            listening = {}
            for name in SOCKETS:
                kind = socket.SOCK_STREAM if name.startswith("tcp") else socket.SOCK_DGRAM
                listening[name] = each = stack.enter_context(socket.socket(type=kind))
                each.bind(("127.0.0.1", 0))
                if name.startswith("tcp"):
                    each.listen()
            numbers = [victim.pid, *(each.getsockname()[1] for each in listening.values())]
            self.done = subprocess.run(
                [sys.executable, *command, str(SCRIPT), str(self.box), *map(str, numbers)],
                capture_output=True,
                text=True,
                cwd=folder,
                check=False,
            )
            self.reached = {
                name for name, each in listening.items() if select.select([each], [], [], 0)[0]
            }
        if victim.poll() is not None:
            self.reached.add("kill")
        victim.kill()
        victim.wait()

    def changes(self, name):
        """Return whether the attempt changed something outside."""
        return name in self.reached or state(self.box / name) != self.before[name]


@pytest.fixture(scope="module", params=["", "landlock.abi = lambda: 1"], ids=["", "Linux 5.13"])
def confined(tmp_path_factory, request):
    """By this kernel's Landlock, and by what its first version covers."""
    code = f"from memlab.world import landlock; {request.param}\n{MAIN}"
    return Attempted(tmp_path_factory.mktemp("confined"), "-c", code, *DRY)


@pytest.fixture(scope="module")
def replaced(tmp_path_factory):
    return Attempted(tmp_path_factory.mktemp("replaced"), "-c", WITHOUT_LANDLOCK, *DRY)


def test_each_attempt_changes_something_by_itself(tmp_path):
    alone = Attempted(tmp_path)
    privileged = {name for name in NAMES if "chown" in name or "xattr" in name}
    assert {name for name in NAMES if not alone.changes(name)} <= privileged


@pytest.mark.few(1)
@confines
@together("name", NAMES)
def test_a_confined_script_changes_nothing_outside(confined, name):
    assert f"\n{name}: " in confined.done.stderr
    assert not confined.changes(name)


@together("name", sorted(set(NAMES) - IN_C))
def test_without_the_systems_help_pythons_functions_change_nothing(replaced, name):
    assert f"\n{name}: " in replaced.done.stderr
    assert not replaced.changes(name)


# ------------------------------------------------------------------ the command around it

TRAINING = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def memlab(tmp_path):
    """Starts `memlab run` on a script, with its own temporary folder; `launcher` before it."""
    temporary = Path(tempfile.mkdtemp())  # a short path, for sockets

    def start(source, *options, launcher=("-m", "memlab"), **popen):
        (tmp_path / "train.py").write_text(source)
        return subprocess.Popen(
            [sys.executable, *launcher, "run", *options, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )

    yield start
    assert list(temporary.glob("memlab*")) == []
    shutil.rmtree(temporary)


def ended(process, given=None):
    out, err = process.communicate(given)
    return process.returncode, out, err


def left(folder):
    return sorted(path.name for path in folder.iterdir())


@confines
class TestTheChild:
    def test_reads_what_the_command_is_given(self, memlab, tmp_path):
        running = memlab("print('got', input())\n" + TRAINING, stdin=subprocess.PIPE)
        status, _, err = ended(running, "a line\n")
        assert (status, "got a line\n" in err) == (0, True)
        assert left(tmp_path) == ["train.py", "work"]

    def test_ends_with_its_status_and_leaves_nothing(self, memlab, tmp_path):
        status, out, err = ended(memlab("1 / 0"))
        assert (status, out) == (2, "")
        assert "ZeroDivisionError" in err
        assert left(tmp_path) == ["train.py"]

    @pytest.mark.few(1)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_is_ended_by_a_signal_to_the_command(self, memlab, tmp_path, number):
        running = memlab("print('here', flush=True)\nimport time\nwhile True: time.sleep(1)")
        while "here" not in running.stderr.readline():
            pass
        running.send_signal(number)
        status, out, err = ended(running)
        assert (status, out) == (130, "")
        assert "interrupted; nothing was written" in err
        assert left(tmp_path) == ["train.py"]

    @pytest.mark.slow
    def test_cannot_catch_the_end_of_the_command(self, memlab, tmp_path):
        source = (
            "import sys, time\nprint('here', flush=True)\n"
            "try:\n    while True: time.sleep(1)\nexcept KeyboardInterrupt: sys.exit(1)\n"
        )
        running = memlab(source)
        while "here" not in running.stderr.readline():
            pass
        running.send_signal(signal.SIGINT)
        status, out, err = ended(running)
        assert (status, out, err) == (130, "", "memlab: interrupted; nothing was written\n")
        assert left(tmp_path) == ["train.py"]

    @pytest.mark.slow
    def test_may_ask_whether_a_process_exists(self, memlab, tmp_path):
        source = (
            "import os\n"
            "for number in (0, 10):\n"
            "    try: os.kill(os.getppid(), number)\n"
            "    except PermissionError: pass\n"
        )
        assert ended(memlab(source + TRAINING))[0] == 0
        refused = (tmp_path / "work" / "run-refused.txt").read_text()
        assert refused == "signal   its parent process\n"

    def test_that_is_killed_ends_the_command_alike(self, memlab, tmp_path):
        assert ended(memlab("import os; os.kill(os.getpid(), 9)"))[0] == -9
        assert left(tmp_path) == ["train.py"]

    @pytest.mark.slow
    def test_says_which_error_the_system_raised(self, memlab):
        source = "import posix; posix.unlink('train.py')"
        _, _, err = ended(memlab(source))
        assert "PermissionError: [Errno 13] Permission denied: 'train.py'" in err
        assert "memlab run refused it; --allow-writes permits it" in err

    @pytest.mark.slow
    def test_finds_again_in_c_what_it_wrote_there(self, memlab, tmp_path):
        source = (
            "import io, os, posix\n"
            "with io.FileIO('new', 'w') as file: file.write(b'text')\n"
            "assert open('new').read() == 'text' and os.listdir() and os.path.getsize('new') == 4\n"
            "descriptor = posix.open('train.py', posix.O_RDWR)\n"
            "assert posix.read(descriptor, 6) == b'import'\n"
            "posix.mkdir('made'); posix.rename('new', 'made/new'); posix.unlink('made/new')\n"
            "import sqlite3, tarfile, torch\n"
            "torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), 'linear.pt')\n"
            "torch.jit.load('linear.pt')\n"
            "with tarfile.open('all.tar', 'w') as tar: tar.add('linear.pt')\n"
            "assert tarfile.open('all.tar').getnames() == ['linear.pt']\n"
            "for _ in range(2):\n"
            "    database = sqlite3.connect('file:runs.db?mode=rwc', uri=True)\n"
            "    database.execute('create table if not exists losses (loss real)')\n"
            "    database.execute('insert into losses values (1)')\n"
            "    database.commit()\n"
            "assert len(database.execute('select * from losses').fetchall()) == 2\n"
        )
        status, _, err = ended(memlab(source + TRAINING, "--real"))
        assert status == 0, err
        refused = (tmp_path / "work" / "run-refused.txt").read_text().split()[1::2]
        written = {"new", "train.py", "made", "made/new", "linear.pt", "all.tar", "runs.db"}
        assert {path for path in refused if not path.startswith("runs.db-")} == written

    @pytest.mark.slow
    def test_changes_its_own_temporary_files(self, memlab):
        source = (
            "import os, shutil, tempfile\n"
            "folder = tempfile.mkdtemp()\n"
            "path = shutil.copy2('train.py', folder)\n"
            "os.chmod(path, 0o600); os.utime(path, (1, 1))\n"
            "assert os.stat(path).st_mtime == 1 and os.stat(path).st_mode & 0o777 == 0o600\n"
            "shutil.rmtree(folder)\n"
        )
        status, _, err = ended(memlab(source + TRAINING))
        assert status == 0, err

    def test_writes_all_that_is_allowed(self, memlab, tmp_path):
        source = "import posix; posix.mkdir('made'); posix.open('made/new', posix.O_CREAT)\n"
        assert ended(memlab(source + TRAINING, "--allow-writes"))[0] == 0
        assert left(tmp_path) == ["made", "train.py", "work"]

    def test_may_have_workers(self, memlab):
        source = (
            "import torch\n"
            "from torch.utils.data import DataLoader, TensorDataset\n"
            "data = TensorDataset(torch.zeros(8, 2))\n"
            "for strategy in ('file_descriptor', 'file_system'):\n"
            "    torch.multiprocessing.set_sharing_strategy(strategy)\n"
            "    assert len(list(DataLoader(data, num_workers=2))) == 8\n"
        )
        status, _, err = ended(memlab(source + TRAINING, "--real"))
        assert status == 0, err


def test_a_system_without_landlock_is_named_first(memlab):
    running = memlab(TRAINING, launcher=("-c", WITHOUT_LANDLOCK))
    status, _, err = ended(running)
    assert status == 0
    assert err.splitlines()[:2] == [
        "memlab: running train.py until step 2 has ended",
        "memlab: the operating system does not confine the script (this kernel has no Landlock); "
        "only functions that memlab replaces in Python keep it from files, programs and the "
        "network",
    ]
