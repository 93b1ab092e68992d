"""Post-hoc EMA: cost and accuracy of synthesized averages.

    synthesis   averages from 20 float16 snapshots of a 128 MiB model. Compares time and anonymous
                memory of memlab, of a loop over snapshots, and of ema-pytorch, which makes one
                average at a time. Each runs in its own process, in turn. Goals: half the time of
                either; less than 64 MiB of anonymous memory, with at most 12 MiB of buffers. The
                loop is written as packages do it, total += snapshot * share; "fused" is
                total.add_(snapshot, alpha=share) and has no goal
    profiles    profile error by number of snapshots, and its slope; the paper says 4
    pruning     profile error for several ways to keep 20 of 100 snapshots
    files       bytes per weight of tracked averages and snapshots, and the rounding error
    decoding    CPU time to read and to synthesize from snapshots of each encoding, of a quarter of
                the model, side by side: what the smaller files cost
    float16     error of a synthesis by the dtype of the files and of the sums, against float64
    update      CPU time of an update of two averages: memlab, lerp_ on each tensor, mul_ and add_
                as packages do it; for float32 and bfloat16 weights

    python benchmarks/ema.py [--section synthesis] [--quick]

"Into a model" writes float32 weights in place; ema-pytorch makes a new model. Anonymous memory
excludes what exists before the synthesis: the model, and ema-pytorch's averages.

Prints Markdown and writes each section to `benchmarks/results/<machine>.json`.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    Runner,
    SectionReport,
    Spread,
    core_seconds,
    parser_of_sections,
    print_reports,
    ratios,
    set_environment,
    side_by_side,
    table,
    timed,
)
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import memlab
from memlab.ema import (
    PostHocEMA,
    errors_at_end,
    every_kth,
    find_snapshots,
    last_n,
    log_spaced,
    power_profile,
    profile_error,
    solve_weights,
    synthesize,
)
from memlab.ema.averages import InMemoryAverage, move_towards
from memlab.ema.synthesis import CHUNK
from memlab.internals.cycles import no_cycle_collection
from memlab.units import format_bytes

OURS, THEIRS = "memlab", "ema-pytorch"
OUTER, FUSED = "loop over snapshots", "loop over snapshots, fused"
TRACKED = (0.05, 0.10)
WANTED = (0.07, 0.06, 0.08, 0.12)  # a single average uses the first
MIN_SPEEDUP, MAX_BYTES, MAX_BUFFER_BYTES = 2.0, 64 * 2**20, 12 * 2**20


@dataclass(frozen=True)
class EmaSizes:
    """Sizes of the benchmark."""

    layers: int
    width: int  # a layer has width² weights
    steps: int  # each writes two snapshots
    rounds: int
    counts: tuple[int, ...]  # snapshots per average

    @property
    def weights(self) -> int:
        return self.layers * self.width**2


FULL = EmaSizes(8, 2048, 10, 7, (2, 4, 8, 16, 32, 64))
QUICK = EmaSizes(2, 64, 10, 2, (16, 64))


# ------------------------------------------------------------------ snapshots on disk


def model_of(plan: EmaSizes) -> nn.Module:
    """Return a model of alternating large and small tensors."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(plan.width - 1, plan.width) for _ in range(plan.layers)))


@torch.no_grad()
def trained(plan: EmaSizes, update: Callable[[int], object], model: nn.Module) -> None:
    """Move all weights in a random walk, and call `update` after each step."""
    for step in range(1, plan.steps + 1):
        torch.manual_seed(step)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.01)
        update(step)


def track(plan: EmaSizes, folder: Path, **settings: Any) -> PostHocEMA:
    """Write memlab's snapshots at every step."""
    model = model_of(plan)
    ema = PostHocEMA(model, folder, TRACKED, snapshot_every=1, **settings)
    trained(plan, ema.update, model)
    return ema


def theirs_of(folder: Path, model: nn.Module, every: int | str = "manual") -> Any:
    from ema_pytorch import PostHocEMA as Theirs

    return Theirs(
        model, sigma_rels=TRACKED, update_every=1,
        checkpoint_every_num_steps=every, checkpoint_folder=str(folder),
    )  # fmt: skip


