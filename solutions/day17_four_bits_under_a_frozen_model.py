# %% [markdown]
# # Day 17: Four bits under a frozen model
#
# **Seven billion weights in four bits are 3.3 GiB. Why does training on top of them still run out
# of memory?**
#
# After today you have built QLoRA: the sixteen NF4 levels, packing, double quantization, and a
# frozen layer that saves no decoded weight for backward. You can also say which tensors
# fill the GPU when the weights are small.
#
# About 90 minutes, 60 of them for five exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks them. If you are
# stuck, type `memlab hint 17.1` in a terminal. You can skip an exercise and go on.

# %% [markdown]
# ## The question
#
# LoRA (Day 3) freezes the weights and trains a low-rank update, an **adapter**, beside each matrix.
# Frozen weights have no gradient and no optimizer state, and they never change. So **QLoRA** stores
# them in four bits, as **NF4** (4-bit NormalFloat), and decodes them for each use: seven billion
# weights need 3.3 GiB instead of 13.0 in bfloat16. Still, QLoRA often runs out of memory. Which
# tensors fill the GPU?

# %%
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import NormalDist

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import optim
from memlab.checkpointing import checkpoint
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.optional import MISSING, imported
from memlab.data import batches, source_bytes
from memlab.lora import add_lora
from memlab.losses import chunked_cross_entropy
from memlab.model import GPT, PRESETS
from memlab.monitoring.counters import counters_for
from memlab.planner import memory_named
from memlab.qlora import NF4Linear, add_qlora, prepare_for_low_bits, quantize_layers
from memlab.quantize import dynamic_code, nf4_bytes, nf4_code, quantize_nf4
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# Train Llama 2 7B with QLoRA on one GPU: 4 × 1,024 tokens, no autocast, no checkpointing. Every
# matrix of the blocks is quantized and gets an adapter of rank 16. peft's
# `prepare_model_for_kbit_training` (with `use_gradient_checkpointing=False`) casts the other
# weights (embedding, output layer, norms) to float32.
#
# 1. How many times smaller than in bfloat16 is a quantized matrix?
# 2. How many GiB is the model, adapters included, before the first step?
# 3. How many GiB does a step need at its peak?

# %%
### BEGIN SOLUTION
guess("17.1", smaller_times=4, model_gib=3.3, step_gib=6)  # 16 bits to 4, plus some activations
### END SOLUTION
### BEGIN STUB
# guess("17.1", smaller_times=..., model_gib=..., step_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# We **predict** the step (Day 16). `add_qlora` quantizes the matrices and adds float32 adapters, as
# peft does. `prepare_for_low_bits` is memlab's version of `prepare_model_for_kbit_training`.


# %%
@dataclass(frozen=True)
class Setup:
    """The options that QLoRA users turn on or leave out."""

    prepared: bool = True
    autocast: bool = False
    checkpointed: bool = False
    chunked: bool = False  # compute the logits in chunks (Day 11)
    ends: bool = False  # also train the embedding and the output layer


def float32_loss(hidden, weight, targets):
    """Compute the loss from float32 logits, as transformers does."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# %%
def qlora_model(config, setup):
    loss = chunked_cross_entropy if setup.chunked else float32_loss
    model = GPT(config, dtype=torch.bfloat16, loss=loss)
    add_qlora(model, 16, compute_dtype=torch.bfloat16, adapter_dtype=torch.float32)
    if setup.prepared:
        prepare_for_low_bits(model)
    if setup.checkpointed:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward)
    if setup.ends:
        model.embedding.requires_grad_()
        model.unembedding.requires_grad_()
    return model


# %%
def qlora_step(config, setup, batch, length, device="cuda"):
    """Return a training step, its model and its optimizer."""
    model = qlora_model(config, setup).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(batch, length, dtype=torch.long, device=device)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=setup.autocast):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()

    return step, model, optimizer


# %% [markdown]
# The transformer blocks are identical, so predicting one block and two is enough: each further
# block adds the same bytes to the peak.


# %%
def predicted(config, setup, batch, length):
    """Return the allocated bytes of a step at its peak, and the bytes of each category."""
    one, two = (
        memlab.predict(partial(qlora_step, replace(config, layers=n), setup, batch, length))
        for n in (1, 2)
    )

    def all_layers(of_one, of_two):
        return of_two + (config.layers - 2) * (of_two - of_one)

    parts = {name: all_layers(one.at_peak.get(name, 0), of_two)
             for name, of_two in two.at_peak.items()}  # fmt: skip
    return all_layers(one.allocated_bytes, two.allocated_bytes), parts


seven = PRESETS["llama-2-7b"]
peak, plain_parts = predicted(seven, Setup(), 4, 1024)
for name, count in plain_parts.items():
    if count > 2**20:
        print(f"{name:21}{format_bytes(count):>12}  {count / peak:4.0%}")

# %%
bytes_of_one = nf4_bytes(4096 * 4096)  # the size of 7B's query projection
model_bytes = plain_parts["parameters"] + plain_parts["buffers"]
reveal("17.1", smaller_times=2 * 4096 * 4096 / bytes_of_one, model_gib=model_bytes, step_gib=peak)

# %% [markdown]
# The quantized weights are the *buffers*: 7 % of the peak. The largest part is **activations**.
#
# So there are two questions: how do four bits represent a weight, and what reduces the other 93 %
# of the peak?

# %% [markdown]
# ## Sixteen levels
#
# Divide each block of 64 neighboring weights by its **absmax**, its largest |w|. The results are
# fractions from −1 to 1. NF4 rounds each fraction to one of 16 values, its **levels**.
#
# Optimizer moments span many decades (Day 9). Weights don't: the QLoRA paper finds that trained
# weights are nearly normally distributed. Check it for our model after 40 steps:

# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def train(model, steps, lr, seed=1, text=TEXT):
    """Train the unfrozen weights on a text, by default torch's own source."""
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer, drawn = optim.AdamW(weights, lr=lr), batches(text, 8, 64, seed=seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*next(drawn)).backward()
        optimizer.step()


