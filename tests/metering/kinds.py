"""Kinds of training steps for testing the meter: one small realistic step for each kind.

A builder returns a new `(step, model, optimizer)` from seed 0. `step()` can be called repeatedly;
the first call allocates the optimizer's state, so the second is typical.

The kinds cover hard cases: accumulated gradients (fan-in), autograd formulas that
write in place without a dispatch mode, kernels with scratch, recomputation, optimizer loops, dtypes
and third-party modules. Sizes are odd so that few storages have the same size.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from memlab.attention import attention_reference
from memlab.model import GPT, PRESETS

Step = Callable[[], object]
Built = tuple[Step, nn.Module, Optimizer | None]
Builder = Callable[[], Built]
Family = Callable[[Tensor], Iterator[Tensor]]

KINDS: dict[str, Builder] = {}

# Kinds without an exact trace, and why.
INEXACT = {
    "formulas_beyond_the_promise": "their gradients run other operators under a mode",
}


def kind(builder: Builder) -> Builder:
    """Register a builder in KINDS under its own name, and seed it."""

    def build() -> Built:
        torch.manual_seed(0)
        return builder()

    KINDS[builder.__name__] = build
    return build


def training(model: nn.Module, optimizer: Optimizer, loss: Callable[[], Tensor]) -> Built:
    """A basic step: zero the gradients, forward, backward, update."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step, model, optimizer


# ------------------------------------------------------------------ small networks


def perceptron(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a three-layer model and its batch: (B, 40) in, 10 classes out."""
    layers = (nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 72), nn.GELU(), nn.Linear(72, 10))
    return nn.Sequential(*layers).to(dtype), torch.randn(24, 40, dtype=dtype), labels(24, 10)


def labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes


@kind
def mlp() -> Built:
    model, x, y = perceptron()
    return training(model, AdamW(model.parameters()), lambda: F.cross_entropy(model(x), y))


@kind
def mlp_pure_bfloat16() -> Built:
    model, x, y = perceptron(torch.bfloat16)
    return training(model, AdamW(model.parameters()), lambda: F.cross_entropy(model(x), y))


@kind
def mlp_new_batch_each_step() -> Built:
    model, _, y = perceptron()

    def loss() -> Tensor:
        x = torch.randn(24, 40)
        return F.cross_entropy(model((x - x.mean(0)) / x.std(0)), y)

    return training(model, AdamW(model.parameters()), loss)


@kind
def convolutions() -> Built:
    stages = (
        nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(12, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20), nn.SiLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Sequential(nn.Flatten(), nn.Linear(20, 10)),
    )
    model = nn.Sequential(*stages)
    x, y = torch.randn(6, 3, 20, 20), labels(6, 10)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return training(model, optimizer, lambda: F.cross_entropy(model(x), y))


@kind
def autoencoder() -> Built:
    encoder = (nn.Conv2d(3, 8, 4, stride=2), nn.GroupNorm(2, 8), nn.LeakyReLU(0.2))
    decoder = (nn.ConvTranspose2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ELU())
    output = (nn.ConvTranspose2d(8, 3, 4, stride=2), nn.Sigmoid())
    model = nn.Sequential(*encoder, *decoder, *output)
    x = torch.rand(4, 3, 18, 18)
    return training(model, AdamW(model.parameters()), lambda: F.mse_loss(model(x), x))


class UNet(nn.Module):
    """Two levels with a skip connection, pooling and upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 10, 3, padding=1)
        self.deep = nn.Conv2d(10, 14, 3, padding=1)
        self.shuffle = nn.Conv2d(14, 16, 1)
        self.up = nn.Conv2d(10 + 4, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(10)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.down(x)))  # (B, 10, S, S)
        deep = F.softplus(self.deep(F.avg_pool2d(skip, 2)))  # (B, 14, S/2, S/2)
        up = F.pixel_shuffle(self.shuffle(deep), 2)  # (B, 4, S, S)
        up = up + F.interpolate(deep[:, :4], scale_factor=2, mode="bilinear")
        return x + self.up(torch.cat((skip, up), dim=1))


