# %% [markdown]
# # Day 19: Eight bits in the matmul
#
# **FP8 has half the bits of BF16. Does training in FP8 need half the memory?**
#
# After today you have built FP8 training: casts with scales, tiles with their own scale, and a
# linear layer whose three matmuls run in eight bits. You can also say which copies of a weight
# exist, and which memory FP8 really saves.
#
# About 90 minutes, 55 of them for four exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks them. If you are
# stuck, type `memlab hint 19.1` in a terminal. You can skip an exercise and go on.

# %% [markdown]
# ## The question
#
# Since the Ada and Hopper generations, NVIDIA's tensor cores multiply 8-bit floats, twice as fast
# as BF16. A guide says of FP8: "1 byte/param → 7 GB for 7B". DeepSeek-V3 was trained in FP8.
#
# Day 9 stored optimizer state in 8 bits, and Day 17 frozen weights in 4. Today all weights train,
# and the three **matmuls** of each linear layer run in 8 bits: one in forward and two in backward.
# How much memory does this save?

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
# Train Llama 2 7B in pure bfloat16 with AdamW and 2 × 4,096 tokens on one GPU. Now run the matmuls
# of the blocks' linear layers in FP8; attention stays in BF16.
#
# 1. By how many percent does the peak shrink?
# 2. The blocks' linear layers save tensors for backward. By how many percent do these shrink?

# %%
### BEGIN SOLUTION
guess("19.1", peak_reduction_percent=50, saved_reduction_percent=50)  # 16 bits to 8
### END SOLUTION
### BEGIN STUB
# guess("19.1", peak_reduction_percent=..., saved_reduction_percent=...)
### END STUB

# %% [markdown]
# ## Measure
#
# `convert_to_fp8` replaces the linear layers of a model. We **predict** the step (Day 16) with one
# block and with two, since each further block adds the same bytes. (`tests/course/test_day19.py`
# compares this with all 32 blocks.)


# %%
def training_step(config, recipe, batch, length, checkpointed=False, device="cuda"):
    """Return a step, its model and its optimizer. A recipe converts the blocks to FP8."""
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
    """Return the bytes of each category at the peak of a step with all blocks."""
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
# At the peak, backward has just begun, so no gradients exist yet. Weights and optimizer state are
# the same to the byte. Only activations shrink, by a tenth. To see why, build the cast and the
# layer, and count the bytes that the layer saves for backward.

# %% [markdown]
# ## Two formats
#
# Eight bits hold a sign, an exponent and a fraction. **E4M3** has 4 exponent bits and 3 fraction
# bits; **E5M2** has 5 and 2. More fraction bits give smaller steps. More exponent bits give a wider
# range.

# %%
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"E4M3": E4M3, "E5M2": E5M2, "BF16": torch.bfloat16}
print("format   largest    smallest normal   smallest    step near 1")
for name, dtype in FORMATS.items():
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # the smallest subnormal number
    print(f"{name:6}{info.max:10.3g}{info.smallest_normal:16.3g}{least:14.3g}{info.eps:11}")

# %% [markdown]
# Micikevicius et al. propose E4M3 for inputs and weights, where precision matters more, and E5M2
# for gradients, which need a wider range.
#
# BF16 has the range of float32. FP8 does not: E4M3 rounds everything below about 0.001, half of
# its smallest number, to zero, and a gradient is often near a millionth. So divide each tensor by a
# **scale** before the cast, and multiply the result of a matmul by both scales.

# %% [markdown]
# ### Exercise 19.1: a cast with a scale
#
# About 10 minutes. `x` is float32 or bfloat16, of any shape; `dtype` is E4M3 or E5M2. Return
# `(codes, scale)`: codes with the shape of x in `dtype`, and a float32 scale of shape (), so that x
# ≈ codes · scale. The largest |x| becomes the format's largest value (`torch.finfo`).
#
# Compute in float32. Gradients may be as small as 10⁻²⁵. A tensor of zeros gives zeros and a
# positive scale: replace an **amax** (the largest |x|) below `SMALLEST` by `SMALLEST`.

# %%
SMALLEST = 2.0**-100  # with a far smaller amax, 1 / scale would overflow