# %%
torch.manual_seed(0)
base = GPT(CONFIG)
train(base, 40, lr=3e-3)
matrices = {name: w.detach() for name, w in base.blocks.named_parameters() if w.ndim == 2}
of_std = torch.cat([(w / w.std()).flatten() for w in matrices.values()])
for within in (1, 2):
    normal = 2 * NormalDist().cdf(within) - 1
    share = (of_std.abs() < within).float().mean()
    print(f"within {within} std: {share:.0%} of the weights, {normal:.0%} of a normal distribution")

# %% [markdown]
# Levels should be dense where most weights are. **Quantiles** do that: cut the area under the bell
# curve into equal parts, and each part holds equally many weights.

# %% [markdown]
# ### Exercise 17.1: sixteen quantiles
#
# About 10 minutes. Return 16 levels, sorted, in float32:
#
# - above zero: cut the probabilities from 1/2 to `OUTERMOST` (in the next cell) into 8 equal parts;
#   the levels are the quantiles at the upper ends of the parts
# - below zero: the same with 7 parts, negated
# - zero
#
# Divide all by the largest. `NormalDist().inv_cdf(p)` is the quantile of the probability p.

# %%
OUTERMOST = 1 - (1 / 32 + 1 / 30) / 2  # the probability whose quantile becomes the level 1.0


def levels():
    ### BEGIN SOLUTION memlab.reference.nf4.levels

    def quantiles(count: int) -> list[float]:
        step = (OUTERMOST - 0.5) / count
        return [NormalDist().inv_cdf(0.5 + step * i) for i in range(1, count + 1)]

    found = sorted([*(-q for q in quantiles(7)), 0.0, *quantiles(8)])
    found = torch.tensor(found, dtype=torch.float32)
    return found / found.max()
    ### END SOLUTION


# %%
levels = exercise("17.1", levels)

# %% [markdown]
# Zero must be a level, or no weight could be exactly 0 (padding, pruned weights). The quantile of
# probability 1 is infinite, so the levels end earlier, at `OUTERMOST`, as in bitsandbytes.

# %%
NF4, EVEN = levels(), torch.linspace(-1, 1, 16)
fractions = torch.cat([(b := w.view(-1, 64)) / b.abs().amax(1, keepdim=True)
                       for w in matrices.values()])  # fmt: skip
fig, axes = plt.subplots(3, sharex=True, figsize=(9, 3.4), height_ratios=(5, 1, 1),
                         layout="constrained")  # fmt: skip
axes[0].hist(fractions.flatten().numpy(), bins=101, color="#4477aa")
axes[0].set(ylabel="weights", title="Weights as fractions of the absmax of their block of 64")
for one, (name, table, color) in zip(axes[1:], (("NF4", NF4, "C0"), ("even steps", EVEN, "C3")),
                                      strict=True):  # fmt: skip
    one.vlines(table, 0, 1, color=color)
    one.set(yticks=[])
    one.set_ylabel(name, rotation=0, ha="right", va="center")
axes[2].set_xlabel("fraction of the absmax (bars at −1 and 1: each block's largest weight)")
print("NF4:", " ".join(f"{level:.3f}" for level in NF4))

# %% [markdown]
# ## Two codes in a byte
#
# A code is the index of a level, 0 to 15. Two codes share a byte, the first in the upper four bits.
# To decode, split the byte, look up each code's level, and multiply by the block's absmax:

# %%
BLOCK = 64


def decode(codes, absmax):
    """Decode packed codes, with the absmax of each block, to float32 weights (n,)."""
    indices = torch.stack([codes >> 4, codes & 15], 1).int()
    return (levels()[indices].view(-1, BLOCK) * absmax.view(-1, 1)).flatten()


# %% [markdown]
# ### Exercise 17.2: four bits
#
# About 15 minutes. `weight` is float32 or bfloat16, contiguous or not, with n elements (a multiple
# of 64). Return `(codes, absmax)`: uint8 (n/2,) and float32 (n/64,).
#
# - A block is 64 neighbors of the flattened weight.
# - A code is the index of the level nearest to w / absmax in float32 (at a tie, either).
# - A block of zeros gets code 7 and absmax 0.
# - Don't clamp a small absmax, such as 10⁻²⁶.
#
# Return no slice of a larger tensor. Don't change `weight`. Peak, `weight` included: at most 64
# bytes per weight.


# %%
def encode(weight):
    ### BEGIN SOLUTION memlab.reference.nf4.encode
    blocks = weight.flatten().float().view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    fractions = blocks / absmax.where(absmax > 0, 1).view(-1, 1)
    table = levels()
    codes = torch.bucketize(fractions, (table[:-1] + table[1:]) / 2).to(torch.uint8)
    first, second = codes.view(-1, 2).unbind(1)
    return first << 4 | second, absmax
    ### END SOLUTION


# %%
encode = exercise("17.2", encode)