@kind
def unet() -> Built:
    model, x = UNet(), torch.randn(3, 3, 16, 16)
    noise = torch.randn_like(x)
    return training(model, AdamW(model.parameters()), lambda: F.smooth_l1_loss(model(x), noise))


@kind
def recommender() -> Built:
    """Embedding tables; a batch uses few rows, and a bag sums rows."""
    users, items = nn.Embedding(50, 12), nn.EmbeddingBag(80, 12, mode="mean")
    model = nn.ModuleList((users, items, nn.Linear(12, 12)))
    user, item, liked = torch.arange(18) % 7, torch.arange(36).view(18, 2), labels(18, 2).float()

    def loss() -> Tensor:
        scores = (model[2](users(user)) * items(item)).sum(-1)
        return F.binary_cross_entropy_with_logits(scores, liked)

    return training(model, SGD(model.parameters(), lr=0.1), loss)


@kind
def recommender_sparse_gradients() -> Built:
    table = nn.Embedding(50, 12, sparse=True)
    rows = torch.arange(18) % 7
    optimizer = torch.optim.SparseAdam(table.parameters())
    return training(table, optimizer, lambda: table(rows).square().mean())


@kind
def lstm() -> Built:
    model = nn.ModuleList((nn.LSTM(12, 20, num_layers=2, batch_first=True), nn.Linear(20, 5)))
    x, y = torch.randn(6, 15, 12), labels(6, 5)

    def loss() -> Tensor:
        states, _ = model[0](x)
        return F.cross_entropy(model[1](states[:, -1]), y)

    return training(model, AdamW(model.parameters()), loss)


# ------------------------------------------------------------------ accumulated gradients


@kind
def fan_out() -> Built:
    """One activation used many times: autograd adds its gradients, in place if possible."""
    model = nn.Linear(30, 40)
    x = torch.randn(25, 30)

    def loss() -> Tensor:
        h = model(x).tanh()
        h = h + h  # both gradients are the same tensor, so they are not added in place
        mixed = h * h + h.sin() + h.cos() * h
        views = h[:, :20] * h[:, 20:] + h.view(25, 2, 20)[:, 0] + h.t().t()[:, :20]
        spread = h.mean(0).expand(25, 40) + h.mean(1, keepdim=True).expand_as(h)
        return mixed.mean() + views.mean() + (spread * h).mean()

    return training(model, AdamW(model.parameters()), loss)


@kind
def shared_gradients() -> Built:
    """A sum's gradient goes to several inputs, so the tensor has several owners for a while."""
    first, second, third = nn.Linear(20, 33), nn.Linear(20, 33), nn.Linear(33, 33)
    model = nn.ModuleList((first, second, third))
    x = torch.randn(18, 20)

    def loss() -> Tensor:
        a, b = first(x), second(x)
        c = third(a + b) + a + b
        return (c + a - b + (a + b).relu()).square().mean()

    return training(model, AdamW(model.parameters()), loss)


@kind
def pieces() -> Built:
    """cat, stack, split, chunk, unbind: gradients are views of one storage."""
    model = nn.Linear(24, 36)
    x = torch.randn(10, 24)

    def loss() -> Tensor:
        h = model(x)
        a, b, c = h.chunk(3, dim=-1)
        joined = torch.cat((a * b, b + c, a), dim=0)
        stacked = torch.stack((a, b * 2, c), dim=1)
        rows = [row * row for row in h.unbind(0)]
        left, right = h.split((20, 16), dim=-1)
        both = torch.cat((h, h), dim=0) + torch.cat((h, h * 3), dim=0)
        total = joined.square().mean() + stacked.square().mean() + torch.stack(rows).mean()
        return total + left.square().mean() + right.exp().mean() + both.square().mean()

    return training(model, AdamW(model.parameters()), loss)


@kind
def tied_weights() -> Built:
    """One matrix embeds and scores: its two gradients are added at a leaf."""
    embedding, body = nn.Embedding(60, 28), nn.Linear(28, 28)
    model = nn.ModuleList((embedding, body))
    tokens = torch.arange(45).view(3, 15) % 60

    def loss() -> Tensor:
        hidden = F.rms_norm(body(embedding(tokens)), (28,))
        logits = F.linear(hidden, embedding.weight)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())

    return training(model, AdamW(model.parameters()), loss)


