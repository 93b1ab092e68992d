"""Two averages beside the bill's step: what they hold of the GPU, take in an update, and cost."""

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
SIGMA = 0.05  # made of one snapshot of two averages, one of which is 0.05 wide


def beside_a_step(name: str, small: bool, rehearsal: bool) -> Answer:
    """Averages that live there; a rehearsal has them on the CPU, where "the host" is no other
    memory."""
    device = "cpu" if rehearsal else "cuda"
    setting = replace(SMALL_BILL if small else BILL, device=device)
    training = build(setting, combined("plain"))
    model = training.model
    with tempfile.TemporaryDirectory() as folder:
        ema, held, _ = taken(device, lambda: PostHocEMA(model, folder, **PLACES[name]()))
        ema.update(1)
        _, _, update = taken(device, lambda: ema.update(2))
        ema.snapshot()
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()  # only the synthesis can bring it back
        _, _, synthesis = taken(device, lambda: synthesize(folder, SIGMA, out=model))
        off = furthest(model, ema.averages[SIGMA])
        ratios = over_a_step(training.step, ema)  # last: how many steps it takes is the clock's
    return {
        "what": str(setting),
        "averages_bytes": ema.nbytes,
        "held_bytes": held,
        "update_bytes": update,
        "synthesis_bytes": synthesis,
        "synthesized, off by": off,
        "time of a step and an update over a step": statistics.median(ratios),
    }


def taken(device: str, call: Callable[[], Any]) -> tuple[Any, int, int]:
    """What it gives, what it leaves on the device, and the most it took there."""
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
    """Of a step with an update after it, in rounds."""
    times = count(3)

    def both() -> None:
        step()
        ema.update(next(times))

    return [with_it / without for with_it, without in time_in_turn(both, step)]


def furthest(model: nn.Module, average: Mapping[str, Tensor]) -> float:
    """The largest distance of a weight from its average, over the average's largest number."""
    weights = dict(model.named_parameters())
    distances = (
        (weights[name].detach().cpu() - kept.cpu()).abs().max() / kept.abs().max().cpu()
        for name, kept in average.items()
    )
    return max(map(float, distances))
