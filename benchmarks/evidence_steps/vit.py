"""Vision transformers as torchao's README trains them (benchmarks/evidence/torchao.json).

A 4070 Ti SUPER with 16 GB, torch 2.4 or newer, timm's models with 45 classes. The figure is
torch.cuda.max_memory_allocated of the whole process in GB of 10⁹ bytes, with two decimals.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .xmem import torchvision

PIXELS = 224
Row = Mapping[str, Any]


def build(row: Row) -> tuple[Callable[[], None], nn.Module, Any]:
    """Return (step, model, optimizer) of a row."""
    torchvision()
    import timm

    model = timm.create_model(row["model"], num_classes=45, img_size=PIXELS)
    if row["checkpointed"]:
        model.set_grad_checkpointing()
    dtype = torch.float32 if row["autocast"] else torch.bfloat16
    model.to(dtype).cuda().train()
    if row["compiled"]:
        model.compile(fullgraph=True)
    optimizer = _optimizer(row)(model.parameters(), lr=1e-4, weight_decay=0)
    size = row["batch"], 3, PIXELS, PIXELS
    kept = {}

    def step() -> None:
        images, labels = torch.rand(size, dtype=dtype), torch.zeros(row["batch"], dtype=torch.int64)
        with torch.autocast("cuda", torch.bfloat16, enabled=row["autocast"]):
            kept["loss"] = F.cross_entropy(model(images.cuda()), labels.cuda())
        kept["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def _optimizer(row: Row) -> Callable[..., Any]:
    import bitsandbytes
    from torchao import optim

    kinds = {"fused": partial(torch.optim.AdamW, fused=True), "bnb": bitsandbytes.optim.AdamW8bit}
    kind = kinds.get(row["optimizer"]) or getattr(optim, row["optimizer"])
    if row["offloaded"] is None:
        return kind
    gradients = row["offloaded"] == "state and gradients"
    return partial(optim.CPUOffloadOptimizer, optimizer_class=kind, offload_gradients=gradients)
