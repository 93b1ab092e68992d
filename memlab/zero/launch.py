"""Start R Python processes on this machine that can join each other; bring their results back.

    results = run_ranks("train.py:train", 2, 1e-3, timeout=60)   # what each train(1e-3) returned

It is a small `torchrun` that returns something: for notebooks, tests and benchmarks. The processes
meet on loopback, at a store that this one keeps: no port is chosen in advance, so none can be taken
away. They end with this process, whichever way it ends; after `timeout` seconds; and
`GRACE_SECONDS` after one of them has failed, in which the others can say that they noticed.
"""

import contextlib
import faulthandler
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from memlab.internals.files import temporary_folder

GRACE_SECONDS = 15.0
_TAIL = 4000  # characters of what a process said last


class Failure(NamedTuple):
    """How a rank failed: in one line, and with all it said."""

    rank: int
    error: str
    traceback: str


class RanksFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """At least one rank failed; `failures` has those that did, the first of them first."""

    def __init__(self, ranks: int, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        first = failures[0]
        super().__init__(f"rank {first.rank} of {ranks} failed: {first.error}")

    @property
    def traceback(self) -> str:
        """Of the first rank that failed."""
        return self.failures[0].traceback

    @property
    def errors(self) -> dict[int, str]:
        """What each rank that failed said."""
        return {failure.rank: failure.error for failure in self.failures}


def run_ranks(
    target: str | Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 300.0,
    threads: int = 1,
    **named: Any,
) -> list[Any]:
    """What the target returned in each of so many processes, for these arguments, by rank.

    `target` is a function that other processes can find: `"package.module:function"`,
    `"folder/file.py:function"`, a function of a module, or source text that defines `main`; a cell
    of a notebook is no module. Inside it, `with memlab.zero.processes.joined("gloo"):` makes the
    processes one group. Arguments and results are pickled. What ranks print is printed at the end,
    in rank order. `threads` is how many each computes with.

    Raises RanksFailed if a rank raises or is killed, TimeoutError if some still run after `timeout`
    seconds, and TypeError for a function that cannot be found.
    """
    if ranks < 1:
        raise ValueError(f"got {ranks} ranks; give at least 1")
    with temporary_folder("memlab-ranks-") as folder:
        job = (_findable(target), arguments, named)
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        store = _store()
        environment = _environment(ranks, store.port, threads)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(_start(folder, rank, environment))
            ended = _wait(processes, time.monotonic() + timeout)
            _dump_stacks(processes)
        finally:
            for process in processes:
                _end(process)
            del store  # an error's traceback would keep it, and its port, for as long as it lives
        return _collect(folder, processes, ended, timeout)


# ------------------------------------------------------------------ the processes


def _store() -> Any:
    from torch.distributed import TCPStore  # late: what is started does not pay for it twice

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _environment(ranks: int, port: int, threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: rank 0 is not to make one
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _start(folder: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = f"from memlab.zero.launch import _run; _run({str(folder)!r}, {rank})"
    with (folder / f"out-{rank}").open("wb") as out, (folder / f"err-{rank}").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,  # it ends when we do
            stdout=out,
            stderr=err,
            env=own,
            start_new_session=True,  # Ctrl-C is ours to handle
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """The ranks that ended by themselves, in that order."""
    ended: list[int] = []
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended.append(rank)
                if process.returncode:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    return ended


def _dump_stacks(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Those that still run are to write where they are."""
    running = [process for process in processes if process.poll() is None]
    if running and hasattr(signal, "SIGUSR1"):
        for process in running:
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it, with what it has started itself."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.stdin.close()
    process.wait()


def _collect(
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    ended: Sequence[int],
    timeout: float,
) -> list[Any]:
    ranks, said = len(processes), [_text(folder / f"err-{rank}") for rank in range(len(processes))]
    failures = [
        _failure(folder, rank, processes[rank].returncode, said[rank])
        for rank in ended
        if processes[rank].returncode
    ]
    running = [rank for rank in range(ranks) if rank not in ended]
    if failures:
        waiting = [Failure(r, "still ran when it was ended", said[r]) for r in running]
        raise RanksFailed(ranks, [*sorted(failures, key=_when(folder)), *waiting])
    if running:
        raise TimeoutError(
            f"ranks {', '.join(map(str, running))} of {ranks} still ran after {timeout:g} s; the "
            f"first of them was at\n{said[running[0]]}"
        )
    for rank in range(ranks):
        print(_text(folder / f"out-{rank}", tail=None), end="")
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def _failure(folder: Path, rank: int, code: int, said: str) -> Failure:
    path = folder / f"error-{rank}"
    if path.exists():
        _, error, trace = pickle.loads(path.read_bytes())
        return Failure(rank, error, trace)
    if code < 0:
        return Failure(rank, f"killed by {signal.Signals(-code).name}", said)
    return Failure(rank, f"ended with status {code}", said)


def _when(folder: Path) -> Callable[[Failure], float]:
    """When it failed; who was killed could not say, and comes first."""

    def when(failure: Failure) -> float:
        path = folder / f"error-{failure.rank}"
        return pickle.loads(path.read_bytes())[0] if path.exists() else 0.0

    return when


def _text(path: Path, tail: int | None = _TAIL) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if tail is None else text[-tail:]


# ------------------------------------------------------------------ the function


def _findable(target: str | Callable[..., Any]) -> str:
    """The target as text: source, or `where:name`."""
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not inspect.isfunction(target) or module in (None, "__main__") or not name.isidentifier():
        raise TypeError(
            f"got {target!r}, which other processes cannot import; give source text that defines "
            f"main, 'file.py:function' or 'package.module:function'"
        )
    file = inspect.getsourcefile(target)
    return f"{module}:{name}" if module in sys.modules and "." in module else f"{file}:{name}"


def _found(target: str) -> Callable[..., Any]:
    if "\n" in target:
        module = ModuleType("main_of_ranks")
        sys.modules[module.__name__] = module
        exec(compile(target, "<source of ranks>", "exec"), vars(module))
        name = "main"
    else:
        where, _, name = target.rpartition(":")
        module = _module_of_file(Path(where)) if where.endswith(".py") else import_module(where)
    if not hasattr(module, name):
        raise TypeError(f"there is no {name} in {target[:60]!r}; define a function of that name")
    return getattr(module, name)


def _module_of_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    return import_module(path.stem)


def _run(folder: str, rank: int) -> None:
    """What a started process does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    try:
        target, arguments, named = pickle.loads((Path(folder) / "job.pickle").read_bytes())
        result = pickle.dumps(_found(target)(*arguments, **named))
    except BaseException as error:
        said = (time.time(), f"{type(error).__name__}: {error}", traceback.format_exc())
        (Path(folder) / f"error-{rank}").write_bytes(pickle.dumps(said))
        traceback.print_exc()
        status = 1
    else:
        (Path(folder) / f"result-{rank}").write_bytes(result)
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: threads of a group that broke may wait for ever for what will not come.
    os._exit(status)


def _end_with_parent() -> None:
    """Nobody writes to the pipe: it ends when the process that holds the other end does."""
    while os.read(0, 1):
        pass
    os._exit(1)
