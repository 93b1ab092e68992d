"""A compiled GPT as it was measured on an H100 (benchmarks/evidence/h100.json).

Written from a description of the measured script: the same tensors, dtypes and operators. The
optimizer has the measured one's state and a simpler update, because the peak is in backward.
FlashAttention 3 saves what torch's flash attention saves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM, VOCABULARY, SEQ_LEN, BATCH = 128, 8192, 2048, 128
_GATE_WIDTH, _LOGIT_CAP = 32, 15


def build(facts: Mapping[str, Any]) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """Return (step, model, optimizer) of a row."""
    with torch.device("cuda"):
        model = GPT(facts["depth"], facts["width"])
        batch = torch.empty(2, BATCH, SEQ_LEN, dtype=torch.long)
    optimizer = StackedMomentum(model)
    compiled = torch.compile(model, dynamic=False)

    def step() -> None:
        for _ in range(facts["micro_steps"]):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(*batch)
            (loss / facts["micro_steps"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def norm(x: Tensor) -> Tensor:
    """Normalize in x's dtype: autocast has a rule for it only since torch 2.12."""
    with torch.autocast("cuda", enabled=False):
        return F.rms_norm(x, x.shape[-1:])


class Attention(nn.Module):
    """Attention with normalized queries and keys; some layers add an embedding to the values."""

    def __init__(self, width: int, has_value_embedding: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        heads = width // HEAD_DIM
        self.gate = nn.Linear(_GATE_WIDTH, heads, bias=False) if has_value_embedding else None

    def forward(self, x: Tensor, added: Tensor | None, rotation: tuple[Tensor, Tensor]) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            layer(x).view(B, T, -1, HEAD_DIM) for layer in (self.query, self.key, self.value)
        )  # (B, T, H, D)
        if self.gate is not None and added is not None:
            share = 2 * torch.sigmoid(self.gate(x[..., :_GATE_WIDTH]))  # (B, T, H)
            v = v + share.unsqueeze(-1) * added.view_as(v)
        q, k = norm(rotated(q, *rotation)), norm(rotated(k, *rotation))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, width: int, has_value_embedding: bool) -> None:
        super().__init__()
        self.attention = Attention(width, has_value_embedding)
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in
                              ((width, 4 * width), (4 * width, width)))  # fmt: skip

    def forward(self, x: Tensor, added: Tensor | None, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(norm(x), added, rotation)
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    """Maps tokens (B, T) and targets to a loss."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.with_values = [layer % 2 != depth % 2 for layer in range(depth)]  # the last one too
        self.tokens = nn.Embedding(VOCABULARY, width, dtype=torch.bfloat16)
        self.values = nn.ModuleList(
            nn.Embedding(VOCABULARY, width, dtype=torch.bfloat16)
            for _ in range(sum(self.with_values))
        )
        self.layers = nn.ModuleList(Layer(width, has) for has in self.with_values)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.scale, self.first_scale = (nn.Parameter(torch.ones(depth)) for _ in range(2))
        for name in ("cos", "sin"):
            table = torch.empty(1, 10 * SEQ_LEN, 1, HEAD_DIM // 2, dtype=torch.bfloat16)
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        T = tokens.shape[1]
        rotation = self.cos[:, :T], self.sin[:, :T]
        x = first = norm(self.tokens(tokens))  # (B, T, C)
        values = iter(self.values)
        for i, layer in enumerate(self.layers):
            x = self.scale[i] * x + self.first_scale[i] * first
            added = next(values)(tokens) if self.with_values[i] else None
            x = layer(x, added, rotation)
        logits = self.head(norm(x)).float()  # (B, T, V)
        logits = _LOGIT_CAP * torch.tanh(logits / _LOGIT_CAP)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class StackedMomentum(torch.optim.Optimizer):
    """One momentum for all matrices of a shape, with a second moment per row or column. Other
    parameters have Adam's two moments in their dtype."""

    def __init__(self, model: GPT) -> None:
        matrices = list(model.layers.parameters())
        shapes = dict.fromkeys(weight.shape for weight in matrices)
        groups = [[w for w in matrices if w.shape == shape] for shape in shapes]
        inside = set(matrices)
        others = [[weight] for weight in model.parameters() if weight not in inside]
        super().__init__([{"params": group} for group in (*groups, *others)], {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for group in self.param_groups:
            weights = group["params"]
            grads = torch.stack([weight.grad for weight in weights])  # (n, rows, columns)
            state = self.state[weights[0]] or self._zeros(weights[0], grads)
            for moment in state.values():
                moment.mul_(0.95)
            torch._foreach_add_(weights, list(state["momentum"].unbind()), alpha=-0.02)

    def _zeros(self, weight: Tensor, stacked: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape[0], weight.shape[-1]
        is_matrix = weight.dim() == 2 and weight.dtype == torch.float32 and len(stacked) > 1
        second = (
            (stacked[:, :, :1] if rows >= columns else stacked[:, :1]) if is_matrix else stacked
        )
        self.state[weight] = {
            "momentum": torch.zeros_like(stacked), "second": torch.zeros_like(second),
        }  # fmt: skip
        return self.state[weight]
