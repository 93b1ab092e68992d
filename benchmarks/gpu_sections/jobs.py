"""Jobs, each in its own process, so that caches, CUDA contexts and crashes stay separate.

A job is plain data. Its answer is a dict, or `{"failure": message}`. On a GPU each job runs in a
new Python process with its own allocator, several at a time. A rehearsal answers the same jobs in
this process, from predictions.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import cores

from memlab.configs.targets import TARGETS, target_of

from . import (
    day_jobs,
    ema_jobs,
    fused_jobs,
    optim_jobs,
    recorder,
)
from .configurations import CONFIGURATIONS, FULL, SMALL, Size
from .predictions import Prediction, predicted, settings_of

SCRIPT = Path(__file__).parents[1] / "gpu.py"
SECONDS = 240  # time limit of a job; the longest takes a tenth of this
MOST_AT_ONCE = 8
_BYTES_OF_A_JOB = 16 * 2**30  # most GPU memory of a job
_CONFIGURATIONS_OF_THE_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

Answer = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A job for a process."""

    task: str
    configuration: str = ""
    name: str = ""  # of the recording
    conf: str = ""  # PYTORCH_ALLOC_CONF
    cap_bytes: int | None = None  # limit of reserved memory
    small: bool = False
    rehearsal: bool = False

    @property
    def size(self) -> Size:
        return SMALL if self.small else FULL


# ------------------------------------------------------------------ tasks

CARD_OF_A_REHEARSAL = {"device": "rehearsal", "total_bytes": 80 * 2**30, "capability": [9, 0]}


def facts(job: Job) -> Answer:
    """Describe the GPU; a rehearsal describes a made-up one."""
    if job.rehearsal:
        return {**CARD_OF_A_REHEARSAL, "target": "cuda:hopper"}
    if not torch.cuda.is_available():
        return {"failure": "torch finds no GPU"}
    card = torch.cuda.get_device_properties(0)
    target = target_of(card.name, f"sm_{card.major}{card.minor}") or TARGETS["cuda"]
    return {
        "device": card.name,
        "total_bytes": torch.cuda.mem_get_info()[1],
        "total_bytes_of_properties": card.total_memory,
        "capability": [card.major, card.minor],
        "multiprocessors": card.multi_processor_count,
        "multiprocessors_assumed": target.multiprocessors,
        "target": target.device,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": torch.cuda.get_allocator_backend(),
    }


def record(job: Job) -> Answer:
    """Record the history of a configuration."""
    about = {
        **{name: getattr(job, name) for name in ("name", "configuration", "conf", "cap_bytes")},
        "small": job.small,
    }
    if job.rehearsal:
        settings = settings_of(job.conf, job.cap_bytes, CARD_OF_A_REHEARSAL["total_bytes"])
        return {**about, **recorder.rehearsed(prediction_of(job), settings)}
    configuration = CONFIGURATIONS[job.configuration]
    return {**about, **recorder.record(configuration, job.size, job.cap_bytes)}


def predict_near_gpu(job: Job) -> Answer:
    """Predict in a process that has a GPU; the prediction must be the same and not use it."""
    prediction = predicted(CONFIGURATIONS[job.configuration], job.size, "cuda")
    return {
        "sizes": [event.bytes for event in prediction.whole],
        "touched": torch.cuda.is_initialized(),
    }


def _of_the_job(task: day_jobs.Task) -> Callable[[Job], Answer]:
    return lambda job: task(job.configuration, job.small, job.rehearsal)


TASKS: dict[str, Callable[[Job], Answer]] = {
    "facts": facts,
    "record": record,
    "predict": predict_near_gpu,
    "optim": _of_the_job(optim_jobs.compare),
    "fused": _of_the_job(fused_jobs.compare),
    "ema": _of_the_job(ema_jobs.measure_averages),
    **{name: _of_the_job(task) for name, task in day_jobs.TASKS.items()},
}


