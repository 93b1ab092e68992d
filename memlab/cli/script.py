"""Load and run a user's own training step, and report its errors in one line.

The script runs as Python would run it: its folder is first on sys.path, and sys.argv holds only its
name. Only its `__name__` is not `__main__`.
"""

import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

import memlab
from memlab.cli import report, terminal
from memlab.cli.choices import choose_device
from memlab.cli.errors import (
    RankLostError,
    UsageError,
    error_summary,
    is_out_of_memory,
    message_of,
    quoted,
    suggestions,
)
from memlab.cli.machine import devices_present
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import Request
from memlab.cli.results import write
from memlab.cli.rows import Announce, Row
from memlab.cli.script_sizes import Size, sizes_of
from memlab.cli.torchrun import find_rank
from memlab.configs.targets import TARGETS
from memlab.dry_runs.assumptions import fraction_of
from memlab.dry_runs.fake_tensors import is_assumption
from memlab.dry_runs.routing import imbalance_of
from memlab.internals.imports import of_a_new_process
from memlab.internals.libraries import is_librarys
from memlab.scripts.ranks import as_rank_0
from memlab.trace import Trace
from memlab.units import paragraph
from memlab.world.data.hub import UnavailableError
from memlab.world.messages import NotYetSentError
from memlab.world.started import NoAnswerError

_MEMLAB_FOLDER = Path(memlab.__file__).resolve().parent
_OF_BACKENDS = re.compile(r"gloo|NCCL|TCPStore")  # in messages of failed collectives


@dataclass(frozen=True)
class Script:
    """`path.py:function`.

    ranks   number of processes, this one being rank 0; None: it is not distributed
    """

    path: Path
    function: str
    assume: str | None = None  # for sizes that depend on values in a dry run
    ranks: int | None = None
    arguments: Mapping[str, int] = field(default_factory=dict)  # of the function
    sizes: dict[str, Size] = field(default_factory=dict)  # that it takes, known once it has run

    def __str__(self) -> str:
        return f"{self.path}:{self.function}"

    @property
    def of_ranks(self) -> str:
        return "" if self.ranks is None else f" of rank 0 of {self.ranks}"


def measure_script(request: Request) -> int:
    """Measure the second step of the user's training; print it, write pictures and results."""
    dry, assume = request.dry, request.assume
    assert request.script is not None
    script = find_script(request.script, assume, request.ranks)
    if assume is not None and not dry:
        raise UsageError(
            "got --assume without --dry-run; a real step knows its sizes, so leave --assume out"
        )
    device = request.device and choose_device(request)
    folder = choose_folder(request.out)
    with terminal.progress(stages=3) as announce:
        if dry and device in TARGETS:
            trace = predicted(script, device, announce)
        else:
            with memlab.dry_run(assume=assume) if dry else nullcontext():
                trace = measured(script, None if dry else device, announce)
    if not trace.peak_bytes:
        raise UsageError(
            f"the step of {script} allocated nothing on {trace.device}; it must call the model"
        )
    first = [f"{script}: {_how(script, dry, device)}", *assumed(trace), ""]
    for line in [*first, *str(trace).splitlines()]:
        terminal.echo(paragraph(line) if len(line) > terminal.WIDTH else line)
    context = report.context_of(device if dry else None)
    if numbers := "\n".join(map(paragraph, report.memory_numbers(trace, context))):
        terminal.echo(f"\n{numbers}")
    write([Row(str(script), trace)], f"{script}, dry run" if dry else str(script), folder)
    return 0


def assumed(trace: Trace) -> list[str]:
    """Return the notes to print in the first lines."""
    return list(filter(is_assumption, trace.notes))


def _how(script: Script, dry: bool, device: str | None) -> str:
    """Say how the step was measured."""
    step = f"its second step{script.of_ranks}"
    if not dry:
        return step
    made_up = "nothing is computed, so a printed loss is meaningless"
    if device in TARGETS:
        return f"{step}, predicted for CUDA ({TARGETS[device].name}); {made_up}"
    return f"{step}, dry run; {made_up}"


def find_script(given: str, assume: str | None = None, ranks: int | None = None) -> Script:
    """Parse the path and the function's name, and check that the file exists."""
    check_assumption(assume)
    path, _, function = given.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise UsageError(
            f"got --script {quoted(given)}; give a file and a function in it that returns (step, "
            f"model, optimizer), such as train.py:build"
        )
    if not os.path.isfile(path):
        raise UsageError(
            f"got --script {quoted(given)}; there is no file {quoted(path)}: give an existing file"
        )
    return Script(Path(path), function, assume, ranks)


