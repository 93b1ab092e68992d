"""Two averages updated after each training step: GPU memory, and time of an update."""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor, nn

from memlab.cli.rows import time_in_turn
from memlab.ema import PostHocEMA, synthesize
from memlab.metering import measure
from memlab.offload import DiskStore
from memlab.train import build, combined

from .day_jobs import BILL, SMALL_BILL

Answer = dict[str, Any]

ON_THE_GPU, ON_THE_HOST, ON_THE_DISK = "on the GPU", "on the host", "on the disk"
PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    ON_THE_GPU: dict,
    ON_THE_HOST: lambda: {"device": "cpu"},
    ON_THE_DISK: lambda: {"store": DiskStore()},
}
SIGMA = 0.05  # one of the two tracked averages, so one snapshot reproduces it


def measure_averages(name: str, small: bool, rehearsal: bool) -> Answer:
    """Measure averages stored in the place `name`; a rehearsal runs on the CPU."""
    device = "cpu" if rehearsal else "cuda"
    setting = replace(SMALL_BILL if small else BILL, device=device)
    training = build(setting, combined("plain"))
    model = training.model
    with tempfile.TemporaryDirectory() as folder:
        ema, held, _ = memory_of(device, lambda: PostHocEMA(model, folder, **PLACES[name]()))
        ema.update(1)
        _, _, update = memory_of(device, lambda: ema.update(2))
        ema.snapshot()
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()  # only the synthesis can restore them
        _, _, synthesis = memory_of(device, lambda: synthesize(folder, SIGMA, out=model))
        error = largest_error(model, ema.averages[SIGMA])
        ratios = over_a_step(training.step, ema)  # last, since it takes an unknown number of steps
    return {
        "what": str(setting),
        "averages_bytes": ema.nbytes,
        "held_bytes": held,
        "update_bytes": update,
        "synthesis_bytes": synthesis,
        "synthesis error": error,
        "time of step and update / step": statistics.median(ratios),
    }


def memory_of(device: str, call: Callable[[], Any]) -> tuple[Any, int, int]:
    """Return the call's result, the device memory that it keeps, and its peak."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        return result, torch.cuda.memory_allocated() - before, most
    results: list[Any] = []
    trace = measure(lambda: results.append(call()))
    made = list(accumulate(event.bytes for event in trace.events if event.phase != "before"))
    return results[0], made[-1] if made else 0, max(made, default=0)


def over_a_step(step: Callable[[], object], ema: PostHocEMA) -> list[float]:
    """Return the time ratios of a step with an update to a step alone."""
    times = count(3)

    def both() -> None:
        step()
        ema.update(next(times))

    return [with_it / without for with_it, without in time_in_turn(both, step)]


def largest_error(model: nn.Module, average: Mapping[str, Tensor]) -> float:
    """Return the largest distance of a weight from its average, relative to the tensor's absmax."""
    weights = dict(model.named_parameters())
    distances = (
        (weights[name].detach().cpu() - kept.cpu()).abs().max() / kept.abs().max().cpu()
        for name, kept in average.items()
    )
    return max(map(float, distances))
