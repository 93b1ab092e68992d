"""Our own training steps: recorded on a GPU by benchmarks/gpu.py, and predicted as evidence.

A builder takes a Size and returns `(step, model, optimizer)`; `step()` can be called repeatedly. It
creates everything on the GPU, as a CUDA script would. At the full size, activations outweigh
library workspaces. The vocabulary is small, so the peak lies in the blocks and not in the logits.

The steps vary the choices that affect memory: kernels (SDPA's four, normalization, dropout,
optimizers), dtypes, recomputation, and libraries with scratch memory (cuDNN, cuBLAS, sorts).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.internals.cycles import no_cycle_collection
from memlab.model import GPT, GPTConfig
from memlab.trace import Trace
from memlab.train import Setting, build, combined

Built = tuple[Callable[[], object], nn.Module, Optimizer | None]
Around = Callable[[], AbstractContextManager[Any]]


class Size(NamedTuple):
    """The sizes of a step."""

    width: int  # a multiple of 256, for at least two heads of dimension 128
    layers: int
    batch: int
    seq_len: int
    vocabulary: int
    image: int  # pixels per side


FULL = Size(width=1024, layers=4, batch=8, seq_len=1024, vocabulary=4_000, image=128)
SMALL = Size(width=256, layers=2, batch=2, seq_len=32, vocabulary=101, image=16)

STEPS: dict[str, Callable[[Size], Built]] = {}


def step(name: str, builder: Callable[..., Built], **choices: Any) -> None:
    """Register a builder. It runs with a fixed seed, and creates its tensors on the GPU."""

    def built(size: Size) -> Built:
        torch.manual_seed(0)
        with torch.device("cuda"):
            return builder(size, **choices)

    STEPS[name] = built


def predicted(name: str, size: Size, target: str) -> Trace:
    """Predict the second step, with its history."""
    with no_cycle_collection():
        return memlab.predict(lambda: STEPS[name](size), device=target)


def training(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: Callable[[Any], Optimizer] = AdamW,
    around: Around = nullcontext,
) -> Built:
    """Return a plain step: zero_grad, forward inside `around()`, backward, optimizer step."""
    update = optimizer(model.parameters())

    def run() -> None:
        update.zero_grad()
        with around():
            value = loss()
        value.backward()
        update.step()

    return run, model, update


def autocast(dtype: torch.dtype) -> Around:
    return partial(torch.autocast, "cuda", dtype)


FLASH = (SDPBackend.FLASH_ATTENTION,)
EFFICIENT = (SDPBackend.EFFICIENT_ATTENTION,)
CUDNN = (SDPBackend.CUDNN_ATTENTION,)
MATH = (SDPBackend.MATH,)
BF16, FP16 = torch.bfloat16, torch.float16
IN_BF16, IN_FP16 = autocast(BF16), autocast(FP16)

# ------------------------------------------------------------------ language models


@dataclass(frozen=True)
class Variant:
    """Choices of a language model."""

    head_dim: int = 64
    queries_per_key: int = 1
    kernels: tuple[SDPBackend, ...] | None = None  # None lets torch choose
    causal: bool = True
    masked: bool = False  # an explicit boolean causal mask
    attention_dropout: float = 0.0
    dropout: float = 0.0
    norm: Callable[..., nn.Module] = nn.LayerNorm
    dtype: torch.dtype = torch.float32
    reentrant: bool | None = None  # how blocks are checkpointed; None keeps all activations
    label_smoothing: float = 0.0


class VariantAttention(nn.Module):
    """Attention with torch's SDPA, (B, T, C) to (B, T, C)."""

    def __init__(self, size: Size, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        C, D = size.width, variant.head_dim
        self.q = nn.Linear(C, C, bias=False)
        self.kv = nn.Linear(C, 2 * C // variant.queries_per_key, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        mask = torch.ones(size.seq_len, size.seq_len, dtype=torch.bool).tril()
        self.register_buffer("mask", mask if variant.masked else None)
        self.D = D

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        variant = self.variant
        q = self.q(x).view(B, T, -1, self.D).transpose(1, 2)  # (B, H, T, D)
        k, v = self.kv(x).view(B, T, 2, -1, self.D).permute(2, 0, 3, 1, 4)  # (B, KV, T, D) each
        with nullcontext() if variant.kernels is None else sdpa_kernel(list(variant.kernels)):
            out = F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=None if self.mask is None else self.mask[:T, :T],
                dropout_p=variant.attention_dropout if self.training else 0.0,
                is_causal=variant.causal and not variant.masked,
                enable_gqa=variant.queries_per_key > 1,
            )  # fmt: skip
        return self.out(out.transpose(1, 2).reshape(B, T, -1))


class VariantBlock(nn.Module):
    """Attention and an MLP, each with a norm before and dropout after."""

    def __init__(self, size: Size, variant: Variant) -> None:
        super().__init__()
        C = size.width
        self.attention = VariantAttention(size, variant)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.norms = nn.ModuleList(variant.norm(C) for _ in range(2))
        self.dropout = nn.Dropout(variant.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class LanguageModel(nn.Module):
    """A language model that maps tokens (B, T) and targets to a loss."""

    def __init__(self, size: Size, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(VariantBlock(size, variant) for _ in range(size.layers))
        self.norm = variant.norm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self._run(block, x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        smoothing = self.variant.label_smoothing
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        reentrant = self.variant.reentrant
        return block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)


def text(size: Size, device: str | None = None) -> tuple[Tensor, Tensor]:
    """Return contiguous tokens and targets, each (B, T)."""
    shape = size.batch, size.seq_len
    return tuple(torch.randint(size.vocabulary, shape, device=device) for _ in range(2))


def language(
    size: Size, around: Around = nullcontext, is_compiled: bool = False, **choices: Any
) -> Built:
    """Train a variant of the language model."""
    variant = Variant(**choices)
    model = LanguageModel(size, variant).to(variant.dtype)
    run = torch.compile(model) if is_compiled else model
    tokens, targets = text(size)
    return training(model, lambda: run(tokens, targets), around=around)


def large_vocabulary(size: Size, **options: Any) -> Built:
    """Train one layer with so large a vocabulary that the logits dominate."""
    return language(size._replace(vocabulary=16 * size.vocabulary, layers=1), **options)


LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "sdpa auto, causal, 64, float32": {},
    "sdpa auto, causal, 64, bf16": {"dtype": BF16},
    "sdpa auto, full, 128, bf16": {"dtype": BF16, "head_dim": 128, "causal": False},
    "sdpa auto, masked, 64, bf16": {"dtype": BF16, "masked": True},
    "sdpa flash, causal, 64, bf16": {"dtype": BF16, "kernels": FLASH},
    "sdpa flash, full, 128, bf16": {
        **{"dtype": BF16, "kernels": FLASH, "causal": False, "head_dim": 128},
    },
    "sdpa flash, causal, 128, float16": {"dtype": FP16, "kernels": FLASH, "head_dim": 128},
    "sdpa efficient, causal, 64, float32": {"kernels": EFFICIENT},
    "sdpa efficient, full, 128, bf16": {
        **{"dtype": BF16, "kernels": EFFICIENT, "causal": False, "head_dim": 128},
    },
    "sdpa efficient, masked, 64, bf16": {"dtype": BF16, "kernels": EFFICIENT, "masked": True},
    "sdpa cudnn, causal, 128, bf16": {"dtype": BF16, "kernels": CUDNN, "head_dim": 128},
    "sdpa cudnn, full, 64, bf16": {"dtype": BF16, "kernels": CUDNN, "causal": False},
    "sdpa math, causal, 64, float32": {"kernels": MATH},
    "sdpa math, full, 128, bf16": {
        **{"dtype": BF16, "kernels": MATH, "causal": False, "head_dim": 128},
    },
    "grouped queries, auto, 64, float32": {"queries_per_key": 2},
    "grouped queries, auto, 128, bf16": {"dtype": BF16, "queries_per_key": 2, "head_dim": 128},
    "grouped queries, flash, 64, bf16": {"dtype": BF16, "queries_per_key": 2, "kernels": FLASH},
    "attention with dropout, flash, bf16": {
        **{"dtype": BF16, "attention_dropout": 0.1, "kernels": FLASH},
    },
    "attention with dropout, efficient, float32": {"attention_dropout": 0.1, "kernels": EFFICIENT},
    "dropout after each branch": {"dropout": 0.1},
    "dropout after each branch, bf16": {"dropout": 0.1, "dtype": BF16},
    "RMSNorm": {"norm": nn.RMSNorm},
    "RMSNorm, bf16": {"norm": nn.RMSNorm, "dtype": BF16},
    "label smoothing": {"label_smoothing": 0.1},
    "autocast bf16": {"around": IN_BF16},
    "autocast bf16, RMSNorm, dropout": {"around": IN_BF16, "norm": nn.RMSNorm, "dropout": 0.1},
    "autocast bf16, checkpointed": {"around": IN_BF16, "reentrant": False, "dropout": 0.1},
    "checkpointed": {"reentrant": False},
    "checkpointed, reentrant": {"reentrant": True},
    "checkpointed, dropout, bf16": {"reentrant": False, "dropout": 0.1, "dtype": BF16},
    "compiled, float32": {"is_compiled": True},
    "compiled, bf16": {"is_compiled": True, "dtype": BF16},
    "compiled, autocast bf16": {"is_compiled": True, "around": IN_BF16},
    "compiled, autocast bf16, RMSNorm, dropout": {
        **{"is_compiled": True, "around": IN_BF16, "norm": nn.RMSNorm, "dropout": 0.1},
    },
    "compiled, checkpointed": {"is_compiled": True, "reentrant": False},
}
for _name, _choices in LANGUAGE_MODELS.items():
    step(_name, language, **_choices)
step("cross-entropy of a large vocabulary", large_vocabulary)
step("cross-entropy of a large vocabulary, autocast bf16", large_vocabulary, around=IN_BF16)
step("compiled, large vocabulary, autocast bf16", large_vocabulary, around=IN_BF16,
     is_compiled=True)  # fmt: skip


def course_gpt(size: Size, around: Around = nullcontext) -> Built:
    """Train memlab's GPT: RMSNorm and rotary embeddings in small operators, grouped queries."""
    C, heads = size.width, size.width // 64
    sizes = size.vocabulary, C, size.layers, heads, heads // 2, 2 * C, size.seq_len
    model = GPT(GPTConfig(*sizes))
    tokens, targets = text(size)
    return training(model, lambda: model(tokens, targets), around=around)


step("course's GPT, float32", course_gpt)
step("autocast bf16, course's GPT", course_gpt, around=IN_BF16)

# ------------------------------------------------------------------ loops


def loop(
    size: Size, body: Callable[..., object], batch: int = 1, device: str | None = None
) -> Built:
    """Train the plain language model with `body(model, optimizer, tokens, targets)` as the step."""
    model = LanguageModel(size, Variant())
    tokens, targets = text(size._replace(batch=batch * size.batch), device)
    optimizer = AdamW(model.parameters())
    return lambda: body(model, optimizer, tokens, targets), model, optimizer


def accumulated(model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        (model(x, y) / 4).backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    model(tokens, targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def loss_read(model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> float:
    optimizer.zero_grad(set_to_none=False)
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def varying_lengths(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor
) -> None:
    """Train twelve steps on sequences of different lengths, which fragments the cache.

    All twelve count as one step, because no two are alike.
    """
    for number in range(12):
        length = 1 + 37 * (7 * number + 3) % tokens.shape[1]
        optimizer.zero_grad()
        model(tokens[:, :length], targets[:, :length].contiguous()).backward()
        optimizer.step()


def scaled_and_clipped(size: Size) -> Built:
    model = LanguageModel(size, Variant())
    tokens, targets = text(size)
    optimizer, scaler = AdamW(model.parameters()), torch.amp.GradScaler("cuda")

    def run() -> None:
        optimizer.zero_grad()
        with IN_FP16():
            loss = model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return run, model, optimizer


def copied(size: Size) -> Built:
    """Copy the batch from the CPU in each step; only the copy counts."""
    model = LanguageModel(size, Variant())
    tokens, targets = text(size, "cpu")
    return training(model, lambda: model(tokens.to("cuda"), targets.to("cuda")))


def copied_on_side_stream(size: Size) -> Built:
    """Copy on a side stream: the allocator keeps a pool per stream, and blocks still in use."""
    side = torch.cuda.Stream()

    def body(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> None:
        optimizer.zero_grad()
        with torch.cuda.stream(side):
            batch = tuple(tensor.to("cuda") for tensor in batch)
        torch.cuda.current_stream().wait_stream(side)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())
        model(*batch).backward()
        optimizer.step()

    return loop(size, body, device="cpu")


def evaluation(size: Size, without_gradients: Around, around: Around = nullcontext) -> Built:
    model = LanguageModel(size, Variant()).eval()
    tokens, targets = text(size)

    def run() -> None:
        with without_gradients(), around():
            model(tokens, targets)

    return run, model, None


step("gradients accumulated over four micro-batches", loop, body=accumulated, batch=4)
step("gradients clipped", loop, body=clipped)
step("loss read each step", loop, body=loss_read)
step("varying lengths", loop, body=varying_lengths)
step("autocast float16, GradScaler, clipped", scaled_and_clipped)
step("batch copied from the CPU each step", copied)
step("batch copied on a side stream", copied_on_side_stream)
for _name, _context in {"no_grad": torch.no_grad, "inference mode": torch.inference_mode}.items():
    step(_name, evaluation, without_gradients=_context)
    step(f"{_name}, autocast bf16", evaluation, without_gradients=_context, around=IN_BF16)

# ------------------------------------------------------------------ optimizers


def perceptron(size: Size) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return an MLP whose weights outweigh its activations, and its loss."""
    C = 2 * size.width
    layers = [layer for _ in range(size.layers) for layer in (nn.Linear(C, C), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(C, 10))
    x, y = torch.randn(size.batch, C), torch.randint(10, (size.batch,))
    return model, lambda: F.cross_entropy(model(x), y)


def compiled_optimizer(size: Size) -> Built:
    model, loss = perceptron(size)
    optimizer = AdamW(model.parameters())
    update = torch.compile(optimizer.step)

    def run() -> None:
        optimizer.zero_grad()
        loss().backward()
        update()

    return run, model, optimizer


sgd = partial(SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW, default": AdamW,
    "AdamW, foreach": partial(AdamW, foreach=True),
    "AdamW, loop": partial(AdamW, foreach=False),
    "AdamW, fused": partial(AdamW, fused=True),
    "AdamW, amsgrad": partial(AdamW, amsgrad=True),
    "AdamW, capturable": partial(AdamW, capturable=True),
    "SGD, momentum": sgd,
    "SGD, fused": partial(SGD, lr=0.01, momentum=0.9, fused=True),
    "SGD, stateless": partial(SGD, lr=0.01),
    "Adafactor": Adafactor,
}
for _name, _optimizer in OPTIMIZERS.items():
    step(
        _name, lambda size, optimizer: training(*perceptron(size), optimizer), optimizer=_optimizer
    )
step("compiled optimizer", compiled_optimizer)

# ------------------------------------------------------------------ other layers


def recurrent(size: Size, kind: type[nn.RNNBase]) -> Built:
    """Train two recurrent layers with a target for each output."""
    C = size.width // 2
    model = kind(C, C, num_layers=2, batch_first=True)
    x, y = (torch.randn(size.batch, size.seq_len // 16, C) for _ in range(2))
    return training(model, lambda: (model(x)[0] - y).square().mean())


def embedding(size: Size) -> Built:
    """Train a large embedding; its gradient is as large as the table."""
    model = nn.Embedding(16 * size.vocabulary, size.width)
    rows = torch.randint(16 * size.vocabulary, (size.batch, size.seq_len))
    return training(model, lambda: model(rows).square().mean())


step("LSTM", recurrent, kind=nn.LSTM)
step("GRU", recurrent, kind=nn.GRU)
step("embedding alone", embedding)

# ------------------------------------------------------------------ convolutional networks


def images(size: Size, channels: int = 3, dimensions: int = 2) -> Tensor:
    return torch.randn(4 * size.batch, channels, *[size.image] * dimensions)


def plain_convolutions(
    size: Size, layout: torch.memory_format = torch.contiguous_format, **options: Any
) -> Built:
    """Train three stages of convolution, BatchNorm, ReLU and pooling."""
    channels = (3, size.width // 8, size.width // 4, size.width // 2)
    stages = [
        nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        for inside, outside in pairwise(channels)
    ]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10)
    model = nn.Sequential(*stages, *ends).to(memory_format=layout)
    batch = images(size).to(memory_format=layout)
    labels = torch.randint(10, (4 * size.batch,))
    return training(model, lambda: F.cross_entropy(model(batch), labels), **options)


class Bottleneck(nn.Module):
    """A residual bottleneck: 1 × 1, k × k and 1 × 1 convolutions, each with a norm."""

    def __init__(
        self, inside: int, outside: int, *, stride: int = 1, groups: int = 1, kernel: int = 3,
        expansion: float = 0.25, norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:  # fmt: skip
        super().__init__()
        C = int(expansion * outside)
        convolution = partial(nn.Conv2d, bias=False)
        self.body = nn.Sequential(
            *(convolution(inside, C, 1), norm(C), nn.ReLU(inplace=True)),
            convolution(C, C, kernel, stride, kernel // 2, groups=C if groups == -1 else groups),
            *(norm(C), nn.ReLU(inplace=True)),
            *(convolution(C, outside, 1), norm(outside)),
        )
        same = stride == 1 and inside == outside
        self.skip = nn.Identity() if same else convolution(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def residual_network(size: Size, **options: Any) -> nn.Module:
    """Return a stem of 7 × 7 and four stages of two bottlenecks each."""
    C = size.width // 4
    widths = (C, 2 * C, 4 * C, 8 * C)
    stages = [
        block
        for inside, outside in pairwise((C // 4, *widths))
        for block in (
            Bottleneck(inside, outside, stride=1 if outside == C else 2, **options),
            Bottleneck(outside, outside, **options),
        )
    ]
    stem = nn.Conv2d(3, C // 4, 7, stride=2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000)
    return nn.Sequential(stem, nn.BatchNorm2d(C // 4), nn.ReLU(inplace=True), pool, *stages, *ends)


def classification(
    size: Size,
    around: Around = nullcontext,
    layout: torch.memory_format = torch.contiguous_format,
    is_compiled: bool = False,
    benchmark: bool = False,
    **options: Any,
) -> Built:
    """Train a residual network."""
    torch.backends.cudnn.benchmark = benchmark
    model = residual_network(size, **options).to(memory_format=layout)
    x = images(size).to(memory_format=layout)
    labels = torch.randint(1000, (len(x),))
    run = torch.compile(model) if is_compiled else model
    return training(model, lambda: F.cross_entropy(run(x), labels), around=around)


LAST = {"layout": torch.channels_last}
DEPTHWISE = {"groups": -1, "expansion": 1.0}
RESIDUAL_NETWORKS: dict[str, dict[str, Any]] = {
    "residual network": {},
    "residual network, autocast bf16": {"around": IN_BF16},
    "residual network, channels last, autocast bf16": {"around": IN_BF16, **LAST},
    "residual network, channels last, autocast float16": {"around": IN_FP16, **LAST},
    "residual network, cudnn.benchmark": {"benchmark": True},
    "residual network, four groups": {"groups": 4},
    "depthwise network": DEPTHWISE,
    "depthwise network, channels last, autocast bf16": {"around": IN_BF16, **DEPTHWISE, **LAST},
    "residual network, 7 × 7": {"kernel": 7},
    "residual network, GroupNorm": {"norm": partial(nn.GroupNorm, 8)},
    "compiled residual network": {"is_compiled": True},
    "compiled residual network, channels last, autocast bf16": {
        **{"is_compiled": True, "around": IN_BF16, **LAST},
    },
}
step("convolutions, BatchNorm, SGD", plain_convolutions, optimizer=sgd)
step("convolutions, channels last, autocast bf16", plain_convolutions, around=IN_BF16, **LAST)
for _name, _choices in RESIDUAL_NETWORKS.items():
    step(_name, classification, **_choices)


class UNet(nn.Module):
    """Two levels down and up with skips, GroupNorm and SiLU, as in diffusion models."""

    def __init__(self, width: int, dimensions: int = 2) -> None:
        super().__init__()
        kinds = {
            2: (nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d),
            3: (nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d),
        }
        self.convolution, transposed, pool = kinds[dimensions]
        self.inside = self._twice(4, width)
        self.middle = self._twice(width, 2 * width)
        self.deepest = self._twice(2 * width, 4 * width)
        self.pool = pool(2)
        self.up = nn.ModuleList(
            [transposed(4 * width, 2 * width, 2, 2), transposed(2 * width, width, 2, 2)]
        )
        self.outside = nn.ModuleList(
            [self._twice(4 * width, 2 * width), self._twice(2 * width, width)]
        )
        self.last = self.convolution(width, 4, 1)

    def _twice(self, inside: int, outside: int) -> nn.Module:
        layers = [
            (self.convolution(here, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU())
            for here in (inside, outside)
        ]
        return nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, x: Tensor) -> Tensor:
        first = self.inside(x)
        second = self.middle(self.pool(first))
        x = self.deepest(self.pool(second))
        for up, outside, skip in zip(self.up, self.outside, (second, first), strict=True):
            x = outside(torch.cat((up(x), skip), dim=1))
        return self.last(x)


def restoration(size: Size, dimensions: int = 2, around: Around = nullcontext) -> Built:
    """Train a U-Net to restore its input."""
    model = UNet(size.width // 16, dimensions)
    small = size if dimensions == 2 else size._replace(image=size.image // 4)
    x = images(small, 4, dimensions)
    return training(model, lambda: F.mse_loss(model(x), x), around=around)


class WaveEncoder(nn.Module):
    """Strided 1-D convolutions, as at the start of speech models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        kernels = ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))
        widths = (1, *[width] * len(kernels))
        self.layers = nn.ModuleList(
            nn.Conv1d(inside, outside, kernel, stride, bias=False)
            for (inside, outside), (kernel, stride) in zip(pairwise(widths), kernels, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def speech(size: Size) -> Built:
    model = WaveEncoder(size.width // 2)
    x = torch.randn(size.batch, 1, 64 * size.seq_len)
    return training(model, lambda: model(x).square().mean())


step("U-Net", restoration)
step("U-Net, autocast bf16", restoration, around=IN_BF16)
step("U-Net, 3-D", restoration, dimensions=3)
step("U-Net, 3-D, autocast bf16", restoration, dimensions=3, around=IN_BF16)
step("speech encoder", speech)

# ------------------------------------------------------------------ models and techniques of others


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def hugging_face(
    size: Size, config: str, model: str, attention: str, dtype: torch.dtype, **names: str
) -> Built:
    """Train a model with random weights; `names` maps our sizes to the config's arguments."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers  # takes seconds to import

    C, heads = size.width, size.width // 64
    sizes = {"vocabulary": size.vocabulary, "width": C, "inner": 3 * C, "layers": size.layers,
             "heads": heads, "key_heads": heads // 2, "seq_len": size.seq_len,
             "first": 0, "last": 1}  # fmt: skip
    chosen = {theirs: sizes[ours] for ours, theirs in names.items()}
    made = getattr(transformers, config)(**chosen, attn_implementation=attention)
    with default_dtype(dtype):
        network = getattr(transformers, model)(made).train()
    tokens, _ = text(size)
    return training(network, lambda: network(input_ids=tokens, labels=tokens, use_cache=False).loss)


LLAMA = {
    **{"config": "LlamaConfig", "model": "LlamaForCausalLM", "vocabulary": "vocab_size"},
    **{"width": "hidden_size", "inner": "intermediate_size", "layers": "num_hidden_layers"},
    **{"heads": "num_attention_heads", "key_heads": "num_key_value_heads"},
    "seq_len": "max_position_embeddings",
}
GPT2 = {
    **{"config": "GPT2Config", "model": "GPT2LMHeadModel", "vocabulary": "vocab_size"},
    **{"width": "n_embd", "layers": "n_layer", "heads": "n_head", "seq_len": "n_positions"},
    **{"first": "bos_token_id", "last": "eos_token_id"},
}
FLOAT32 = torch.float32
step("transformers' Llama, sdpa, bf16", hugging_face, attention="sdpa", dtype=BF16, **LLAMA)
step("transformers' Llama, eager, float32", hugging_face, attention="eager", dtype=FLOAT32, **LLAMA)
step("transformers' GPT-2, sdpa, float32", hugging_face, attention="sdpa", dtype=FLOAT32, **GPT2)


def of_memlab(technique: str) -> Callable[[Size], Built]:
    """Return a builder of the step that `memlab measure` takes with a technique."""

    def built(size: Size) -> Built:
        torch.manual_seed(0)
        sizes = ("25m", 8, 512) if size.width > SMALL.width else ("tiny", 2, 32)
        taken = build(Setting(*sizes, device="cuda"), combined(technique))
        return taken.step, taken.model, taken.optimizer

    return built


for _technique in (
    *("accumulation", "lora", "loss-scaling", "bfloat16", "master-weights", "checkpointing"),
    *("sqrt-checkpointing", "selective-checkpointing", "checkpointing+autocast"),
):
    STEPS[f"memlab: {_technique}"] = of_memlab(_technique)
