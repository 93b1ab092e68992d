"""What one technique comes to: its trace, its seconds and its gradients, against the plain step's.

The step that is metered is the second. The first makes the optimizer's state; it also starts from
the same weights whatever the technique, so its gradients are the ones to compare.

Nothing else may be alive on an accelerator while a step is metered there: its allocator's figures
are of everything on it. The meter's own figures are of one model, so on the CPU the plain training
may stay in memory, and need not be built again for each technique that it is timed against.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from memlab.cli.errors import is_out_of_memory
from memlab.trace import Trace
from memlab.train import Plugs, Setting, Training, build, dry_trace, measured, predicted_trace

LONG_SECONDS = 0.4  # of all rounds together
AGREEMENT = 1.1  # two ratios agree if neither is larger than the other by this factor

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """What one technique came to. Ratios and the difference are against the plain step.

    A technique that could not be measured has a `failure`, one line, and nothing else. One that
    would have taken too long is `dry_for` a reason: its bytes, and no time.
    """

    name: str
    trace: Trace | None = None
    seconds: float | None = None
    time_ratios: tuple[float, ...] = ()  # of each round
    gradient_difference: float | None = None
    largest_gradient: float | None = None
    failure: str | None = None
    dry_for: str | None = None
    estimated_time_ratio: float | None = None  # where nothing runs

    @property
    def time_ratio(self) -> float | None:
        """The median of the rounds, which one disturbed round of three or five does not move."""
        return statistics.median(self.time_ratios) if self.time_ratios else None


def silent(stage: str) -> None:
    """Announces nothing."""


def dry_row(setting: Setting, name: str, technique: Plugs, announce: Announce = silent) -> Row:
    """The exact bytes, without computing anything."""
    announce(name)
    return Row(name, dry_trace(setting, technique))


def predicted_row(
    setting: Setting, name: str, technique: Plugs, announce: Announce = silent
) -> Row:
    """What it would take on the setting's class of cards, without one."""
    announce(f"{name}: on CUDA")
    return Row(name, predicted_trace(setting, technique))


class SideBySide:
    """Takes real steps: each technique's beside the plain one's."""

    def __init__(self, setting: Setting, plain: Plugs) -> None:
        self._setting = setting
        self._plain = plain
        self._yardstick: Training | None = None
        self._gradients: dict[str, torch.Tensor] = {}

    def row(self, name: str, technique: Plugs, announce: Announce = silent) -> Row:
        """Measure the technique; the plain one first."""
        _clear_memory(self._setting)
        announce(f"{name}: bytes")
        training = self._started(technique)
        difference, largest = self._compare(training)
        trace = measured(training)
        announce(f"{name}: time")
        rounds = self._rounds(training, technique)
        seconds = statistics.median(ours for ours, *_ in rounds) if rounds else None
        return Row(name, trace, seconds, _ratios(rounds), difference, largest)

    def _started(self, technique: Plugs) -> Training:
        training = build(self._setting, technique)
        training.step()
        return training

    def _compare(self, training: Training) -> tuple[float | None, float | None]:
        """The largest difference from the plain gradients, and the largest gradient.

        Weights that the plain model does not have, or that keep no gradient, are left out.
        """
        gradients = _copied_gradients(training)
        self._gradients = self._gradients or gradients
        both = [name for name in gradients if name in self._gradients]
        differences = (gradients[name] - self._gradients[name] for name in both)
        return _largest(differences), _largest(gradients[name] for name in both)

    def _rounds(self, training: Training, technique: Plugs) -> list[tuple[float, ...]]:
        """Seconds of the technique's step and the plain one; none if the two do not fit at once."""
        if technique is self._plain:
            self._keep(training)
            return in_turn(training.step)
        try:
            plain = self._yardstick or self._started(self._plain)
            return in_turn(training.step, plain.step)
        except Exception as error:
            if is_out_of_memory(error):
                return []
            raise

    def _keep(self, plain: Training) -> None:
        if self._setting.device == "cpu":
            self._yardstick = plain


def in_turn(*steps: Callable[[], object]) -> list[tuple[float, ...]]:
    """The seconds of each step, round by round: what else the machine does meets all alike.

    Five rounds; three where they are long, and two where these agree.
    """
    rounds: list[tuple[float, ...]] = []
    while not _enough(rounds):
        rounds.append(tuple(map(_seconds, steps)))
    return rounds


def _enough(rounds: Sequence[tuple[float, ...]]) -> bool:
    is_long = sum(map(sum, rounds)) >= LONG_SECONDS
    wanted = 5 if not is_long else 2 if _agree(rounds[:2]) else 3
    return len(rounds) >= wanted


def _agree(rounds: Sequence[tuple[float, ...]]) -> bool:
    ratios = _ratios(rounds)
    return max(ratios) <= AGREEMENT * min(ratios)


def _ratios(rounds: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Of the first step's seconds to the last one's."""
    return tuple(seconds[0] / seconds[-1] for seconds in rounds)


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _copied_gradients(training: Training) -> dict[str, torch.Tensor]:
    """Copies: the gradients themselves, held here, would stay alive in the measured step.

    They are widened on the CPU: on a device, that would take memory between the two steps. Where
    the optimizer steps copies of the weights, those have the gradients.
    """
    names = [name for name, p in training.model.named_parameters() if p.requires_grad]
    groups = training.optimizer.param_groups
    stepped = [p for group in groups for p in group["params"] if p.requires_grad]
    gradients = {n: p.grad for n, p in zip(names, stepped, strict=True) if p.grad is not None}
    return {name: g.to("cpu", copy=True).float() for name, g in gradients.items()}


def _largest(tensors: Iterable[torch.Tensor]) -> float | None:
    """The largest absolute value, nan if there is one; None of nothing."""
    largest = [tensor.abs().max() for tensor in tensors]
    return torch.stack(largest).max().item() if largest else None


def _clear_memory(setting: Setting) -> None:
    """Let go of the technique before: a wrapped block and its wrapper hold each other."""
    gc.collect()
    if setting.device != "cpu":
        torch.accelerator.empty_cache()