# %%
def rounded(weight, table, block):
    """Return the weight, rounded to a table's levels times the absmax of each block."""
    rows = weight.flatten().view(-1, block)
    absmax = rows.abs().amax(1, keepdim=True)
    nearest = torch.bucketize(rows / absmax, (table[:-1] + table[1:]) / 2)
    return (table[nearest] * absmax).view_as(weight)


def error(weight, other):
    """Return the norm of the difference, relative to the norm of the weight."""
    return ((weight - other.view_as(weight)).norm() / weight.norm()).item()


some = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
outlier = some.clone()
outlier[:: 2**12] = 20  # one weight in 4,096 is far larger than the rest
print("block   bits per weight   NF4 error   even steps   NF4 with outliers")
for block in (16, 64, 256, 4096):
    found = [error(some, rounded(some, table, block)) for table in (NF4, EVEN)]
    typical = outlier != 20
    restored = rounded(outlier, NF4, block)[typical]
    print(f"{block:5}{4 + 32 / block:14.2f}{found[0]:15.0%}{found[1]:12.0%}", end="")
    print(f"{error(outlier[typical], restored):17.0%}")
same = torch.equal(decode(*encode(some)), rounded(some, NF4, 64))
print(f"decode(encode(w)) equals the rounded weight: {same}")

# %% [markdown]
# - With blocks of 64 or more, NF4 has a smaller error than even steps.
# - Smaller blocks have a smaller error but need more bits, because each block stores a 32-bit
#   absmax.
# - An outlier increases the error of the other weights in its block (last column: error without the
#   outliers themselves). The smaller the blocks, the fewer weights are affected.

# %% [markdown]
# ## The absmax values cost half a bit per weight
#
# With blocks of 64, the absmax adds 4/64 bytes per weight: 386 MiB for 7B. **Double quantization**
# encodes the absmax values too: in 8 bits each, with Day 9's signed dynamic codebook and a float32
# scale per 256 values. Look at the absmax values of a normally distributed matrix:

# %%
torch.manual_seed(0)
matrix = 0.02 * torch.randn(1024, 1024)
codes, absmax = encode(matrix)
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.hist(absmax.numpy(), bins=80, color="#4477aa")
axes.axvline(absmax.mean().item(), color="#cc6677")
axes.set(xlim=(0, None), xlabel="absmax of a block of 64", ylabel="blocks")
_ = axes.set_title("All absmax values are positive and near their mean (red)")

# %% [markdown]
# The signed codebook covers −1 to 1, but all absmax values are positive. Subtract the **mean**
# first: the differences use both halves of the codebook and have smaller scales.

# %% [markdown]
# ### Exercise 17.3: double quantization
#
# About 10 minutes. `absmax` is float32 (n,), for any n. `codebook` has 256 sorted values, zero
# among them. Return `(codes, scales, mean)`: uint8 (n,), float32 (⌈n/256⌉,), float32 ().
#
# 1. Subtract the `mean` of all n values.
# 2. Take blocks of 256 (the last may be short). A block's scale is its largest absolute value.
# 3. A code is the index of the entry nearest to value / scale.
#
# If all values are equal, every code is the code of zero. Return no slice of a larger tensor. Don't
# change the inputs.


# %%
def double_encode(absmax, codebook):
    ### BEGIN SOLUTION memlab.reference.nf4.double_encode
    mean = absmax.mean() if absmax.sum().isfinite() else (absmax / len(absmax)).sum()
    centered = torch.nn.functional.pad(absmax - mean, (0, -len(absmax) % 256)).view(-1, 256)
    scales = centered.abs().amax(1)
    fractions = centered / scales.where(scales > 0, 1).view(-1, 1)
    codes = torch.bucketize(fractions, (codebook[:-1] + codebook[1:]) / 2).to(torch.uint8)
    return codes.flatten()[: len(absmax)].clone(), scales, mean
    ### END SOLUTION


# %%
double_encode = exercise("17.3", double_encode)


# %%
def double_decode(codes, scales, mean, codebook):
    return codebook[codes.int()] * scales.repeat_interleave(256)[: len(codes)] + mean


SIGNED = dynamic_code(True)
small, scales, mean = double_encode(absmax, SIGNED)
restored = double_decode(small, scales, mean, SIGNED)


def bytes_per_weight(*tensors):
    return sum(t.nbytes for t in tensors) / matrix.numel()


print(f"codes and absmax in float32: {bytes_per_weight(codes, absmax):.4f} bytes per weight")
print(f"  by formula 1/2 + 4/64:     {1 / 2 + 4 / 64:.4f}")
print(f"codes and absmax in 8 bits:  {bytes_per_weight(codes, small, scales, mean):.4f}")
print(f"  1/2 + 1/64 + 4/(64·256):   {1 / 2 + 1 / 64 + 4 / (64 * 256):.4f}")
print(f"error of the weights: {error(matrix, decode(codes, absmax)):.2%} with float32 absmax, ",
      end="")  # fmt: skip
print(f"{error(matrix, decode(codes, restored)):.2%} with double quantization")

# %% [markdown]
# The error of the weights is the same. A weight now needs 4.13 bits instead of 16: 3.88× less, not
# 4×.

# %% [markdown]
# ## A layer that saves no decoded weight
#
# The layer decodes its weight and multiplies. For y = x Wᵀ, the gradient of x is the gradient of y
# times W, so backward needs W. If you decode outside a `torch.autograd.Function`, autograd saves
# the *decoded* weight of every layer until backward.
#
# Backward does not need x, because only the gradient of W uses it, and W is frozen.