def track_theirs(plan: EmaSizes, folder: Path) -> None:
    """Write ema-pytorch's snapshots at every step."""
    model = model_of(plan)
    theirs = theirs_of(folder, model, every=1)
    trained(plan, lambda step: theirs.update(), model)


# ------------------------------------------------------------------ implementations


@torch.no_grad()
def outer_loop(
    folder: Path, sigmas: Sequence[float], out: Sequence[nn.Module], *, fused: bool = False
) -> Sequence[nn.Module]:
    """Load one whole snapshot after another and add it to every average."""
    found = find_snapshots(folder)
    profiles = [snapshot.profile for snapshot in found]
    end = profiles[-1].t
    weights = [solve_weights(profiles, power_profile(sigma, end)).tolist() for sigma in sigmas]
    totals = [dict(model.named_parameters()) for model in out]
    for total in totals:
        for tensor in total.values():
            tensor.zero_()
    for number, snapshot in enumerate(found):
        for name, tensor in load_file(snapshot.path).items():
            exact = tensor.float()
            for total, shares in zip(totals, weights, strict=True):
                if fused:
                    total[name].add_(exact, alpha=shares[number])
                else:
                    total[name].add_(exact * shares[number])
    return out


def ours_into_models(plan: EmaSizes, folder: Path, count: int) -> Callable[[], object]:
    out = [model_of(plan) for _ in range(count)]
    return lambda: synthesize(folder, WANTED[:count], out=out)


def outer_into_models(plan: EmaSizes, folder: Path, count: int) -> Callable[[], object]:
    out = [model_of(plan) for _ in range(count)]
    return lambda: outer_loop(folder, WANTED[:count], out)


def fused_into_models(plan: EmaSizes, folder: Path, count: int) -> Callable[[], object]:
    out = [model_of(plan) for _ in range(count)]
    return lambda: outer_loop(folder, WANTED[:count], out, fused=True)


def theirs_into_models(plan: EmaSizes, folder: Path, count: int) -> Callable[[], object]:
    theirs = theirs_of(folder, model_of(plan))
    return lambda: [theirs.synthesize_ema_model(sigma_rel=sigma) for sigma in WANTED[:count]]


def ours_into_files(plan: EmaSizes, folder: Path, count: int) -> Callable[[], object]:
    out = [folder / f"ours-{number}.safetensors" for number in range(count)]
    return lambda: synthesize(folder, WANTED[:count], out=out)


def outer_into_files(plan: EmaSizes, folder: Path, count: int) -> Callable[[], object]:
    def run() -> None:
        out = [model_of(plan) for _ in range(count)]
        outer_loop(folder, WANTED[:count], out)
        for number, model in enumerate(out):
            save_file(dict(model.state_dict()), folder / f"outer-{number}.safetensors")

    return run


Way = Callable[[EmaSizes, Path, int], Callable[[], object]]
WAYS: dict[str, dict[str, Way]] = {
    "into a model": {
        OURS: ours_into_models,
        OUTER: outer_into_models,
        FUSED: fused_into_models,
        THEIRS: theirs_into_models,
    },
    "into a file": {OURS: ours_into_files, OUTER: outer_into_files},
}


@dataclass(frozen=True)
class Task:
    """How many averages to make, and whether into models or files."""

    place: str
    count: int

    def __str__(self) -> str:
        place = self.place if self.count == 1 else self.place.replace("a ", "") + "s"
        return f"{self.count} {'average' if self.count == 1 else 'averages'} {place}"


TASKS = (Task("into a model", 1), Task("into a model", 4), Task("into a file", 4))


@dataclass(frozen=True)
class SynthesisCosts:
    """Seconds in each round, and peak anonymous memory, for each implementation."""

    seconds: dict[str, list[float]]
    peak_bytes: dict[str, int]

    def ratio(self, way: str) -> Spread:
        """Return an implementation's time relative to memlab's."""
        return ratios(self.seconds[way], self.seconds[OURS])