def cast(x, dtype):
    ### BEGIN SOLUTION memlab.reference.fp8.cast
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float().clamp(min=SMALLEST)
    return (x.float() * (largest / amax)).to(dtype), amax / largest
    ### END SOLUTION


# %%
cast = exercise("19.1", cast)

# %% [markdown]
# ### Why a scale is needed
#
# Gradients of a mean over many tokens are small. Cast gradients near a millionth, with and without
# a scale:


# %%
def error(x, other):
    """Return the norm of the difference, relative to the norm of x."""
    return ((x - other).norm() / x.norm()).item()


def share_lost(x, codes):
    """Return the share of nonzero elements that became zero."""
    return ((codes.float() == 0) & (x != 0)).sum().item() / (x != 0).sum().item()


random = torch.Generator().manual_seed(0)
gradient = 1e-6 * torch.randn(256, 1024, generator=random)
print("format   without a scale        with a scale")
for name, dtype in (("E4M3", E4M3), ("E5M2", E5M2)):
    codes, scale = cast(gradient, dtype)
    plain = gradient.to(dtype)
    zeros, scaled_zeros = share_lost(gradient, plain), share_lost(gradient, codes)
    print(f"{name:6}{zeros:8.0%} become zero{scaled_zeros:14.1%}", end="")
    print(f", error {error(gradient, codes.float() * scale):.1%}")

# %% [markdown]
# Without a scale, all elements underflow. With a scale, none do, and only the format's rounding
# error remains: about 3 % in E4M3 and 5 % in E5M2.
#
# The scale needs the amax, so a cast reads its tensor twice. *Delayed scaling* uses the amax of
# earlier steps instead, which saves a pass. It fails when a tensor grows suddenly, because elements
# above the earlier amax saturate at the format's largest value:

# %%
earlier, now = gradient, 8 * gradient
for name, amax in (("own amax", now.abs().amax()), ("last step's amax", earlier.abs().amax())):
    late = quantize_fp8(now, E5M2, amax=amax)
    saturated = (late.codes.float().abs() == torch.finfo(E5M2).max).float().mean().item()
    print(f"{name:17}error {error(now, dequantize_fp8(late)):4.0%}, saturated {saturated:.0%}")

# %% [markdown]
# ## Outliers
#
# A few features of a transformer's activations are far larger than the rest, but all share one
# scale. With integers, this spoils the small elements (Day 7). Floating point has smaller steps
# near zero. How large may an outlier be?


# %%
def round_to_int8(x):
    """Round to 255 evenly spaced values, with one scale for the tensor."""
    step = x.abs().amax() / 127
    return (x / step).round() * step


def round_to_fp8(x, dtype=E4M3):
    codes, scale = cast(x, dtype)
    return codes.float() * scale


typical = torch.randn(128, 1024, generator=random)
print("outlier      INT8    E4M3    E5M2    (error of the other elements)")
for size in (1, 100, 10_000, 100_000):
    x = typical.clone()
    x[:, 0] *= size  # one feature of 1,024
    rest = x[:, 1:]
    found = (error(rest, round_to_int8(x)[:, 1:]), error(rest, round_to_fp8(x)[:, 1:]),
             error(rest, round_to_fp8(x, E5M2)[:, 1:]))  # fmt: skip
    print(f"{size:7,} ×" + "".join(f"{each:8.1%}" for each in found))

# %% [markdown]
# At 100 ×, INT8's error is 65 %, and FP8's does not change. At 10,000 ×, most other
# elements fall below E4M3's smallest normal number, and its error grows. E5M2 has a wider range,
# but coarser steps.
#
# DeepSeek-V3 uses a scale per **tile**: 1 × 128 elements of activations and gradients, 128 × 128 of
# weights. Then E4M3 has enough range for everything, gradients included.

# %% [markdown]
# ### Exercise 19.2: a scale for each tile
#
# About 15 minutes. `x` is (n, k). A tile has `rows` × `columns` elements; tiles at the edges may be
# smaller. Return `(codes, scales)`: codes (n, k) in `dtype`, and float32 scales (⌈n/rows⌉,
# ⌈k/columns⌉), each computed for its tile as in Exercise 19.1. The result must not keep a larger
# tensor alive. (`F.pad(x, (0, right, 0, below))` pads a matrix with zeros.)


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
def round_to_fp8_tiles(x, columns, dtype=E4M3):
    codes, scales = cast_tiles(x, dtype, 1, columns)
    return codes.float() * scales.repeat_interleave(columns, 1)