# %% [markdown]
# ### Exercise 17.4: decode, multiply, discard
#
# About 15 minutes. Write the Function. `matmul(x, codes, absmax, out_features)` is x · Wᵀ, with W =
# `decode(codes, absmax)` of shape (out_features, in). `x` is (..., in), float32 or bfloat16. The
# result and the gradient of x have the dtype of x.
#
# `decode` returns float32. In forward, cast W to the dtype of x; in backward, decode again and cast
# W to the dtype of the gradient. Save only `codes` and `absmax` for backward. Each pass may use
# the memory of `decode`, a cast, a matmul and one more float32 copy of W.


# %%
class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, absmax, out_features):
        ### BEGIN SOLUTION memlab.reference.qlora.Matmul.forward
        ctx.weight = codes, absmax
        return x @ decode(codes, absmax).view(out_features, -1).to(x.dtype).T
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 17.4, about 2 lines")
        ### END STUB

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION memlab.reference.qlora.Matmul.backward
        weight = decode(*ctx.weight).view(gradient.shape[-1], -1)
        return gradient @ weight.to(gradient.dtype), None, None, None
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 17.4, about 2 lines")
        ### END STUB


def matmul(x, codes, absmax, out_features):
    return Matmul.apply(x, codes, absmax, out_features)


# %%
matmul = exercise("17.4", matmul)

# %% [markdown]
# Add Day 3's adapter, and you have QLoRA: y = x Wᵀ + (alpha / rank) · x Aᵀ Bᵀ. Only A and B are
# trained.


# %%
class QLoRALinear(nn.Module):
    """A linear layer without bias: a frozen 4-bit weight and a trained adapter."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        for name, tensor in zip(("codes", "absmax"), encode(linear.weight.detach()), strict=True):
            self.register_buffer(name, tensor)
        self.A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))  # the update starts at 0
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x):
        frozen = matmul(x, self.codes, self.absmax, len(self.B))
        return frozen + self.scale * (x @ self.A.T @ self.B.T)


class DecodesOutside(QLoRALinear):
    """The same layer without the Function, so autograd saves the decoded weight."""

    def forward(self, x):
        weight = decode(self.codes, self.absmax).view(len(self.B), -1)
        return F.linear(x, weight) + self.scale * (x @ self.A.T @ self.B.T)


# %%
def stack(make):
    """Return the bytes of eight 512 × 512 layers, and of the tensors that forward saves."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(make(nn.Linear(512, 512, bias=False)) for _ in range(8)))
    x, outputs = torch.randn(4, 512).requires_grad_(), []
    trace = memlab.measure(lambda: outputs.append(layers(x)), model=layers)
    held = sum(t.nbytes for t in [*layers.parameters(), *layers.buffers()])
    return held, trace.live_bytes - held - x.nbytes - outputs[0].nbytes


frozen = {
    "float32, frozen": lambda layer: layer.requires_grad_(False),
    "4 bits, decoded outside": partial(DecodesOutside, rank=4, alpha=8),
    "4 bits, your Function": partial(QLoRALinear, rank=4, alpha=8),
}
for name, make in frozen.items():
    held, saved = stack(make)
    print(f"{name:24} weights {format_bytes(held):>11}, saved by forward {format_bytes(saved):>10}")

# %% [markdown]
# If you decode outside, autograd saves the eight decoded weights, 8 MiB, on top of their codes:
# more than without quantization. With your Function, forward saves only the inputs of A and B.

# %% [markdown]
# ## One decoded weight at a time
#
# In each pass, one decoded weight exists while its matmul runs. How much memory does this need for
# the largest matrix of a 7B block, 11,008 × 4,096?

# %%
rows, columns = seven.intermediate_size, seven.hidden_size
with memlab.dry_run():
    linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    layers = {"yours": QLoRALinear(linear, 16, 32).bfloat16(), "memlab's": NF4Linear(linear)}
    layers["yours"].absmax = layers["yours"].absmax.float()  # .bfloat16() cast it, too
    x = torch.ones(1, columns, dtype=torch.bfloat16)
    for name, layer in layers.items():
        trace = memlab.measure(partial(layer, x), model=layer)
        before = sum(event.bytes for event in trace.events if event.phase == "before")
        print(f"{name:9} {format_bytes(trace.peak_bytes - before):>11} of temporaries")
print(f"the decoded weight, in bfloat16: {format_bytes(2 * rows * columns)}")

# %% [markdown]
# The lesson's `decode` holds indices, levels and products of the whole matrix at once. memlab
# decodes a chunk at a time into one bfloat16 buffer.

# %% [markdown]
# ## Does it still learn?
#
# First quantize the base model: how much does its loss change? Then train LoRA (adapters beside
# float32 weights) and QLoRA (beside quantized weights) on another task, the same text in capitals,
# for 15 steps each.

# %%
# The letters a to z are the bytes 97 to 122.
CAPITALS = torch.where((TEXT > 96) & (TEXT < 123), TEXT - 32, TEXT)


def loss_of(model, text):
    with torch.no_grad():
        drawn = batches(text, 8, 64, seed=7)
        return sum(model(*next(drawn)).item() for _ in range(4)) / 4


def copy_of_base():
    model = GPT(CONFIG)
    model.load_state_dict(base.state_dict())
    return model


quantized, of_base = copy_of_base(), {}
quantize_layers(quantized)
for name, text in {"the text": TEXT, "in capitals": CAPITALS}.items():
    of_base[name] = loss_of(base, text)
    change = loss_of(quantized, text) / of_base[name] - 1
    print(f"{name}: four bits change the loss by less than 0.5 %: {abs(change) < 0.005}")

