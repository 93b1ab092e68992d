"""Record training steps on a GPU, and time there what a CPU cannot.

    python benchmarks/gpu.py                     all sections
    python benchmarks/gpu.py --plan              list the sections and their jobs; run nothing
    python benchmarks/gpu.py --only steps        the sections whose names begin with this
    python benchmarks/gpu.py --quick --out DIR   small sizes, to check that the script runs

    steps-…    training steps, which `make evidence` compares with their predictions
    time       a step with tensor cores, with Adam8bit, or with the cache cleared after it, relative
               to the plain step
    optim      a step of Adam8bit, relative to torch's and bitsandbytes' optimizers
    ema        two averages on the GPU, the host and the disk: memory, and the time of an update
    attention  memlab's flash_attn_func against the flash-attn package and torch: error and time
    fp8        FP8 matmuls and linear layers, relative to bfloat16

Each job runs in its own process; recordings run several at a time, timings alone. After each job
the script saves what it has, so an interrupted run keeps its results:

    benchmarks/evidence/own-<device>.json     allocated and reserved memory of the recorded steps
    tests/recordings/<device>.jsonl.gz        their allocator histories
    benchmarks/results/<device>.json          timings

All go to the folder given as --out instead. Markdown goes to standard output, progress to standard
error.

Without a GPU the script rehearses with small sizes: it predicts the steps and takes the timings on
the CPU. The numbers then only show that the script runs, and nothing is written without --out.
"""

import argparse
import copy
import gc
import gzip
import importlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import (
    RESULTS,
    ROOT,
    circumstances,
    cores,
    heading,
    parser,
    put,
    set_environment,
    table,
)
from evidence_steps.measurements import EVIDENCE, kind_of, put_own_steps
from evidence_steps.own import FULL, SMALL, STEPS, predicted
from torch import Tensor, nn

from memlab.allocator.recordings import ACTIONS
from memlab.attention import attention_reference
from memlab.attention.package_interface import flash_attn_func
from memlab.cli.rows import time_in_turn
from memlab.configs.targets import TARGETS, target_of
from memlab.ema import PostHocEMA
from memlab.internals.cycles import no_cycle_collection
from memlab.offload import DiskStore
from memlab.optim import Adam8bit
from memlab.precision import convert_to_fp8
from memlab.precision.fp8 import RECIPES, matmul_fp8, quantize_fp8
from memlab.train import Setting, build, combined
from memlab.units import format_bytes

Facts = dict[str, Any]
Call = Callable[[], object]

RECORDINGS = ROOT / "tests" / "recordings"
SECONDS = 240  # time limit of a job; the longest takes a tenth of this
MOST_AT_ONCE = 8
BYTES_OF_A_JOB = 16 * 2**30  # most GPU memory of a job
NO_GPU = "torch finds no GPU, so this is a rehearsal: the numbers only show that the script runs"


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------ steps as evidence