x = typical.clone()
x[:, 0] *= 100_000
rest = x[:, 1:]
print("a scale per    error, other elements   bytes per element")
print(f"tensor{error(rest, round_to_fp8(x)[:, 1:]):23.1%}{1 + 4 / x.numel():20.4f}")
for columns in (512, 128, 32):
    found = error(rest, round_to_fp8_tiles(x, columns)[:, 1:])
    print(f"1 × {columns:<6}{found:19.1%}{1 + 4 / columns:20.4f}")

# %% [markdown]
# Now an outlier increases the error of its own tile only, as in Day 17's blocks of 64. A tile of
# 128 elements adds 4 bytes of scale to 128 bytes of codes: 3 %.
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
# Here g is the gradient of y, and x8, W8 and g8 are FP8 casts. Which tensors should forward save
# for backward?

# %% [markdown]
# Autograd would save x, 2 bytes per element in BF16. Only dW needs x, and its matmul uses x8. So
# save **x8** instead of x.
#
# Don't save W8. The optimizer's updates to W are far smaller than a step of FP8 (Day 4), so W stays
# in BF16 or float32 as a **master weight**. It still exists in backward: cast it again there.


# %%
def multiply(a, b, dtype):
    """Return a · b. Both are (codes, scale) pairs; accumulate in float32."""
    return (a[0].float() @ b[0].float() * (a[1] * b[1])).to(dtype)


# %% [markdown]
# On a GPU, `torch._scaled_mm` multiplies the codes directly. `multiply` decodes them first, which
# works on any machine but gives no speed-up. The results differ only by rounding in the sums.

