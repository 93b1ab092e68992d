# %% [markdown]
# # Day 7: Activation compression
#
# **Keep them, but in eight bits?**
#
# After today you can keep activations in 8, 4 or 2 bits; you can say of any model what that saves
# and what it cannot; and you can see in the gradients whether the bits were enough.
#
# About 85 minutes, 59 of them for five exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 7.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Day 5 forgot activations, Day 6 chose which. Both compute again what is gone. There is a third
# way: keep **everything**, with fewer digits. The forward pass computes with exact numbers, as
# always. Only what is put aside for backward is rounded, and backward gets nearly what was there.
#
# A float32 has 4 bytes. Here a number gets one: 256 values. To write numbers with few values is
# called **quantization**; which of the values it is, its **code**.

# %%
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import memlab
from memlab.checkpointing import ATTENTION, checkpoint, selective
from memlab.compression import compressed_activations
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.bill import SETTING
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.train import TECHNIQUES, build, measured
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# A block of the 124M model holds 310 MiB for backward (8 × 640 tokens, float32; with its input, for
# the next block holds its output). How many MiB if all that can shrink is kept in 8 bits? How many
# with Day 5's checkpoint instead, and how many with both?

# %%
### BEGIN SOLUTION
guess("7.1", eight_bits_mib=77.5, checkpointed_mib=15, both_mib=4)  # a quarter; the input alone
### END SOLUTION
### BEGIN STUB
# guess("7.1", eight_bits_mib=..., checkpointed_mib=..., both_mib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# By the library, on fake tensors: the forward pass runs inside `with compressed_activations():`.


# %%
def plainly(fn, x):
    return fn(x)


def held_by(call, around):
    """Bytes a block holds for backward, by part: its input, attention's, the MLP's, and scales."""
    outputs = []

    def forward():
        with around():
            outputs.append(call(block, x * 1))  # the input is made, as by a block before

    trace = memlab.measure(forward, model=block)
    kept = [e for e in trace.alive() if e.phase != "before"]
    first = min(kept, key=lambda e: e.storage)  # the input, or its codes
    held = {"input": 0, "attention": 0, "MLP": -outputs[0].nbytes, "smallest and step": 0}
    for e in kept:
        of_mlp = e.module.startswith("mlp") or e.module == "Block"  # with norm and sum before it
        part = "input" if e is first else "MLP" if of_mlp else "attention"
        held["smallest and step" if e.dtype == "bfloat16" else part] += e.bytes
    return held


# %%
WAYS = {
    "all kept": (plainly, nullcontext),
    "in 8 bits": (plainly, compressed_activations),
    "checkpointed": (checkpoint, nullcontext),
    "both": (checkpoint, compressed_activations),
}
with memlab.dry_run():
    block, x = GPT(replace(PRESETS["124m"], layers=1)).blocks[0], torch.randn(8, 640, 768)
    x.requires_grad_()
    held = {name: held_by(*way) for name, way in WAYS.items()}
totals = {name: sum(parts.values()) for name, parts in held.items()}
measured_mib = {"eight_bits_mib": "in 8 bits", "checkpointed_mib": "checkpointed"}
reveal("7.1", both_mib=totals["both"], **{k: totals[name] for k, name in measured_mib.items()})

# %%
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
colours = {"input": "#ddaa33", "attention": "#cc6677", "MLP": "#4477aa"}
colours["smallest and step"] = "#222222"
for name, parts in held.items():
    left = 0
    for part, colour in colours.items():
        mib = parts.get(part, 0) / 2**20
        axes.barh(name, mib, left=left, color=colour, label=part if name == "in 8 bits" else None)
        left += mib
    axes.text(left + 3, name, f"{left:.1f} MiB", va="center")
axes.set(xlabel="MiB held for backward by one block", xlim=(0, 350))
axes.set_title("A quarter by 8 bits, a twentieth by a checkpoint")
axes.invert_yaxis()
_ = axes.legend(frameon=False, loc="lower right")

# %% [markdown]
# A quarter would be 77.5. The gap is made of the black sliver, 4 bytes for each 256 numbers, and of
# a quarter of a MiB that was left alone. **Nothing is computed again**, and four times as many
# tokens fit where activations are what fills the memory. Checkpointing saves more, and runs every
# block twice; its inputs can shrink as well.
#
# What does it cost? An error in every gradient. So build it, and look.

# %% [markdown]
# ## 256 values on even steps
#
# Take 256 activations. Write down the **smallest** of them, and a **step** of a 255th of their
# range. Each number is then so many steps above the smallest: a whole number from 0 to 255, a byte.
# Coming back, it is `smallest + code · step`. With 4 bits there are 15 steps, with 2 bits three.
#
# Here are some: what the MLP of a tiny model makes of random bytes.

