"""Count the floating-point operations of matmuls and attention, 2 per multiply-add.

Norms, activations and sums are limited by memory, not compute. They count 0 here, as in torch's
`FlopCounterMode`, whose formulas are reused.
"""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memlab.internals.scaled_mm import SCALED_MM
from memlab.internals.torch_internals import TorchDispatchMode

aten = torch.ops.aten

MATMULS = frozenset(
    {
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
        *(aten.convolution.default, *SCALED_MM),
    }
)
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
# torch has no formulas for in-place matmuls and, before 2.15, for attention on the CPU; these take
# the same leading arguments as their counterparts.
_FORMULAS = flop_registry | {
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
    torch.ops.memlab.scaled_mm_on_cpu: flop_registry[aten._scaled_mm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


def operations(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the operations of one operator call; 0 if it is neither matmul nor attention."""
    formula = _FORMULAS.get(func.overloadpacket)
    if formula is None:
        return 0
    if "_attention" in func.overloadpacket.__name__:
        args = _with_equal_heads(args)
    return formula(*args, **kwargs, out_val=result)


def _with_equal_heads(args: Any) -> list[Any]:
    """Replace tensors (B, H, T, D) with their shapes, all with as many heads as the queries.

    Grouped queries read each key several times. torch 2.11's formula rejects them.
    """
    is_heads = [isinstance(x, torch.Tensor) and x.dim() == 4 for x in args]
    heads = max(x.shape[1] for x, is_so in zip(args, is_heads, strict=True) if is_so)
    return [
        torch.Size((x.shape[0], heads, *x.shape[2:])) if is_so else x
        for x, is_so in zip(args, is_heads, strict=True)
    ]


class Operations(TorchDispatchMode):
    """Counts operations inside `with`, in sections."""

    def __init__(self) -> None:
        super().__init__()
        self.sections = [0]

    @property
    def total(self) -> int:
        return sum(self.sections)

    def begin_section(self) -> None:
        self.sections.append(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.sections[-1] += operations(func, args, kwargs, result)
        return result