# %% [markdown]
# ### Exercise 19.3: forward and backward in FP8
#
# About 20 minutes. `x` is (n, in) and `weight` (out, in). Cast `x` and `weight` to E4M3 and the
# gradient to E5M2 with your `cast`, and multiply with `multiply`. Dtypes:
#
# - the result: x's dtype
# - the gradient of x: the incoming gradient's dtype
# - the gradient of the weight: the weight's dtype
#
# Between forward and backward, save x8, its scale and the weight, but neither x nor an FP8 copy of
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
    """A linear layer without bias, with FP8 matmuls."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return matmul(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def measured(layer, x):
    """Return output and gradients, and the bytes that forward saves, not counting the output."""
    given, outputs = x.clone().requires_grad_(), []
    # `given * 1` stays alive only if the graph saves it.
    trace = memlab.measure(lambda: outputs.append(layer(given * 1)), model=layer)
    saved = sum(event.bytes for event in trace.events if event.phase != "before")
    outputs[0].square().mean().backward()
    return (outputs[0], given.grad, layer.weight.grad), saved - outputs[0].nbytes


# %%
torch.manual_seed(0)
linear, x = nn.Linear(512, 256, bias=False), torch.randn(64, 512)
exact, _ = measured(linear, x)
in_bf16 = nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)
in_bf16.load_state_dict(linear.state_dict())
LAYERS = {"BF16": in_bf16, "FP8": FP8Linear(in_bf16)}
for name, layer in LAYERS.items():
    found, saved = measured(layer, x.bfloat16())
    layer.weight.grad = None
    errors = [error(*pair) for pair in zip(exact, [t.float() for t in found], strict=True)]
    print(f"{name}: errors of y {errors[0]:.2%}, dx {errors[1]:.1%}, dW {errors[2]:.1%}; ", end="")
    print(f"saved for backward: {saved:,} bytes for {x.numel():,} input elements")

# %% [markdown]
# The FP8 layer's gradients have an error of about 6 %, against 0.4 % in BF16. The layer keeps half
# as many bytes for backward, as hoped. So why is the whole model's peak 5 % lower and not 50?

# %% [markdown]
# ## One input, three layers
#
# In a block, query, key and value read **the same tensor**. In BF16, autograd saves references to
# one tensor. Three FP8 layers save three copies. Attention also saves its own output for backward,
# so the output projection's FP8 copy is extra.

# %% [markdown]
# ### Exercise 19.4: what the linear layers of a block save
#
# About 10 minutes. Query, key and value read one norm's output (tokens × C); gate and up read the
# other's. The output projection reads attention's output (tokens × Q), which attention saves
# anyway. `down` reads (tokens × F). Return an integer, the bytes that linear layers **add** to a
# block's saved tensors. They save
#
# - `"bf16"`: their inputs, in bfloat16
# - `"own"`: an FP8 copy for each of the seven layers
# - `"shared"`: an FP8 copy for each different input
#
# A copy has one float32 scale, or with `columns`, ⌈k / columns⌉ per row of k elements.


# %%
def saved_bytes(tokens, C, Q, F, way, columns=None):
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
saved_bytes = exercise("19.4", saved_bytes)


# %% [markdown]
# Measure the bytes that a second block saves in forward, in each way. The difference from BF16 must
# match your formula.


# %%
def bytes_of_a_block(config, recipe, tokens):
    """Measure on this machine how many bytes a second block holds after forward."""
    held = []
    for layers in (1, 2):
        _, model, _ = training_step(replace(config, layers=layers), recipe, 1, tokens, device="cpu")
        batch, out = torch.zeros(1, tokens, dtype=torch.long), []
        trace = memlab.measure(lambda m=model, b=batch, o=out: o.append(m(b, b)), model=model)
        held.append(sum(event.bytes for event in trace.events if event.phase != "before"))
    return held[1] - held[0]


WAYS = {"bf16": (None, None), "own": (FP8Recipe(share_inputs=False), None),
        "shared": (FP8Recipe(), None),
        "shared, tiles": (FP8Recipe(inputs=(1, 128), weights=(128, 128)), 128)}  # fmt: skip
wide = replace(PRESETS["tiny"], hidden_size=256, heads=4, kv_heads=2, intermediate_size=768)
sizes = (wide.hidden_size, wide.hidden_size, wide.intermediate_size)
blocks = {way: bytes_of_a_block(wide, recipe, 32) for way, (recipe, _) in WAYS.items()}
for way, (_, columns) in WAYS.items():
    formula = saved_bytes(32, *sizes, way.split(",")[0], columns)
    less = blocks["bf16"] - blocks[way]
    agree = less == saved_bytes(32, *sizes, "bf16") - formula
    print(f"{way:14} block {blocks[way]:8,} bytes, linear layers {formula:7,} bytes; ", end="")
    print(f"difference matches: {agree}")

# %%
seven = PRESETS["llama-2-7b"]
of_seven = (seven.hidden_size, seven.heads * seven.head_dim, seven.intermediate_size)
a_token = {way: saved_bytes(8192, *of_seven, way) / 8192 for way in ("bf16", "own", "shared")}
for way, count in a_token.items():
    print(f"7B, {way:7} {count:9,.1f} bytes per token and block, {count / a_token['bf16']:.0%}")
reveal("19.1", peak_reduction_percent=100 * (1 - peaks["FP8"] / peaks["BF16"]),
       saved_reduction_percent=100 * (1 - a_token["shared"] / a_token["bf16"]))  # fmt: skip

# %% [markdown]
# ## Explain the gap
#
# - With a copy for each layer, linear layers save 7 % fewer bytes for backward than in BF16. With
#   shared copies, they save 39 % fewer, not 50 %, because attention's output is saved twice: in
#   BF16 and in FP8.
# - Linear layers save only a quarter of a block's activations. Attention, the activation function
#   and the norms save the rest in BF16: queries, keys, values, the MLP's two branches and the
#   residual stream.

# %%
PARTS = {"weights": "parameters", "AdamW's moments": "optimizer_state",
         "activations": "activations", "temporaries": "backward_temporaries"}  # fmt: skip
COLORS = ("#4477aa", "#ddaa33", "#cc6677", "0.75")
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
axes.set_title("7B, 2 × 4,096 tokens: FP8 matmuls shrink only some activations")
axes.legend(frameon=False, ncols=5, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.35))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Does it learn?
#
# The gradients have an error of about 6 %. Train a small model on the same text in four ways: BF16
# autocast, FP8 with a scale per tensor, FP8 with tiles, and FP8 **without scales**. The last run
# only rounds to FP8's values, and saves no memory.
#
# We divide the loss by 2,048, as for one of 2,048 micro-batches, to get small gradients. AdamW is
# almost unaffected, because its step does not depend on the size of gradients.


# %%
class Unscaled(torch.autograd.Function):
    """Round to E4M3 in forward, or the gradient to E5M2 in backward."""

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
    """Return the loss of each step, and the share of zeros in the blocks' last gradients."""
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
# tiles of 32, because the model has only 64 features
TILES = FP8Recipe(inputs=(1, 32), weights=(32, 32), gradients=E4M3)
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
# With scales, FP8 trains like BF16. Without scales, the blocks get **no gradient at all**. The loss
# falls anyway, because the model first learns in its embedding, which is not converted. So check
# the gradients too.
#
# A few steps of a tiny model prove little about a large one. DeepSeek-V3 reports a loss within 0.25
# % of BF16's over a trillion tokens, with tiles, and with embedding, output layer, norms and
# attention in BF16 or float32.

