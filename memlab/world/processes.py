"""Run the processes that a script starts in this one, where the meter sees them.

torch.multiprocessing.spawn   its function runs here as rank 0; the other ranks do not run
Process.start                 in started.py
a launcher's other ranks      (Lightning starts the script again for each) have ended at once
collectives                   finish at once; no other rank answers
"""

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.spawn

from memlab.internals.torch_internals import (
    disable_current_modes,
    fake_process_group_store,
    forget_meshes,
)
from memlab.world.entering import enter
from memlab.world.started import StartedProcesses

RELEASE_SECONDS = 2e-3  # gloo's thread drops the tensors of finished work within this time


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
        self.ranks, self._started = ranks, StartedProcesses(announce)
        self._is_alone, self._joins = real and not joins, joins

    @contextmanager
    def in_this_one(self) -> Iterator[None]:
        """Run the script's processes here inside `with`.

        A rank that fails among real ones stays connected, so that the others learn of it only when
        it has said why.
        """
        keeps = self._joins
        with enter(self._stand_ins()), self._started.until_the_end():
            try:
                yield
                keeps = False
            finally:
                if not keeps and dist.is_available() and dist.is_initialized():
                    dist.destroy_process_group()
                    forget_meshes()

    def run_waiting(self) -> None:
        """Run the processes that the script has started and not yet waited for."""
        self._started.run_waiting()

    def _stand_ins(self) -> dict[str, Callable[[Any], Any]]:
        return {
            **self._started.stand_ins(),
            "spawn": self._spawn,
            "popen": self._start_program,
            "init_process_group": self._initialize,
            **({"work_wait": _unmetered} if self._joins else {}),
            **({"ddp": _alone} if self._is_alone else {}),
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


class _Ended:
    """What `start_processes(join=False)` returns: all of its processes have ended."""

    processes: tuple[Any, ...] = ()

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


def _is_another_rank(variables: Any) -> bool:
    """Return whether a program's environment makes it a rank of this training other than 0."""
    return bool(variables) and variables.get("LOCAL_RANK", "0") != "0"
