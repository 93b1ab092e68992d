"""The module and the phase that an operator belongs to.

In forward, global module hooks run as each module starts and ends. In backward, each graph node
carries a sequence number from forward. The range of sequence numbers of each module's forward is
known, so a backward operator belongs to the module whose forward created its node.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memlab.internals.threads import only_where_asked
from memlab.internals.torch_internals import (
    ConvNd,
    current_autograd_node,
    get_sequence_nr,
    in_backward,
)
from memlab.metering.compiled import CompiledLayer

_LARGE_WORKSPACE = (torch.nn.RNNBase, ConvNd)  # modules whose kernels use large workspaces
_LAST_SEQUENCE_NUMBER = 2**64 - 1  # AccumulateGrad nodes have it, so they run first


class ModuleNames:
    """Map each module and parameter to a name in the first root module that contains it."""

    def __init__(self) -> None:
        self.roots: list[torch.nn.Module] = []
        self._module_names: dict[int, str] = {}
        self._parameter_owners: dict[int, str] = {}

    def add_root(self, root: torch.nn.Module) -> None:
        """Name the root by its class, and its submodules by their path."""
        prefix = f"{type(root).__name__}." if self.roots else ""
        self.roots.append(root)
        for name, module in root.named_modules():
            name = prefix + name if name else type(root).__name__
            self._module_names.setdefault(id(module), name)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._parameter_owners.setdefault(id(tensor), name)

    def __contains__(self, module: torch.nn.Module) -> bool:
        return id(module) in self._module_names

    def of(self, module: torch.nn.Module) -> str:
        return self._module_names.get(id(module), type(module).__name__)

    def inside(self, outer: str, name: str) -> str:
        """Return the name of a module that has this name in another one."""
        if outer and name and outer not in (type(root).__name__ for root in self.roots):
            return f"{outer}.{name}"
        return name or outer

    def owner_of(self, parameter: torch.Tensor) -> str:
        """Return the name of the module that owns the parameter, "" if unknown."""
        return self._parameter_owners.get(id(parameter), "")


def follow_modules(
    wanted: bool, handles: list[Any], enter: Callable[..., None], leave: Callable[..., None]
) -> None:
    """Register two global module hooks, or remove them. `handles` has those that are registered."""
    if wanted and not handles:
        handles += [
            register_module_forward_pre_hook(only_where_asked(enter)),
            register_module_forward_hook(only_where_asked(leave), always_call=True),
        ]
    elif not wanted:
        while handles:
            handles.pop().remove()


class Context:
    """Track modules and phases inside `followed()`.

    on_root(module)             before the forward of a module that no known root contains
    on_first_step(optimizer)    before an optimizer's first step
    on_step_end(optimizer)      after each step
    on_backward_start()         at the first operator of a backward pass
    on_backward_end()           at the first operator after it
    in_step                     starts at the end of an optimizer's step, inside one of its hooks
    """

    def __init__(
        self,
        on_root: Callable[[torch.nn.Module], None],
        on_first_step: Callable[[torch.optim.Optimizer], None],
        on_step_end: Callable[[torch.optim.Optimizer], None],
        on_backward_start: Callable[[], None],
        on_backward_end: Callable[[], None],
        *,
        in_step: bool = False,
    ) -> None:
        self.names = ModuleNames()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.has_large_workspace = self.has_recurrent_layer = False
        self.in_backward = False
        self.last_phase = "forward"
        self._after_backward = False
        self._step_depth = int(in_step)
        self._step_in_backward = False  # whether backward runs the step, not the step backward
        self._thread = get_ident()
        self._running: list[str] = []
        self._numbers: list[int] = []  # sequence numbers at which the running module changed …
        self._number_modules: list[str] = []  # … and the module that runs from there on
        self._on_root = on_root
        self._on_first_step, self._on_step_end = on_first_step, on_step_end
        self._on_backward_start, self._on_backward_end = on_backward_start, on_backward_end
        self._module_handles: list[Any] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        handles = [
            register_optimizer_step_pre_hook(only_where_asked(self._before_step)),
            register_optimizer_step_post_hook(only_where_asked(self._after_step)),
        ]
        self.follow_modules(True)
        try:
            yield
        finally:
            self.follow_modules(False)
            for handle in handles:
                handle.remove()
            if self.in_backward:
                self._leave_backward()

    def follow_modules(self, wanted: bool) -> None:
        """Register the global module hooks, or remove them."""
        follow_modules(wanted, self._module_handles, self._enter, self._leave)

    def phase(self) -> str:
        """Return the phase of the next operator."""
        self.last_phase = self._phase()
        return self.last_phase

    def _phase(self) -> str:
        if in_backward():
            if not self.in_backward:
                self.in_backward = self._after_backward = True
                self._on_backward_start()
            return "optimizer" if self._step_in_backward else "backward"
        if self.in_backward:
            self._leave_backward()
        # Lightning runs forward and backward in a closure, and its activations once counted as the
        # optimizer's temporaries (test_a_closures_activations_are_activations).
        if self._step_depth:  # steps run without gradients, and their closures with them
            return "forward" if torch.is_grad_enabled() else "optimizer"
        if self._after_backward and (self._running or torch.is_grad_enabled()):
            self._after_backward = False
        return "optimizer" if self._after_backward else "forward"

    def module(self) -> str:
        """Return the name of the current operator's module, "" if it has none."""
        layer = CompiledLayer.name
        if self._running:
            return self.names.inside(self._running[-1], layer)
        node = self.node()
        return layer if node is None else self.names.inside(self._module_of(node), layer)

    def node(self) -> Node | None:
        """Return the graph node that backward is evaluating, None outside backward."""
        return current_autograd_node() if self.in_backward else None

    def leaf(self) -> torch.Tensor | None:
        """Return the leaf whose `.grad` autograd is accumulating, None if there is none."""
        node = current_autograd_node()
        return getattr(node, "variable", None) if node and _is_accumulation(node) else None

    @property
    def in_module(self) -> bool:
        """True while a module's forward runs."""
        return bool(self._running)

    def _module_of(self, node: Any) -> str:
        if _is_accumulation(node):
            return self.names.owner_of(node.variable)
        position = bisect_right(self._numbers, node._sequence_nr())
        return self._number_modules[position - 1] if position else ""

    def _leave_backward(self) -> None:
        self.in_backward = False
        self._on_backward_end()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if module not in self.names:
            self.names.add_root(module)
            self._on_root(module)
        self.has_large_workspace |= isinstance(module, _LARGE_WORKSPACE)
        self.has_recurrent_layer |= isinstance(module, torch.nn.RNNBase)
        self._running.append(self.names.of(module))
        self._record_number()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()
        self._record_number()

    def _record_number(self) -> None:
        if get_ident() == self._thread:  # sequence numbers are per thread
            self._numbers.append(get_sequence_nr())
            self._number_modules.append(self._running[-1] if self._running else "")

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self._on_first_step(optimizer)
        self._step_depth += 1
        self._step_in_backward = in_backward()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step_depth -= 1
        self._step_in_backward = False
        self._after_backward = False  # the update is done, even if it ran inside backward
        self._on_step_end(optimizer)


def _is_accumulation(node: Node) -> bool:
    return node._sequence_nr() == _LAST_SEQUENCE_NUMBER