def record(name: str, small: bool) -> Facts:
    """Record building, a first and a second step; without a GPU, predict them.

    No dispatch mode or hook is active, and no stacks are recorded. The history begins before the
    first tensor, so it can be replayed from an empty GPU.
    """
    size = SMALL if small else FULL
    if device() == "cpu":
        memory = predicted(name, size, "cuda").memory
        return _row(name, memory.allocated_peak_bytes, memory.reserved_peak_bytes)
    torch.cuda.init()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None)
    with no_cycle_collection():
        built = STEPS[name](size)
        built[0]()
        torch.cuda.synchronize()
        step_at = len(_events(torch.cuda.memory._snapshot()))
        reserved_before = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        built[0]()
        torch.cuda.synchronize()
        stats, after = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    allocated = stats["allocated_bytes.all.peak"]
    reserved = max(reserved_before, stats["reserved_bytes.all.peak"])
    history = {
        # The name that the stored recordings have: the later recording of a name counts.
        **{"name": f"predict: {name}", "configuration": name, "conf": "", "cap_bytes": None},
        **{"small": small, "allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved},
        **{"step_at": step_at, "events": _events(after), "segments_at_end": _segments(after)},
    }
    return {**_row(name, allocated, reserved), "history": history}


def _row(name: str, allocated_bytes: int | None, reserved_bytes: int | None) -> Facts:
    """Return a row as `put_own_steps` takes it."""
    figures = {"allocated_bytes": allocated_bytes, "reserved_bytes": reserved_bytes}
    return {"configuration": name, **figures}


def _events(snapshot: Mapping[str, Any]) -> list[Facts]:
    entries = snapshot["device_traces"][0]
    names = ("action", "addr", "size", "stream")
    return [_only(names, entry) for entry in entries if entry["action"] in ACTIONS]


def _segments(snapshot: Mapping[str, Any]) -> list[Facts]:
    names = ("address", "total_size", "segment_type", "stream")
    of_block = ("address", "size", "requested_size", "state")
    return [
        {**_only(names, each), "blocks": [_only(of_block, block) for block in each["blocks"]]}
        for each in snapshot["segments"]
        if each["device"] == 0
    ]


def _only(names: Iterable[str], entry: Mapping[str, Any]) -> Facts:
    return {name: entry[name] for name in names}


# ------------------------------------------------------------------ timings


def ratio(ours: Call, theirs: Call) -> float:
    """Return the median time of `ours`, relative to `theirs`, after three warm-up calls each."""
    for call in (ours, theirs):
        for _ in range(3):  # creates optimizer state; tunes and compiles kernels
            call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return statistics.median(a / b for a, b in time_in_turn(ours, theirs))


def training(small: bool) -> Setting:
    return Setting(*(("tiny", 2, 32) if small else ("124m", 8, 640)), device=device())


def in_tf32(step: Call) -> None:
    """Run a step with TF32 matmuls, which torch switches off by default."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        step()
    finally:
        torch.set_float32_matmul_precision(before)


def then(clear: Call, step: Call) -> None:
    step()
    clear()


AROUND: dict[str, Callable[[Call], object]] = {
    "tf32": in_tf32,
    "empty_cache": partial(then, torch.cuda.empty_cache),
    "gc.collect": partial(then, gc.collect),
}
TECHNIQUES = ("bfloat16", "autocast", "adam8bit")


def time_of_step(name: str, small: bool) -> Facts:
    """Time a step with a technique, or with something around it, relative to the plain step."""
    setting = training(small)
    plain = build(setting, combined("plain")).step
    ours = partial(AROUND[name], plain) if name in AROUND else build(setting, combined(name)).step
    return {"what": str(setting), name: ratio(ours, plain)}


OPTIMIZERS = {
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "bitsandbytes' Adam8bit": lambda weights, **options: importlib.import_module(
        "bitsandbytes.optim"
    ).Adam8bit(weights, **options),
}


def time_of_optimizer(name: str, small: bool) -> Facts:
    """Time a step of Adam8bit, relative to another optimizer; measure the bytes of its state."""
    weights = 2**14 if small else 2**26
    ours, theirs = (_started(kind, weights) for kind in (Adam8bit, OPTIMIZERS[name]))
    return {
        "what": f"{weights:,} weights",
        f"time / {name}": ratio(ours.step, theirs.step),
        "Adam8bit, state_bytes": _state_bytes(ours),
        f"{name}, state_bytes": _state_bytes(theirs),
    }


def _started(kind: Callable[..., torch.optim.Optimizer], weights: int) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(weights, device=device()))
    weight.grad = torch.randn_like(weight)
    return kind([weight], lr=1e-3, weight_decay=0.0)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state's tensors, without the count of steps."""
    [state] = optimizer.state.values()
    return sum(kept.nbytes for kept in state.values() if isinstance(kept, Tensor) and kept.dim())


PLACES: dict[str, Callable[[], Facts]] = {
    "on the GPU": dict,
    "on the host": lambda: {"device": "cpu"},
    "on the disk": lambda: {"store": DiskStore()},
}


def time_of_ema(name: str, small: bool) -> Facts:
    """Measure two averages in a place: GPU memory, and the time of an update."""
    setting = training(small)
    trained = build(setting, combined("plain"))
    trained.step()  # its gradients and optimizer state stay
    with tempfile.TemporaryDirectory() as folder:
        before = allocated_bytes()
        ema = PostHocEMA(trained.model, folder, **PLACES[name]())
        held, times = allocated_bytes() - before, count(1)

        def step_and_update() -> None:
            trained.step()
            ema.update(next(times))

        return {
            "what": str(setting),
            f"{name}, averages_bytes": ema.nbytes,
            f"{name}, held_bytes": held,
            f"{name}, time of step and update / step": ratio(step_and_update, trained.step),
        }


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if device() == "cuda" else 0


ATTENTION: dict[str, Facts] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window_size": (127, 0)},
}