# %% [markdown]
# ## Compare with torchao
#
# torchao's `convert_to_float8_training` is a production version of your layer. It is optional here:
# install it with `pip install -e ".[oracles]"` in the repository's folder.

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
    yours, saved = measured(FP8Linear(layer), x)
    found, their_saved = measured(theirs, x)
    for name, own, other in zip(("y", "dx", "dW"), yours, found, strict=True):
        print(f"{name}: {(own == other).float().mean():.2%} of the elements are equal to the bit")
    print(f"saved for backward: yours {saved:,} bytes, torchao's {their_saved:,} bytes")
else:
    print('torchao is not installed: pip install -e ".[oracles]" in the repository\'s folder')

# %% [markdown]
# The values match, but the bytes differ: torchao saves **x in BF16** and casts it again in
# backward. Then FP8 saves no activation memory, only time. In return, query, key and value share
# one saved tensor automatically.

# %% [markdown]
# ## At scale: which copies exist
#
# `tests/course/test_day19.py` predicts this table with all 32 blocks. At the start of the day, you
# predicted the allocated peaks of its first and third rows.

# %%
COPIES = {
    "BF16": (None, (82_456_765_440, 84_945_141_760)),
    "FP8, a copy for each layer": (FP8Recipe(share_inputs=False), (81_720_779_776, 85_502_984_192)),
    "FP8, shared copies": (FP8Recipe(), (78_499_505_152, 83_626_033_152)),
    "FP8, W8 saved for backward": (
        FP8Recipe(keep_weights=True),
        (85_008_131_072, 87_411_392_512),
    ),
}
CHECKPOINTED = {
    "BF16": (None, (67_402_309_632, 68_451_041_280)),
    "FP8, shared copies": (FP8Recipe(), (67_404_406_784, 68_436_361_216)),
}
for title, table in (("7B, 2 × 4,096 tokens", COPIES), ("checkpointed", CHECKPOINTED)):
    print(f"{title:32}  allocated    reserved   allocated, against BF16")
    for name, (_, (allocated, reserved)) in table.items():
        less = 1 - allocated / table["BF16"][1][0]
        print(f"  {name:30}{format_bytes(allocated):>11}{format_bytes(reserved):>12}", end="")
        print(f"{-less:+8.1%}" if less else "")
agree = [COPIES[name][1][0] == peaks[dtype]
         for name, dtype in (("BF16", "BF16"), ("FP8, shared copies", "FP8"))]  # fmt: skip
print(f"the first and third rows equal your predictions: {all(agree)}")

# %% [markdown]
# The table shows three things:
#
# - **A copy for each layer** saves 1 %, but the allocator **reserves** more than with BF16: the gap
#   between reserved and allocated grows from 2.3 to 3.5 GiB. Shared copies save 5 % of allocated
#   and 2 % of reserved memory.
# - **Saving W8 for backward** needs 1 byte per weight, so FP8 needs *more* memory than BF16.
# - **With checkpointing**, the peak is in AdamW's step, when no activations are alive. FP8 does not
#   lower it.

