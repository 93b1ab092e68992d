"""Sub-groups: weights that are stepped at once, and where each number of their state lies.

    weights     [w0, w1 | w2 | w3, w4, w5]            a run of one group, of so many numbers at most
    states      {name: tensor or number} of each      as an optimizer keeps them
    record      the tensors in a list, each once      this is what moves
    layout      (weight, name, index in the record)   and this what finds them again
    small       the numbers, and tensors of one       these stay where they are

A plan alone: no store, no optimizer, and no tensor is moved or copied here.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.internals.torch_internals import FakeTensor

WEIGHT = None  # the name of the weight itself among the tensors of a state
State = dict[Any, Any]


class Place(NamedTuple):
    """A weight: its group's number, and its own there and among all weights."""

    group: int
    position: int
    number: int


def sub_groups(sizes: list[list[int]], most: int) -> list[list[Place]]:
    """Runs of weights, none across two groups, of at most so many numbers; a larger weight is a
    run of its own."""
    runs: list[list[Place]] = []
    number = 0
    for group, of_group in enumerate(sizes):
        left = -1
        for position, size in enumerate(of_group):
            if left < size:
                runs.append([])
                left = most
            runs[-1].append(Place(group, position, number))
            left, number = left - size, number + 1
    return runs


@dataclass
class SubGroup:
    """Weights of one group that are stepped at once, and what is known of their state."""

    key: str
    places: list[Place]
    weights: list[Tensor]
    # Which tensor of the record each is: (weight, name, index). Two that were one are one.
    layout: list[tuple[int, str | None, int]] = field(default_factory=list)
    # Of each weight, what stays: numbers, and tensors of one number.
    small: list[State] = field(default_factory=list)

    def pack(self, states: list[State], whose: str) -> list[Tensor]:
        """The record of these states, one for each weight; they are known from now on.

        TypeError, with the name of the optimizer, for what is neither tensor nor number.
        """
        tensors: list[Tensor] = []
        index_of: dict[tuple[int, ...], int] = {}
        self.layout, self.small = [], [{} for _ in states]
        for weight, state in enumerate(states):
            for name, kept in state.items():
                if not isinstance(kept, Tensor) or (kept.dim() == 0 and name is not WEIGHT):
                    self.small[weight][name] = _require_number(kept, name, whose)
                    continue
                same = (kept.untyped_storage()._cdata, kept.storage_offset(), *kept.shape)
                if same not in index_of:
                    index_of[same] = len(tensors)
                    tensors.append(kept)
                self.layout.append((weight, name, index_of[same]))
        return tensors

    def unpack(self, record: list[Tensor]) -> list[State]:
        """The state of each weight, by name."""
        states = [dict(small) for small in self.small]
        for weight, name, index in self.layout:
            states[weight][name] = record[index]
        return states

    def to_json(self) -> dict[str, Any]:
        """What is known of the state, as plain data."""
        small = [{k: _number_to_json(v) for k, v in s.items()} for s in self.small]
        return {"layout": self.layout, "small": small}

    def know(self, data: dict[str, Any] | None) -> None:
        """The opposite; without data, there is no state."""
        data = data or {"layout": [], "small": [{} for _ in self.places]}
        self.layout = [tuple(row) for row in data["layout"]]
        self.small = [
            {name: _number_from_json(kept, weight) for name, kept in small.items()}
            for small, weight in zip(data["small"], self.weights, strict=True)
        ]


def _require_number(kept: Any, name: str, whose: str) -> Any:
    if kept is None or isinstance(kept, (bool, int, float, Tensor)):
        return kept
    raise TypeError(
        f"got {whose}, whose state has {name!r} of {type(kept).__name__}; tensors and numbers can "
        f"be stored, so use it without offloading"
    )


def _number_to_json(kept: Any) -> Any:
    if not isinstance(kept, Tensor):
        return kept
    value = 0 if isinstance(kept, FakeTensor) else kept.item()
    on_cpu = kept.device.type == "cpu"
    return {"value": value, "dtype": str(kept.dtype).removeprefix("torch."), "on_cpu": on_cpu}


def _number_from_json(kept: Any, weight: Tensor) -> Any:
    if not isinstance(kept, dict):
        return kept
    device = "cpu" if kept["on_cpu"] else weight.device
    return torch.tensor(kept["value"], dtype=getattr(torch, kept["dtype"]), device=device)
