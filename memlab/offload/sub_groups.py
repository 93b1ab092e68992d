"""Sub-groups: weights that one optimizer step updates together, and the layout of their state.

    weights     [w0, w1 | w2 | w3, w4, w5]          adjacent weights of one group, up to a maximum
    states      {name: tensor or number} of each    as the optimizer keeps them
    record      the tensors in a list               stored in the store, each once
    layout      (weight, name, index in record)     finds a state's tensors in the record
    small       numbers and scalar tensors          kept in memory

This module only plans: it copies no tensor.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.internals.torch_internals import FakeTensor

WEIGHT = None  # the key of the weight itself in a state
State = dict[Any, Any]


class WeightIndex(NamedTuple):
    """A weight: its group, its position in the group, and its number among all weights."""

    group: int
    position: int
    number: int


def sub_groups(sizes: list[list[int]], max_elements: int) -> list[list[WeightIndex]]:
    """Split each group into runs of at most `max_elements` elements.

    A larger weight is a run of its own.
    """
    runs: list[list[WeightIndex]] = []
    number = 0
    for group, of_group in enumerate(sizes):
        left = -1
        for position, size in enumerate(of_group):
            if left < size:
                runs.append([])
                left = max_elements
            runs[-1].append(WeightIndex(group, position, number))
            left, number = left - size, number + 1
    return runs


@dataclass
class SubGroup:
    """Weights of one group to step together, and the layout of their state."""

    key: str
    places: list[WeightIndex]
    weights: list[Tensor]
    # (weight, name, index in the record) of each tensor. Shared tensors have one index.
    layout: list[tuple[int, str | None, int]] = field(default_factory=list)
    # The numbers and scalar tensors of each weight's state.
    small: list[State] = field(default_factory=list)

    def pack(self, states: list[State], optimizer_name: str) -> list[Tensor]:
        """Return the record of these states, one state per weight, and remember the layout.

        Raises TypeError, with the optimizer's name, for a value other than a tensor or a number.
        """
        tensors: list[Tensor] = []
        index_of: dict[tuple[int, ...], int] = {}
        self.layout, self.small = [], [{} for _ in states]
        for weight, state in enumerate(states):
            for name, kept in state.items():
                if not isinstance(kept, Tensor) or (kept.dim() == 0 and name is not WEIGHT):
                    self.small[weight][name] = _require_number(kept, name, optimizer_name)
                    continue
                same = (kept.untyped_storage()._cdata, kept.storage_offset(), *kept.shape)
                if same not in index_of:
                    index_of[same] = len(tensors)
                    tensors.append(kept)
                self.layout.append((weight, name, index_of[same]))
        return tensors

    def unpack(self, record: list[Tensor]) -> list[State]:
        """Return the state of each weight, by name."""
        states = [dict(small) for small in self.small]
        for weight, name, index in self.layout:
            states[weight][name] = record[index]
        return states

    def to_json(self) -> dict[str, Any]:
        """Return layout and small values as plain data."""
        small = [{k: _number_to_json(v) for k, v in s.items()} for s in self.small]
        return {"layout": self.layout, "small": small}

    def restore(self, data: dict[str, Any] | None) -> None:
        """Restore layout and small values; without data, the state is empty."""
        data = data or {"layout": [], "small": [{} for _ in self.places]}
        self.layout = [tuple(row) for row in data["layout"]]
        self.small = [
            {name: _number_from_json(kept, weight) for name, kept in small.items()}
            for small, weight in zip(data["small"], self.weights, strict=True)
        ]


def _require_number(kept: Any, name: str, optimizer_name: str) -> Any:
    if kept is None or isinstance(kept, (bool, int, float, Tensor)):
        return kept
    raise TypeError(
        f"got {optimizer_name}, whose state has {name!r} of {type(kept).__name__}; only tensors "
        f"and numbers can be stored, so use it without offloading"
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
