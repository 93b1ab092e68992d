"""Run the processes that a script starts in this one, where the meter sees them.

torch.multiprocessing.spawn   its function runs here as rank 0; the other ranks do not run
Process.start                 the function runs here, once the script joins the process, asks
                              whether it is alive, or reads a queue
workers of libraries          (pools, loaders, managers) do start: they are forked, so they
                              inherit all replacements
a launcher's other ranks      (Lightning starts the script again for each) have ended at once
collectives                   finish at once; no other rank answers
"""

import inspect
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.spawn
from torch.nn.parallel import DistributedDataParallel

from memlab.internals.libraries import is_librarys
from memlab.internals.replacing import importers, replaced
from memlab.internals.torch_internals import (
    disable_current_modes,
    fake_process_group_store,
    forget_meshes,
)

RELEASE_SECONDS = 2e-3  # gloo's thread drops the tensors of finished work within this time
_QUEUES = (multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue)
_SPAWNING = sys.modules["torch.multiprocessing.spawn"]


class Processes:
    """The processes of a script.

    ranks   of the whole training, as the launcher or the script says; None: it is not distributed
    real    whether tensors are real, so that DDP waits for what its collectives give
    joins   whether this process is one of a launcher's, and meets the others
    """

    def __init__(
        self,
        ranks: int | None,
        announce: Callable[[str], object],
        *,
        real: bool = False,
        joins: bool = False,
    ) -> None:
        self.ranks, self._announce = ranks, announce
        self._is_alone, self._joins = real and not joins, joins
        self._waiting: list[_Started] = []

    @contextmanager
    def in_this_one(self) -> Iterator[None]:
        """Run the script's processes here inside `with`.

        A rank that fails among real ones stays connected, so that the others learn of it only when
        it has said why.
        """
        keeps = self._joins
        with replaced(self._replacements()):
            try:
                yield
                keeps = False
            finally:
                for each in tuple(self._waiting):  # Python asks for them when it exits
                    each.terminate()
                if not keeps and dist.is_available() and dist.is_initialized():
                    dist.destroy_process_group()
                    forget_meshes()

    def run_waiting(self) -> None:
        """Run the processes that the script has started and not yet waited for."""
        while self._waiting:
            self._waiting[0].run()

    def _replacements(self) -> dict[tuple[Any, str], Callable[[Any], Any]]:
        spawning = (_SPAWNING, torch.multiprocessing)
        return {
            **{(owner, "start_processes"): self._spawn for owner in spawning},
            **{(kind, "_Popen"): self._start for kind in _kinds_of_process()},
            # it would ask, and so run, every process at the start of another
            (multiprocessing.process, "_cleanup"): lambda real: lambda: None,
            **{(queue, "get"): self._get for queue in _QUEUES},
            (subprocess.Popen, "__init__"): self._start_program,
            **({(dist.Work, "wait"): _unmetered} if self._joins else {}),
            **({(DistributedDataParallel, "__init__"): _alone} if self._is_alone else {}),
            **{
                (owner, "init_process_group"): self._initialize
                for owner in importers("init_process_group", dist.init_process_group)
            },
        }

    def _spawn(self, real: Any) -> Callable[..., Any]:
        def start_processes(
            fn: Callable[..., Any],
            args: Any = (),
            nprocs: int = 1,
            join: bool = True,
            *_: Any,
            **__: Any,
        ) -> Any:
            self.ranks = nprocs
            fn(0, *args)
            return None if join else _Ended()

        return start_processes

    def _start(self, real: Any) -> Any:
        def start(process: BaseProcess) -> Any:
            if not _is_librarys(process):
                return _Started(process, self._waiting, self._announce)
            from multiprocessing.popen_fork import Popen

            return Popen(process) if hasattr(os, "fork") else real(process)

        return staticmethod(start)

    def _get(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def get(queue: Any, *args: Any, **kwargs: Any) -> Any:
            if self._waiting and queue.empty():
                self.run_waiting()
            return real(queue, *args, **kwargs)

        return get

    def _start_program(self, real: Callable[..., None]) -> Callable[..., None]:
        def start(popen: Any, *args: Any, **kwargs: Any) -> None:
            if not _is_another_rank(kwargs.get("env")):
                real(popen, *args, **kwargs)
                return
            popen.args = args[0] if args else kwargs["args"]
            popen.stdin = popen.stdout = popen.stderr = None
            popen.pid, popen.returncode = os.getpid(), 0

        return start

    def _initialize(self, real: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(real)

        def initialized(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            size, rank = given.get("world_size", -1), given.get("rank", -1)
            self.ranks = size if size > 0 else int(os.environ.get("WORLD_SIZE", 1))
            if self._joins:
                real(*args, **kwargs)
                return
            rank = rank if rank >= 0 else int(os.environ.get("RANK", 0))
            real("fake", store=fake_process_group_store(), rank=rank, world_size=self.ranks)

        return initialized


class _Started:
    """What a Process has as its `_popen`: it has started, but runs only when it is asked for."""

    def __init__(
        self,
        process: BaseProcess,
        waiting: list["_Started"],
        announce: Callable[[str], object],
    ) -> None:
        self._process, self._waiting, self._announce = process, waiting, announce
        names = ("_target", "_args", "_kwargs")  # which the process forgets when it has started
        self._what = {name: getattr(process, name) for name in names}
        self.pid, self.returncode = os.getpid(), None
        self.sentinel, end = os.pipe()
        os.close(end)  # a caller that waits for the process goes on, and joins it
        waiting.append(self)

    def run(self) -> None:
        """Run it here, the first time. Its exception is the script's."""
        if self in self._waiting:
            self._waiting.remove(self)
            self._announce(f"{self._process.name} of the script runs in this process")
            self.returncode = 1
            vars(self._process).update(self._what)
            try:
                self._process.run()
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
            self.returncode = 0

    def wait(self, timeout: float | None = None) -> int | None:
        self.run()
        return self.returncode

    def poll(self, *args: Any) -> int | None:
        return self.wait()

    def terminate(self) -> None:
        """End it; if it has not run, it never will."""
        if self in self._waiting:
            self._waiting.remove(self)
            self.returncode = -15

    kill = terminate

    def close(self) -> None:
        os.close(self.sentinel)


class _Ended:
    """What `start_processes(join=False)` returns: all of its processes have ended."""

    processes: tuple[BaseProcess, ...] = ()

    def join(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def _unmetered(real: Callable[..., Any]) -> Callable[..., Any]:
    """Hide gloo's own copies from the meter: it reduces a copy of the whole input of a
    reduce-scatter, and writes the output when the work is waited for. NCCL has no such copy."""

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        with disable_current_modes():
            result = real(work, *args, **kwargs)
        time.sleep(RELEASE_SECONDS)
        return result

    return wait


def _alone(init: Callable[..., None]) -> Callable[..., None]:
    """Make DDP keep its own gradients: a group that sends nothing gives none back."""

    def own(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept

    def made(model: Any, *args: Any, **kwargs: Any) -> None:
        init(model, *args, **kwargs)
        model.register_comm_hook(None, own)
        model.register_comm_hook = lambda *_: None  # the script's

    return made


def _kinds_of_process() -> set[type]:
    return {
        value
        for value in vars(multiprocessing.context).values()
        if isinstance(value, type) and issubclass(value, BaseProcess) and "_Popen" in vars(value)
    }


def _is_librarys(process: Any) -> bool:
    """Return whether a library's function runs in the process, not one of the script's."""
    function = process._target
    while isinstance(function, partial):
        function = function.func
    name = getattr(function or type(process), "__module__", "") or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name != "__main__" and bool(file) and is_librarys(file)


def _is_another_rank(variables: Any) -> bool:
    """Return whether a program's environment makes it a rank of this training other than 0."""
    return bool(variables) and variables.get("LOCAL_RANK", "0") != "0"
