"""Builders of training steps, to predict on a CPU and record on a GPU.

A builder takes a Size and a device and returns `(step, model, optimizer)`; `step()` can be called
repeatedly. It creates everything on the device, as a CUDA script would. On a GPU the sizes are
large enough that activations outweigh library workspaces. The vocabulary is small, so the peak lies
in the blocks and not in the logits. Rehearsals use small sizes.

The configurations vary the choices that affect memory: kernels (SDPA's four, normalization,
dropout, optimizers), dtypes, recomputation, and libraries with scratch memory (cuDNN, cuBLAS,
sorts).
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from memlab.model import GPT, GPTConfig
from memlab.train import Setting, build, combined

Step = Callable[[], object]
Built = tuple[Step, nn.Module, Optimizer | None]


class Size(NamedTuple):
    """The sizes of a configuration."""

    width: int  # a multiple of 256, for at least two heads of dimension 128
    layers: int
    batch: int
    seq_len: int
    vocabulary: int
    image: int  # pixels per side

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of width {self.width}, {self.batch} × {self.seq_len} tokens of "
            f"{self.vocabulary:,}, images of {self.image} × {self.image}"
        )


FULL = Size(width=1024, layers=4, batch=8, seq_len=1024, vocabulary=4_000, image=128)
SMALL = Size(width=256, layers=2, batch=2, seq_len=32, vocabulary=101, image=16)

Builder = Callable[[Size, str], Built]


@dataclass(frozen=True)
class Configuration:
    """A builder, and the package that it requires besides torch."""

    build: Builder
    needs: str | None = None

    @property
    def missing(self) -> str | None:
        """Return the required package if it is not installed."""
        is_installed = self.needs is None or importlib.util.find_spec(self.needs) is not None
        return None if is_installed else self.needs


CONFIGURATIONS: dict[str, Configuration] = {}


def configuration(name: str, needs: str | None = None) -> Callable[[Builder], Builder]:
    """Register a builder in `CONFIGURATIONS`; it runs with a fixed seed."""

    def register(builder: Builder) -> Builder:
        def build(size: Size, device: str) -> Built:
            torch.manual_seed(0)
            return builder(size, device)

        CONFIGURATIONS[name] = Configuration(build, needs)
        return builder

    return register


# ------------------------------------------------------------------ variants of a language model


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
    checkpointing: str | None = None  # "reentrant" or "nonreentrant"
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
        return F.cross_entropy(
            logits, targets.flatten(), label_smoothing=self.variant.label_smoothing
        )

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.variant.checkpointing is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.variant.checkpointing == "reentrant")


def language_model(size: Size, device: str, variant: Variant) -> LanguageModel:
    with torch.device(device):
        return LanguageModel(size, variant).to(variant.dtype)


def text(size: Size, device: str) -> tuple[Tensor, Tensor]:
    """Return contiguous tokens and targets, each (B, T)."""
    shape = size.batch, size.seq_len
    return tuple(torch.randint(size.vocabulary, shape, device=device) for _ in range(2))


def training(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: Callable[[Any], Optimizer] = AdamW,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Built:
    """Return a plain step: zero_grad, forward inside `around()`, backward, optimizer step."""
    update = optimizer(model.parameters())

    def step() -> None:
        update.zero_grad()
        with around():
            value = loss()
        value.backward()
        update.step()

    return step, model, update


def language_training(size: Size, device: str, variant: Variant, **options: Any) -> Built:
    model = language_model(size, device, variant)
    tokens, targets = text(size, device)
    return training(model, lambda: model(tokens, targets), **options)


def varied(name: str, **choices: Any) -> None:
    """Register the plain training of a variant of the language model."""
    configuration(name)(lambda size, device: language_training(size, device, Variant(**choices)))


# ------------------------------------------------------------------ attention kernels

FLASH = (SDPBackend.FLASH_ATTENTION,)
EFFICIENT = (SDPBackend.EFFICIENT_ATTENTION,)
CUDNN = (SDPBackend.CUDNN_ATTENTION,)
MATH = (SDPBackend.MATH,)
BF16, FP16 = torch.bfloat16, torch.float16

varied("sdpa auto, causal, 64, float32")
varied("sdpa auto, causal, 64, bf16", dtype=BF16)
varied("sdpa auto, full, 128, bf16", dtype=BF16, head_dim=128, causal=False)
varied("sdpa auto, masked, 64, bf16", dtype=BF16, masked=True)
varied("sdpa flash, causal, 64, bf16", dtype=BF16, kernels=FLASH)
varied("sdpa flash, full, 128, bf16", dtype=BF16, kernels=FLASH, causal=False, head_dim=128)
varied("sdpa flash, causal, 128, float16", dtype=FP16, kernels=FLASH, head_dim=128)
varied("sdpa efficient, causal, 64, float32", kernels=EFFICIENT)
varied("sdpa efficient, full, 128, bf16", dtype=BF16, kernels=EFFICIENT, causal=False,
       head_dim=128)  # fmt: skip
varied("sdpa efficient, masked, 64, bf16", dtype=BF16, kernels=EFFICIENT, masked=True)
varied("sdpa cudnn, causal, 128, bf16", dtype=BF16, kernels=CUDNN, head_dim=128)
varied("sdpa cudnn, full, 64, bf16", dtype=BF16, kernels=CUDNN, causal=False)
varied("sdpa math, causal, 64, float32", kernels=MATH)
varied("sdpa math, full, 128, bf16", dtype=BF16, kernels=MATH, causal=False, head_dim=128)
varied("grouped queries, auto, 64, float32", queries_per_key=2)
varied("grouped queries, auto, 128, bf16", dtype=BF16, queries_per_key=2, head_dim=128)
varied("grouped queries, flash, 64, bf16", dtype=BF16, queries_per_key=2, kernels=FLASH)
varied("attention with dropout, flash, bf16", dtype=BF16, attention_dropout=0.1, kernels=FLASH)
varied("attention with dropout, efficient, float32", attention_dropout=0.1, kernels=EFFICIENT)

# ------------------------------------------------------------------ layers

varied("dropout after each branch", dropout=0.1)
varied("dropout after each branch, bf16", dropout=0.1, dtype=BF16)
varied("RMSNorm", norm=nn.RMSNorm)
varied("RMSNorm, bf16", norm=nn.RMSNorm, dtype=BF16)
varied("label smoothing", label_smoothing=0.1)


@configuration("course's GPT, float32")
def course_gpt(size: Size, device: str, **options: Any) -> Built:
    """Train memlab's GPT: RMSNorm and rotary embeddings in small operators, grouped queries."""
    heads = size.width // 64
    config = GPTConfig(
        size.vocabulary, size.width, size.layers, heads, heads // 2, 2 * size.width, size.seq_len
    )
    with torch.device(device):
        model = GPT(config)
    tokens, targets = text(size, device)
    return training(model, lambda: model(tokens, targets), **options)


