"""`torchrun … -m memlab train --zero`: the steps of one rank of several.

Each rank has its own batches. Rank 0 prints the mean loss over all ranks, and the largest and the
smallest peak of a rank.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.cli import report, terminal
from memlab.cli.choices import (
    SUITABLE,
    choose_device,
    choose_setting,
    choose_techniques,
    require_memory,
)
from memlab.cli.errors import UsageError, is_out_of_memory
from memlab.cli.memory_cap import choose_cap, memory_cap
from memlab.cli.requests import TrainRequest
from memlab.cli.rows import Announce, silent
from memlab.cli.steps import (
    TEXT,
    Batch,
    StepResult,
    load_batch,
    require_byte_vocabulary,
    run_steps,
    summary,
)
from memlab.cli.torchrun import Rank, interruptible
from memlab.data import batches, source_bytes
from memlab.train import SEED, Plugs, RankTraining, Setting, build_rank, measured_rank, rank_step
from memlab.train.registry import rows_of, whole_weights
from memlab.units import format_bytes
from memlab.zero.joining import RankLost, joined
from memlab.zero.stages import STAGES

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Peak(NamedTuple):
    """A rank's peak; the CPU has no allocator that reserves more."""

    allocated_bytes: int
    reserved_bytes: int | None = None


def train_rank(request: TrainRequest, rank: Rank) -> None:
    """Run this rank's steps; rank 0 prints the losses, the peaks and the time."""
    terminal.console.quiet = not rank.is_first
    name, steps = request.technique, request.steps
    technique = choose_techniques(request)[name]
    stage = request.zero
    assert stage is not None
    if stage == max(STAGES) and (reason := whole_weights(rows_of(name).values())):
        raise _not_sharded(ValueError(reason))
    device = _choose_device(request, rank)
    setting = _choose_setting(replace(request, device=device))
    cap_bytes = choose_cap(request.memory, device)
    predicted_bytes = _require_memory(setting, technique, name, stage, rank)
    terminal.echo(
        f"{report.headline(setting, dry=False)}\ntechnique: {name}\n"
        f"{rank.ranks} ranks, each with this batch; ZeRO stage {stage}: "
        f"{STAGES[stage]}\n"
    )
    with (
        interruptible(rank),
        terminal.progress(steps + 2) if rank.is_first else nullcontext(silent) as announce,
        memory_cap(cap_bytes),
        _in_one_sentence(name, setting, rank),
        joined(BACKENDS[device]),
    ):
        result = run(setting, technique, stage, rank, steps, announce)
    terminal.echo(f"\n{result}")
    if predicted_bytes is not None:
        terminal.echo(f"predicted: {format_bytes(predicted_bytes)} for a rank, by a dry run")


def run(
    setting: Setting, technique: Plugs, stage: int, rank: Rank, steps: int, announce: Announce
) -> str:
    """Build this rank's training, run the steps with the other ranks, and return the summary."""
    announce("building")
    dtypes: dict[torch.dtype, None] = {}
    try:
        training = build_rank(
            setting, technique, stage, on_loss=lambda loss: dtypes.setdefault(loss.dtype)
        )
    except (TypeError, ValueError) as error:
        raise _not_sharded(error) from error
    if setting.device == "cuda":  # building may need more than a step
        torch.cuda.reset_peak_memory_stats()
    text = batches(source_bytes(TEXT), setting.batch, setting.seq_len, SEED + rank.index)
    taken = run_steps(lambda: step(training, next(text)), steps, announce)
    announce("peak")
    comm: Any = training.group.comm  # of the rank in this process
    peaks = comm.gather_objects(peak(training, next(text)))
    return summary(taken, next(iter(dtypes)), format_peaks(peaks))


def step(training: RankTraining, batch: Batch) -> StepResult:
    """Run one step on this rank's batch; return the mean loss over all ranks, and the time."""
    load_batch(training, batch)
    started = time.perf_counter()
    loss = training.step().loss
    if training.batch[0].device.type == "cuda":
        torch.cuda.synchronize()
    return StepResult(loss, time.perf_counter() - started)


