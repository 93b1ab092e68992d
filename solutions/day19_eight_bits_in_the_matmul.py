# %% [markdown]
# # Day 19: Eight bits in the matmul
#
# **FP8 has half the bits of BF16. Does a training in FP8 need half the memory?**
#
# After today you have built FP8 training: casts with scales, tiles that share a scale, and a linear
# layer whose three matmuls run in eight bits. You can also say which copies of a weight exist, and
# which bytes FP8 really saves.
#
# About 90 minutes, 55 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 19.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# From the Hopper generation on, NVIDIA's tensor cores multiply 8-bit floating-point numbers, twice
# as fast as BF16. A guide says of FP8: "1 byte/param → 7 GB for 7B". DeepSeek-V3 was trained that
# way.
#
# Day 9 kept optimizer state in 8 bits, and Day 17 frozen weights in 4. Here everything trains, and
# the **matmuls** run in 8 bits: forward, and both in backward. What does that take off a training?

# %%
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import optim
from memlab.checkpointing import checkpoint
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.optional import imported
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.planner import memory_named
from memlab.precision import FP8Recipe, convert_to_fp8
from memlab.precision.fp8 import dequantize_fp8, quantize_fp8
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# Llama 2 7B in pure bfloat16 with AdamW, 2 × 4,096 tokens, on one GPU. Now all matmuls of the
# blocks run in FP8.
#
# 1. By how many percent does the peak shrink?
# 2. By how many percent do the bytes shrink that the blocks' linear layers keep for backward?

# %%
### BEGIN SOLUTION
guess("19.1", peak_percent=50, kept_percent=50)  # 16 bits to 8
### END SOLUTION
### BEGIN STUB
# guess("19.1", peak_percent=..., kept_percent=...)
### END STUB

# %% [markdown]
# ## Measure
#
# `convert_to_fp8` replaces the linear layers of a model. The step is **predicted** (Day 16) with
# one block and with two; each further block adds the same bytes. (`tests/course/test_day19.py`
# compares this with all 32.)


# %%
def training_step(config, recipe, batch, length, checkpointed=False, device="cuda"):
    """A step in BF16, or with FP8 matmuls if there is a recipe; its model and optimizer."""
    model = GPT(config, dtype=torch.bfloat16)
    if recipe:
        convert_to_fp8(model, recipe)
    if checkpointed:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(batch, length, dtype=torch.long, device=device)

    def step():
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()

    return step, model, optimizer


# %%
def predicted(recipe, config=PRESETS["llama-2-7b"], batch=2, length=4096):
    """What holds the allocated bytes at the peak of a step with all blocks."""
    one, two = (
        memlab.predict(partial(training_step, replace(config, layers=n), recipe, batch, length))
        for n in (1, 2)
    )
    more = config.layers - 2
    names = {*one.at_peak, *two.at_peak}
    return {name: two.at_peak.get(name, 0) * (1 + more) - one.at_peak.get(name, 0) * more
            for name in names}  # fmt: skip


parts = {"BF16": predicted(None), "FP8": predicted(FP8Recipe())}
for name in ("parameters", "optimizer_state", "activations", "backward_temporaries"):
    before, after = (parts[dtype][name] for dtype in ("BF16", "FP8"))
    print(f"{name:21}BF16 {format_bytes(before):>10}   FP8 {format_bytes(after):>10}")
peaks = {dtype: sum(found.values()) for dtype, found in parts.items()}
print(f"{'peak':21}BF16 {format_bytes(peaks['BF16']):>10}   FP8 {format_bytes(peaks['FP8']):>10}")

# %% [markdown]
# Weights and optimizer state are the same to the byte. Only activations shrink, by a tenth. To see
# why, build the cast, the layer, and then count what it keeps.
#
# ## Two formats
#
# Eight bits are a sign, an exponent and a fraction. **E4M3** has 4 bits of exponent and 3 of
# fraction; **E5M2** has 5 and 2. More fraction gives smaller steps, more exponent a wider range.

# %%
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"E4M3": E4M3, "E5M2": E5M2, "BF16": torch.bfloat16}
print("format   largest    smallest normal   smallest    step near 1")
for name, dtype in FORMATS.items():
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # a subnormal number
    print(f"{name:6}{info.max:10.3g}{info.smallest_normal:16.3g}{least:14.3g}{info.eps:11}")