# %%
learned = {}
for name, add in (("LoRA", add_lora), ("QLoRA", add_qlora)):
    torch.manual_seed(1)
    model = copy_of_base()
    add(model, 4, where=lambda name: name.startswith("blocks."))
    train(model, 15, lr=1e-2, seed=2, text=CAPITALS)
    learned[name] = loss_of(model, CAPITALS)
    gained = of_base["in capitals"] - learned[name]
    print(f"{name}: the loss on capitals falls by more than 0.5: {gained > 0.5}")
print(f"QLoRA ends within 1 % of LoRA: {abs(learned['QLoRA'] / learned['LoRA'] - 1) < 0.01}")

# %% [markdown]
# QLoRA's adapters train about as well as LoRA's. (A small model proves nothing about large ones.
# The paper compares models up to 65B.)

# %% [markdown]
# ## Fixed memory
#
# **Fixed memory** is the same for any number of tokens: weights, gradients and optimizer state.
# Besides the quantized weights, it has two parts:
#
# - **Unquantized weights:** embedding, output layer and norms. Preparing casts them to float32, for
#   stability. 7B has 262 million of them.
# - **Adapters** in float32. In training, each adapter weight also has a gradient and two moments.

# %% [markdown]
# ### Exercise 17.5: fixed memory
#
# About 10 minutes. `shapes` has (out, in) of each quantized matrix, `others` is the number of
# unquantized weights in the base model, and `rank` the rank of the adapters. Return a dictionary of
# bytes:
#
# | key | contents |
# | --- | --- |
# | `"codes"` | per matrix: codes, 8-bit absmax values, float32 scales and mean |
# | `"others"` | in bfloat16, or in float32 if `prepared` |
# | `"adapters"` | A and B of each matrix, float32 |
# | `"training"` | the adapters' gradients and AdamW's two moments, float32 |
#
# For each matrix of n weights, round up the bytes of codes (n/2), the number of blocks (n/64) and
# the number of scales (blocks/256).