# %%
torch.manual_seed(0)
model = GPT(PRESETS["tiny"])
tokens, made = torch.randint(256, (8, 64)), []
hook = model.blocks[0].mlp.down.register_forward_pre_hook(lambda _, inputs: made.append(inputs[0]))
model(tokens)
hook.remove()
activations = made.pop().detach().flatten()  # 49,152 numbers
one_group = activations[:256].view(1, 256)

# %%
fig, all_axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained", sharey=True)
low, high = one_group.aminmax()
for axes, bits in zip(all_axes, (8, 4, 2), strict=True):
    for level in torch.linspace(low, high, 2**bits).tolist():
        axes.axhline(level, color="#cc6677", linewidth=0.3 if bits == 8 else 0.8, zorder=0)
    axes.plot(one_group[0], ".", color="#1b3a57", markersize=4)
    axes.set(title=f"{bits} bits: {2**bits} values", xlabel="place in the group")
_ = all_axes[0].set_ylabel("activation")

# %% [markdown]
# Each point moves to the nearest red line. At 8 bits nobody will notice; at 2 bits most of a group
# ends up on the same line.
#
# Smallest and step are kept for each group. As two float32 they would be 8 bytes; as two bfloat16
# they are 4. But a bfloat16 has two to three digits. Rounded to the *nearest*, the smallest could
# lie above the numbers, and the largest be out of reach. So round one down and the other up:


# %%
def as_bfloat16(numbers, towards):
    """Rounded in one direction: down for towards=-inf, up for inf."""
    nearest = numbers.bfloat16()
    beyond = torch.nextafter(nearest, torch.full_like(nearest, towards))
    passed = nearest.float() > numbers if towards < 0 else nearest.float() < numbers
    return torch.where(passed, beyond, nearest)


def dequantize(codes, smallest, step):
    """What comes back: float32 (groups, n)."""
    return smallest.float() + codes * step.float()


numbers = torch.tensor([100.3])
print(f"{numbers.item():.1f} down: {as_bfloat16(numbers, -inf).item()}, ", end="")
print(f"up: {as_bfloat16(numbers, inf).item()}")

# %% [markdown]
# ### Exercise 7.1: quantize
#
# About 15 minutes. `groups` is float32 (groups, n), mostly n = 256. Return three tensors: `codes`,
# uint8 (groups, n), from 0 to `levels`; `smallest`, bfloat16 (groups, 1), rounded down; `step`,
# bfloat16 (groups, 1), rounded up, so that `levels` steps from the *rounded* smallest reach the
# largest. No number may come back more than half a step off.
#
# Turn steps into whole numbers by `round(steps)`, whatever function `round` is. It must be handed
# no 0 / 0: groups of zeros exist. Leave `groups` as it is.


# %%
def quantize(groups, levels, round=torch.round):
    """(codes, smallest, step)"""
    ### BEGIN SOLUTION memlab.reference.activation_compression.quantize
    low, high = groups.aminmax(dim=1, keepdim=True)
    smallest = as_bfloat16(low, -inf)
    step = as_bfloat16((high - smallest.float()) / levels, inf)
    steps = (groups - smallest.float()) / torch.where(step == 0, 1, step.float())
    return round(steps).clamp(0, levels).to(torch.uint8), smallest, step
    ### END SOLUTION


# %%
quantize = exercise("7.1", quantize)

# %% [markdown]
# ## Why groups, and why of 256
#
# Activations have outliers. One number of 50 among numbers around 1 makes the steps coarse for all
# that share its scale. A guide's `tensor.abs().max() / 127` has one scale for the whole tensor. Let
# one of the 49,152 be an outlier, and look at the others:

# %%
with_outlier = activations.clone()
with_outlier[1000] = 100 * activations.abs().max()
others = torch.arange(len(with_outlier)) != 1000


def error(numbers, size):
    """Of what comes back, by the size of the numbers, outlier aside; groups of another size."""
    groups = numbers.view(-1, size)
    off = (dequantize(*quantize(groups, 255)) - groups).flatten()
    return (off[others].norm() / numbers[others].norm()).item()


for size in (16, 64, 256, 1024, len(activations)):
    overhead = 4 / size
    errors = error(activations, size), error(with_outlier, size)
    print(
        f"groups of {size:6,}: {1 + overhead:.2f} bytes a number, error {errors[0]:5.1%}, ", end=""
    )
    print(f"with the outlier {errors[1]:6.1%}")
scale = with_outlier.abs().max() / 127
back = (with_outlier / scale).round() * scale
off = (back - with_outlier)[others].norm() / with_outlier[others].norm()
print(f"the guide's scale: error with the outlier {off:.0%}")

# %% [markdown]
# With one scale everything but the outlier is lost: of most numbers a zero comes back. In groups of
# 256 only 255 others suffer. Smaller groups would be finer still, and dearer: at 16 they cost a
# quarter of a byte each. At 256 it is 1/64, less than 2 %.
#
# And why begin at the *smallest*, where the guide goes from −largest to largest? Hardly any group
# is *exactly* centred on zero. So the whole range of codes is used, at the same bytes.