# %% [markdown]
# All copies of a weight, in bytes:
#
# | copy | bytes | alive |
# | --- | --- | --- |
# | master weight, BF16 or float32 | 2 or 4 | always |
# | gradient, BF16 or float32 | 2 or 4 | from backward to `zero_grad` |
# | AdamW's moments, BF16 or float32 | 4 or 8 | always |
# | W8 | 1 | during a matmul, or until backward if saved |
# | W8 transposed | 1 | during the matmul of dx |
#
# Before Blackwell, NVIDIA's FP8 matmul needs both operands contiguous along the summed dimension,
# so backward needs W8 transposed. A library that keeps both copies to save time adds 2 bytes per
# weight.

# %% [markdown]
# ### 405 billion weights on 128 GPUs
#
# Day 16 tested the guide's largest configuration by formula: FP8, tensor parallel 8, pipeline
# parallel 4, data parallel 4, ZeRO-1, checkpointing. The formula omitted the *block at work*: the
# activations and temporaries of the block whose backward runs. Predict them for 8,192 tokens and an
# eighth of each matrix. This leaves out sequence parallelism, which would also divide the norms and
# the residual stream by 8.

# %%
huge = PRESETS["llama-3-405b"]
eighth = replace(huge, layers=1, heads=huge.heads // 8, kv_heads=huge.kv_heads // 8,
                 custom_head_dim=huge.head_dim, intermediate_size=huge.intermediate_size // 8,
                 vocab_size=256)  # fmt: skip


def at_work(recipe):
    """Return the bytes of a block's activations and temporaries during its backward."""

    def build():
        _, model, optimizer = training_step(eighth, recipe, 1, 1)
        tokens = torch.zeros(1, 8192, dtype=torch.long, device="cuda")
        return lambda: model(tokens, tokens).backward(), model, optimizer

    found = memlab.predict(build).at_peak
    return found["activations"] + found["backward_temporaries"]


working = {"BF16": at_work(None), "FP8": at_work(FP8Recipe())}
for dtype, count in working.items():
    print(f"an eighth of a 405B block at work, {dtype}: {count / 1e9:.2f} GB")

# %% [markdown]
# The rank that holds the most has an eighth of 32 blocks and of the embedding. ZeRO-1 shards the
# optimizer state over 4 ranks. Checkpointing saves the block inputs of 4 micro-batches in BF16, one
# per pipeline stage. For these inputs, the formula of Day 16 includes sequence parallelism: it
# divides them by 8.