@kind
def residual_with_dropout() -> Built:
    norms = [nn.LayerNorm(32) for _ in range(4)]
    linears = [nn.Linear(32, 32) for _ in range(4)]
    model = nn.ModuleList([*norms, *linears])
    x = torch.randn(7, 9, 32)

    def loss() -> Tensor:
        h = x
        for norm, linear in zip(norms, linears, strict=True):
            h = h + F.dropout(F.gelu(linear(norm(h))), 0.1)
        return F.huber_loss(h, x)

    return training(model, AdamW(model.parameters()), loss)


@kind
def gradient_of_a_gradient() -> Built:
    """A gradient penalty: the first backward pass is recorded, so it adds out of place."""
    model, x, _ = perceptron()

    def loss() -> Tensor:
        point = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
        return (slope.norm(dim=-1) - 1).square().mean()

    return training(model, AdamW(model.parameters()), loss)


class SquareInFloat16(torch.autograd.Function):
    """A custom function that saves half the bytes and adds out of place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.half())
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (half,) = ctx.saved_tensors
        x = half.float()
        return gradient * x + gradient * x


@kind
def custom_function() -> Built:
    model, x, y = perceptron()

    def loss() -> Tensor:
        return F.cross_entropy(SquareInFloat16.apply(model(x)), y)

    return training(model, AdamW(model.parameters()), loss)


@kind
def hooks() -> Built:
    """Saved tensors packed into bfloat16, and hooks that scale or replace a gradient."""
    model, x, y = perceptron()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)

    def pack(saved: Tensor) -> Tensor:
        return saved.bfloat16() if saved.dtype is torch.float32 else saved

    def unpack(packed: Tensor) -> Tensor:
        return packed.float() if packed.dtype is torch.bfloat16 else packed

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            h = model[:3](x)
            h.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return F.cross_entropy(model[3:](h) + h[:, :10], y)

    return training(model, AdamW(model.parameters()), loss)


@kind
def transformer_encoder() -> Built:
    layer = nn.TransformerEncoderLayer(24, 3, 40, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    x = torch.randn(4, 11, 24)
    optimizer = torch.optim.NAdam(model.parameters())
    return training(model, optimizer, lambda: F.mse_loss(model(x), x))


@kind
def generator_and_critic() -> Built:
    """Two optimizers and two backward passes, with a detached and a retained graph."""
    generator, critic = nn.Linear(8, 30), nn.utils.parametrizations.spectral_norm(nn.Linear(30, 1))
    model = nn.ModuleList((generator, critic))
    first, second = AdamW(generator.parameters()), AdamW(critic.parameters())
    noise, real = torch.randn(16, 8), torch.randn(16, 30)

    def step() -> None:
        fake = generator(noise)
        second.zero_grad()
        (F.softplus(critic(fake.detach())) + F.softplus(-critic(real))).mean().backward()
        second.step()
        first.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        first.step()

    return step, model, first


@kind
def teacher_student_and_average() -> Built:
    """Distillation from an average of the weights, updated after each step."""
    student, x, _ = perceptron()
    teacher, _, _ = perceptron()
    model, optimizer = nn.ModuleList((student, teacher)), AdamW(student.parameters())

    def step() -> None:
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        optimizer.zero_grad()
        F.cross_entropy(student(x), target).backward()
        optimizer.step()
        with torch.no_grad():
            averages, weights = list(teacher.parameters()), list(student.parameters())
            torch._foreach_lerp_(averages, weights, 0.1)

    return step, model, optimizer


# ------------------------------------------------------------------ autograd formulas


def formulas(family: Family) -> Builder:
    """A step over a family of operators: each gradient alone, then all together."""

    def build() -> Built:
        model = nn.Linear(21, 34)  # the operators are applied to its weight
        optimizer = SGD(model.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            for output in family(model.weight):
                output.square().mean().backward()
            x = model.weight * 1.5  # (34, 21), not a leaf
            torch.stack([output.square().mean() for output in family(x)]).sum().backward()
            optimizer.step()

        return step, model, optimizer

    build.__name__ = family.__name__
    return kind(build)


@formulas
def gathers(x: Tensor) -> Iterator[Tensor]:
    rows, columns = torch.tensor([3, 1, 3, 30]), torch.arange(34).view(34, 1) % 21
    yield x.gather(1, columns)
    yield x.index_select(0, rows)
    yield x[rows]
    yield x[rows, torch.tensor([5, 6, 5, 7])]
    yield x[:, rows % 21]
    yield x.take_along_dim(columns, dim=1)
    yield x.take(torch.tensor([0, 9, 500]))
    yield x[2:9, ::2]
    yield x[4]
    yield F.embedding(rows, x)
    yield F.embedding_bag(rows.view(2, 2), x, mode="sum")


@formulas
def scatters(x: Tensor) -> Iterator[Tensor]:
    rows, columns = torch.tensor([3, 1, 30]), torch.arange(34).view(34, 1) % 21
    zeros = torch.zeros(34, 21)
    yield x.scatter(1, columns, x[:, :1])
    yield x.scatter_add(1, columns, x[:, :1])
    yield x.scatter_reduce(1, columns, x[:, :1], reduce="amax")
    yield x.index_add(0, rows, x[:3])
    yield x.index_copy(0, rows, x[:3])
    yield x.index_fill(0, rows, 0.5)
    yield x.index_put((rows,), x[:3])
    yield x.index_put((rows,), x[:3], accumulate=True)
    yield x.slice_scatter(x[:3], 0, 0, 3)
    yield x.select_scatter(x[0], 0, 5)
    yield zeros.scatter_add(0, columns.expand(34, 21), x)
    yield x.scatter(1, columns, 0.5)  # from here on only x has a gradient
    yield x.scatter(1, columns, zeros)
    yield x.scatter_add(1, columns, zeros)
    yield x.index_put((rows,), zeros[:3])
    yield x.index_put((rows,), zeros[:3], accumulate=True)
    yield x.put(rows, zeros[0, :3])
    yield x.index_copy(0, rows, zeros[:3])
    yield x.masked_scatter(x.detach() > 0, zeros)


@formulas
def masks(x: Tensor) -> Iterator[Tensor]:
    mask = (torch.arange(34 * 21) % 3 == 0).view(34, 21)
    yield x.masked_fill(mask, -1.0)
    yield x[mask]
    yield x.masked_select(mask)
    yield x.masked_scatter(mask, x * 2)
    yield torch.where(mask, x, x * 3)
    yield x.tril()
    yield x.clamp(-0.1, 0.1)
    yield torch.maximum(x, x.flip(0))
    yield x.nan_to_num()


@formulas
def selections(x: Tensor) -> Iterator[Tensor]:
    yield x.max(dim=1).values
    yield x.min(dim=0, keepdim=True).values
    yield x.median(dim=1).values
    yield x.mode(dim=1).values
    yield x.kthvalue(3, dim=1).values
    yield x.topk(4, dim=1).values
    yield x.sort(dim=0).values
    yield x.cummax(dim=1).values
    yield x.amax(dim=1)
    yield x.aminmax(dim=1).min


@formulas
def reductions(x: Tensor) -> Iterator[Tensor]:
    yield x.sum(dim=0)
    yield x.mean(dim=1)
    yield x.var(dim=1)
    yield x.std(dim=0)
    yield x.norm()
    yield x.norm(dim=1)
    yield x.norm(p=1, dim=0)
    yield x.norm(p=3, dim=0)
    yield x.norm(p=float("inf"), dim=1)
    yield torch.linalg.vector_norm(x, dim=1)
    yield x.logsumexp(dim=1)
    yield x.cumsum(dim=1)
    yield x.logcumsumexp(dim=1)
    yield x[:, :5].trace()
    yield x.diag()
    yield x.diagonal(1)
    yield x.diff(dim=1)
    yield F.normalize(x, dim=1)


@formulas
def formulas_beyond_the_promise(x: Tensor) -> Iterator[Tensor]:
    """Under a mode they run other operators; without one, most check for zeros or NaNs."""
    mask, square = (x > 0).detach(), x[:6, :6] + 3 * torch.eye(6)
    yield (x / 9 + 1).prod()
    yield (x / 9 + 1).prod(dim=1)
    yield (x / 9 + 1).cumprod(dim=1)
    yield x.max()
    yield x.median()
    yield x.masked_fill(mask, x.mean())
    yield torch.complex(x, x + 3).abs()
    yield torch.polar(x + 3, x).angle()
    yield torch.linalg.matrix_exp(square / 9)
    yield torch.linalg.pinv(square)
    yield torch.linalg.lstsq(square, x[:6, :3]).solution


@formulas
def elementary_functions(x: Tensor) -> Iterator[Tensor]:
    """Formulas that combine intermediate results out of place, even without a mode."""
    y = x.flip(0) + 3
    yield x.atan()
    yield x.atan2(y)
    yield x.asinh()
    yield y.acosh()
    yield (x / 9).atanh()
    yield (x / 9).asin()
    yield x.tan()
    yield x.sinh()
    yield x.tanh()
    yield x.erf()
    yield (x / 9).erfinv()
    yield x.expm1()
    yield y.log1p()
    yield y.log2()
    yield y.lgamma()
    yield y.digamma()
    yield x.sinc()
    yield x.hypot(y)
    yield y.pow(x)
    yield y.pow(2.5)
    yield y.rsqrt()
    yield y.reciprocal()
    yield torch.logaddexp(x, y)
    yield torch.xlogy(x, y)
    yield x.lerp(y, 0.3)
    yield x.lerp(y, x.sigmoid())
    yield torch.addcmul(x, y, y, value=0.5)
    yield torch.addcdiv(x, y, y, value=0.5)
    yield x.fmod(0.3)
    yield torch.linalg.cross(x[:, :3], y[:, :3])
    yield torch.dist(x, y)
    yield torch.renorm(x, 2, 0, 0.1)
    yield x.cov()


@formulas
def linear_algebra(x: Tensor) -> Iterator[Tensor]:
    square = x[:6, :6] + 3 * torch.eye(6)

    def symmetric() -> Tensor:
        return square @ square.mT

    yield x @ x.mT
    yield torch.bmm(x.view(2, 17, 21), x.view(2, 21, 17))
    yield torch.addmm(x, x @ x.mT, x)
    yield torch.baddbmm(x.view(2, 17, 21), x.view(2, 17, 21), x.new_ones(2, 21, 21))
    yield F.bilinear(x, x, x[:4, :1, None] * torch.ones(4, 21, 21))
    yield torch.einsum("ij,kj->ik", x, x)
    yield torch.outer(x[0], x[1])
    yield torch.kron(square, square)
    yield torch.linalg.inv(square)
    yield torch.linalg.solve(square, x[:6, :3])
    yield torch.linalg.det(square)
    yield torch.linalg.slogdet(square).logabsdet
    yield torch.linalg.cholesky(symmetric())
    yield torch.linalg.qr(square).R
    yield torch.linalg.svdvals(square)
    yield torch.linalg.svd(square).S
    yield torch.linalg.eigh(symmetric()).eigenvalues
    yield torch.linalg.matrix_power(square, 3)
    yield torch.linalg.solve_triangular(square.tril(), x[:6, :3], upper=False)
    yield torch.linalg.multi_dot((x, x.mT, x))
    yield torch.fft.rfft(x).abs()
    yield torch.fft.irfft(torch.fft.rfft(x), n=21)
    yield torch.stft(
        x.flatten(), 16, hop_length=8, window=torch.ones(16), return_complex=True
    ).abs()


@formulas
def images(x: Tensor) -> Iterator[Tensor]:
    image = x[:, :20].reshape(1, 2, 17, 20)
    volume = x[:32, :20].reshape(1, 1, 4, 8, 20)
    grid = F.affine_grid(torch.eye(2, 3)[None], [1, 2, 9, 9], align_corners=False)
    yield F.conv1d(x.view(1, 34, 21), x[:5, :1, None] * torch.ones(5, 34, 3), padding=1)
    yield F.conv2d(image, x[:6, :1, None, None] * torch.ones(6, 1, 3, 3), groups=2)
    yield F.conv3d(volume, x[:3, :1, None, None, None] * torch.ones(3, 1, 2, 2, 2))
    yield F.max_pool2d(image, 2)
    yield F.avg_pool2d(image, 3, stride=2)
    yield F.adaptive_max_pool2d(image, 4)
    yield F.adaptive_avg_pool2d(image, 4)
    yield F.lp_pool2d(image, 2, 2)
    yield F.max_unpool2d(*F.max_pool2d(image, 2, return_indices=True), 2, output_size=(17, 20))
    yield F.interpolate(image, scale_factor=2, mode="nearest")
    yield F.interpolate(image, size=(9, 11), mode="bicubic", antialias=True)
    yield F.grid_sample(image, grid, align_corners=False)
    yield F.pixel_unshuffle(x[:, :20].reshape(1, 1, 34, 20), 2)
    yield F.local_response_norm(image, 2)
    yield F.instance_norm(image)
    yield F.group_norm(image, 2)
    yield F.batch_norm(image, None, None, training=True)
    yield F.layer_norm(x, (21,))
    yield F.rms_norm(x, (21,))


@formulas
def activation_functions(x: Tensor) -> Iterator[Tensor]:
    yield F.softplus(x)
    yield F.prelu(x, x.mean().abs().view(1))
    yield F.hardswish(x)
    yield F.glu(x[:, :20])
    yield F.mish(x)
    yield F.gelu(x, approximate="tanh")
    yield F.logsigmoid(x)
    yield F.softmax(x, dim=1)
    yield F.log_softmax(x, dim=0)
    yield F.hardtanh(x)
    yield F.relu6(x)
    yield F.celu(x)
    yield F.rrelu(x)
    yield F.softshrink(x)
    yield F.alpha_dropout(x, 0.2)
    yield F.silu(x).relu_()


@formulas
def shapes(x: Tensor) -> Iterator[Tensor]:
    yield F.pad(x, (1, 2, 3, 4))
    yield F.pad(x.view(1, 34, 21), (2, 1), mode="reflect")
    yield F.unfold(x.view(1, 1, 34, 21), 3)
    yield F.fold(x.view(1, 34, 21)[:, :27], (5, 9), 3)
    yield F.pixel_shuffle(x[:32].view(1, 8, 4, 21), 2)
    yield x.repeat(2, 1)
    yield x.repeat_interleave(2, dim=0)
    yield x.roll(3, dims=1)
    yield x.unfold(1, 5, 3)
    yield x.as_strided((10, 3), (21, 2))
    yield x.to(torch.bfloat16).float()
    yield x.t().contiguous()
    yield x.flip(1)
    yield torch.cdist(x, x * 2)
    yield torch.cdist(x, x, p=1)
    yield torch.tensordot(x, x, dims=2)
    yield torch.block_diag(x, x)
    yield torch.cartesian_prod(x[0], x[1])
    yield x.expand(3, 34, 21).sum(0)
    yield x.movedim(0, 1).reshape(-1)
    yield x.narrow(0, 3, 9)
    yield x.tile(2, 2)
    yield x.rot90()


@formulas
def losses(x: Tensor) -> Iterator[Tensor]:
    classes, target = torch.arange(34) % 21, torch.linspace(0, 1, 34 * 21).view(34, 21)
    sign = torch.where(torch.arange(34) % 2 == 0, 1.0, -1.0)
    yield F.cross_entropy(x, classes)
    yield F.cross_entropy(x, target.softmax(1), label_smoothing=0.1)
    yield F.binary_cross_entropy(x.sigmoid(), target)
    yield F.binary_cross_entropy_with_logits(x, target)
    yield F.kl_div(x.log_softmax(1), target.softmax(1), reduction="batchmean")
    yield F.mse_loss(x, target)
    yield F.l1_loss(x, target)
    yield F.huber_loss(x, target)
    yield F.gaussian_nll_loss(x, target, x.exp())
    yield F.poisson_nll_loss(x, target)
    yield F.cosine_embedding_loss(x, target, sign)
    yield F.margin_ranking_loss(x[:, 0], x[:, 1], sign)
    yield F.hinge_embedding_loss(x[:, 0], sign)
    yield F.triplet_margin_loss(x, target, x.flip(0))
    yield F.multi_margin_loss(x, classes)
    yield F.multilabel_soft_margin_loss(x, target.round())
    yield F.soft_margin_loss(x[:, 0], sign)
    yield F.ctc_loss(
        x.view(34, 1, 21).log_softmax(2),
        classes[:5].view(1, 5) + 1,
        (34,),
        (5,),
        zero_infinity=True,
    )


# ------------------------------------------------------------------ language models


def tokens_for(model: GPT, batch: int = 3, length: int = 40) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(model.config.vocab_size, (batch, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


@kind
def gpt_sdpa() -> Built:
    model = GPT(PRESETS["tiny"])
    x, y = tokens_for(model)
    return training(model, AdamW(model.parameters()), lambda: model(x, y))


@kind
def gpt_eager() -> Built:
    model = GPT(PRESETS["tiny"], attention=attention_reference)
    x, y = tokens_for(model)
    return training(model, AdamW(model.parameters()), lambda: model(x, y))


@kind
def gpt_pure_bfloat16() -> Built:
    model = GPT(PRESETS["tiny"], dtype=torch.bfloat16)
    x, y = tokens_for(model)
    return training(model, AdamW(model.parameters()), lambda: model(x, y))


@kind
def gpt_autocast_bfloat16() -> Built:
    model = GPT(PRESETS["tiny"])
    x, y = tokens_for(model)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, y)

    return training(model, AdamW(model.parameters()), loss)


@kind
def gpt_autocast_float16_scaled() -> Built:
    model = GPT(PRESETS["tiny"], attention=attention_reference)
    optimizer, scaler = AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = tokens_for(model)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, model, optimizer


def checkpointed_gpt(use_reentrant: bool) -> Built:
    model = GPT(PRESETS["tiny"])
    x, y = tokens_for(model)

    def loss() -> Tensor:
        h = model.embedding(x)
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=use_reentrant)
        return model.loss(model.norm(h), model.unembedding_weight, y)

    return training(model, AdamW(model.parameters()), loss)


@kind
def gpt_checkpointed() -> Built:
    return checkpointed_gpt(use_reentrant=False)


@kind
def gpt_checkpointed_reentrant() -> Built:
    return checkpointed_gpt(use_reentrant=True)


@kind
def gpt_checkpointed_nested() -> Built:
    """Two segments of two blocks; each block is checkpointed again inside its segment."""
    model = GPT(PRESETS["tiny"])
    x, y = tokens_for(model)

    def segment(blocks: list[nn.Module], h: Tensor) -> Tensor:
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h

    def loss() -> Tensor:
        h = model.embedding(x)
        for blocks in (list(model.blocks[:2]), list(model.blocks[2:])):
            h = checkpoint(segment, blocks, h, use_reentrant=False)
        return model.loss(model.norm(h), model.unembedding_weight, y)

    return training(model, AdamW(model.parameters()), loss)


@kind
def gpt_accumulates_three_micro_batches() -> Built:
    model = GPT(PRESETS["tiny"])
    optimizer = AdamW(model.parameters())
    x, y = tokens_for(model, batch=6)

    def step() -> None:
        optimizer.zero_grad()
        for micro_x, micro_y in zip(x.chunk(3), y.chunk(3), strict=True):
            (model(micro_x, micro_y) / 3).backward()
        optimizer.step()

    return step, model, optimizer


@kind
def gpt_clips_and_schedules() -> Built:
    model = GPT(PRESETS["tiny"])
    optimizer = AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    x, y = tokens_for(model)

    def step() -> None:
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step, model, optimizer


@kind
def gpt_steps_in_backward() -> Built:
    """Each weight is updated and its gradient freed as soon as the gradient is accumulated."""
    model = GPT(PRESETS["tiny"])
    optimizers = {p: SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    x, y = tokens_for(model)

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return (lambda: model(x, y).backward()), model, None


@kind
def gpt_evaluated() -> Built:
    model = GPT(PRESETS["tiny"]).eval()
    x, y = tokens_for(model)

    @torch.no_grad()
    def step() -> float:
        return model(x, y).item()

    return step, model, None


@kind
def gpt_in_inference_mode() -> Built:
    model = GPT(PRESETS["tiny"]).eval()
    x, _ = tokens_for(model)

    @torch.inference_mode()
    def step() -> None:
        tokens = x[:, :4]
        for _ in range(3):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)

    return step, model, None


# ------------------------------------------------------------------ optimizers


def optimized(make: Callable[[Any], Optimizer]) -> Built:
    model, x, y = perceptron()
    return training(model, make(model.parameters()), lambda: F.cross_entropy(model(x), y))


@kind
def adamw_loop() -> Built:
    return optimized(lambda weights: AdamW(weights, foreach=False))


@kind
def adamw_foreach() -> Built:
    return optimized(lambda weights: AdamW(weights, foreach=True))


@kind
def adamw_fused() -> Built:
    return optimized(lambda weights: AdamW(weights, fused=True))


@kind
def adamw_amsgrad() -> Built:
    return optimized(lambda weights: AdamW(weights, amsgrad=True, maximize=True))


@kind
def sgd_momentum() -> Built:
    return optimized(lambda weights: SGD(weights, lr=0.1, momentum=0.9))


@kind
def adafactor() -> Built:
    return optimized(lambda weights: torch.optim.Adafactor(weights))


@kind
def lbfgs() -> Built:
    """An optimizer that runs forward and backward itself."""
    model, x, y = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return (lambda: optimizer.step(closure)), model, optimizer


@kind
def handwritten_adam() -> Built:
    """No torch.optim: moments in a dictionary, updated under no_grad."""
    model, x, y = perceptron()
    moments: dict[Tensor, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def update(weight: Tensor) -> None:
        gradient = weight.grad
        first, second = moments.setdefault(
            weight, (torch.zeros_like(weight), torch.zeros_like(weight))
        )
        first.lerp_(gradient, 0.1)
        second.mul_(0.99).add_(gradient * gradient, alpha=0.01)
        weight -= 0.01 * first / (second.sqrt() + 1e-8)
        weight.grad = None

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        for weight in model.parameters():
            update(weight)

    return step, model, None


# ------------------------------------------------------------------ Hugging Face models


def hugging_face(config_name: str, model_name: str, attention: str, **sizes: Any) -> Built:
    """A model built from its configuration, without a download."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers  # takes seconds, so only where it is used

    config = getattr(transformers, config_name)(**sizes, attn_implementation=attention)
    model = getattr(transformers, model_name)(config).train()
    tokens = torch.arange(54).view(2, 27) % 90
    optimizer = AdamW(model.parameters())
    return training(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


LLAMA_SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 56}
LLAMA_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2_SIZES = {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
GPT2_SIZES |= {"bos_token_id": 0, "eos_token_id": 1}
BERT_SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 56}
BERT_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40}