# ------------------------------------------------------------------ synthesis


def serve(plan: EmaSizes, folder: Path, task: Task, way: str) -> None:
    """Run the task once for each line on standard input, and print the seconds."""
    folder = folder / ("theirs" if way == THEIRS else "ours")
    run = WAYS[task.place][way](plan, folder, task.count)
    print(0.0, flush=True)
    for _ in sys.stdin:
        with no_cycle_collection():
            start = time.perf_counter()
            run()
            print(time.perf_counter() - start, flush=True)


def costs(plan: EmaSizes, folder: Path, task: Task, bar: Progress) -> SynthesisCosts:
    """Run every implementation in turn.

    The first round loads the snapshots into the page cache; only its memory counts.
    """
    numbers = (plan.layers, plan.width, plan.steps, task.count)
    with ExitStack() as stack:
        runners, before = {}, {}
        for way in WAYS[task.place]:
            words = (__file__, "--serve", way, task.place, str(folder), *map(str, numbers))
            runners[way] = stack.enter_context(Runner(*words))
            runners[way].answer()
            before[way] = runners[way].bytes_now()
            runners[way].peak_bytes = 0
        runs = {way: runner.run for way, runner in runners.items()}
        side_by_side(runs, range(1))
        rounds = bar.track(range(plan.rounds), description=str(task))
        seconds = side_by_side(runs, rounds)
        peaks = {way: runner.peak_bytes - before[way] for way, runner in runners.items()}
    return SynthesisCosts(seconds, peaks)


def buffer_bytes(plan: EmaSizes, folder: Path, count: int) -> int:
    """Return the peak of synthesis for one layer, without mapped files and output weights."""
    found = find_snapshots(folder)
    out = [model_of(plan) for _ in range(count)]
    mapped = sum(snapshot.nbytes for snapshot in found)
    written = sum(tensor.nbytes for model in out for tensor in model.parameters())
    trace = memlab.measure(lambda: synthesize(found, WANTED[:count], only="0", out=out))
    return trace.peak_bytes - mapped - written