# %%
groups = activations.view(-1, 256)
scale = groups.abs().amax(1, keepdim=True) / 127
from_largest = (((groups / scale).round() * scale - groups).norm() / groups.norm()).item()
from_smallest = error(activations, 256)
print(f"error from -largest to largest: {from_largest:.2%}, from the smallest: ", end="")
print(f"{from_smallest:.2%}, {1 - from_smallest / from_largest:.0%} less")

# %% [markdown]
# ## Fewer bits: round at random
#
# A gradient is a sum, over all tokens. Errors that point up and down at random cancel in sums;
# errors with a side of their own add up. At 8 bits the nearest value is so near that this does not
# matter. With 3 steps it does: most of a group is rounded the same way.
#
# **Stochastic rounding** (Day 4 had it for bfloat16): 2.25 becomes 3 in a quarter of all cases, 2
# in the others. Each draw is worse than the nearest. The mean of many is *right*.

# %% [markdown]
# ### Exercise 7.2: round at random
#
# About 8 minutes. `steps` is a float32 tensor of any shape, from 0 up. Return float32 of its shape,
# whole numbers: each rounded up with a probability equal to its fraction, else down. Each number
# gets a draw of its own, from `generator` and nowhere else: `torch.rand(..., generator=generator)`.
# Whoever trains has random numbers of their own, for dropout, and those must stay what they were.
# Leave `steps` as it is.


# %%
def round_at_random(steps, generator):
    """Whole numbers whose mean over many draws is `steps`."""
    ### BEGIN SOLUTION
    down = steps.floor()
    return down + (torch.rand(steps.shape, generator=generator) < steps - down)
    ### END SOLUTION


# %%
round_at_random = exercise("7.2", round_at_random)

# %% [markdown]
# The sum of the group above, estimated 3,000 times from 2 bits:

# %%
at_random = partial(round_at_random, generator=torch.Generator().manual_seed(7))
exact = one_group.sum().item()
nearest = dequantize(*quantize(one_group, 3)).sum().item()
draws = dequantize(*quantize(one_group.repeat(3000, 1), 3, at_random)).sum(1)
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
one_step = quantize(one_group, 3)[2].item()  # a sum moves by whole steps: a bar for each
bars = torch.arange(draws.min() - one_step / 2, draws.max() + one_step, one_step)
axes.hist(draws.tolist(), bins=bars.tolist(), color="#b7c9d9")
for sum_of, name, colour in (
    (exact, "exact", "#1b3a57"),
    (draws.mean().item(), "mean of the draws", "#44aa77"),
    (nearest, "nearest", "#cc6677"),
):
    style = "--" if name.startswith("mean") else "-"
    axes.axvline(sum_of, color=colour, linestyle=style, linewidth=2.5, label=name)
axes.set(xlabel="sum of the 256 numbers, from 2 bits each", ylabel="draws of 3,000")
axes.set_title("One sum, 3,000 times")
axes.legend(frameon=False)
spread = draws.std().item()
print("the mean of the draws is nearer than the nearest: ", end="")
print(abs(draws.mean().item() - exact) < abs(nearest - exact))
print(f"and within a tenth of their spread: {abs(draws.mean().item() - exact) < spread / 10}")

# %% [markdown]
# The nearest gives the same wrong sum every time. The draws scatter, and have no side.
#
# So: **nearest at 8 bits**, where its error is smaller by a good quarter and its side too small to
# matter. **Below 8, it is a trade**: the nearest has a side, the draws have more noise, which
# averages over tokens and steps take away, if there are enough of them. Both are tried below.
# (ActNN and GACT, of which more later, round at random always.)

# %% [markdown]
# ## Bits into bytes
#
# Memory comes in bytes. Codes of 4 bits are to lie two in a byte, codes of 2 bits four: the first
# in the lowest bits. `unpack` takes them apart again: `>>` moves bits down, `&` cuts off those
# above.


# %%
def unpack(packed, bits, count):
    """`count` codes of so many bits, uint8 (count,)."""
    per_byte = 8 // bits
    codes = torch.empty(count, dtype=torch.uint8, device=packed.device)
    for place in range(per_byte):
        part = codes[place::per_byte]
        part.copy_((packed[: len(part)] >> place * bits) & (2**bits - 1))
    return codes


print(unpack(torch.tensor([0b0010_0001, 0b0000_0011], dtype=torch.uint8), bits=4, count=3))

# %% [markdown]
# ### Exercise 7.3: pack
#
# About 8 minutes. `codes` is uint8 (n,), each code below 2 to the power of `bits` (8, 4 or 2).
# Return uint8 (⌈n · bits / 8⌉,), where ⌈ ⌉ rounds up, from which `unpack` gets them back; n need
# not fill the last byte. What you return owns its bytes and no more: `codes` may be a view of a
# longer tensor, which is to die. Leave `codes` as it is.