@kind
def llama_sdpa() -> Built:
    return hugging_face("LlamaConfig", "LlamaForCausalLM", "sdpa", **LLAMA_SIZES)


@kind
def llama_eager() -> Built:
    return hugging_face("LlamaConfig", "LlamaForCausalLM", "eager", **LLAMA_SIZES)


@kind
def gpt2_sdpa() -> Built:
    return hugging_face("GPT2Config", "GPT2LMHeadModel", "sdpa", **GPT2_SIZES)


@kind
def gpt2_eager() -> Built:
    return hugging_face("GPT2Config", "GPT2LMHeadModel", "eager", **GPT2_SIZES)


@kind
def bert_sdpa() -> Built:
    return hugging_face("BertConfig", "BertForMaskedLM", "sdpa", **BERT_SIZES)


@kind
def bert_eager() -> Built:
    return hugging_face("BertConfig", "BertForMaskedLM", "eager", **BERT_SIZES)


@kind
def qwen2_sdpa() -> Built:
    return hugging_face("Qwen2Config", "Qwen2ForCausalLM", "sdpa", **LLAMA_SIZES)


@kind
def qwen3_eager() -> Built:
    return hugging_face("Qwen3Config", "Qwen3ForCausalLM", "eager", **LLAMA_SIZES, head_dim=16)