def largest_difference(plan: EmaSizes, folder: Path) -> float:
    """Return the largest difference between memlab's average and the loop's."""
    ours, outer = model_of(plan), model_of(plan)
    synthesize(folder, WANTED[0], out=ours)
    outer_loop(folder, WANTED[:1], [outer])
    pairs = zip(ours.parameters(), outer.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@contextmanager
def snapshots_of(plan: EmaSizes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        track(plan, Path(name, "ours"))
        track_theirs(plan, Path(name, "theirs"))
        yield Path(name)


def synthesis_section(plan: EmaSizes, bar: Progress) -> SectionReport:
    with snapshots_of(plan) as folder:
        difference = largest_difference(plan, folder / "ours")
        buffers = {task: buffer_bytes(plan, folder / "ours", task.count) for task in TASKS}
        found = {task: costs(plan, folder, task, bar) for task in TASKS}
    rows = []
    for task, cost in found.items():
        for way, peak in cost.peak_bytes.items():
            rows.append(
                (
                    str(task) if way == OURS else "",
                    way,
                    format_bytes(buffers[task]) if way == OURS else "",
                    format_bytes(peak),
                    "" if way == OURS else f"{cost.ratio(way)} × memlab's",
                )
            )
    header = ("task", "implementation", "buffers", "anonymous memory", "time")
    return SectionReport(
        synthesis_sentence(plan, found, difference),
        table(header, rows) + "\n\n" + goals_table(found, buffers),
        {
            "difference": difference,
            **{
                str(task): {
                    "seconds": cost.seconds,
                    "peak_bytes": cost.peak_bytes,
                    "buffer_bytes": buffers[task],
                    "ratios": {w: cost.ratio(w)._asdict() for w in cost.seconds if w != OURS},
                }
                for task, cost in found.items()
            },
            "goals": {name: verdict for name, *_, verdict in goals(found, buffers)},
        },
    )


def synthesis_sentence(plan: EmaSizes, found: dict[Task, SynthesisCosts], difference: float) -> str:
    cost = found[TASKS[1]]
    others = " and ".join(f"{cost.ratio(way).median:.1f} × ({way})" for way in (OUTER, THEIRS))
    return (
        f"{2 * plan.steps} snapshots of a model of {format_bytes(4 * plan.weights)}: four averages "
        f"into models need {format_bytes(cost.peak_bytes[OURS])} of anonymous memory beyond the "
        f"models. Others take {others} the time (results differ by {difference:.0e} at most)."
    )


def goals(
    found: dict[Task, SynthesisCosts], buffers: dict[Task, int]
) -> list[tuple[str, str, str, str]]:
    """Return rows of goal, measured value, limit and verdict."""
    rows = []
    for task, cost in found.items():
        if task.place == "into a model":
            for way in (OUTER, THEIRS):
                ratio = cost.ratio(way)
                rows.append(
                    (f"{task}: time of {way}", f"{ratio} ×", f"≥ {MIN_SPEEDUP} ×",
                     _verdict(ratio.median >= MIN_SPEEDUP))
                )  # fmt: skip
        peak = cost.peak_bytes[OURS]
        rows.append(
            (f"{task}: anonymous memory", format_bytes(peak), f"≤ {format_bytes(MAX_BYTES)}",
             _verdict(peak <= MAX_BYTES))
        )  # fmt: skip
        rows.append(
            (f"{task}: buffers", format_bytes(buffers[task]), f"≤ {format_bytes(MAX_BUFFER_BYTES)}",
             _verdict(buffers[task] <= MAX_BUFFER_BYTES))
        )  # fmt: skip
    return rows


def goals_table(found: dict[Task, SynthesisCosts], buffers: dict[Task, int]) -> str:
    return table(("goal", "measured", "limit", "verdict"), sorted(goals(found, buffers)))


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


# ------------------------------------------------------------------ profiles


def snapshot_profiles(times: Sequence[float], sigmas: Sequence[float] = TRACKED) -> list[Any]:
    return [power_profile(sigma, t) for t in times for sigma in sigmas]


def errors_by_count(plan: EmaSizes, sigmas: Sequence[float], tracked: Sequence[float]) -> dict:
    """Return, for each sigma, the profile errors at the end of training by snapshot count."""
    return {
        sigma: [
            profile_error(snapshot_profiles(range(1, n + 1), tracked), power_profile(sigma, n))
            for n in plan.counts
        ]
        for sigma in sigmas
    }


def slope(counts: Sequence[int], errors: Sequence[float]) -> float:
    """Return the exponent of the error's decrease from 16 snapshots on."""
    first = counts.index(16)
    return math.log(errors[first] / errors[-1]) / math.log(counts[-1] / counts[first])


def profiles_section(plan: EmaSizes, bar: Progress) -> SectionReport:
    rows, plain = [], {}
    for tracked in (TRACKED, (0.05, 0.28)):
        found = errors_by_count(plan, (0.03, 0.07, 0.15, 0.20, 0.25), tracked)
        for sigma, errors in found.items():
            slope_of = slope(plan.counts, errors)
            cells = (f"{error:.1e}" for error in errors)
            rows.append((f"{tracked}", f"{sigma}", *cells, f"{slope_of:.2f}"))
            plain[f"{tracked} → {sigma}"] = {"errors": errors, "slope": slope_of}
    at_15 = plain[f"{TRACKED} → 0.15"]
    sentence = (
        f"With {plan.counts[-1]} snapshots each of σ = 0.05 and 0.10, a profile of σ = 0.15 has an "
        f"error of {at_15['errors'][-1]:.0e}. The error falls with exponent {at_15['slope']:.2f} "
        f"in the number of snapshots."
    )
    header = (
        "tracked",
        "synthesized",
        *(f"{n} snapshots" for n in plan.counts),
        "slope from 16 on",
    )
    return SectionReport(sentence, table(header, rows), {"counts": plan.counts, **plain})


# ------------------------------------------------------------------ pruning

CHOICES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "all 100": lambda times: list(times),
    "every 5th, and the last": lambda times: every_kth(times, 5),
    "the last 20": lambda times: last_n(times, 20),
    "20, log-spaced from the end": lambda times: log_spaced(times, 20),
}


def pruning_section(plan: EmaSizes, bar: Progress) -> SectionReport:
    sigmas = (0.03, 0.07, 0.12, 0.15, 0.20, 0.25)
    found = {
        name: errors_at_end(snapshot_profiles(choose(range(1, 101))), sigmas)
        for name, choose in CHOICES.items()
    }
    rows = [(name, *(f"{e:.1e}" for e in errors.values())) for name, errors in found.items()]
    worst = {name: max(errors.values()) for name, errors in found.items()}
    sentence = (
        f"With 20 of 100 snapshots, the largest error is {worst['every 5th, and the last']:.0e} "
        f"for every 5th, {worst['20, log-spaced from the end']:.0e} for log-spaced ones, and "
        f"{worst['the last 20']:.0e} for the last 20."
    )
    return SectionReport(sentence, table(("kept", *map(str, sigmas)), rows), {"errors": found})


# ------------------------------------------------------------------ files


def files_section(plan: EmaSizes, bar: Progress) -> SectionReport:
    sizes, made, tracked = {}, {}, 0
    for name, encoding in bar.track(ENCODINGS.items(), description="files"):
        with tempfile.TemporaryDirectory() as folder:
            tracked = track(plan, Path(folder), snapshot_dtype=encoding).nbytes
            sizes[name] = find_snapshots(folder)[0].nbytes
            made[name] = synthesize(folder, WANTED[0])
            if name == "float16":
                verified = verification(plan, Path(folder))
    off = {name: relative_error(made[name], made["float32"]) for name in ENCODINGS}
    sentence = (
        f"Two averages need {tracked / plan.weights:.2f} bytes per weight, and a snapshot of both "
        f"{2 * sizes['float16'] / plan.weights:.2f} in float16 or "
        f"{2 * sizes['int8'] / plan.weights:.2f} in int8. int8 snapshots give averages with a "
        f"relative error of {off['int8']:.1%}. Verifying checksums makes a synthesis take "
        f"{verified} × the time."
    )
    rows = [("both averages, tracked", format_bytes(tracked), f"{tracked / plan.weights:.3f}", "")]
    rows += [
        (f"a file in {name}", format_bytes(size), f"{size / plan.weights:.3f}", f"{off[name]:.1e}")
        for name, size in sizes.items()
    ]
    header = ("item", "bytes", "bytes per weight", f"relative error at σ = {WANTED[0]}")
    plain = {
        "tracked_bytes": tracked,
        "file_bytes": sizes,
        "errors": off,
        "verified": verified._asdict(),
    }
    return SectionReport(sentence, table(header, rows), plain)


def verification(plan: EmaSizes, folder: Path) -> Spread:
    """Return the time ratio of a synthesis that verifies checksums to one that does not."""

    def synthesis(verify: bool) -> Callable[[], float]:
        return timed(lambda: synthesize(find_snapshots(folder, verify=verify), WANTED[0]))

    runs = {"verified": synthesis(True), "unverified": synthesis(False)}
    found = side_by_side(runs, range(plan.rounds))
    return ratios(found["verified"], found["unverified"])


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the RMS error divided by the RMS of the weights."""
    error = sum(((found[name] - tensor) ** 2).sum().item() for name, tensor in wanted.items())
    return math.sqrt(error / sum((tensor**2).sum().item() for tensor in wanted.values()))


# ------------------------------------------------------------------ decoding

ENCODINGS: dict[str, Any] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": "int8",
}


def decoding_section(plan: EmaSizes, bar: Progress) -> SectionReport:
    smaller = replace(plan, layers=max(1, plan.layers // 4))
    with tempfile.TemporaryDirectory() as name:
        folders = {encoding: Path(name, encoding) for encoding in ENCODINGS}
        for encoding, folder in folders.items():
            track(smaller, folder, snapshot_dtype=ENCODINGS[encoding])
        reading, making = (
            side_by_side(
                {
                    encoding: partial(core_seconds, way(folder))
                    for encoding, folder in folders.items()
                },
                bar.track(range(plan.rounds), description=way.__name__),
            )
            for way in (reads, synthesizes)
        )
        sizes = {encoding: find_snapshots(folder)[0].nbytes for encoding, folder in folders.items()}
    found = {
        encoding: {
            "file_bytes": sizes[encoding],
            "reading": ratios(reading[encoding], reading["float32"]),
            "synthesis": ratios(making[encoding], making["float32"]),
        }
        for encoding in ENCODINGS
    }
    return _decoding_report(found, smaller.weights)


def _decoding_report(found: dict[str, dict[str, Any]], weights: int) -> SectionReport:
    rows = [
        (name, f"{row['file_bytes'] / weights:.3f}",
         f"{row['reading']} ×", f"{row['synthesis']} ×")
        for name, row in found.items()
    ]  # fmt: skip
    sentence = (
        f"Reading int8 snapshots takes {found['int8']['reading']} × the CPU time of float32 ones, "
        f"from the page cache, and a synthesis {found['int8']['synthesis']} ×, with "
        f"{found['float32']['file_bytes'] / found['int8']['file_bytes']:.1f} × fewer bytes on disk."
    )
    plain = {
        name: {**row, "reading": row["reading"]._asdict(), "synthesis": row["synthesis"]._asdict()}
        for name, row in found.items()
    }
    return SectionReport(
        sentence, table(("encoding", "bytes per weight", "reading", "synthesis"), rows), plain
    )


def reads(folder: Path) -> Callable[[], object]:
    """Read every element of every snapshot into float32, in synthesis' chunks, unverified."""

    def run() -> Tensor:
        buffer = torch.empty(CHUNK)
        for snapshot in find_snapshots(folder, verify=False):
            for name, shape in snapshot.shapes.items():
                read, numel = snapshot.reader(name), math.prod(shape)
                for start in range(0, numel, CHUNK):
                    stop = min(start + CHUNK, numel)
                    buffer[: stop - start].copy_(read(start, stop))
        return buffer

    return run


def synthesizes(folder: Path) -> Callable[[], object]:
    """Synthesize one average into new tensors, with checksums verified."""
    return lambda: synthesize(find_snapshots(folder), WANTED[0])


# ------------------------------------------------------------------ float16


def float16_section(plan: EmaSizes, bar: Progress) -> SectionReport:
    """Float16 may round the files, the sums, or both."""
    smaller = replace(plan, layers=1)
    sigmas = (0.03, 0.07, 0.15, 0.25)
    with tempfile.TemporaryDirectory() as folder:
        track(smaller, Path(folder), snapshot_dtype=torch.float32)
        snapshots = find_snapshots(folder)
        rows = {s.path: s.read("0.weight", 0, math.prod(s.shapes["0.weight"])) for s in snapshots}
        profiles = [snapshot.profile for snapshot in snapshots]
        found = {}
        for sigma in bar.track(sigmas, description="float16"):
            shares = solve_weights(profiles, power_profile(sigma, plan.steps)).tolist()
            found[sigma] = {
                f"{_short(files)} files, {_short(sums)} sums": sum_error(
                    list(rows.values()), shares, files, sums
                )
                for files in (torch.float32, torch.float16)
                for sums in (torch.float32, torch.float16)
            }
    cases = list(found[sigmas[0]])
    lines = [(case, *(f"{found[sigma][case]:.1e}" for sigma in sigmas)) for case in cases]
    at = found[0.07]
    in_files, in_sums = at["float16 files, float32 sums"], at["float32 files, float16 sums"]
    sentence = (
        f"At σ = 0.07, float16 files give a relative error of {in_files:.1e}, and float16 sums of "
        f"float32 files {in_sums:.1e}, {in_sums / in_files:.1f} × as much. Sums in float32 cost 2 "
        f"bytes more per element of a chunk."
    )
    header = ("relative error", *(f"σ = {sigma}" for sigma in sigmas))
    return SectionReport(sentence, table(header, lines), {"errors": found})


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sum_error(
    snapshots: Sequence[Tensor],
    shares: Sequence[float],
    files: torch.dtype,
    sums: torch.dtype,
) -> float:
    """Return the relative RMS error of a sum in `sums` of snapshots rounded to `files`."""
    total = torch.zeros(snapshots[0].shape, dtype=sums)
    wanted = torch.zeros(snapshots[0].shape, dtype=torch.float64)
    for snapshot, share in zip(snapshots, shares, strict=True):
        total.add_(snapshot.to(files).to(sums), alpha=share)
        wanted.add_(snapshot.double(), alpha=share)
    return relative_error({"": total.double()}, {"": wanted})


# ------------------------------------------------------------------ updates

Averages = list[dict[str, Tensor]]


@torch.no_grad()
def lerp_each_tensor(averages: Averages, weights: dict[str, Tensor], share: float) -> None:
    for average in averages:
        for name, tensor in average.items():
            tensor.lerp_(weights[name].to(tensor.dtype), share)


@torch.no_grad()
def multiply_and_add(averages: Averages, weights: dict[str, Tensor], share: float) -> None:
    for average in averages:
        for name, tensor in average.items():
            tensor.mul_(1 - share).add_(weights[name] * share)


@torch.no_grad()
def move_all(averages: Averages, weights: dict[str, Tensor], share: float) -> None:
    move_towards([InMemoryAverage(a) for a in averages], weights, [share] * len(averages))


UPDATES: dict[str, Callable[[Averages, dict[str, Tensor], float], None]] = {
    OURS: move_all,
    "lerp_ on each tensor": lerp_each_tensor,
    "mul_ and add_": multiply_and_add,
}


def update_section(plan: EmaSizes, bar: Progress) -> SectionReport:
    models = {
        "large tensors": (plan.layers, plan.width),
        "small tensors": (8 * plan.layers, max(2, plan.width // 16)),
    }
    kinds = [(what, dtype) for what in models for dtype in (torch.float32, torch.bfloat16)]
    lines, plain = [], {}
    for what, dtype in bar.track(kinds, description="update"):
        count, width = models[what]
        weights = {f"{n}": torch.randn(width, width, dtype=dtype) for n in range(count)}
        averages = [{n: w.float() for n, w in weights.items()} for _ in TRACKED]
        runs = {
            name: partial(core_seconds, partial(update, averages, weights, 0.01))
            for name, update in UPDATES.items()
        }
        seconds = side_by_side(runs, range(4 * plan.rounds))
        over = {name: ratios(seconds[name], seconds[OURS]) for name in UPDATES if name != OURS}
        kind = f"{what}, {_short(dtype)}"
        lines.append((kind, *(f"{ratio} ×" for ratio in over.values())))
        plain[kind] = {
            "ratios": {name: ratio._asdict() for name, ratio in over.items()},
            "weight_bytes": sum(weight.nbytes for weight in weights.values()),
        }
    names = [name for name in UPDATES if name != OURS]
    in_words = ", ".join(f"{cell} ({name})" for cell, name in zip(lines[0][1:], names, strict=True))
    sentence = (
        f"On the CPU, two averages of float32 weights in large tensors are updated by others in "
        f"{in_words} of memlab's CPU time."
    )
    return SectionReport(sentence, table(("weights", *names), lines), plain)


# ------------------------------------------------------------------ the command

SECTIONS: dict[str, Callable[[EmaSizes, Progress], SectionReport]] = {
    "synthesis": synthesis_section,
    "profiles": profiles_section,
    "pruning": pruning_section,
    "files": files_section,
    "decoding": decoding_section,
    "float16": float16_section,
    "update": update_section,
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of_sections(__doc__, SECTIONS, quick="a small model")
    parser.add_argument("--serve", nargs=7, help=argparse.SUPPRESS)  # for a Runner
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    if given.serve:
        way, place, folder, layers, width, steps, count = given.serve
        plan = EmaSizes(int(layers), int(width), int(steps), 0, ())
        serve(plan, Path(folder), Task(place, int(count)), way)
        return 0
    print_reports("Post-hoc EMA", "ema", SECTIONS, given, FULL, QUICK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