# %%
h100_bytes = memory_named("h100").budget_bytes
embedding = huge.vocab_size * huge.hidden_size  # weights; the output layer has as many
block = (huge.parameters - 2 * embedding - huge.hidden_size) // huge.layers
weights = -(-(32 * block + embedding) // 8)
inputs = 4 * 32 * 2 * 8192 * huge.hidden_size // 8
EACH = {  # bytes of a weight, its gradient, and its state (float32 copy, two moments)
    "BF16": (2, 2, 12),
    "FP8 matmuls, W8 cast when needed": (2, 2, 12),
    "FP8 matmuls, W8 also kept": (3, 2, 12),
    "FP8 weights, no BF16 copy": (1, 2, 12),
    "FP8 matmuls, 8-bit moments": (2, 2, 2 * (1 + 4 / 256)),  # no float32 copy
}
ranks = {}
print(f"usable on an H100: {h100_bytes / 2**30:.1f} GiB = {h100_bytes / 1e9:.1f} GB")
print("GB on the rank that holds the most:")
for name, (weight, gradient_bytes, state) in EACH.items():
    held = weights * (weight + gradient_bytes + state / 4) + inputs
    ranks[name] = held + working["BF16" if name == "BF16" else "FP8"]
    print(f"  {name:34}{held / 1e9:6.1f} + {(ranks[name] - held) / 1e9:.1f} at work", end="")
    print(f", {'fits' if ranks[name] <= h100_bytes else 'does not fit'}")

# %% [markdown]
# FP8 **matmuls** save 0.2 GB per rank. FP8 weights without a BF16 copy on the rank save 13 GB: the
# float32 master weights exist once, sharded, and each rank gathers weights in FP8. Even then, only
# 1.9 GB remain for the block at work, network buffers and the allocator's gaps. 8-bit moments (Day
# 9), with BF16 weights and stochastic rounding (Day 4), save more.
#
# (Llama 3 405B itself was trained in BF16.)

# %% [markdown]
# ## On your GPU
#
# FP8 matmuls need an NVIDIA GPU of compute capability 8.9 or newer (RTX 4090, H100). This cell
# compares a 7B layer in BF16 and FP8. AMD's MI300 has two FP8 formats of its own. On MI300 and on
# older GPUs, memlab decodes the codes and multiplies in float32.

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
        saved = torch.cuda.memory_allocated() - before - found[name].nbytes - given.nbytes
        found[name].sum().backward()
        layer.weight.grad = None
        print(f"{name}: saved for backward {format_bytes(saved)}, peak ", end="")
        print(format_bytes(torch.cuda.max_memory_allocated() - before))
    print(f"the outputs differ by {error(found['BF16'], found['FP8']):.1%}")
else:
    print(stored_on_a_gpu("day 19"))

# %% [markdown]
# ## Rules on trial
#
# The guide makes a claim on FP8, and its largest configuration uses FP8. Day 1 showed that weights
# *stored* in FP8 need 7 GB. Is that also true in training?

# %%
bf16, shared = (COPIES[name][1] for name in ("BF16", "FP8, shared copies"))
in_gb = [CHECKPOINTED[name][1][0] / 1e9 for name in ("BF16", "FP8, shared copies")]
figures = (
    f"7B, 2 × 4,096 tokens, predicted: {bf16[0] / 1e9:.1f} GB in BF16, {shared[0] / 1e9:.1f} GB "
    f"with FP8 matmuls ({1 - shared[0] / bf16[0]:.1%} less), "
    f"{parts['FP8']['parameters'] / 1e9:.1f} GB of weights in both; with checkpointing "
    f"{in_gb[0]:.1f} and {in_gb[1]:.1f} GB; linear layers' saved tensors shrink to "
    f"{a_token['shared'] / a_token['bf16']:.0%}"
)
verdict(
    "2c",
    parts["FP8"]["parameters"] <= 7e9,
    figures,
    otherwise="trained weights stay in BF16 or float32, and FP8 copies are extra; only the inputs "
    "that linear layers save shrink; with checkpointing, the peak stays the same",
)

# %%
per_rank = "; ".join(f"{name}: {count / 1e9:.1f}" for name, count in ranks.items())
figures = (
    f"GB of the block at work, predicted without sequence parallelism: "
    f"{working['BF16'] / 1e9:.2f} in BF16, {working['FP8'] / 1e9:.2f} with FP8 matmuls; GB per "
    f"rank: {per_rank}; an H100 has "
    f"{h100_bytes / 1e9:.1f} GB for tensors"
)
verdict(
    "29b",
    ranks["FP8 weights, no BF16 copy"] <= h100_bytes,
    figures,
    otherwise="FP8 matmuls only shrink the block at work, by less than a tenth; FP8 weights "
    "without a BF16 copy save 1 byte per weight, but leave too little for the block at work, "
    "buffers and gaps; BF16 weights, FP8 matmuls and 8-bit moments without float32 copies fit",
)

# %% [markdown]
# ## What you can do now
#
# | in FP8 training | bytes |
# | --- | --- |
# | weight, gradient, optimizer state | unchanged |
# | a saved input of linear layers | 1 per element, once if shared |
# | a scale | 4 per tensor, or per tile of 128 |
# | W8 | 1 per weight while it exists |
# | all other activations, block inputs | unchanged |
#
# FP8 makes matmuls faster. To reduce memory, first find what uses it: optimizer state (Days 8 and
# 9), activations (Days 5 to 7), or frozen weights (Day 17).

# %% [markdown]
# ## The running bill
#
# The bill's step peaks in the optimizer, when no matmul's input is alive. FP8 cannot reduce this
# peak, so the bill does not change.

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
