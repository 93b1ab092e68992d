"""Find the storages of models, optimizers and a step's closure, even if no operator uses them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memlab.metering.context import ModuleNames
from memlab.metering.dry import DryRun
from memlab.metering.reachable import reachable
from memlab.metering.registry import REGISTRY, Storage
from memlab.metering.stream import ChangeStream
from memlab.metering.tensors import is_foreign_fake, plain_tensors, tensors_within


class Scanner:
    """Find storages by walking objects, count them in the stream and mark their category."""

    def __init__(self, stream: ChangeStream, names: ModuleNames, dry_run: DryRun | None) -> None:
        self._stream, self._names, self._dry_run = stream, names, dry_run
        self._parameter_kinds: set[tuple[int, torch.dtype]] = set()  # (bytes, dtype)
        self._unused: dict[int, bool] = {}  # unused storages by number; True if new to the scan

    # ------------------------------------------------------------------ use by operators

    def first_use(self, record: Storage) -> bool | None:
        """At a scanned storage's first use, return whether the scan found it first; else None."""
        return self._unused.pop(record.number, None)

    def unused(self) -> Iterator[Storage]:
        """Yield the storages that the scan found first and that no operator has used."""
        for record in self._stream.found:
            if self._unused.get(record.number):
                yield record

    def is_parameter_sized(self, record: Storage) -> bool:
        """Return whether the storage has the size and dtype of a parameter."""
        return (record.bytes, record.dtype) in self._parameter_kinds

    # ------------------------------------------------------------------ scans

    def scan_model(self, root: torch.nn.Module) -> None:
        """Count parameters, buffers and gradients."""
        for parameter in root.parameters():
            self.scan_parameter(parameter)
        for buffer in root.buffers():
            self.scan(buffer, "buffers", self._names.owner_of(buffer))
        self.scan_gradients(root.parameters())

    def scan_optimizer(self, optimizer: Any) -> None:
        """Count the optimizer's parameters, their gradients and its state."""
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                self.scan_parameter(parameter)
            self.scan_gradients(group["params"])
        self.scan_state(optimizer)

    def scan_state(self, optimizer: Any) -> None:
        """Count the optimizer's state."""
        state = getattr(optimizer, "state", {})
        for parameter, values in state.items() if hasattr(state, "items") else ():
            module = self._names.owner_of(parameter)
            for tensor in tensors_within(values):
                self.scan(tensor, "optimizer_state", module)

    def scan_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the parameters' gradients."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.scan(parameter.grad, "gradients", self._names.owner_of(parameter))

    def scan_parameter(self, parameter: torch.Tensor) -> None:
        """Count a parameter."""
        for plain in plain_tensors(parameter):
            self._parameter_kinds.add((plain.untyped_storage().nbytes(), plain.dtype))
        self.scan(parameter, "parameters", self._names.owner_of(parameter))

    def scan_reachable(self, roots: Iterable[Any]) -> None:
        """Count tensors that can be reached from the step, the model or the optimizer.

        A storage's first use in an operator decides its category. Unused storages are inputs.
        """
        for reached in reachable(roots):
            if isinstance(reached, torch.optim.Optimizer):
                self.scan_state(reached)
            elif isinstance(reached, torch.nn.Module):
                for buffer in reached._buffers.values():
                    if buffer is not None:
                        self.scan(buffer, "buffers", self._names.owner_of(buffer))
            elif not is_foreign_fake(reached):
                self._scan_unused(reached)

    def _scan_unused(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and _is_leaf(tensor)):
            self.scan(tensor, "parameters", self._names.owner_of(tensor))
            self.scan_gradients([tensor])
            return
        for plain in self._plain(tensor):
            record = REGISTRY.find(plain)
            if record is None:
                self._unused[self._stream.find(plain).number] = True
            elif record not in self._stream:
                self._stream.include(record, plain)
                self._unused[record.number] = record.category is None

    def scan(self, tensor: torch.Tensor, category: str, module: str) -> None:
        """Count a tensor's storage, and mark its category and module."""
        for plain in self._plain(tensor):
            record = REGISTRY.find(plain)
            if record is None:
                record = self._stream.find(plain)
            elif record not in self._stream:
                self._stream.include(record, plain)
            record.mark(category)
            record.module = module or record.module

    def _plain(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for plain in plain_tensors(tensor):
            yield plain if self._dry_run is None else self._dry_run.tensor(plain)


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that may no longer be used, as FSDP1 keeps them
        return False