# %% [markdown]
# Micikevicius et al. propose E4M3 for inputs and weights, whose rounding matters more, and E5M2 for
# gradients, whose range is wider.
#
# BF16 has the range of float32. These two don't: in E4M3 everything below 0.001 becomes zero, and a
# gradient is often a millionth. So each tensor is divided by a **scale** before the cast, and the
# result of a matmul is multiplied by both scales.

# %% [markdown]
# ### Exercise 19.1: a cast with a scale
#
# About 10 minutes. `x` has any shape, in float32 or bfloat16; `dtype` is E4M3 or E5M2. Return
# `(codes, scale)`: codes of the shape of x in `dtype`, and a float32 scale () so that x ≈ codes ·
# scale, and the largest |x| becomes the format's largest value (`torch.finfo`). Compute in float32.
# A tensor of zeros gives zeros; gradients may be as small as 10⁻²⁵.

# %%
SMALLEST = 2.0**-100  # of an amax, so that neither scale nor 1 / scale overflows


def cast(x, dtype):
    ### BEGIN SOLUTION memlab.reference.fp8.cast
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float().clamp(min=SMALLEST)
    return (x.float() * (largest / amax)).to(dtype), amax / largest
    ### END SOLUTION


# %%
cast = exercise("19.1", cast)

# %% [markdown]
# ### What a scale is for
#
# Gradients of a mean over many tokens are small. Here are some of about a millionth, with and
# without a scale.


# %%
def error(x, other):
    """The norm of the difference, as a share of the norm of x."""
    return ((x - other).norm() / x.norm()).item()


def lost(x, codes):
    """The share of nonzero elements that have become zero."""
    return ((codes.float() == 0) & (x != 0)).sum().item() / (x != 0).sum().item()


random = torch.Generator().manual_seed(0)
gradient = 1e-6 * torch.randn(256, 1024, generator=random)
print("format   without a scale        with a scale")
for name, dtype in (("E4M3", E4M3), ("E5M2", E5M2)):
    codes, scale = cast(gradient, dtype)
    plain = gradient.to(dtype)
    print(f"{name:6}{lost(gradient, plain):8.0%} become zero{lost(gradient, codes):14.1%}", end="")
    print(f", error {error(gradient, codes.float() * scale):.1%}")

# %% [markdown]
# Without a scale all of them underflow. With one none does, and the error is that of the format:
# about 3 % in E4M3, 5 % in E5M2.
#
# The scale needs the **amax**, so a cast reads its tensor twice. *Delayed scaling* takes the amax
# of earlier steps instead, and saves one pass. It is wrong when a tensor grows suddenly:

# %%
history, now = gradient, 8 * gradient
for name, amax in (("its own amax", now.abs().amax()), ("the last step's", history.abs().amax())):
    late = quantize_fp8(now, E5M2, amax=amax)
    saturated = (late.codes.float().abs() == torch.finfo(E5M2).max).float().mean().item()
    print(f"{name:16}error {error(now, dequantize_fp8(late)):4.0%}, at the limit {saturated:.0%}")

# %% [markdown]
# ## Outliers
#
# A few features of a transformer's activations are far larger than the others. One scale must cover
# them. Day 7 met this problem with integers. With floating point, which has small steps near zero,
# how large may an outlier be?


# %%
def as_int8(x):
    """Rounded to 255 even steps, one scale for the tensor."""
    step = x.abs().amax() / 127
    return (x / step).round() * step


def as_fp8(x, dtype=E4M3):
    codes, scale = cast(x, dtype)
    return codes.float() * scale


usual = torch.randn(128, 1024, generator=random)
print("outlier      INT8    E4M3    E5M2    (error of the other elements)")
for size in (1, 100, 10_000, 100_000):
    x = usual.clone()
    x[:, 0] *= size  # one feature of 1,024
    rest = x[:, 1:]
    found = (error(rest, as_int8(x)[:, 1:]), error(rest, as_fp8(x)[:, 1:]),
             error(rest, as_fp8(x, E5M2)[:, 1:]))  # fmt: skip
    print(f"{size:7,} ×" + "".join(f"{each:8.1%}" for each in found))

# %% [markdown]
# At 100 ×, INT8 has lost most of each element, and FP8 nothing. But at 10,000 × E4M3 comes to the
# end of its range, too. E5M2 goes further, with its coarser steps.
#
# DeepSeek-V3 gives each **tile** a scale of its own: 1 × 128 elements of activations and gradients,
# 128 × 128 of weights. Then E4M3 has enough range for everything, gradients included.

