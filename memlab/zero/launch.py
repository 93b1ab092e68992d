"""Start R Python processes on this machine that can join in one group, and return their results.

    results = run_ranks("train.py:train", 2, 1e-3, timeout=60)   # the results of train(1e-3)

It is a small `torchrun` that returns results, for notebooks, tests and benchmarks. The processes
meet over loopback at a store in this process. No port is chosen in advance, so no other program can
take it first. The processes end in each of these cases:

- this process ends, in whatever way
- `timeout` seconds have passed
- one of them failed `GRACE_SECONDS` ago, which gives the others time to report the failure
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
_TAIL = 4000  # characters kept from the end of a process's output


class Failure(NamedTuple):
    """How a rank failed: the error in one line, and its traceback or output."""

    rank: int
    error: str
    traceback: str


class RanksFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """At least one rank failed; `failures` lists the failed ranks, earliest first."""

    def __init__(self, ranks: int, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        first = failures[0]
        super().__init__(f"rank {first.rank} of {ranks} failed: {first.error}")

    @property
    def traceback(self) -> str:
        """The traceback of the rank that failed first."""
        return self.failures[0].traceback

    @property
    def errors(self) -> dict[int, str]:
        """The error of each failed rank."""
        return {failure.rank: failure.error for failure in self.failures}


def run_ranks(
    target: str | Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 300.0,
    threads: int = 1,
    **named: Any,
) -> list[Any]:
    """Run the target in `ranks` processes with these arguments; return the results by rank.

    `target` is a function that other processes can import: `"package.module:function"`,
    `"folder/file.py:function"`, a function of a module, or source text that defines `main`. A
    notebook cell is not a module. Inside it, `with memlab.zero.processes.joined("gloo"):` joins the
    processes in one group. Arguments and results are pickled. Output of the ranks is printed at the
    end, in rank order. Each process computes with `threads` threads.

    Raises RanksFailed if a rank raises or is killed, TimeoutError if some still run after `timeout`
    seconds, and TypeError for a function that cannot be found.
    """
    if ranks < 1:
        raise ValueError(f"got {ranks} ranks; pass at least 1")
    with temporary_folder("memlab-ranks-") as folder:
        job = (_importable_name(target), arguments, named)
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
            del store  # an error's traceback would keep it and its port alive
        return _collect(folder, processes, ended, timeout)


# ------------------------------------------------------------------ the processes


def _store() -> Any:
    from torch.distributed import TCPStore  # not at the top: each rank imports this module too

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _environment(ranks: int, port: int, threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists: rank 0 must not make one
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _start(folder: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = f"from memlab.zero.launch import _run_rank; _run_rank({str(folder)!r}, {rank})"
    with (folder / f"out-{rank}").open("wb") as out, (folder / f"err-{rank}").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,  # it closes when this process ends
            stdout=out,
            stderr=err,
            env=own,
            start_new_session=True,  # so that only this process handles Ctrl-C
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Return the ranks that ended by themselves, in the order of their ends."""
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
    """Ask the processes that still run to write their stack traces."""
    running = [process for process in processes if process.poll() is None]
    if running and hasattr(signal, "SIGUSR1"):
        for process in running:
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def _collect(
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    ended: Sequence[int],
    timeout: float,
) -> list[Any]:
    ranks = len(processes)
    output = [_text(folder / f"err-{rank}") for rank in range(ranks)]
    failures = [
        _failure(folder, rank, processes[rank].returncode, output[rank])
        for rank in ended
        if processes[rank].returncode
    ]
    running = [rank for rank in range(ranks) if rank not in ended]
    if failures:
        waiting = [Failure(r, "still ran when it was ended", output[r]) for r in running]
        raise RanksFailed(ranks, [*sorted(failures, key=_failure_time(folder)), *waiting])
    if running:
        raise TimeoutError(
            f"ranks {', '.join(map(str, running))} of {ranks} still ran after {timeout:g} s; "
            f"rank {running[0]} was at\n{output[running[0]]}"
        )
    for rank in range(ranks):
        print(_text(folder / f"out-{rank}", tail=None), end="")
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def _failure(folder: Path, rank: int, status: int, output: str) -> Failure:
    path = folder / f"error-{rank}"
    if path.exists():
        _, error, trace = pickle.loads(path.read_bytes())
        return Failure(rank, error, trace)
    if status < 0:
        return Failure(rank, f"killed by {signal.Signals(-status).name}", output)
    return Failure(rank, f"ended with status {status}", output)


def _failure_time(folder: Path) -> Callable[[Failure], float]:
    """Return a sort key: the time of a failure. A killed rank has no time and comes first."""

    def failure_time(failure: Failure) -> float:
        path = folder / f"error-{failure.rank}"
        return pickle.loads(path.read_bytes())[0] if path.exists() else 0.0

    return failure_time


def _text(path: Path, tail: int | None = _TAIL) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if tail is None else text[-tail:]


# ------------------------------------------------------------------ the target


def _importable_name(target: str | Callable[..., Any]) -> str:
    """Return the target as text: source, or `module:function`."""
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not inspect.isfunction(target) or module in (None, "__main__") or not name.isidentifier():
        raise TypeError(
            f"got {target!r}, which other processes cannot import; pass source text that defines "
            f"main, 'file.py:function' or 'package.module:function'"
        )
    file = inspect.getsourcefile(target)
    return f"{module}:{name}" if module in sys.modules and "." in module else f"{file}:{name}"


def _import_target(target: str) -> Callable[..., Any]:
    if "\n" in target:
        module = ModuleType("main_of_ranks")
        sys.modules[module.__name__] = module
        exec(compile(target, "<source of ranks>", "exec"), vars(module))
        name = "main"
    else:
        where, _, name = target.rpartition(":")
        module = _module_of_file(Path(where)) if where.endswith(".py") else import_module(where)
    if not hasattr(module, name):
        raise TypeError(f"there is no {name} in {target[:60]!r}; define a function with this name")
    return getattr(module, name)


def _module_of_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    return import_module(path.stem)


def _run_rank(folder: str, rank: int) -> None:
    """Run the target in a started process, and write its result or error to the folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    try:
        target, arguments, named = pickle.loads((Path(folder) / "job.pickle").read_bytes())
        result = pickle.dumps(_import_target(target)(*arguments, **named))
    except BaseException as error:
        failure = (time.time(), f"{type(error).__name__}: {error}", traceback.format_exc())
        (Path(folder) / f"error-{rank}").write_bytes(pickle.dumps(failure))
        traceback.print_exc()
        status = 1
    else:
        (Path(folder) / f"result-{rank}").write_bytes(result)
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit at once: threads of a broken group may wait forever.
    os._exit(status)


def _end_with_parent() -> None:
    """Exit when the parent does: its end of the stdin pipe closes, and the read returns nothing."""
    while os.read(0, 1):
        pass
    os._exit(1)