def time_of_attention(name: str, small: bool) -> Facts:
    """Compare memlab's flash_attn_func with the package's, if it is installed, and with torch's."""
    heads, tokens, head_dim = (2, 256, 64) if small else (16, 8192, 128)
    options = ATTENTION[name]
    ways: dict[str, Callable[..., Tensor]] = {"memlab": partial(flash_attn_func, **options)}
    if "window_size" not in options:
        ways["torch"] = by_heads(
            partial(F.scaled_dot_product_attention, is_causal=name == "causal")
        )
    found: Facts = {"what": f"{heads} heads, {tokens:,} tokens, head dimension {head_dim}"}
    if importlib.util.find_spec("flash_attn"):
        ways["flash-attn"] = partial(
            importlib.import_module("flash_attn").flash_attn_func, **options
        )
    else:
        found["flash-attn"] = "not installed"
    torch.manual_seed(0)
    few, many = (
        [torch.randn(shape, device=device(), dtype=torch.bfloat16) for _ in range(3)]
        for shape in ((1, 256, 2, 64), (1, tokens, heads, head_dim))
    )
    causal, window = options.get("causal", False), options.get("window_size")
    reference = partial(attention_reference, causal=causal, window=window)
    exact = gradients(by_heads(reference), [x.double() for x in few])
    for who, way in ways.items():
        found[f"{name}, {who}, error"] = largest_error(gradients(way, few), exact)
        if who != "memlab":
            calls = (partial(gradients, each, many) for each in (ways["memlab"], way))
            found[f"{name}, time / {who}"] = ratio(*calls)
    return found


def by_heads(way: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of (B, T, H, D) for one of (B, H, T, D)."""
    return lambda *qkv: way(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)


def gradients(way: Callable[..., Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return the result and the gradients of all arguments."""
    given = [x.detach().requires_grad_() for x in arguments]
    result = way(*given)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), given)]


def largest_error(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Return the largest error, relative to each tensor's absmax."""
    pairs = zip(found, exact, strict=True)
    return max(((ours - it).abs().max() / it.abs().max()).item() for ours, it in pairs)


def time_of_fp8(name: str, small: bool) -> Facts:
    """Time an FP8 matmul, or a linear layer with a recipe, relative to bfloat16."""
    tokens, width = (64, 128) if small else (8192, 4096)
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device(), dtype=torch.bfloat16)
    layer = nn.Sequential(nn.Linear(width, width, bias=False)).to(x)
    what = {"what": f"{tokens:,} tokens, {width:,} × {width:,} weights"}
    weight = layer[0].weight.detach()
    if name == "matmul":
        a, b = quantize_fp8(x), quantize_fp8(weight).transposed()
        ours, theirs = partial(matmul_fp8, a, b, x.dtype), partial(F.linear, x, weight)
    else:
        of_fp8 = copy.deepcopy(layer)
        convert_to_fp8(of_fp8, name)
        ours, theirs = (partial(both_passes, each, x.requires_grad_()) for each in (of_fp8, layer))
    return {**what, f"{name}, time / bf16": ratio(ours, theirs)}