@cache
def _rehearsed_prediction(configuration: str, size: Size) -> Prediction:
    return predicted(CONFIGURATIONS[configuration], size, "cuda:hopper")


def prediction_of(job: Job) -> Prediction:
    return _rehearsed_prediction(job.configuration, job.size)


def answer(job: Job) -> Answer:
    """Run a job; return its answer, or its failure as one line."""
    try:
        return TASKS[job.task](job)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {first_line(str(error))}"}


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


# ------------------------------------------------------------------ processes


def serve(job_json: str, path: str) -> None:
    """Run one job in a subprocess and write its answer to a file."""
    found = answer(Job(**json.loads(job_json)))
    Path(path).write_text(json.dumps(found), encoding="utf-8")


class Here:
    """Answers jobs in this process, one after another."""

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def submit(self, job: Job) -> "Future[Answer]":
        future: Future[Answer] = Future()
        future.set_result(answer(job))
        return future


class Archive:
    """Answers jobs from stored recordings."""

    def __init__(self, recordings: Mapping[str, Answer]) -> None:
        self._recordings = recordings

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    @property
    def latest(self) -> Answer:
        """Return the last recording; all are from the same GPU and size."""
        *_, latest = self._recordings.values()
        return latest

    def submit(self, job: Job) -> "Future[Answer]":
        missing = {"failure": "not in the archive"}
        future: Future[Answer] = Future()
        future.set_result(self._recordings.get(job.name, missing))
        return future


class Processes:
    """Answers jobs in subprocesses, several at a time, each with its own environment."""

    def __init__(self, environment: Mapping[str, str], at_once: int = 1) -> None:
        self._environment = environment
        self._threads = ThreadPoolExecutor(at_once)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def submit(self, job: Job) -> "Future[Answer]":
        return self._threads.submit(self._run, job)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exception: Any) -> None:
        """Kill running processes and start no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()

    def _run(self, job: Job) -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            path, errors = Path(folder) / "answer.json", Path(folder) / "errors.txt"
            command = [sys.executable, str(SCRIPT), "--serve", json.dumps(asdict(job)), str(path)]
            with errors.open("wb") as stderr:
                status = self._wait(command, self._environment_of(job), stderr)
            if path.exists():
                with contextlib.suppress(json.JSONDecodeError):
                    return json.loads(path.read_text(encoding="utf-8"))
            last = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            return {"failure": f"its process ended with {status}: {''.join(last)}"}

    def _wait(self, command: list[str], environment: dict[str, str], stderr: Any) -> str:
        with self._lock:
            if self._stopped:
                return "nothing, because the run was stopped"
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,  # only the parent handles Ctrl-C
            )
            self._running.add(process)
        try:
            return f"status {process.wait(SECONDS)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"no answer in {SECONDS} s"
        finally:
            with self._lock:
                self._running.discard(process)

    def _environment_of(self, job: Job) -> dict[str, str]:
        environment = {"OMP_NUM_THREADS": "2", **self._environment}
        for name in _CONFIGURATIONS_OF_THE_ALLOCATOR:
            environment.pop(name, None)
        return {**environment, "PYTORCH_ALLOC_CONF": job.conf} if job.conf else environment


def at_once(total_bytes: int) -> int:
    """Return how many jobs may run at once on a GPU of this size."""
    return max(1, min(MOST_AT_ONCE, cores() // 2, total_bytes // _BYTES_OF_A_JOB))


@contextlib.contextmanager
def hidden_gpu() -> Iterator[dict[str, str]]:
    """Hide the GPU from this process, so that it cannot affect predictions.

    Yields the environment for subprocesses that use the GPU.
    """
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield before
    finally:
        if "CUDA_VISIBLE_DEVICES" in before:
            os.environ["CUDA_VISIBLE_DEVICES"] = before["CUDA_VISIBLE_DEVICES"]
        else:
            del os.environ["CUDA_VISIBLE_DEVICES"]