def check_assumption(assume: str | None) -> None:
    """Raise UsageError for a wrong --assume."""
    if assume is None:
        return
    try:
        fraction_of(assume)
        imbalance_of(assume)
    except ValueError:
        raise UsageError(
            f"got --assume {quoted(assume)}; give 'most' (every element is chosen), a fraction "
            f"above 0, up to 1, or imbalance:N (tokens of the busiest expert, from 1 times the "
            f"average)"
        ) from None


def identity(*parts: Any) -> Any:
    """Return the training as the script builds it."""
    return parts


def measured(
    script: Script,
    device: str | None,
    announce: Announce,
    change: Callable[..., Any] = identity,
) -> Trace:
    """Measure the second step of the user's training, optionally changed, on this machine."""
    with _as_python_runs_it(script), as_usage_errors(script.path):
        announce("building")
        step, model, optimizer = change(*_parts(_called(script), script))
        announce("first step")
        step()
        announce("measured step")
        return memlab.measure(step, model=model, optimizer=optimizer, device=device)


def predicted(
    script: Script, target: str, announce: Announce, change: Callable[..., Any] = identity
) -> Trace:
    """Predict the second step of the user's training, optionally changed, on such a GPU."""

    def build() -> tuple[Callable[[], Any], torch.nn.Module | None, Any]:
        announce("building")
        step, model, optimizer = change(*_parts(_called(script), script))
        stages = iter(("first step", "predicted step"))

        def announced() -> None:
            announce(next(stages))
            step()

        return announced, model, optimizer

    with _as_python_runs_it(script), as_usage_errors(script.path, dry=""):
        return memlab.predict(build, device=target, assume=script.assume)


@contextmanager
def _as_python_runs_it(script: Script) -> Iterator[None]:
    folders, arguments = sys.path[:], sys.argv
    sys.path.insert(0, str(script.path.parent.resolve()))
    sys.argv = [str(script.path)]
    rank = nullcontext() if script.ranks is None else as_rank_0(script.path, script.ranks)
    try:
        with _streams_kept_open(), rank, of_a_new_process(script.path.parent.resolve()):
            yield
    finally:
        sys.path[:], sys.argv = folders, arguments


@contextmanager
def _streams_kept_open() -> Iterator[None]:
    """Restore stdout and stderr afterwards, because a script may replace or close them."""
    kept = [_Stream.of(name) for name in ("stdout", "stderr")]
    try:
        yield
    finally:
        for stream in kept:
            stream.restore()


class _Stream(NamedTuple):
    """`sys.stdout` or `sys.stderr`, with a duplicate of its file descriptor."""

    name: str
    stream: TextIO
    descriptor: int | None  # None if the stream is not a file, as in a notebook
    duplicate: int

    @classmethod
    def of(cls, name: str) -> "_Stream":
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):
            return cls(name, stream, None, -1)
        return cls(name, stream, descriptor, os.dup(descriptor))

    def restore(self) -> None:
        stream: Any = self.stream
        if self.descriptor is not None:
            os.dup2(self.duplicate, self.descriptor)
            os.close(self.duplicate)
            if stream.closed:
                how = {"encoding": stream.encoding, "errors": stream.errors, "closefd": False}
                stream = open(self.descriptor, "w", **how)  # noqa: SIM115 - stays open
        setattr(sys, self.name, stream)


def _load(script: Script) -> Callable[[], Any]:
    """Load the function. The module is named after the file, because pickle looks it up by name."""
    name = script.path.stem
    if name in sys.modules:  # a script may be called types.py, and must not replace that module
        name += "_script"
    spec = importlib.util.spec_from_file_location(name, script.path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    function = getattr(module, script.function, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if _is_offered(key, value, name)]
        there = f"; {suggestions(script.function, own)}" if own else ""
        raise UsageError(
            f"got --script {script}; {script.path} has no function {script.function}{there}"
        )
    return function


def _called(script: Script) -> Any:
    """Load and call the function."""
    function = _load(script)
    script.sizes.update(sizes_of(function, str(script)))
    return function(**script.arguments)


def _is_offered(name: str, value: Any, module: str) -> bool:
    own = inspect.isfunction(value) and value.__module__ == module
    return own and not name.startswith("_")


def _parts(built: Any, script: Script) -> tuple[Callable[[], Any], torch.nn.Module | None, Any]:
    """Return (step, model, optimizer) after checking their types."""
    if inspect.iscoroutine(built):
        built.close()  # prevents Python's warning about a coroutine that was never awaited
        raise _is_async(f"{script} is", "return the parts from a plain function")
    if not isinstance(built, (tuple, list)):
        raise _wrong_parts(type(built).__name__, script)
    names = f"({', '.join(type(part).__name__ for part in built)})"
    if len(built) != 3:
        raise _wrong_parts(names, script)
    step, model, optimizer = built
    is_model = model is None or isinstance(model, torch.nn.Module)
    optimizers = optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]
    is_optimizer = optimizer is None or all(hasattr(each, "step") for each in optimizers)
    if not (callable(step) and is_model and is_optimizer):
        raise _wrong_parts(names, script)
    if inspect.iscoroutinefunction(step):
        raise _is_async(f"the step that {script} returned is", "let step() call asyncio.run")
    return step, model, optimizer