def both_passes(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


# ------------------------------------------------------------------ sections


@dataclass(frozen=True)
class Section:
    """Jobs that call one function: `measure(name, small)`."""

    summary: str
    measure: Callable[[str, bool], Facts]
    jobs: tuple[str, ...]
    is_timed: bool = True  # its jobs run alone


def of_kind(kind: str) -> Section:
    names = tuple(name for name in STEPS if kind_of(name) == kind)
    return Section(f"{len(names)} training steps as evidence", record, names, is_timed=False)


SECTIONS: dict[str, Section] = {
    **{f"steps-{kind}": of_kind(kind) for kind in dict.fromkeys(map(kind_of, STEPS))},
    "time": Section("a step, relative to the plain one", time_of_step, (*TECHNIQUES, *AROUND)),
    "optim": Section("Adam8bit, relative to other optimizers", time_of_optimizer, (*OPTIMIZERS,)),
    "ema": Section("two averages during training", time_of_ema, (*PLACES,)),
    "attention": Section("flash_attn_func", time_of_attention, (*ATTENTION,)),
    "fp8": Section("FP8, relative to bfloat16", time_of_fp8, ("matmul", *RECIPES)),
}


class Device(NamedTuple):
    """What is measured, and where the results go; no folder writes nothing."""

    facts: Facts
    small: bool
    out: Path | None
    keeps: bool

    @property
    def name(self) -> str:
        """Return the device's name as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.facts["device"].lower()).strip("-")

    def save(self, section: str, found: Facts, is_complete: bool) -> None:
        """Write a section's facts so far: recorded steps as evidence, timings as results."""
        if not self.keeps:
            return
        about = circumstances(self.facts["device"])
        if SECTIONS[section].is_timed:
            state = {} if is_complete else {"complete": False}
            path = (self.out or RESULTS) / f"{self.name}.json"
            put(path, "gpu", section, {**about, **state, **found})
            return
        source = {"gpu": about["device"], "target": self.facts["target"], "small": self.small}
        put_own_steps(self.out or EVIDENCE, self.name, {**source, **about}, found.values())

    def save_history(self, history: Facts) -> None:
        """Append an allocator history to the archive, as a line that is compressed by itself."""
        if self.keeps:
            recording = {**history, "facts": self.facts, **circumstances(self.facts["device"])}
            text = json.dumps(recording, separators=(",", ":"), ensure_ascii=False) + "\n"
            folder = self.out or RECORDINGS
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{self.name}.jsonl.gz").open("ab") as file:
                file.write(gzip.compress(text.encode(), mtime=0))


def device_facts() -> Facts:
    """Describe the GPU; a rehearsal describes a made-up one."""
    if device() == "cpu":
        return {"device": "rehearsal", "total_bytes": 80 * 2**30, "target": "cuda"}
    card = torch.cuda.get_device_properties(0)
    target = target_of(card.name, f"sm_{card.major}{card.minor}") or TARGETS["cuda"]
    return {
        "device": card.name,
        "total_bytes": torch.cuda.mem_get_info()[1],
        "capability": [card.major, card.minor],
        "multiprocessors": card.multi_processor_count,
        "multiprocessors_assumed": target.multiprocessors,
        "target": target.device,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


# ------------------------------------------------------------------ jobs


def answer(section: str, name: str, small: bool) -> Facts:
    """Run a job; return its facts, or its failure as one line."""
    try:
        return SECTIONS[section].measure(name, small)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def in_a_process(section: str, name: str, small: bool) -> Facts:
    """Run a job in a new process: caches, CUDA contexts and crashes stay separate."""
    command = [sys.executable, __file__, "--job", section, name, *["--quick"] * small]
    environment = {"OMP_NUM_THREADS": "2", **os.environ}
    for changes_the_allocator in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment.pop(changes_the_allocator, None)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer in {SECONDS} s"}
    except (IndexError, json.JSONDecodeError):
        last = "".join(done.stderr.strip().splitlines()[-1:])
        return {"failure": f"its process ended with status {done.returncode}: {last}"}


def at_once(total_bytes: int) -> int:
    """Return how many recordings may run at once on a GPU of this size."""
    return max(1, min(MOST_AT_ONCE, cores() // 2, total_bytes // BYTES_OF_A_JOB))


def answers(section: str, on: Device) -> Iterator[tuple[str, Facts]]:
    """Yield the section's jobs and their facts, as they end."""
    of = SECTIONS[section]
    if device() == "cpu":
        yield from ((name, answer(section, name, on.small)) for name in of.jobs)
        return
    threads = ThreadPoolExecutor(1 if of.is_timed else at_once(on.facts["total_bytes"]))
    try:
        jobs = {threads.submit(in_a_process, section, name, on.small): name for name in of.jobs}
        yield from ((jobs[done], done.result()) for done in as_completed(jobs))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def run(section: str, on: Device) -> Iterator[tuple[str, Facts]]:
    """Run a section, save it after each job, and yield what it found, or its failures."""
    start, of, found = time.monotonic(), SECTIONS[section], {}
    for number, (name, facts) in enumerate(answers(section, on), 1):
        if history := facts.pop("history", None):
            on.save_history(history)
        if "failure" not in facts:
            found |= facts if of.is_timed else {name: facts}
            on.save(section, found, is_complete=number == len(of.jobs))
        words = facts.get("failure") or ", ".join(
            f"{fact} {text(fact, value)}" for fact, value in facts.items() if fact not in TEXTS
        )
        seconds = time.monotonic() - start
        progress = f"{section} {number}/{len(of.jobs)}, {seconds:.0f} s: {name}: {words}"
        print(progress, file=sys.stderr, flush=True)
        yield name, facts


TEXTS = ("what", "configuration")  # facts without a figure


def text(fact: str, value: Any) -> str:
    if fact.endswith("_bytes") and value is not None:
        return format_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def title(section: str, found: Mapping[str, Facts]) -> str:
    whats = dict.fromkeys(facts["what"] for facts in found.values() if "what" in facts)
    return "; ".join((SECTIONS[section].summary, *whats))


def markdown(found: Mapping[str, Facts]) -> str:
    lines = [
        (name, fact.removesuffix("_bytes"), text(fact, value))
        for name, facts in found.items()
        for fact, value in facts.items()
        if fact not in TEXTS
    ]
    return table(("job", "figure", "measured"), lines)


# ------------------------------------------------------------------ command


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="run the sections whose names begin with this (may be given more than once)",
    )
    made.add_argument(
        "--plan", action="store_true", help="list the sections and their jobs, and exit"
    )
    made.add_argument("--out", type=Path, metavar="DIR", help="folder for everything that is saved")
    made.add_argument(
        "--quick", action="store_true", help="small sizes, to check that it runs; use with --out"
    )
    made.add_argument("--job", nargs=2, help=argparse.SUPPRESS)  # of a subprocess
    return made.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some steps trigger torch's warnings
        if given.job:
            print(json.dumps(answer(*given.job, given.quick)))
            return 0
        return chosen(given)


def chosen(given: argparse.Namespace) -> int:
    """List or run the chosen sections; return the exit status."""
    begins = tuple(given.only or [""])
    if unknown := [word for word in begins if not any(name.startswith(word) for name in SECTIONS)]:
        known = ", ".join(SECTIONS)
        print(f"error: no section begins with {unknown[0]!r}; choose from {known}", file=sys.stderr)
        return 2
    names = [name for name in SECTIONS if name.startswith(begins)]
    if given.plan:
        for name in names:
            print(f"{name}: {SECTIONS[name].summary}\n  " + "\n  ".join(SECTIONS[name].jobs))
        return 0
    return measure(names, given)


def measure(names: Sequence[str], given: argparse.Namespace) -> int:
    """Run the sections; return 1 if a job failed on a GPU, else 0.

    A rehearsal returns 0 too, because `make bench` runs every script on every machine.
    """
    rehearsal, is_whole = device() == "cpu", True
    if rehearsal:
        print(NO_GPU, file=sys.stderr)
    keeps = given.out is not None or not (rehearsal or given.quick)
    on = Device(device_facts(), given.quick or rehearsal, given.out, keeps)
    print(heading("On a GPU", on.facts["device"]), flush=True)
    try:
        for section in names:
            found = dict(run(section, on))
            print(f"\n## {section}: {title(section, found)}\n\n{markdown(found)}", flush=True)
            is_whole &= not any("failure" in facts for facts in found.values())
    except KeyboardInterrupt:
        print("stopped; finished jobs are saved", file=sys.stderr)
        return 130
    return 0 if is_whole or rehearsal else 1


if __name__ == "__main__":
    sys.exit(main())