# %%
def held(shapes, others, rank, prepared):
    ### BEGIN SOLUTION
    codes = adapters = 0
    for rows, columns in shapes:
        blocks = -(-rows * columns // 64)
        codes += -(-rows * columns // 2) + blocks + 4 * -(-blocks // 256) + 4
        adapters += rank * (rows + columns)
    return {
        "codes": codes,
        "others": others * (4 if prepared else 2),
        "adapters": 4 * adapters,
        "training": 12 * adapters,
    }
    ### END SOLUTION


# %%
held = exercise("17.5", held)


# %%
def shapes_of(config):
    C, F = config.hidden_size, config.intermediate_size
    Q, K = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block = [(Q, C), (K, C), (K, C), (C, Q), (F, C), (F, C), (C, F)]
    return block * config.layers


def held_by(config, prepared=True, rank=16):
    shapes = shapes_of(config)
    quantized = sum(rows * columns for rows, columns in shapes)
    return held(shapes, config.parameters - quantized, rank, prepared)


thirteen = replace(seven, hidden_size=5_120, layers=40, heads=40, kv_heads=40,
                   intermediate_size=13_824)  # fmt: skip
SIZES = {"7B": seven, "13B": thirteen}
for name, config in SIZES.items():
    for prepared in (True, False):
        parts = held_by(config, prepared)
        print(f"{name}, {'prepared' if prepared else 'not prepared'}, in GiB: ", end="")
        print(", ".join(f"{part} {n / 2**30:.2f}" for part, n in parts.items()), end="")
        print(f"; total {sum(parts.values()) / 2**30:.2f}")

# %%
known = held_by(seven)
tables = 4 * (16 + 256) + 2 * seven.seq_len * seven.head_dim  # codebooks; rotary tables in bfloat16
print("7B, the formula minus the prediction: ", end="")
print(f"buffers {known['codes'] + tables - plain_parts['buffers']:,} bytes, ", end="")
print(f"parameters {known['others'] + known['adapters'] - plain_parts['parameters']:,} bytes")

# %% [markdown]
# bitsandbytes' *paged* optimizers can move the moments to host memory. Here, the moments are two
# thirds of `"training"`, 0.3 GiB for 7B, so paging saves little.

# %% [markdown]
# ## Why it still runs out of memory
#
# Activations are 38 GiB. What reduces them? `tests/course/test_day17.py` computes the predictions
# below, for all 32 blocks. Each row adds a change to the row above.
#
# A step fits if its **reserved** memory is at most the GPU's memory minus CUDA's context (Day 16).


# %%
@dataclass(frozen=True)
class Predicted:
    allocated: int
    reserved: int


STEPS = {
    "a plain loop": (Setup(), Predicted(46_870_235_648, 50_866_421_760)),
    "+ autocast": (Setup(autocast=True), Predicted(32_401_885_696, 34_886_123_520)),
    "+ checkpointing": (
        Setup(autocast=True, checkpointed=True), Predicted(8_988_346_880, 11_408_506_880)
    ),
    "+ logits in chunks": (
        Setup(autocast=True, checkpointed=True, chunked=True),
        Predicted(8_257_687_552, 9_753_853_952),
    ),
    "+ not prepared": (
        Setup(prepared=False, autocast=True, checkpointed=True, chunked=True),
        Predicted(6_726_266_880, 7_818_182_656),
    ),
}  # fmt: skip
CARDS = {"rtx4060": 8, "rtx4070": 12, "rtx4080": 16, "rtx4090": 24, "a6000": 48}


# %%
def fits(reserved):
    """Return the smallest GPU of CARDS that can reserve this many bytes."""
    names = [name for name in CARDS if reserved <= memory_named(name).budget_bytes]
    return f"{names[0]} ({CARDS[names[0]]} GB)" if names else "none of these GPUs"


print("7B, 4 × 1,024 tokens            allocated    reserved    fits on")
for name, (_, step) in STEPS.items():
    columns = f"{format_bytes(step.allocated):>11}{format_bytes(step.reserved):>12}"
    print(f"{name:30}{columns}    {fits(step.reserved)}")
agree = peak == STEPS["a plain loop"][1].allocated
print(f"the first row equals the prediction from one and two blocks: {agree}")

# %%
COLORS = {"4-bit weights": "#4477aa", "not quantized": "#cc6677", "adapters, training": "#ddaa33",
          "everything else": "0.75"}  # fmt: skip
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for name in CARDS:
    free = memory_named(name).budget_bytes / 2**30
    axes.axvline(free, color="0.3", linewidth=0.8, linestyle="--", zorder=0)
    axes.text(free, -0.6, f"{CARDS[name]} GB", ha="center", fontsize=8)
for row, (setup, step) in enumerate(STEPS.values()):
    parts, left = held_by(seven, setup.prepared), 0
    training = parts["adapters"] + parts["training"]
    rest = step.allocated - sum(parts.values())
    counts = (parts["codes"], parts["others"], training, rest)
    for (part, color), count in zip(COLORS.items(), counts, strict=True):
        axes.barh(row, count / 2**30, left=left, color=color, label=None if row else part)
        left += count / 2**30
    axes.text(left + 0.3, row, f"{left:.2f}", va="center", fontsize=9,
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
axes.set_yticks(range(len(STEPS)), list(STEPS))
axes.set(xlabel="GiB allocated at the peak", xlim=(0, 49), ylim=(4.6, -1.1))
axes.set_title("QLoRA, 7B, 4 × 1,024 tokens (dashed: a GPU's memory minus CUDA's context)")
axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.7, 0))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Why each change helps:
#
# - **Autocast.** Preparing casts embedding and norms to float32, so without autocast all
#   activations are float32. With autocast, matmuls return bfloat16.
# - **Checkpointing.** Blocks with frozen weights save activations, too. Checkpointing (peft's
#   default) keeps only the block inputs.
# - **Logits in chunks.** The loss needs several tensors of tokens × vocabulary (Day 11). In chunks,
#   they are small.
# - **Not prepared.** Embedding, output layer and norms stay in bfloat16, and so do the block inputs
#   that checkpointing saves.

# %% [markdown]
# ### More tokens, larger vocabularies
#
# How does the peak of the row `+ logits in chunks` grow with the number of tokens? And how much
# would the logits need without chunks, with Llama 2's vocabulary (V = 32,000) or Llama 3's
# (V = 128,256)? First, measure how many bytes the loss needs per token and vocabulary entry:

# %%
tokens, vocab = 256, 4096
hidden = torch.randn(1, tokens, 8, dtype=torch.bfloat16).requires_grad_()
head = torch.randn(vocab, 8, dtype=torch.bfloat16)  # frozen
targets = torch.zeros(1, tokens, dtype=torch.long)
per_logit = {}
for name, loss in (("all logits", float32_loss), ("in chunks", chunked_cross_entropy)):
    trace = memlab.measure(lambda loss=loss: loss(hidden, head, targets).backward())
    before = hidden.nbytes + head.nbytes + targets.nbytes
    per_logit[name] = (trace.peak_bytes - before) / (tokens * vocab)
    print(f"{name}: {per_logit[name]:.1f} bytes per token and vocabulary entry")

# %%
GROWN = {(1, 512): Predicted(5_587_845_120, 6_257_901_568),
         (4, 1024): STEPS["+ logits in chunks"][1],
         (16, 1024): Predicted(18_208_608_256, 21_940_404_224),
         (32, 1024): Predicted(31_476_502_528, 38_241_566_720)}  # fmt: skip
for (batch, length), step in GROWN.items():
    tokens = batch * length
    logits = {v: per_logit["all logits"] * tokens * v / 2**30 for v in (32_000, 128_256)}
    share = held_by(seven)["codes"] / step.allocated
    print(f"{tokens:6,} tokens: allocated {format_bytes(step.allocated):>9} ", end="")
    print(f"({share:.0%} 4-bit weights), ", end="")
    print(f"reserved {format_bytes(step.reserved):>9}, fits {fits(step.reserved)}")
    print("    without chunks, logits for ", end="")
    print(", ".join(f"V = {v:,}: {gib:.2f} GiB" for v, gib in logits.items()))

# %% [markdown]
# So "7B needs 6 GB with QLoRA" means nothing without the number of tokens per step.
#
# ### An optimizer over all parameters
#
# `qlora_step` passes all parameters to AdamW, frozen ones too. Does this cost memory?

# %%
little = replace(PRESETS["tiny"], layers=1, tied=False)
setups = {"adapters": Setup(), "adapters, embedding, output layer": Setup(ends=True)}
for name, setup in setups.items():
    step, model, optimizer = qlora_step(little, setup, 1, 16, device="cpu")
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    trained = sum(w.numel() for w in model.parameters() if w.requires_grad)
    frozen = sum(w.numel() for w in model.parameters()) - trained  # 4-bit codes are buffers
    state = trace.at_end["optimizer_state"] / 4  # elements
    print(f"trained: {name}\n    {trained:,} trained, {frozen:,} frozen weights in AdamW", end="")
    print(f"; state: {state / trained:.2f} elements per trained weight")
ENDS = Predicted(11_119_053_312, 14_029_946_880)
more = ENDS.allocated - STEPS["+ checkpointing"][1].allocated
print("7B, checkpointed: training the embedding and the output layer, too, adds "
      f"{format_bytes(more)} to the peak")  # fmt: skip

# %% [markdown]
# No: a frozen weight has no gradient, so AdamW skips it. But if you leave the embedding and the
# output layer **unfrozen**, or name them in peft's `modules_to_save`, which also copies them, 262
# million weights get a gradient and two moments, 12 bytes per weight. (These gradients do not exist
# yet at the peak, so the peak grows by less.)

# %% [markdown]
# ## At scale: 13 billion and 65 billion weights
#
# Which GPU do 13B and the paper's 65B need? (The fixed memory is from your formula.)

# %%
BEST = Setup(autocast=True, checkpointed=True, chunked=True)
sixty_five = replace(seven, hidden_size=8_192, layers=80, heads=64, kv_heads=64,
                     intermediate_size=22_016)  # fmt: skip
BIG = {
    "13B, 4 × 1,024, a plain loop": (Setup(), Predicted(73_493_654_016, 79_421_243_392)),
    "13B, 4 × 1,024, logits in chunks": (BEST, Predicted(13_539_815_424, 15_565_062_144)),
    "65B, 1 × 512, logits in chunks": (BEST, Predicted(40_258_396_160, 41_483_763_712)),
}
print(f"{'model, tokens':32}{'allocated':>11}{'reserved':>11}    fits on")
for name, (_, step) in BIG.items():
    print(f"{name:32}{format_bytes(step.allocated):>11}{format_bytes(step.reserved):>11}", end="")
    print(f"    {fits(step.reserved)}")
for name, config in {"13B": thirteen, "65B": sixty_five}.items():
    before = sum(held_by(config).values())
    print(f"{name}: fixed memory {format_bytes(before)}; ", end="")
    print(f"all weights in bfloat16: {format_bytes(2 * config.parameters)}")

# %% [markdown]
# With logits in chunks, 13B trains on a 16 GB GPU with 4,096 tokens a step. 65B fits on a 48 GB
# GPU with 512 tokens a step.

# %% [markdown]
# ## Explain the gap
#
# The model needs 4.24 GiB, not 3.3: 3.11 GiB for the quantized weights and their absmax values,
# 0.98 GiB for the embedding, output layer and norms in float32, and 0.15 GiB for the adapters.
#
# The step needs 43.7 GiB. Quantizing weights does not reduce its activations, 38.1 GiB.

# %% [markdown]
# ## Compare with bitsandbytes and peft
#
# In transformers, `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
# bnb_4bit_use_double_quant=True)` quantizes with bitsandbytes as you did, and peft adds the
# adapters. Both packages are optional. Install them with `pip install -e ".[oracles]"` in the
# repository's folder.

# %%
import warnings

bnb = imported("bitsandbytes")
peft = imported("peft") if bnb else None

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if bnb:
    theirs, state = bnb.functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4")
    print(f"memlab's levels, equal to the bit: {torch.equal(state.code, nf4_code())}; ", end="")
    print(f"yours differ by less than 1e-6: {((state.code - NF4).abs() < 1e-6).all()}")
    library = quantize_nf4(matrix, double=False)
    print(f"memlab's codes, equal to the bit: {torch.equal(theirs.flatten(), library.codes)}")
    print(f"your codes, equal: {(theirs.flatten() == codes).float().mean():.4%}; ", end="")
    print(f"absmax, equal to the bit: {torch.equal(state.absmax, absmax)}")
    _, double = bnb.functional.quantize_4bit(
        matrix, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    print(f"your 8-bit codes, equal: {(double.absmax == small).float().mean():.2%}; ", end="")
    print(f"scales, equal to the bit: {torch.equal(double.state2.absmax, scales)}")
else:
    print(f"bitsandbytes is {MISSING}")

# %% [markdown]
# A few 8-bit codes differ, because on a CPU bitsandbytes uses a lookup table (Day 9).
#
# Next, compare the layers: bitsandbytes' `Linear4bit` with peft's LoRA against yours, with the same
# adapters and the same input. Are the gradients equal?


# %%
def peft_layer(linear, rank):
    """Return bitsandbytes' 4-bit layer with peft's adapter."""
    four = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False,
                             compute_dtype=torch.float32, compress_statistics=False,
                             quant_type="nf4")  # fmt: skip
    four.weight = bnb.nn.Params4bit(linear.weight.data.clone(), requires_grad=False,
                                    compress_statistics=False, quant_type="nf4",
                                    module=four)  # fmt: skip
    holder = nn.Sequential(four.to("cpu"))  # this quantizes
    holder.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.LoraModel(holder, config, "default").model[0]


# %% tags=["nbval-ignore-output"] reason="the packages are optional"
if peft:
    torch.manual_seed(0)
    linear, x = nn.Linear(192, 320, bias=False), torch.randn(64, 192)
    theirs, yours = peft_layer(linear, 4), QLoRALinear(linear, 4, 8)
    A, B = theirs.lora_A["default"].weight, theirs.lora_B["default"].weight
    nn.init.normal_(B, std=0.1)
    yours.A.data, yours.B.data = A.data.clone(), B.data.clone()
    for layer in (theirs, yours):
        layer(x).square().mean().backward()
    for name, own, other in (("A", yours.A, A), ("B", yours.B, B)):
        apart = (own.grad - other.grad).abs().max() / other.grad.abs().max()
        print(f"gradients of {name} differ by less than 1e-5 of the largest: {bool(apart < 1e-5)}")
else:
    print(f"bitsandbytes or peft is {MISSING}")

# %% [markdown]
# ## On your GPU
#
# With a GPU, this cell runs 7B's step with logits in chunks, but with only four of the 32 blocks.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    counters = counters_for(gpu)
    four = replace(seven, layers=4)
    step, *_ = qlora_step(four, BEST, 4, 1024, gpu.type)
    for _ in range(2):
        step()
    counters.reset_peak()
    step()
    print(f"allocated {format_bytes(counters.read().peak_bytes)}; predicted for CUDA ", end="")
    trace = memlab.predict(partial(qlora_step, four, BEST, 4, 1024))
    print(format_bytes(trace.allocated_bytes))
else:
    print(stored_on_a_gpu("day 17"))

# %% [markdown]
# ## Rules on trial
#
# A guide claims that `gradient_checkpointing_enable()` reduces the activations of a transformers
# model by 50–70 %. (Newer versions call it `activation_checkpointing_enable()`.) Measure it in
# GPT-2 with 2 × 512 tokens, in training mode and in evaluation mode, which disables dropout.
# (`from_pretrained` returns models in evaluation mode.)
#
# The guide calls the method after `if hasattr(model, "gradient_checkpointing_enable")`. A model
# without the method trains without checkpointing, and no message says so.

# %%
print(f"this course's GPT has the method: {hasattr(base, 'gradient_checkpointing_enable')}")


# %%
def most_activations(transformers, checkpointing, training=True):
    """Return the peak bytes of activations in forward and backward."""
    with memlab.dry_run():
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(loss_type="ForCausalLM"))
        model.train(training)
        if checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # newer versions: the name is deprecated
                model.gradient_checkpointing_enable()
        tokens = torch.zeros(2, 512, dtype=torch.long)
        trace = memlab.measure(
            lambda: model(tokens, labels=tokens, use_cache=False).loss.backward(), model=model
        )
    events = (event.bytes for event in trace.events if event.category == "activations")
    return max(accumulate(events))