# %%
def pack(codes, bits):
    """What `unpack` takes apart."""
    ### BEGIN SOLUTION
    per_byte = 8 // bits
    packed = torch.zeros(-(-len(codes) // per_byte), dtype=torch.uint8, device=codes.device)
    for place in range(per_byte):
        part = codes[place::per_byte]
        packed[: len(part)] |= part << place * bits
    return packed
    ### END SOLUTION


# %%
pack = exercise("7.3", pack)

# %% [markdown]
# Put together: numbers of any count, in groups of 256. The last group is filled up with its last
# number: zeros would stretch its range.


# %%
class Compressed(NamedTuple):
    packed: torch.Tensor
    smallest: torch.Tensor
    step: torch.Tensor
    bits: int
    count: int
    dtype: torch.dtype


def in_groups(numbers):
    missing = -len(numbers) % 256
    return torch.cat([numbers, numbers[-1:].expand(missing)]).view(-1, 256)


def compress(numbers, bits=8, round=torch.round):
    codes, smallest, step = quantize(in_groups(numbers.float()), 2**bits - 1, round)
    packed = pack(codes.view(-1)[: len(numbers)], bits)
    return Compressed(packed, smallest, step, bits, len(numbers), numbers.dtype)


# %%
def decompress(kept):
    codes = in_groups(unpack(kept.packed, kept.bits, kept.count))
    numbers = dequantize(codes, kept.smallest, kept.step)
    return numbers.view(-1)[: kept.count].to(kept.dtype)


for bits in (8, 4, 2):
    kept = compress(activations[:1000], bits)
    nbytes = sum(tensor.nbytes for tensor in kept[:3])
    step = kept.step.float().max()
    is_near = (decompress(kept) - activations[:1000]).abs().max() <= 0.501 * step
    print(f"1,000 numbers at {bits} bits: {nbytes:,} bytes, half a step at most: {is_near}")

# %% [markdown]
# ## What is there to shrink?
#
# A hook (Day 5) sees every tensor that autograd saves. Not all of it is memory, and not all can be
# rounded:
#
# - **Weights** are saved, transposed at times, and are there anyway.
# - One **storage** (the memory behind a tensor) is saved by several operators, or in several views.
# - What has **no gradient** (`requires_grad` is False) is an index, a mask, a table, a statistic:
#   rounded, a row's number is another row. And data are held elsewhere.
# - **Small** ones, below 256 numbers, are not worth it.

# %%
listed, tiny_block = [], model.blocks[1]
x = torch.randn(8, 64, 32).requires_grad_() * 1
with saved_tensors_hooks(lambda tensor: listed.append(tensor) or tensor, lambda tensor: tensor):
    tiny_block(x)
for tensor in listed[2:10]:
    storage, kind = tensor.untyped_storage(), str(tensor.dtype).removeprefix("torch.")
    name = "a weight" if any(tensor.data_ptr() == w.data_ptr() for w in model.parameters()) else ""
    print(f"{tuple(tensor.shape)!s:14} {kind}, {storage.nbytes():6,} bytes  {name}")
print(f"… {len(listed)} tensors, {sum(tensor.nbytes for tensor in listed):,} bytes if one adds up")

# %% [markdown]
# ### Exercise 7.4: what waits for backward
#
# About 10 minutes. `saved` is such a list, `weights` are the parameters. Return two counts of
# bytes: what the storages of `saved` take, each **once** and whole, without weights; and what with
# the *eligible* in `bits` a number. Eligible is what has a gradient, and whose *storage* has at
# least 256 numbers: n take ⌈n · bits / 8⌉ + 4 · ⌈n / 256⌉ bytes.
#
# `tensor.untyped_storage()` is one object for all views of a storage, and can be in a set; it has
# `.nbytes()`, of which one number takes `tensor.itemsize`.


# %%
def bytes_kept(saved, weights, bits):
    """(bytes as they are, bytes in so many bits)"""
    ### BEGIN SOLUTION
    seen = {weight.untyped_storage() for weight in weights}
    before = after = 0
    for tensor in saved:
        storage = tensor.untyped_storage()
        if storage in seen:
            continue
        seen.add(storage)
        count = storage.nbytes() // tensor.itemsize
        is_eligible = tensor.requires_grad and count >= 256
        before += storage.nbytes()
        in_bits = -(-count * bits // 8) + 4 * -(-count // 256)
        after += in_bits if is_eligible else storage.nbytes()
    return before, after
    ### END SOLUTION


# %%
bytes_kept = exercise("7.4", bytes_kept)

# %%
for bits in (8, 4, 2):
    before, after = bytes_kept(listed, model.parameters(), bits)
    print(f"{bits} bits: {before:,} bytes become {after:,}: {before / after:.2f} × less")

# %% [markdown]
# ## The hook
#
# `pack` gets a tensor and returns what is to be kept; `unpack` gets that, in backward, and has to
# come up with the tensor. Three things go wrong easily:
#
# - **Keep the original**, by any reference, and nothing is saved: the codes come on top.
# - **Each storage once.** Two views of one storage must share its codes. So compress all of the
#   storage, and remember size, stride and offset of the view: `numbers.as_strided(size, stride,
#   offset)` makes it again.
# - **Whose codes?** When a storage dies, the next one may get its address.

# %% [markdown]
# `weakref.WeakKeyDictionary()` is a dict that does not keep its keys: an entry goes when its key, a
# storage, dies. It asks for the object, not for an address. (Do Exercise 7.5 before 14.1, where the
# same hooks send storages to a disk.)


# %%
def whole(tensor):
    """All numbers of a tensor's storage, flat and without a graph."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


h = torch.randn(4, 6)
view = h[:, 3:]
flat = whole(view)
again = flat.as_strided(view.size(), view.stride(), view.storage_offset())
print(f"{tuple(view.shape)} of {len(flat)} numbers, made again: {torch.equal(again, view)}")
known = weakref.WeakKeyDictionary({h.untyped_storage(): "codes of h"})
print(f"entries while the storage of h lives: {len(known)}", end="")
del h, view, flat, again
print(f"; when it has died: {len(known)}")

# %% [markdown]
# ### Exercise 7.5: the hooks
#
# About 18 minutes. Return two functions, `pack` and `unpack`. What is eligible (as in 7.4) is kept
# as `compress(whole(tensor))`, once for each storage, and its view; `decompress` of it gives the
# numbers, flat. Everything else is kept as it is, but **detached**: a result that its operator
# saves itself would hold its graph, and the graph holds it (Day 6). Backward may come twice, and
# `unpack` keeps nothing of what it hands out. When the output is dropped, nothing is left.


# %%
def hooks(weights, compress, decompress):
    """(pack, unpack) for saved_tensors_hooks"""
    ### BEGIN SOLUTION memlab.reference.activation_compression.hooks
    left_alone = {weight.untyped_storage() for weight in weights}
    known = weakref.WeakKeyDictionary()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage in left_alone or not tensor.requires_grad or len(whole(tensor)) < 256:
            return tensor.detach()
        if storage not in known:
            known[storage] = compress(whole(tensor))
        return known[storage], tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        compressed, *view = kept
        return decompress(compressed).as_strided(*view)

    return pack, unpack
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 7.5, about 14 lines")
    ### END STUB


# %%
hooks = exercise("7.5", hooks)

# %% [markdown]
# Three things that the library's does besides: it sees when a storage was written to between two
# saves (yours would hand out the old numbers); it packs masks of dropout into bits, exactly; and it
# leaves **logarithms** alone. The loss saves log-probabilities, to exponentiate them in backward,
# and there an error of 0.1 is a factor of 1.1. So put yours around the model, and the loss outside.

# %% [markdown]
# ## Held against exact gradients
#
# The block again: forward under the hooks, backward from a fixed gradient. The error is the length
# of the difference, by the length of the exact gradient of all weights and the input. Nearest; one
# draw at random; the mean of 9 draws.

# %%
start = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(1))
back = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(2))


def gradient(how=None):
    """Of the block's weights and its input, flat."""
    x = start.clone().requires_grad_()
    around = saved_tensors_hooks(*hooks(tiny_block.parameters(), how, decompress)) if how else None
    with around or nullcontext():
        y = tiny_block(x * 1)
    found = torch.autograd.grad(y, [x, *tiny_block.parameters()], back)
    return torch.cat([part.flatten() for part in found])


def off_by(found):
    return ((found - exact_gradient).norm() / exact_gradient.norm()).item()


exact_gradient, errors = gradient(), {}
for bits in (8, 4, 2):
    draws = [gradient(partial(compress, bits=bits, round=at_random)) for _ in range(9)]
    by_nearest = off_by(gradient(partial(compress, bits=bits)))
    errors[bits] = by_nearest, off_by(draws[0]), off_by(torch.stack(draws).mean(0))

# %%
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
names = ("nearest", "at random", "mean of 9 at random")
for n, (name, colour) in enumerate(zip(names, ("#cc6677", "#4477aa", "#a9c4dd"), strict=True)):
    heights = [100 * errors[bits][n] for bits in errors]
    bars = axes.bar([place + 0.27 * (n - 1) for place in range(3)], heights, 0.25, color=colour)
    axes.bar_label(bars, [f"{height:.2g} %" for height in heights], padding=2)
    bars.set_label(name)
axes.set(yscale="log", ylim=(0.02, 60), ylabel="error in %", title="How far the gradient is off")
axes.set_yticks((0.1, 1, 10), ("0.1", "1", "10"))
axes.set_xticks(range(3), [f"{bits} bits" for bits in errors])
axes.legend(frameon=False, loc="upper left")
print(f"8 bits, nearest: below 1 %: {errors[8][0] < 0.01}, ", end="")
print(f"and nearer than a draw at random: {errors[8][0] < errors[8][1]}")
for bits, (_, one, mean_of_9) in errors.items():
    print(f"{bits} bits: the mean of 9 draws is {one / mean_of_9:.0f} × nearer than one draw")

# %% [markdown]
# Each bit less doubles the error: 8 to 4 bits makes it 17 times as large, as steps are 255 / 15 =
# 17 times as wide. And the mean of 9 draws is 3 times nearer, √9: so there is no side in it.
#
# Below which error does training not notice? A gradient of a small batch is itself an estimate, and
# usually off by far more than 1 %. So train.

# %% [markdown]
# ## Does it learn?
#
# The tiny model, cut to one block, on torch's own source: 40 steps of AdamW, from the same
# weights, on the same batches. One of the runs has one scale for each tensor, but in 2 bits.
# (The guide's 8 bits with one scale learn as well as any in so short a run.)


# %%
def losses_of(how=None, steps=40):
    torch.manual_seed(0)
    learner = GPT(replace(PRESETS["tiny"], layers=1))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3, foreach=False)
    text, losses = batches(source_bytes("256 KiB"), batch=4, seq_len=64, seed=0), []
    for _ in range(steps):
        tokens, targets = next(text)
        optimizer.zero_grad()
        pair = hooks(learner.parameters(), how, decompress) if how else None
        with saved_tensors_hooks(*pair) if pair else nullcontext():
            logits = learner(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def one_scale(numbers):
    """To the nearest in 2 bits, the whole tensor a group. (8 bits then hold those four values.)"""
    codes, smallest, step = quantize(numbers.view(1, -1), 3)
    return compress(dequantize(codes, smallest, step).view(-1))


# %%
runs = {
    "32 bits": losses_of(),
    "8 bits": losses_of(compress),
    "4 bits, at random": losses_of(partial(compress, bits=4, round=at_random)),
    "4 bits, nearest": losses_of(partial(compress, bits=4)),
    "2 bits, at random": losses_of(partial(compress, bits=2, round=at_random)),
    "2 bits, nearest": losses_of(partial(compress, bits=2)),
    "2 bits, nearest, one scale": losses_of(one_scale),
}

# %%
fig, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
colours = ("#c9c9d0", "#1b3a57", "#44aa77", "#44aa77", "#4477aa", "#4477aa", "#cc6677")
reached = {}
for (name, losses), colour in zip(runs.items(), colours, strict=True):
    means = torch.tensor(losses).unfold(0, 5, 1).mean(1)  # of five steps
    label = f"{name} (up to {means.max():.0f})" if means.max() > 6 else name
    line = axes.plot(range(5, 41), means, color=colour, label=label)[0]
    line.set(linewidth=6 if name == "32 bits" else 1.6, linestyle="--" if "near" in name else "-")
    reached[name] = sum(losses[-10:]) / 10
axes.set(xlabel="step", ylabel="loss in nats, mean of 5 steps", xlim=(5, 41), ylim=(2.8, 5.6))
axes.set_title("Forty steps with activations in few bits")
axes.legend(frameon=False)
behind = {name: loss - reached["32 bits"] for name, loss in reached.items()}
print(f"8 bits: within 0.02 nats of 32 bits: {abs(behind['8 bits']) < 0.02}")
for bits in ("4 bits", "2 bits"):
    is_ahead = behind[f"{bits}, at random"] < behind[f"{bits}, nearest"]
    print(f"{bits}: at random ends below nearest: {is_ahead}")
print(f"2 bits, one scale: behind 32 bits: {behind['2 bits, nearest, one scale'] > 0.02}")

# %% [markdown]
# 8 bits are not to be told from 32. On four seeds, at **4 bits**, the draws were ahead of the
# nearest each time; at **2 bits** twice: 40 small steps average little of so much noise away.
# **2 bits with one scale** were behind 32 bits each time, by 0.08 to 0.20 nats.

# %% [markdown]
# Longer runs, with a warm-up, a falling rate and clipped gradients, are in
# `benchmarks/activation_compression.py`: there 8 bits end where 32 do, 4 next to them, and 2 a few
# percent behind. That is no proof for *your* training: compare two short runs before a long one.

# %% [markdown]
# ## Beside checkpointing
#
# Of two hooks the inner one sees a tensor. `with compressed_activations():` *around* checkpointed
# blocks gets what they keep: their inputs. (What runs again in backward is outside of the `with`,
# and is exact, from a rounded input.) *Inside* a checkpoint there is nothing to keep.
#
# Day 6's `selective` is another matter: it keeps what it chose detached, without a gradient, and
# compression leaves that alone.

# %%
with memlab.dry_run():
    block = GPT(replace(PRESETS["124m"], layers=1)).blocks[0]
    x = torch.randn(8, 640, 768).requires_grad_()
    keep_attention = selective(ATTENTION)
    for name, around in (("kept", nullcontext), ("kept, 8 bits around", compressed_activations)):
        found = sum(held_by(keep_attention, around).values())
        print(f"attention {name}: {format_bytes(found)}")
print(f"a checkpoint: {format_bytes(totals['checkpointed'])}, ", end="")
print(f"8 bits around it: {format_bytes(totals['both'])}")

# %% [markdown]
# The 11.2 MiB between the two lines are the input's; attention's 15 stay.
#
# ## What does not shrink
#
# - In **bfloat16** there are 2 bytes to begin with: 1.97 × and no more. (On a CPU, float32 copies
#   of the norms shrink by four.)
# - **Weights, gradients, moments**, and logits.
# - **The peak**, if it lies elsewhere. And in backward each tensor is unpacked in full while its
#   operator runs, beside that operator's own temporaries.
#
# Whole steps, then, of two models. A step is measured with one block and with two; every further
# block adds the same.


# %%
def parts(config, way, batch, seq_len, dtype, device):
    """A step, its model and its optimizer."""
    call, around = way
    model = GPT(config, dtype=dtype).to(device)
    for block in model.blocks:
        block.forward = partial(call, block.forward)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long).to(device)

    def step():
        optimizer.zero_grad()
        with around() if optimizer.state else nullcontext():  # a first step only makes the state
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()

    return step, model, optimizer


# %%
def on_a_cpu(build):
    with memlab.dry_run():
        step, model, optimizer = build()
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()  # it makes AdamW's state
        return memlab.measure(step, model=model, optimizer=optimizer)


def step_bytes(name, way, *shape, device="cpu", layers=(1, 2)):
    """(activations when there are most of them, peak), for all blocks of the model."""
    found = []
    for few in layers:
        build = partial(parts, replace(PRESETS[name], layers=few), way, *shape, device)
        trace = on_a_cpu(build) if device == "cpu" else memlab.predict(build)
        running = accumulate(e.bytes for e in trace.events if e.category == "activations")
        found.append((max(running), trace.peak_bytes))
    more = PRESETS[name].layers - layers[1]
    return tuple(two + more * (two - one) for one, two in zip(*found, strict=True))


small = {name: step_bytes("124m", way, 8, 640, torch.float32) for name, way in WAYS.items()}
for name, (kept, peak) in small.items():
    print(f"{name:13} {format_bytes(kept)} of activations, peak {format_bytes(peak)}")

# %% [markdown]
# 124M weights, float32. The blocks shrink by three quarters, and yet a gigabyte of logits stays,
# with backward's two copies of it: the peak falls by a third. Day 11 is for those.

# %% [markdown]
# ## At scale: seven billion
#
# Llama 2 7B in bfloat16, one sequence of 4096 tokens, as CUDA would take it. (On a CPU norms
# compute in float32 and keep float32 copies: there 8 bits would look better than they are.)

# %%
seven = {}
for name, way in WAYS.items():
    layers = (2, 3) if name == "in 8 bits" else (1, 2)  # its peak lies elsewhere with one block
    shape = 1, 4096, torch.bfloat16
    seven[name] = step_bytes("llama-2-7b", way, *shape, device="cuda", layers=layers)
for name, (kept, peak) in seven.items():
    print(f"{name:13} {format_bytes(kept):>9} of activations, peak {format_bytes(peak)}")

# %% [markdown]
# The floor is 50.2 GiB: weights, gradients, moments, at the end of backward. 8 bits end 0.2 GiB
# above it, and no block runs twice; checkpointing 0.3, for beside the last gradients the block that
# ran again is there in full. The row *both* gains nothing more for one sequence; each further one
# adds the first column again: 19, 10, 1.3 or 0.8 GiB.
#
# So 8 bits are for those to whom time is dear, and who lack a factor of two (bfloat16) or four
# (float32). Whoever lacks more, checkpoints.

# %% [markdown]
# ## What others do
#
# - **ActNN** (2021): layers of its own, groups of 256, always at random, 2 bits on average, spread
#   over layers by how much the gradient notices. It reports 12 × less activation memory, for
#   convolutions. torch ≤ 1.8.
# - **GACT** (2022): hooks, so any operator; bits chosen for each tensor. It reports up to 8.1 ×.
#   torch 1.10.
# - **torch.compile** decides what to keep by its cut (Day 6). Inductor, which makes its kernels,
#   has a pass, off unless asked for (`activation_quantization_aten_pass`), that keeps large ones in
#   an 8-bit float.
#
# None of these was run here.

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes the bill's first step on it, plain and in 8 bits. Encoding and
# decoding are passes over memory: a dozen small kernels each. `memlab.kernels` has them fused into
# one each, in Triton, as ActNN and GACT do it.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    on_gpu = replace(SETTING, device=gpu.type)
    plain = TECHNIQUES["plain"]
    in_eight = replace(plain, around_forward=lambda device: compressed_activations())
    for name, how in (("plain", plain), ("in 8 bits", in_eight)):
        training = build(on_gpu, how)
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 7"))

# %% [markdown]
# ## Rules on trial
#
# A guide has two lines: 50 % by INT8 activations, 70–80 % with checkpointing. Of what, it does not
# say. Tried on what can shrink, on all activations, and on the peak.


# %%
def on_a_gpu(around):
    """Bytes that a block of the 124M model would hold there in bfloat16."""
    outputs = []

    def build():
        block = GPT(replace(PRESETS["124m"], layers=1), dtype=torch.bfloat16).cuda().blocks[0]
        x = torch.randn(8, 640, 768, dtype=torch.bfloat16).cuda().requires_grad_()

        def forward():
            with around():
                outputs.append(block(x * 1))

        return forward, block, None

    trace = memlab.predict(build)
    return sum(e.bytes for e in trace.alive() if e.phase != "before") - outputs[-1].nbytes


less_than_16 = 1 - on_a_gpu(compressed_activations) / on_a_gpu(nullcontext)
less_than_32 = 1 - totals["in 8 bits"] / totals["all kept"]


# %%
def fewer(found, way):
    """The shares that go of all activations, and of the peak."""
    return [1 - b / a for a, b in zip(found["all kept"], found[way], strict=True)]


# %%
of_small, of_seven = fewer(small, "in 8 bits"), fewer(seven, "in 8 bits")
verdict(
    "17a",
    abs(less_than_16 - 0.5) < 0.02,
    f"of what a block holds {less_than_16:.0%} against 16 bits (predicted for CUDA), "
    f"{less_than_32:.0%} against 32; of all activations and of a step's peak, 124M in "
    f"float32: {of_small[0]:.0%} and {of_small[1]:.0%}, 7B in bfloat16: {of_seven[0]:.0%} and "
    f"{of_seven[1]:.0%}",
    condition="against 16 bits, for the activations, and with a scale for each group; it is more "
    "against 32 bits, and less for the peak",
)

# %%
both_small, both_seven = fewer(small, "both"), fewer(seven, "both")
alone_small, alone_seven = fewer(small, "checkpointed"), fewer(seven, "checkpointed")
verdict(
    "17b",
    0.7 <= both_small[0] <= 0.8,
    f"of all activations, 124M in float32: {both_small[0]:.0%}, checkpointing alone "
    f"{alone_small[0]:.0%}; 7B in bfloat16: {both_seven[0]:.0%}, alone {alone_seven[0]:.0%}; of "
    f"the peak {both_small[1]:.0%} (alone {alone_small[1]:.0%}) and {both_seven[1]:.0%} (alone "
    f"{alone_seven[1]:.0%})",
    condition="for a small model with a large vocabulary; nearly all of it is checkpointing's: "
    "8 bits halve or quarter what little that leaves",
)

# %% [markdown]
# ## What you can do now
#
# | | a block holds, 124M, float32 | runs again | gradient |
# | --- | --- | --- | --- |
# | all kept | 310 MiB | nothing | exact |
# | 8 bits | 79 | nothing | below 1 % off |
# | 4 bits, 2 bits | about 40, 20 | nothing | some %, some 10 % off |
# | checkpoint | 15 | the block | exact |
# | both | 3.8 | the block | off from its rounded input |
#
# n numbers in b bits take ⌈n · b / 8⌉ + 4 · ⌈n / 256⌉ bytes. Groups tame outliers; nearest at 8
# bits, at random at 4, and try both at 2; each storage once; no weight, no index, no mask, no
# logarithm. And the peak is another number.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. At yesterday's peak there is no activation,
# so nothing of today can lower it. Could 8 bits take the place of the second run? One sequence in
# bfloat16:

# %%
with memlab.dry_run():
    block = GPT(replace(PRESETS["124m"], layers=1), dtype=torch.bfloat16).blocks[0]
    x = torch.randn(1, 640, 768, dtype=torch.bfloat16).requires_grad_()
    one, other = (sum(held_by(*WAYS[name]).values()) for name in ("all kept", "in 8 bits"))
print(f"a block: {format_bytes(one)}, in 8 bits {format_bytes(other)}: ", end="")
print(f"12 blocks hold {format_bytes(12 * (one - other))} less")

# %% [markdown]
# Day 4's peak, 1.61 GiB with all kept, would be 1.45. Nothing runs again; but yesterday's is 1.37,
# for a second run of 16 % of all operations. Measured block by block (by a test of this day): three
# of twelve in 8 bits leave that peak where it is, a fourth raises it. Three would spare more than
# attention's outputs (25 % of a full second run against 15 %), but the gradients of these blocks,
# and of all before them, would be off. **Tried, not taken**: the line stays.

# %%
running_bill(7)

# %% [markdown]
# ## Sources
#
# - Chen et al. 2021: [ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
#   Training](https://arxiv.org/abs/2104.14129)
# - Liu et al. 2022: [GACT: Activation Compressed Training for Generic Network
#   Architectures](https://arxiv.org/abs/2206.11357)
# - PyTorch: [Autograd mechanics, hooks for saved
#   tensors](https://docs.pytorch.org/docs/stable/notes/autograd.html)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