def peak(training: RankTraining, batch: tuple[Tensor, Tensor]) -> Peak:
    """Return this rank's peak from CUDA's allocator, or of one metered CPU step."""
    if training.batch[0].device.type == "cuda":
        return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    load_batch(training, batch)
    return Peak(measured_rank(training).peak_bytes)


def format_peaks(peaks: Sequence[Peak]) -> str:
    """Format the smallest and the largest peak, with their ranks if they differ."""
    allocated = _range([peak.allocated_bytes for peak in peaks])
    reserved = [peak.reserved_bytes for peak in peaks if peak.reserved_bytes is not None]
    if not reserved:
        return f"{allocated}, measured in one more step"
    return f"{allocated} allocated, {_range(reserved)} reserved"


def _range(found: Sequence[int]) -> str:
    least, most = min(found), max(found)
    if least == most:
        return f"{format_bytes(most)} on each rank"
    return (
        f"{format_bytes(least)} (rank {found.index(least)}) to "
        f"{format_bytes(most)} (rank {found.index(most)})"
    )


# ------------------------------------------------------------------ choices


def _choose_device(request: TrainRequest, rank: Rank) -> str:
    """Return the device; on CUDA, give this process a GPU of its own."""
    device = choose_device(request)
    if device not in BACKENDS:
        raise UsageError(
            f"got --zero {request.zero} on the device {device}; ranks train on CUDA or, with "
            f"--device cpu, on the CPU"
        )
    if device == "cuda":
        if rank.local_ranks > torch.cuda.device_count():
            raise UsageError(
                f"got {rank.local_ranks} processes on a machine with {torch.cuda.device_count()} "
                f"GPUs; give torchrun at most that many as --nproc-per-node"
            )
        torch.cuda.set_device(rank.local_index)
    return device


def _choose_setting(request: TrainRequest) -> Setting:
    """Return the same setting on every rank: a batch that suits one GPU's free memory may not suit
    another's."""
    usual = SUITABLE["cpu" if request.device == "cpu" else "accelerator"]
    batch = request.batch or usual.batch
    setting = choose_setting(replace(request, batch=batch, dry=True))
    require_byte_vocabulary(setting)
    return setting


def _require_memory(
    setting: Setting, technique: Plugs, name: str, stage: int, rank: Rank
) -> int | None:
    """Predict a rank's peak on the CPU, and require memory for all ranks of this machine. On a GPU,
    require memory for the whole weights, which a rank makes before it keeps its shards."""
    if setting.device != "cpu":
        whole_bytes = setting.parameters * setting.dtype.itemsize
        _, total_bytes = torch.cuda.mem_get_info()
        if whole_bytes > total_bytes:
            raise UsageError(
                f"got a model of {format_bytes(whole_bytes)} of weights on GPUs of "
                f"{format_bytes(total_bytes)}; memlab makes the whole model on each GPU before it "
                f"shards it: give a smaller model"
            )
        return None
    try:
        [trace] = rank_step(setting, technique, rank.ranks, stage).traces
    except (TypeError, ValueError) as error:
        raise _not_sharded(error) from error
    what = f"a step with {name} on {rank.local_ranks} ranks"
    require_memory(what, setting, rank.local_ranks * trace.peak_bytes, "use memlab measure --ranks")
    return trace.peak_bytes


# ------------------------------------------------------------------ errors


@contextmanager
def _in_one_sentence(name: str, setting: Setting, rank: Rank) -> Iterator[None]:
    """Turn what a user can cause into a sentence. Every rank raises; rank 0 prints."""
    try:
        yield
    except (RankLost, FloatingPointError) as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"rank {rank.index} of {rank.ranks} ran out of memory with {name} and {setting}; give "
            f"a smaller --batch or --seq, a higher stage of ZeRO, or another technique"
        ) from error


def _not_sharded(error: Exception) -> UsageError:
    return UsageError(f"got a technique that does not work with --zero: {error}")