def _is_async(what: str, remedy: str) -> UsageError:
    return UsageError(f"{what} a coroutine (async def), which memlab does not await; {remedy}")


def _wrong_parts(got: str, script: Script) -> UsageError:
    return UsageError(
        f"{script} returned {got}; expected (step, model, optimizer), where step() is one training "
        f"step, model and optimizer may be None, and optimizer may be a list of several"
    )


# ------------------------------------------------------------------ errors in the script


@contextmanager
def as_usage_errors(
    path: Path, folder: Path | None = None, dry: str = "--dry-run"
) -> Iterator[None]:
    """Turn an exception of the user's code into one sentence that names the line of the script.

    folder  has the user's code, by default the script's
    dry     what the user adds for a run that needs no device; "" if this was one
    """
    try:
        yield
    except UsageError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and BaseExceptions that a script defines
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        described = _describe(error, path, folder)
        if _lost_a_rank(error):
            lines = " and ".join(_lines(error, path, folder) or [str(path)])
            raise RankLostError(
                f"{lines} waited for another rank, which has ended without a message or did not "
                f"come ({error_summary(error).partition('. ')[0]})"
            ) from error
        raise UsageError(f"{described}{notes}{_advice(error, dry)}") from error


def _lost_a_rank(error: BaseException) -> bool:
    """Return whether a collective of real ranks failed. Backends raise a plain RuntimeError."""
    if not isinstance(error, RuntimeError) or memlab.dry_run.active is not None:
        return False
    rank = find_rank()
    is_one_of_several = rank is not None and rank.ranks > 1
    return is_one_of_several and bool(_OF_BACKENDS.search(message_of(error)))


def _describe(error: BaseException, path: Path, folder: Path | None) -> str:
    lines = _lines(error, path, folder) or [str(path)]
    if lines[0] in message_of(error):  # a dry run's message has the line already
        return message_of(error)
    if isinstance(error, (NoAnswerError, NotYetSentError, UnavailableError)):
        return f"{lines[-1]}: {error}"
    where = ", called from ".join(lines) + "," * (len(lines) > 1)
    return f"{where} raised {error_summary(error, 2)}"


def _lines(error: BaseException, path: Path, folder: Path | None) -> list[str]:
    """Return the innermost line of the user's code in the error's traceback, and the script's line
    that led there if it is another one."""
    script = path.resolve()
    frames = [(Path(frame.filename).resolve(), frame.lineno) for frame in _frames(error)]
    own = [(file, line) for file, line in frames if is_users(file, folder or script.parent)]
    in_script = [(file, line) for file, line in own if file == script]
    return [
        f"{path.name if file == script else file.name}:{line}"
        for file, line in dict.fromkeys((*own[-1:], *in_script[-1:]))
    ]


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, ""))
    return frames


def is_users(file: Path, folder: Path) -> bool:
    """Return whether a file in the script's folder is neither memlab's nor an environment's. The
    name of generated code is no file, such as <string> for a dataclass."""
    if not file.is_relative_to(folder) or file.is_relative_to(_MEMLAB_FOLDER):
        return False
    return not file.name.startswith("<") and not is_librarys(str(file))


def _advice(error: BaseException, dry: str) -> str:
    if "environment variable RANK expected" in message_of(error):
        return (
            "; for a distributed function add --ranks 8 to measure --dry-run, or --gpus 8 to plan"
        )
    if memlab.dry_run.active is not None or not dry:
        return ""
    if is_out_of_memory(error):
        return f"; {dry} allocates nothing"
    device_of_word = {"CUDA": "cuda", "NVIDIA": "cuda", "MPS": "mps", "XPU": "xpu"}
    missing = {d for word, d in device_of_word.items() if word in message_of(error)} - set(
        devices_present()
    )
    return f"; there is no {missing.pop()} here, and {dry} needs none" if missing else ""