# %% tags=["nbval-ignore-output"] reason="the package is optional"
if peft:
    transformers = imported("transformers")
    plain, again = (most_activations(transformers, on) for on in (False, True))
    ignored = most_activations(transformers, True, training=False)
    without = most_activations(transformers, False, training=False)
    measured = (
        f"GPT-2's activations fall from {plain / 1e9:.2f} to {again / 1e9:.2f} GB "
        f"({1 - again / plain:.0%} less); in evaluation mode they are {ignored / 1e9:.2f} GB with "
        f"the call and {without / 1e9:.2f} GB without it"
    )
    verdict(
        "31",
        0.5 <= 1 - again / plain <= 0.7,
        measured,
        otherwise="in training mode it saves more, and what remains is mostly logits, which it "
        "does not reduce; in evaluation mode it saves nothing, without a warning",
    )
else:
    print(f"transformers is {MISSING}")

# %% [markdown]
# ## More claims on trial
#
# The first claim is from the QLoRA paper, the others are common:

# %%
before, after = 32 / 64, 8 / 64 + 32 / (64 * 256)
prepared, unprepared = (STEPS[name][1] for name in ("+ logits in chunks", "+ not prepared"))
CLAIMS = {
    "double quantization saves 0.373 bits per weight":
        f"{before - after:.3f}: from {before:.3f} to {after:.3f}",
    "four bits need a quarter of bfloat16's memory":
        f"{model_bytes:,} of {2 * seven.parameters:,} bytes: "
        f"{model_bytes / (2 * seven.parameters):.2f} for 7B with adapters",
    "preparing costs two bytes per unquantized weight":
        f"{format_bytes(known['others'] // 2)} for 7B, but it raises the peak by "
        f"{format_bytes(prepared.allocated - unprepared.allocated)}",
}  # fmt: skip
for claim, found in CLAIMS.items():
    print(f"{claim}\n    {found}")