@configuration("convolutions, BatchNorm, SGD")
def convolutions(size: Size, device: str, **options: Any) -> Built:
    return training(*image_classifier(size, device), optimizer=sgd, **options)


@configuration("convolutions, channels last, autocast bf16")
def convolutions_channels_last(size: Size, device: str) -> Built:
    model, loss = image_classifier(size, device, torch.channels_last)
    return training(model, loss, around=autocast(BF16))


def image_classifier(
    size: Size, device: str, layout: torch.memory_format = torch.contiguous_format
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return three stages of convolution, BatchNorm, ReLU and pooling, and their loss."""
    channels = (3, size.width // 8, size.width // 4, size.width // 2)
    with torch.device(device):
        stages = [
            nn.Sequential(
                nn.Conv2d(inside, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            )
            for inside, outside in pairwise(channels)
        ]
        model = nn.Sequential(
            *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10)
        ).to(memory_format=layout)
        images = torch.randn(4 * size.batch, 3, size.image, size.image).to(memory_format=layout)
        labels = torch.randint(10, (4 * size.batch,))
    return model, lambda: F.cross_entropy(model(images), labels)


@configuration("LSTM")
def lstm(size: Size, device: str) -> Built:
    return recurrent(nn.LSTM, size, device)


@configuration("GRU")
def gru(size: Size, device: str) -> Built:
    return recurrent(nn.GRU, size, device)


def recurrent(kind: type[nn.RNNBase], size: Size, device: str) -> Built:
    """Train two recurrent layers with a target for each output."""
    C = size.width // 2
    with torch.device(device):
        model = kind(C, C, num_layers=2, batch_first=True)
        x, y = (torch.randn(size.batch, size.seq_len // 16, C) for _ in range(2))
    return training(model, lambda: (model(x)[0] - y).square().mean())


@configuration("embedding alone")
def embedding(size: Size, device: str) -> Built:
    """Train a large embedding; its gradient is as large as the table."""
    with torch.device(device):
        model = nn.Embedding(16 * size.vocabulary, size.width)
        rows = torch.randint(16 * size.vocabulary, (size.batch, size.seq_len))
    return training(model, lambda: model(rows).square().mean())


@configuration("cross-entropy of a large vocabulary")
def large_vocabulary(size: Size, device: str) -> Built:
    return language_training(large(size), device, Variant())


@configuration("cross-entropy of a large vocabulary, autocast bf16")
def large_vocabulary_autocast(size: Size, device: str) -> Built:
    return language_training(large(size), device, Variant(), around=autocast(BF16))


def large(size: Size) -> Size:
    """Return a size at which the logits dominate."""
    return size._replace(vocabulary=16 * size.vocabulary, layers=1)


# ------------------------------------------------------------------ optimizers


def perceptron(size: Size, device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return an MLP whose weights outweigh its activations."""
    C = 2 * size.width
    with torch.device(device):
        layers = [layer for _ in range(size.layers) for layer in (nn.Linear(C, C), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(C, 10))
        x, y = torch.randn(size.batch, C), torch.randint(10, (size.batch,))
    return model, lambda: F.cross_entropy(model(x), y)


def sgd(weights: Any) -> Optimizer:
    return SGD(weights, lr=0.01, momentum=0.9, weight_decay=1e-4)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW, default": AdamW,
    "AdamW, foreach": lambda weights: AdamW(weights, foreach=True),
    "AdamW, loop": lambda weights: AdamW(weights, foreach=False),
    "AdamW, fused": lambda weights: AdamW(weights, fused=True),
    "AdamW, amsgrad": lambda weights: AdamW(weights, amsgrad=True),
    "AdamW, capturable": lambda weights: AdamW(weights, capturable=True),
    "SGD, momentum": sgd,
    "SGD, fused": lambda weights: SGD(weights, lr=0.01, momentum=0.9, fused=True),
    "SGD, stateless": lambda weights: SGD(weights, lr=0.01),
    "Adafactor": Adafactor,
}


def _register(name: str, optimizer: Callable[[Any], Optimizer]) -> None:
    @configuration(name)
    def build(size: Size, device: str) -> Built:
        return training(*perceptron(size, device), optimizer=optimizer)


for _name, _optimizer in OPTIMIZERS.items():
    _register(_name, _optimizer)

# ------------------------------------------------------------------ mixed precision


def autocast(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast("cuda", dtype)


@configuration("autocast bf16")
def autocast_bf16(size: Size, device: str) -> Built:
    return language_training(size, device, Variant(), around=autocast(BF16))


@configuration("autocast bf16, RMSNorm, dropout")
def autocast_bf16_rms(size: Size, device: str) -> Built:
    variant = Variant(norm=nn.RMSNorm, dropout=0.1)
    return language_training(size, device, variant, around=autocast(BF16))


@configuration("autocast bf16, course's GPT")
def autocast_bf16_gpt(size: Size, device: str) -> Built:
    return course_gpt(size, device, around=autocast(BF16))


@configuration("autocast bf16, checkpointed")
def autocast_bf16_checkpointed(size: Size, device: str) -> Built:
    variant = Variant(checkpointing="nonreentrant", dropout=0.1)
    return language_training(size, device, variant, around=autocast(BF16))


@configuration("autocast float16, GradScaler, clipped")
def autocast_float16(size: Size, device: str) -> Built:
    model = language_model(size, device, Variant())
    tokens, targets = text(size, device)
    optimizer, scaler = AdamW(model.parameters()), torch.amp.GradScaler("cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", FP16):
            loss = model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step, model, optimizer


# ------------------------------------------------------------------ loops

varied("checkpointed", checkpointing="nonreentrant")
varied("checkpointed, reentrant", checkpointing="reentrant")
varied("checkpointed, dropout, bf16", checkpointing="nonreentrant", dropout=0.1, dtype=BF16)


@configuration("gradients accumulated over four micro-batches")
def accumulation(size: Size, device: str) -> Built:
    model = language_model(size, device, Variant())
    tokens, targets = text(size._replace(batch=4 * size.batch), device)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
            (model(x, y) / 4).backward()
        optimizer.step()

    return step, model, optimizer


@configuration("gradients clipped")
def clipped(size: Size, device: str) -> Built:
    model = language_model(size, device, Variant())
    tokens, targets = text(size, device)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, model, optimizer


@configuration("loss read each step")
def loss_read(size: Size, device: str) -> Built:
    model = language_model(size, device, Variant())
    tokens, targets = text(size, device)
    optimizer = AdamW(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=False)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, model, optimizer


@configuration("batch copied from the CPU each step")
def copied(size: Size, device: str) -> Built:
    """Copy the batch from the CPU in each step; only the copy counts."""
    model = language_model(size, device, Variant())
    tokens, targets = text(size, "cpu")
    return training(model, lambda: model(tokens.to(device), targets.to(device)))


@configuration("batch copied on a side stream")
def copied_on_side_stream(size: Size, device: str) -> Built:
    """Copy on a side stream: the allocator keeps a pool per stream, and blocks still in use."""
    model = language_model(size, device, Variant())
    tokens, targets = text(size, "cpu")
    optimizer, side = AdamW(model.parameters()), torch.cuda.Stream()

    def step() -> None:
        optimizer.zero_grad()
        with torch.cuda.stream(side):
            batch = [tensor.to(device) for tensor in (tokens, targets)]
        torch.cuda.current_stream().wait_stream(side)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())
        model(*batch).backward()
        optimizer.step()

    return step, model, optimizer


# ------------------------------------------------------------------ without gradients


def evaluation(
    size: Size, device: str, without_gradients: Callable[[], Any], dtype: torch.dtype | None = None
) -> Built:
    model = language_model(size, device, Variant()).eval()
    tokens, targets = text(size, device)

    def step() -> None:
        with without_gradients(), nullcontext() if dtype is None else autocast(dtype)():
            model(tokens, targets)

    return step, model, None


@configuration("no_grad")
def without_gradients(size: Size, device: str) -> Built:
    return evaluation(size, device, torch.no_grad)


@configuration("inference mode")
def inference_mode(size: Size, device: str) -> Built:
    return evaluation(size, device, torch.inference_mode)


@configuration("no_grad, autocast bf16")
def without_gradients_autocast(size: Size, device: str) -> Built:
    return evaluation(size, device, torch.no_grad, BF16)


@configuration("inference mode, autocast bf16")
def inference_mode_autocast(size: Size, device: str) -> Built:
    return evaluation(size, device, torch.inference_mode, BF16)


# ------------------------------------------------------------------ convolutional networks


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


def residual_network(size: Size, device: str, **options: Any) -> nn.Module:
    """Return a stem of 7 × 7 and four stages of two bottlenecks each."""
    C = size.width // 4
    widths = (C, 2 * C, 4 * C, 8 * C)
    with torch.device(device):
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
        return nn.Sequential(
            stem, nn.BatchNorm2d(C // 4), nn.ReLU(inplace=True), pool, *stages, *ends
        )


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


def images(size: Size, device: str, channels: int = 3, dimensions: int = 2) -> Tensor:
    return torch.randn(4 * size.batch, channels, *[size.image] * dimensions, device=device)


def classified(
    name: str,
    *,
    channels_last: bool = False,
    dtype: torch.dtype | None = None,
    compiled: bool = False,
    benchmark: bool = False,
    **options: Any,
) -> None:
    """Register the training of a residual network on images, with torch's AdamW."""

    @configuration(name)
    def build(size: Size, device: str) -> Built:
        torch.backends.cudnn.benchmark = benchmark
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = residual_network(size, device, **options).to(memory_format=layout)
        x = images(size, device).to(memory_format=layout)
        labels = torch.randint(1000, (len(x),), device=device)
        run = torch.compile(model) if compiled else model
        around = nullcontext if dtype is None else autocast(dtype)
        return training(model, lambda: F.cross_entropy(run(x), labels), around=around)


classified("residual network")
classified("residual network, autocast bf16", dtype=BF16)
classified("residual network, channels last, autocast bf16", dtype=BF16, channels_last=True)
classified("residual network, channels last, autocast float16", dtype=FP16, channels_last=True)
classified("residual network, cudnn.benchmark", benchmark=True)
classified("residual network, four groups", groups=4)
classified("depthwise network", groups=-1, expansion=1.0)
classified("depthwise network, channels last, autocast bf16", groups=-1, expansion=1.0, dtype=BF16,
           channels_last=True)  # fmt: skip
classified("residual network, 7 × 7", kernel=7)
classified("residual network, GroupNorm", norm=partial(nn.GroupNorm, 8))


def restored(name: str, dimensions: int = 2, dtype: torch.dtype | None = None) -> None:
    """Register the training of a U-Net to restore its input."""

    @configuration(name)
    def build(size: Size, device: str) -> Built:
        with torch.device(device):
            model = UNet(size.width // 16, dimensions)
        small = size if dimensions == 2 else size._replace(image=size.image // 4)
        x = images(small, device, 4, dimensions)
        around = nullcontext if dtype is None else autocast(dtype)
        return training(model, lambda: F.mse_loss(model(x), x), around=around)


restored("U-Net")
restored("U-Net, autocast bf16", dtype=BF16)
restored("U-Net, 3-D", dimensions=3)
restored("U-Net, 3-D, autocast bf16", dimensions=3, dtype=BF16)


@configuration("speech encoder")
def speech(size: Size, device: str) -> Built:
    with torch.device(device):
        model = WaveEncoder(size.width // 2)
        x = torch.randn(size.batch, 1, 64 * size.seq_len)
    return training(model, lambda: model(x).square().mean())


# ------------------------------------------------------------------ compiled steps


def compiled(name: str, around: Any = nullcontext, **choices: Any) -> None:
    """Register the training of a compiled language model."""

    @configuration(name)
    def build(size: Size, device: str) -> Built:
        model = language_model(size, device, Variant(**choices))
        run = torch.compile(model)
        tokens, targets = text(size, device)
        return training(model, lambda: run(tokens, targets), around=around)


compiled("compiled, float32")
compiled("compiled, bf16", dtype=BF16)
compiled("compiled, autocast bf16", around=autocast(BF16))
compiled("compiled, autocast bf16, RMSNorm, dropout", around=autocast(BF16), norm=nn.RMSNorm,
         dropout=0.1)  # fmt: skip
compiled("compiled, checkpointed", checkpointing="nonreentrant")
classified("compiled residual network", compiled=True)
classified("compiled residual network, channels last, autocast bf16", compiled=True, dtype=BF16,
           channels_last=True)  # fmt: skip


@configuration("compiled, large vocabulary, autocast bf16")
def compiled_large_vocabulary(size: Size, device: str) -> Built:
    model = language_model(large(size), device, Variant())
    run = torch.compile(model)
    tokens, targets = text(large(size), device)
    return training(model, lambda: run(tokens, targets), around=autocast(BF16))


@configuration("compiled optimizer")
def compiled_optimizer(size: Size, device: str) -> Built:
    model, loss = perceptron(size, device)
    optimizer = AdamW(model.parameters())
    update = torch.compile(optimizer.step)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        update()

    return step, model, optimizer


# ------------------------------------------------------------------ Hugging Face models


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
    kind: str, size: Size, device: str, attention: str, dtype: torch.dtype, **sizes: Any
) -> Built:
    """Train a model with random weights; nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers  # takes seconds to import

    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation=attention)
    model_kind = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}[kind]
    with torch.device(device), default_dtype(dtype):
        model = getattr(transformers, model_kind)(config).train()
    tokens, _ = text(size, device)
    return training(model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss)


def llama(size: Size, device: str, attention: str, dtype: torch.dtype) -> Built:
    heads = size.width // 64
    return hugging_face(
        *("Llama", size, device, attention, dtype),
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=size.seq_len,
    )


@configuration("transformers' Llama, sdpa, bf16", needs="transformers")
def llama_sdpa(size: Size, device: str) -> Built:
    return llama(size, device, "sdpa", BF16)


@configuration("transformers' Llama, eager, float32", needs="transformers")
def llama_eager(size: Size, device: str) -> Built:
    return llama(size, device, "eager", torch.float32)


@configuration("transformers' GPT-2, sdpa, float32", needs="transformers")
def gpt2(size: Size, device: str) -> Built:
    return hugging_face(
        *("GPT2", size, device, "sdpa", torch.float32),
        vocab_size=size.vocabulary,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.width // 64,
        n_positions=size.seq_len,
        bos_token_id=0,
        eos_token_id=1,
    )


# ------------------------------------------------------------------ memlab's techniques


def own(technique: str) -> None:
    """Register the step that `memlab measure` takes with a technique."""

    def build_it(size: Size, device: str) -> Built:
        setting = Setting("25m", 8, 512) if size.width > SMALL.width else Setting("tiny", 2, 32)
        taken = build(replace(setting, device=device), combined(technique))
        return taken.step, taken.model, taken.optimizer

    configuration(f"memlab: {technique}")(build_it)


for _technique in (
    *("accumulation", "lora", "loss-scaling", "bfloat16", "master-weights", "checkpointing"),
    *("sqrt-checkpointing", "selective-checkpointing", "checkpointing+autocast"),
):
    own(_technique)


# ------------------------------------------------------------------ for the allocator


@configuration("varying lengths")
def varied_lengths(size: Size, device: str) -> Built:
    """Train twelve steps on sequences of different lengths, which fragments the cache.

    All twelve count as one step, because no two are alike.
    """
    model = language_model(size, device, Variant())
    tokens, targets = text(size, device)
    optimizer = AdamW(model.parameters())
    lengths = [1 + 37 * (7 * number + 3) % size.seq_len for number in range(12)]

    def step() -> None:
        for length in lengths:
            optimizer.zero_grad()
            model(tokens[:, :length], targets[:, :length].contiguous()).backward()
            optimizer.step()

    return step, model, optimizer