# %% [markdown]
# ### Exercise 19.2: a scale for each tile
#
# About 15 minutes. `x` is (n, k); a tile has `rows` × `columns` elements, and the tiles at the
# edges may be smaller. Return `(codes, scales)`: codes (n, k) in `dtype`, scales (⌈n/rows⌉,
# ⌈k/columns⌉) in float32, each as in Exercise 19.1 for its tile. The result keeps no larger tensor
# alive. (`F.pad(x, (0, right, 0, below))` pads a matrix with zeros.)


# %%
def cast_tiles(x, dtype, rows, columns):
    ### BEGIN SOLUTION memlab.reference.fp8.cast_tiles
    largest, (n, k) = torch.finfo(dtype).max, x.shape
    padded = nn.functional.pad(x, (0, -k % columns, 0, -n % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (·, rows, ·, columns)
    amax = tiles.abs().amax((1, 3), keepdim=True).float().clamp(min=SMALLEST)
    codes = (tiles.float() * (largest / amax)).to(dtype).view(padded.shape)
    return codes[:n, :k].clone(), (amax / largest)[:, 0, :, 0].clone()
    ### END SOLUTION


# %%
cast_tiles = exercise("19.2", cast_tiles)


# %%
def of_tiles(x, columns, dtype=E4M3):
    codes, scales = cast_tiles(x, dtype, 1, columns)
    return codes.float() * scales.repeat_interleave(columns, 1)


x = usual.clone()
x[:, 0] *= 100_000
print("a scale for       error of the others   bytes per element")
print(f"the tensor{error(rest, as_fp8(x)[:, 1:]):19.1%}{1 + 4 / x.numel():20.4f}")
for columns in (512, 128, 32):
    found = error(rest, of_tiles(x, columns)[:, 1:])
    print(f"1 × {columns:<6}{found:19.1%}{1 + 4 / columns:20.4f}")

# %% [markdown]
# An outlier now spoils its own tile alone, as in Day 17's blocks of 64. A tile of 128 costs 4 bytes
# of scale for 128 of codes: 3 %.
#
# ## Three matmuls
#
# A linear layer y = x Wᵀ has one matmul in forward and two in backward:
#
# | | matmul | needs |
# | --- | --- | --- |
# | forward | y = x Wᵀ | x8, W8 |
# | backward | dx = g W | g8, W8 |
# | backward | dW = gᵀ x | g8, x8 |
#
# Forward casts x and W. What should it keep for backward?

# %% [markdown]
# Autograd would keep x itself, 2 bytes per element in BF16. Only dW needs it, and that matmul takes
# x8. So keep **x8**, and let x go.
#
# And W8? The optimizer adds updates to W that are far smaller than a step of FP8 (Day 4). So W
# stays in BF16 or float32, as a **master weight**, beside every FP8 copy. W is there in backward
# anyway: cast it again.


# %%
def multiply(a, b, dtype):
    """a · b of (codes, scale) pairs, with float32 sums."""
    return (a[0].float() @ b[0].float() * (a[1] * b[1])).to(dtype)


# %% [markdown]
# On a GPU `torch._scaled_mm` does this: it multiplies the codes themselves. `multiply` decodes
# them, which gives the same numbers on any machine, and no speed.

# %% [markdown]
# ### Exercise 19.3: forward and backward in FP8
#
# About 20 minutes. `x` is (n, in), `weight` (out, in). Cast `x` and `weight` to E4M3 and the
# gradient to E5M2, with your `cast`; multiply with `multiply`. The result has the dtype of x, the
# gradient of x the dtype of the incoming gradient, and the gradient of the weight the dtype of the
# weight. Between forward and backward keep x8, its scale, and the weight: no x, and no FP8 copy of
# the weight.


# %%
class FP8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ### BEGIN SOLUTION memlab.reference.fp8.FP8Matmul.forward
        x8, (w8, scale) = cast(x, E4M3), cast(weight, E4M3)
        ctx.save_for_backward(*x8, weight)
        return multiply(x8, (w8.T, scale), x.dtype)  # (n, out)
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 19.3, about 3 lines")
        ### END STUB

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION memlab.reference.fp8.FP8Matmul.backward
        x8, x_scale, weight = ctx.saved_tensors
        g8, scale = cast(gradient, E5M2)
        dx = multiply((g8, scale), cast(weight, E4M3), gradient.dtype)  # (n, in)
        return dx, multiply((g8.T, scale), (x8, x_scale), weight.dtype)  # (out, in)
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 19.3, about 4 lines")
        ### END STUB


def matmul(x, weight):
    return FP8Matmul.apply(x, weight)


# %%
matmul = exercise("19.3", matmul)


# %%
class FP8Linear(nn.Module):
    """In place of a linear layer without bias."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return matmul(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def measured(layer, x):
    """Output and gradients, and the bytes that forward leaves for backward beside the output."""
    given, outputs = x.clone().requires_grad_(), []
    trace = memlab.measure(lambda: outputs.append(layer(given * 1)), model=layer)
    left = sum(event.bytes for event in trace.events if event.phase != "before")
    outputs[0].square().mean().backward()
    return (outputs[0], given.grad, layer.weight.grad), left - outputs[0].nbytes


# %%
torch.manual_seed(0)
linear, x = nn.Linear(512, 256, bias=False), torch.randn(64, 512)
exact, _ = measured(linear, x)
LAYERS = {"BF16": nn.Linear(512, 256, bias=False).bfloat16(), "FP8": FP8Linear(linear).bfloat16()}
LAYERS["BF16"].weight = linear.weight
linear.weight.grad = None
for name, layer in LAYERS.items():
    found, left = measured(layer, x.bfloat16())
    layer.weight.grad = None
    errors = [error(*pair) for pair in zip(exact, [t.float() for t in found], strict=True)]
    print(f"{name}: errors of y {errors[0]:.2%}, dx {errors[1]:.1%}, dW {errors[2]:.1%}; ", end="")
    print(f"kept for backward {left:,} bytes of {x.numel():,} inputs")

# %% [markdown]
# The FP8 layer's gradients are 6 % off; in BF16 they are 0.4 % off. And FP8 keeps half of the
# bytes, as hoped. So why does the whole model save 5 % and not 50?
#
# ## One input, three layers
#
# In a block, query, key and value read **the same tensor**. Autograd keeps a reference to it, once.
# Three FP8 layers make three copies. And attention keeps its own output for its backward, so the
# copy for the output layer comes on top.

# %% [markdown]
# ### Exercise 19.4: what the linear layers of a block keep
#
# About 10 minutes. Query, key and value read one norm's output (tokens × C); gate and up read
# another. The output layer reads attention's output (tokens × Q), which attention keeps anyway.
# `down` reads (tokens × F). Return the bytes that the linear layers **add** to what others keep:
#
# - `"bf16"`: the tensors themselves, in bfloat16;
# - `"own"`: an FP8 copy for each of the seven layers;
# - `"shared"`: an FP8 copy for each different input.
#
# A copy has a float32 scale, or one for each `columns` elements of a row.


# %%
def kept(tokens, C, Q, F, way, columns=None):
    ### BEGIN SOLUTION
    inputs = {"bf16": [C, C, F], "own": [C, C, C, Q, C, C, F], "shared": [C, Q, C, F]}[way]
    if way == "bf16":
        return 2 * tokens * sum(inputs)
    scales = [1 if columns is None else tokens * -(-k // columns) for k in inputs]
    return tokens * sum(inputs) + 4 * sum(scales)
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 19.4, about 5 lines")
    ### END STUB


# %%
kept = exercise("19.4", kept)


# %% [markdown]
# By the meter: what one more block holds after forward, in each way. The difference to BF16 must be
# your formula's.


# %%
def held_by_a_block(config, recipe, tokens):
    """By the meter, on this machine: what a second block holds after forward."""
    held = []
    for layers in (1, 2):
        _, model, _ = training_step(replace(config, layers=layers), recipe, 1, tokens, device="cpu")
        batch, out = torch.zeros(1, tokens, dtype=torch.long), []
        trace = memlab.measure(lambda m=model, b=batch, o=out: o.append(m(b, b)), model=model)
        held.append(sum(event.bytes for event in trace.events if event.phase != "before"))
    return held[1] - held[0]


WAYS = {"bf16": (None, None), "own": (FP8Recipe(share_inputs=False), None),
        "shared": (FP8Recipe(), None), "shared, tiles": ("block", 128)}  # fmt: skip
wide = replace(PRESETS["tiny"], hidden_size=256, heads=4, kv_heads=2, intermediate_size=768)
sizes = (wide.hidden_size, wide.hidden_size, wide.intermediate_size)
blocks = {way: held_by_a_block(wide, recipe, 32) for way, (recipe, _) in WAYS.items()}
for way, (_, columns) in WAYS.items():
    formula = kept(32, *sizes, way.split(",")[0], columns)
    less = blocks["bf16"] - blocks[way]
    agree = less == kept(32, *sizes, "bf16") - formula
    print(f"{way:14} a block {blocks[way]:9,} bytes, its linear layers {formula:7,}: {agree}")

# %%
seven = PRESETS["llama-2-7b"]
of_seven = (seven.hidden_size, seven.heads * seven.head_dim, seven.intermediate_size)
a_token = {way: kept(8192, *of_seven, way) / 8192 for way in ("bf16", "own", "shared")}
for way, count in a_token.items():
    print(f"7B, {way:7} {count:9,.1f} bytes per token and block, {count / a_token['bf16']:.0%}")
reveal("19.1", peak_percent=100 * (1 - peaks["FP8"] / peaks["BF16"]),
       kept_percent=100 * (1 - a_token["shared"] / a_token["bf16"]))  # fmt: skip

# %% [markdown]
# ## Explain the gap
#
# Copies of their own save 7 % of what linear layers keep; shared ones 39 %, not 50: attention's
# output exists twice. And linear layers keep only a quarter of a block's activations. Queries, keys
# and values, the two branches of the MLP and the residual stream belong to attention, to the
# activation function and to the norms. They stay in BF16.

# %%
PARTS = {"weights": "parameters", "gradients": "gradients", "AdamW's moments": "optimizer_state",
         "activations": "activations", "temporaries": "backward_temporaries"}  # fmt: skip
COLORS = ("#4477aa", "#66ccee", "#ddaa33", "#cc6677", "0.75")
fig, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
for row, found in enumerate(parts.values()):
    left = 0
    for (label, part), color in zip(PARTS.items(), COLORS, strict=True):
        count = found.get(part, 0) / 2**30
        axes.barh(row, count, left=left, color=color, label=None if row else label)
        left += count
    axes.text(left + 0.5, row, f"{left:.1f}", va="center")
axes.set_yticks(range(len(parts)), list(parts))
axes.set(xlabel="GiB allocated at the peak", xlim=(0, 88))
axes.set_title("7B, 2 × 4,096 tokens: FP8 matmuls shrink a part of the activations")
axes.legend(frameon=False, ncols=5, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.35))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Does it learn?
#
# The gradients are 6 % off. Train a small model four ways, on the same text: BF16 autocast, FP8
# with a scale per tensor, with tiles, and **without scales**. The last one only rounds: a
# simulation that gives FP8's values, and saves nothing.
#
# The loss is divided by 2,048, as if the batch were one of 2,048 micro-batches. AdamW hardly minds:
# its step doesn't depend on the size of gradients.


# %%
class Unscaled(torch.autograd.Function):
    """Round to E4M3 on the way forward, or the gradient to E5M2 on the way back."""

    @staticmethod
    def forward(ctx, x, is_output):
        ctx.is_output = is_output
        return x.clone() if is_output else x.to(E4M3).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(E5M2).to(gradient.dtype) if ctx.is_output else gradient, None


def unscaled_forward(layer, x):
    out = F.linear(Unscaled.apply(x, False), Unscaled.apply(layer.weight, False))
    return Unscaled.apply(out, True)


# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def without_scales(model):
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(unscaled_forward, layer)


# %%
def train(change, steps=24):
    """The loss of each step, and the share of the blocks' last gradients that are zero."""
    torch.manual_seed(0)
    model, losses = GPT(CONFIG), []
    change(model)
    optimizer, drawn = optim.AdamW(model.parameters(), lr=3e-3), batches(TEXT, 4, 64, seed=1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*next(drawn))
        (loss / 2048).backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [w.grad for w in model.blocks.parameters()]
    zeros = sum((g == 0).sum().item() for g in gradients)
    return losses, zeros / sum(g.numel() for g in gradients)


# %%
TILES = FP8Recipe((1, 32), (32, 32), gradients=E4M3)  # the model has only 64 features
CHANGES = {"BF16": lambda model: None, "FP8, a scale per tensor": convert_to_fp8,
           "FP8, tiles": partial(convert_to_fp8, recipe=TILES),
           "FP8, no scales": without_scales}  # fmt: skip
runs = {name: train(change) for name, change in CHANGES.items()}
mean = {name: sum(losses[-10:]) / 10 for name, (losses, _) in runs.items()}
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, (losses, zeros) in runs.items():
    axes.plot(losses, label=name, linestyle=":" if name == "BF16" else "-")
    print(f"{name:24} zero gradients in the blocks {zeros:4.0%}", end="")
    close = f"; loss within 2 % of BF16's: {abs(mean[name] / mean['BF16'] - 1) <= 0.02}"
    print(close if "scale per" in name or "tiles" in name else "")
axes.set(xlabel="step", ylabel="loss (nats)")
_ = axes.legend(frameon=False)

# %% [markdown]
# With scales FP8 trains as BF16 does. Without them the blocks get **no gradient at all**. The curve
# hardly shows it: what a model learns first is in the embedding, which is not converted. So look at
# the gradients, too.
#
# A few steps of a tiny model prove little about a large one. DeepSeek-V3 reports a loss within
# 0.25 % of BF16's over a trillion tokens, with tiles, and with embedding, output layer, norms and
# attention in BF16 or float32.

# %% [markdown]
# ## Held against torchao
#
# torchao's `convert_to_float8_training` does the same for production. It is optional here:
# `pip install -e ".[oracles]"` in the repository's folder brings it.

# %%
float8 = imported("torchao.float8")

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if float8:
    torch.manual_seed(0)
    layer, x = nn.Linear(512, 256, bias=False).bfloat16(), torch.randn(64, 512).bfloat16()
    theirs = nn.Sequential(nn.Linear(512, 256, bias=False).bfloat16())
    theirs[0].weight = nn.Parameter(layer.weight.detach().clone())
    config = float8.Float8LinearConfig(emulate=True)  # no tensor cores needed
    theirs = float8.convert_to_float8_training(theirs, config=config)[0]
    yours, left = measured(FP8Linear(layer), x)
    found, their_left = measured(theirs, x)
    for name, own, other in zip(("y", "dx", "dW"), yours, found, strict=True):
        print(f"{name}: {(own == other).float().mean():.2%} of the elements are equal to the bit")
    print(f"kept for backward: yours {left:,} bytes, torchao {their_left:,}")
else:
    print('torchao is not installed: pip install -e ".[oracles]" in the repository\'s folder')

# %% [markdown]
# The same numbers, but other bytes: torchao keeps **x in BF16** and casts it again in backward.
# Then FP8 saves no activation at all: it is there for speed. On the other hand, query, key and
# value share what is kept without any effort.

# %% [markdown]
# ## At scale: which copies exist
#
# `tests/course/test_day19.py` makes these predictions of the step from the beginning, with all
# blocks and with what the allocator reserves. You have made the first two peaks above.

# %%
COPIES = {
    "BF16": (None, (82_456_765_440, 84_945_141_760)),
    "FP8, a copy for each layer": (FP8Recipe(share_inputs=False), (81_720_779_776, 85_502_984_192)),
    "FP8, shared copies": (FP8Recipe(), (78_499_505_152, 83_626_033_152)),
    "FP8, weights' copies kept, too": (
        FP8Recipe(keep_weights=True),
        (85_008_131_072, 87_411_392_512),
    ),
}
CHECKPOINTED = {
    "BF16": (None, (67_402_309_632, 68_451_041_280)),
    "FP8, shared copies": (FP8Recipe(), (67_404_406_784, 68_436_361_216)),
}
for title, table in (("7B, 2 × 4,096 tokens", COPIES), ("checkpointed", CHECKPOINTED)):
    print(f"{title:32}  allocated    reserved")
    for name, (_, (allocated, reserved)) in table.items():
        less = 1 - allocated / table["BF16"][1][0]
        print(f"  {name:30}{format_bytes(allocated):>11}{format_bytes(reserved):>12}", end="")
        print(f"{-less:+8.1%}" if less else "")
agree = [COPIES[name][1][0] == peaks[dtype]
         for name, dtype in (("BF16", "BF16"), ("FP8, shared copies", "FP8"))]  # fmt: skip
print(f"the first and the third row are what you predicted: {all(agree)}")

# %% [markdown]
# Three findings:
#
# - A copy for each layer saves 1 %, and the allocator even **reserves** more than with BF16: casts
#   and transposed copies have new sizes. Shared copies save 5 %, and 2 % of what is reserved.
# - If forward keeps W8 for backward, that is 1 byte per weight, and FP8 needs *more* than BF16.
# - With checkpointing FP8 saves nothing. What is kept are block inputs, in BF16.

# %% [markdown]
# All copies of a weight, in bytes:
#
# | copy | bytes | alive |
# | --- | --- | --- |
# | master weight, BF16 or float32 | 2 or 4 | always |
# | gradient, BF16 or float32 | 2 or 4 | from backward to the step |
# | AdamW's moments, BF16 or float32 | 4 or 8 | always |
# | W8 | 1 | during a matmul, or until backward if kept |
# | W8 transposed | 1 | during the matmul of dx |
#
# NVIDIA's FP8 matmul reads both operands along the summed dimension, before Blackwell. So backward
# needs W8 transposed. A library that keeps both, to save time, adds 2 bytes per weight.

# %% [markdown]
# ### 405 billion on 128
#
# Day 16 tried the guide's largest configuration by formula: FP8, tensor 8, pipeline 4, data 4,
# ZeRO-1, checkpointing. It left out the block at work, which is the part that FP8 changes. Now you
# can predict it, for a rank's eighth of each matrix of a block and 8,192 tokens.

# %%
huge = PRESETS["llama-3-405b"]
eighth = replace(huge, layers=1, heads=huge.heads // 8, kv_heads=huge.kv_heads // 8,
                 custom_head_dim=huge.head_dim, intermediate_size=huge.intermediate_size // 8,
                 vocab_size=256)  # fmt: skip


def at_work(recipe):
    """A block's activations and temporaries when backward runs it: not weights or gradients."""

    def build():
        _, model, optimizer = training_step(eighth, recipe, 1, 1)
        tokens = torch.zeros(1, 8192, dtype=torch.long, device="cuda")
        return lambda: model(tokens, tokens).backward(), model, optimizer

    found = memlab.predict(build).at_peak
    return found["activations"] + found["backward_temporaries"]


working = {"BF16": at_work(None), "FP8": at_work(FP8Recipe())}
for dtype, count in working.items():
    print(f"a block of 405B at work, an eighth of it, {dtype}: {count / 1e9:.2f} GB")

# %% [markdown]
# The fullest rank has 32 blocks and the embedding, an eighth of each. ZeRO-1 shards the state over
# 4. Block inputs of 4 micro-batches are kept in BF16, cut in 8 as well.

# %%
of_h100 = memory_named("h100").budget_bytes
end = huge.vocab_size * huge.hidden_size
block = (huge.parameters - 2 * end - huge.hidden_size) // huge.layers
weights = -(-(32 * block + end) // 8)
inputs = 4 * 32 * 2 * 8192 * huge.hidden_size // 8
EACH = {  # bytes of a weight, its gradient, and its state: float32 copy and two moments
    "BF16": (2, 2, 12),
    "FP8 matmuls, cast when needed": (2, 2, 12),
    "FP8 matmuls, W8 kept beside": (3, 2, 12),
    "FP8 weights, no BF16 beside": (1, 2, 12),
    "FP8 matmuls, 8-bit moments": (2, 2, 2 * (1 + 4 / 256)),  # no float32 copy
}
ranks = {}
print(f"GB of the fullest of 128 ranks; an H100 leaves {of_h100 / 1e9:.1f}")
for name, (weight, gradient_bytes, state) in EACH.items():
    held = weights * (weight + gradient_bytes + state / 4) + inputs
    ranks[name] = held + working["BF16" if name == "BF16" else "FP8"]
    print(f"  {name:34}{held / 1e9:6.1f} + {(ranks[name] - held) / 1e9:.1f} at work", end="")
    print(f", {'fits' if ranks[name] <= of_h100 else 'does not fit'}")

# %% [markdown]
# FP8 **matmuls** take 0.2 GB off a rank. Weights without a BF16 copy on the rank take 13 GB off:
# the float32 masters exist once, sharded, and each rank gathers weights in FP8. Even then there is
# no room for the block at work. Eight-bit moments (Day 9), with BF16 weights and stochastic
# rounding (Day 4), save more.
#
# (Llama 3 405B itself was trained in BF16.)

# %% [markdown]
# ## On your GPU
#
# FP8 matmuls need an NVIDIA GPU of capability 8.9 or newer (RTX 4090, H100). There, this compares a
# layer of 7B in BF16 and FP8. AMD's MI300 has two FP8 formats of its own; there and on older GPUs
# memlab decodes the codes and multiplies in float32.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if torch.cuda.is_available():
    print(f"FP8 matmuls: {torch.cuda.get_device_capability() >= (8, 9) and not torch.version.hip}")
    torch.manual_seed(0)
    layer = nn.Linear(4096, 11_008, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    both = {"BF16": layer, "FP8": nn.Sequential(layer)}
    convert_to_fp8(both["FP8"])
    found = {}
    for name, one in both.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        given = x.clone().requires_grad_()
        found[name] = one(given * 1)
        left = torch.cuda.memory_allocated() - before - found[name].nbytes - given.nbytes
        found[name].sum().backward()
        layer.weight.grad = None
        print(f"{name}: kept for backward {format_bytes(left)}, peak ", end="")
        print(format_bytes(torch.cuda.max_memory_allocated() - before))
    print(f"the outputs differ by {error(found['BF16'], found['FP8']):.1%}")
else:
    print(stored_on_a_gpu("day 19"))

# %% [markdown]
# ## Rules on trial
#
# The guide's line on FP8, and its largest configuration once more. Day 1 has shown that weights
# *stored* in FP8 are 7 GB. Are they, in a training?

# %%
bf16, shared = (COPIES[name][1] for name in ("BF16", "FP8, shared copies"))
verdict(
    "2c",
    shared[0] <= 0.6 * bf16[0],
    f"7B, 2 × 4,096 tokens, predicted: {bf16[0] / 1e9:.1f} GB in BF16, {shared[0] / 1e9:.1f} with "
    f"FP8 matmuls ({1 - shared[0] / bf16[0]:.1%} less), of which weights "
    f"{parts['FP8']['parameters'] / 1e9:.1f} GB in both; checkpointed "
    f"{CHECKPOINTED['BF16'][1][0] / 1e9:.1f} and "
    f"{CHECKPOINTED['FP8, shared copies'][1][0] / 1e9:.1f}; linear layers keep "
    f"{a_token['shared'] / a_token['bf16']:.0%} of the bytes for backward",
    otherwise="the weights that are trained stay in BF16 or float32, and the FP8 copy is beside "
    "them; what shrinks are the inputs that linear layers keep, and nothing with checkpointing",
)

# %%
of_ranks = "; ".join(f"{name}: {count / 1e9:.1f}" for name, count in ranks.items())
verdict(
    "29b",
    ranks["FP8 weights, no BF16 beside"] <= of_h100,
    f"GB of a rank with the block at work, predicted: {working['BF16'] / 1e9:.2f} in BF16, "
    f"{working['FP8'] / 1e9:.2f} with FP8 matmuls; in all: {of_ranks}; an H100 leaves "
    f"{of_h100 / 1e9:.1f}",
    otherwise="FP8 matmuls shrink the block at work by less than a tenth, and nothing else; FP8 "
    "weights without a BF16 copy save 1 byte per weight, and leave less than the block at work "
    "needs; BF16 weights, FP8 matmuls and 8-bit moments without float32 copies fit",
)

# %% [markdown]
# ## What you can do now
#
# | in FP8 training | bytes |
# | --- | --- |
# | weight, gradient, optimizer state | as before |
# | an input that linear layers keep | 1 per element, once if it is shared |
# | a scale | 4 per tensor, or per tile of 128 |
# | W8 | 1 per weight while it exists |
# | all other activations, block inputs | as before |
#
# FP8 makes matmuls faster. To make a training smaller, ask first what holds its bytes: state (Days
# 8 and 9), activations (Days 5 to 7), or weights that don't train (Day 17).

# %% [markdown]
# ## The running bill
#
# The bill's step has its peak in the optimizer, where no matmul's input is left. FP8 has nothing to
# shrink there. Its line stays what it was.

# %%
running_bill(19)

# %% [markdown]
# ## Sources
#
# - Micikevicius et al. 2022: [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433)
# - DeepSeek-AI 2024: [DeepSeek-V3 Technical Report](https://arxiv.org/abs/2412.19437)
# - Grattafiori et al. 2024: [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783)
# - PyTorch: [torchao](https://github.com/pytorch/ao)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