# %% [markdown]
# ## What you can do now
#
# | part of a QLoRA training | bytes |
# | --- | --- |
# | a quantized weight | 0.516: 1/2 + 1/64 + 4/(64 · 256) |
# | an unquantized weight | 2; prepared 4 |
# | an adapter weight, with gradient and moments | 16 |
# | the decoded weight, one at a time | 2 · out · in |
# | activations, logits | as in any training: checkpoint, chunk |
#
# When QLoRA runs out of memory, check four things:
#
# 1. How many tokens are in a step?
# 2. Does it use checkpointing and autocast?
# 3. Are all logits in memory at once?
# 4. Which weights are not frozen?

# %% [markdown]
# ## The running bill
#
# The bill's model trains all its weights, so none can be stored in four bits.

# %%
running_bill(17)

# %% [markdown]
# ## Sources
#
# - Dettmers et al. 2023: [QLoRA: Efficient Finetuning of Quantized
#   LLMs](https://arxiv.org/abs/2305.14314)
# - Hu et al. 2021: [LoRA: Low-Rank Adaptation of Large Language
#   Models](https://arxiv.org/abs/2106.09685)
# - Hugging Face: [PEFT,
#   quantization](https://huggingface.co/docs/peft/developer_guides/quantization)
#
# The rules on trial are from:
#
# - thINKblots: [Multi-Platform Memory
#   Optimization](https://github.com/thINKblots/gearhead/blob/d9730c481ff0cc18e9e2b2e6981495e233b9f7b1/MEMORY_OPTIMIZATIONS.md)
