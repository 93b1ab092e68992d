# %% [markdown]
# # Day 9: 8-bit Adam
#
# **Can Adam's state need 2 bytes per weight instead of 8?**
#
# After today you have built an optimizer whose state is four times smaller than Adam's. You know
# which 256 values its codebook needs and why. You have seen a rounding to zero destroy a training
# run, and you know the line of code that prevents it.
#
# About 85 minutes, 53 of them for four exercises. You need a laptop. A GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** the code that explains the gap. In each
# exercise, replace `raise NotImplementedError` with your own code; the cell below it checks your
# answer. If you are stuck, run `memlab hint 9.1` in a terminal. You can skip an exercise.

# %% [markdown]
# ## The question
#
# Adam keeps two moments per weight: m, a running mean of its gradients, and v, a running mean of
# their squares. In float32 they need 8 bytes per weight, twice as much as the weight. Lion and
# Adam-mini drop half of the state. Today you keep both moments, in **one byte** each.
#
# A byte is an index into a table of 256 values, the **codebook**. Which values should it hold?

# %%
import importlib
import re
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from math import log10

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import memlab
from memlab import optim
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.bill import SETTING
from memlab.course.optional import MISSING, imported
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.quantize import quantize_blockwise
from memlab.train import TECHNIQUES, build, measured
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# Make two guesses for 20 training steps of a small text model with 123,200 weights:
#
# 1. How many KiB does Adam's state need with one byte per moment, everything included?
# 2. Quantize v linearly, in *even steps*: divide the range from 0 to the largest v of a block (256
#    consecutive elements) into 255 equal steps. What percentage of the second moments become
#    exactly 0?

# %%
### BEGIN SOLUTION
guess("9.1", state_kib=241, zeros_percent=0.5)  # two bytes per weight; almost none
### END SOLUTION
### BEGIN STUB
# guess("9.1", state_kib=..., zeros_percent=...)
### END STUB

# %% [markdown]
# ## Measure
#
# The model trains on torch's own source code, once with 32-bit Adam and once with the library's
# 8-bit Adam.

# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def train(make, steps=20):
    """Train a new model; return its losses and its optimizer."""
    torch.manual_seed(0)
    model, losses = GPT(CONFIG), []
    optimizer, data = make(model), batches(TEXT, 8, 64, seed=1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def state_bytes(optimizer):
    return memlab.measure(lambda: None, optimizer=optimizer).at_end["optimizer_state"]


# %%
runs = {
    "32-bit Adam": train(lambda model: optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)),
    "8-bit Adam": train(lambda model: optim.Adam8bit(model.parameters(), lr=3e-3, weight_decay=0)),
}
adam, adam_8bit = (optimizer for _, optimizer in runs.values())
print(f"state of 32-bit Adam: {format_bytes(state_bytes(adam))}")

# %%
moments = [state["exp_avg_sq"].flatten() for state in adam.state.values()]
blocks = torch.cat([v.view(-1, 256) for v in moments if len(v) >= 4096])
fractions = blocks / blocks.amax(1, keepdim=True)  # relative to the block's largest
zeros = (fractions * 255).round() == 0
zero_percent = round(100 * zeros.float().mean().item(), 1)
reveal("9.1", state_kib=state_bytes(adam_8bit), zeros_percent=zero_percent)

# %% [markdown]
# Two bytes per weight are 240.6 KiB. The other 7.6 KiB have three parts:
#
# - one float32 scale per block of each moment (explained below)
# - two codebooks of 256 float32 entries, 2 KiB in all
# - float32 moments, 6 bytes more per weight, in tensors with fewer than 4096 elements (here five
#   norms), where there is little to save
#
# Even steps round 2.5 % of the second moments to 0. Is that a problem? Adam divides by √v.

# %% [markdown]
# ## The distribution of v
#
# The histogram shows the second moments of all matrices (122,880 elements), each as a fraction of
# the largest in its block, on logarithmic axes. Below it are the even steps.

# %%
fig, (top, bottom) = plt.subplots(
    2, sharex=True, figsize=(9, 3.2), height_ratios=(4, 1), layout="constrained"
)
decades = torch.logspace(-6, 0, 61).tolist()
top.hist(fractions.flatten().numpy(), bins=decades, color="#4477aa", log=True)
top.set(ylabel="second moments", title="v as a fraction of the largest in its block of 256")
top.axvspan(1e-6, 0.5 / 255, color="#cc6677", alpha=0.25, linewidth=0)
top.text(3e-6, 800, f"{zero_percent} % of all v", color="#882233")
bottom.vlines(torch.arange(1, 256) / 255, 0, 1, color="#cc6677", linewidth=0.8)
bottom.axvspan(1e-6, 0.5 / 255, color="#cc6677", alpha=0.25, linewidth=0)
bottom.text(3e-6, 0.4, "rounded to 0", color="#882233")
bottom.set(yticks=[], xscale="log", xlim=(1e-6, 1), xlabel="fraction of the largest")
_ = bottom.set_ylabel("even steps", rotation=0, ha="right", va="center")

# %% [markdown]
# Squaring doubles the range in decades: if a weight's gradients are 100 times smaller than its
# neighbor's, its v is 10,000 times smaller. Even steps were enough for Day 7's activations. Moments
# need small steps near zero and large steps near the maximum, so that the **relative** error stays
# small.
#
# Floating-point formats do this with a fixed number of exponent bits. A *dynamic* codebook varies
# this number: small values use more bits for the exponent, and large values more bits for the
# mantissa.

# %% [markdown]
# ### Exercise 9.1: 256 entries for seven decades
#
# About 12 minutes. Decade i = 0 … 6 ranges from 0.1 · 10ⁱ⁻⁶ to 10ⁱ⁻⁶. Divide 0.1 … 1 into 2ⁱ equal
# parts (2ⁱ⁺¹ if `signed` is False). The entries of the decade are the midpoints of the parts times
# 10.0 ** (i − 6), with both signs if `signed`. Add 0 and 1. Return the 256 entries in float32,
# sorted.
#
# Compute in float32 and in this order: edges (`torch.linspace`), midpoints, power of ten. Then your
# codebook is bitwise equal to bitsandbytes', so you can read 8-bit states from its checkpoints.


# %%
def dynamic_code(signed):
    ### BEGIN SOLUTION memlab.reference.adam8bit.dynamic_code
    values = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values
    ### END SOLUTION


# %%
dynamic_code = exercise("9.1", dynamic_code)

# %%
SIGNED, UNSIGNED = dynamic_code(True), dynamic_code(False)
EVEN = torch.arange(256) / 255
fig, axes = plt.subplots(3, sharex=True, figsize=(9, 2.6), layout="constrained")
rows = {"dynamic, for v": UNSIGNED, "dynamic, for m": SIGNED, "even steps": EVEN}
for ax, (name, codebook), colour in zip(axes, rows.items(), ("C0", "C2", "#cc6677"), strict=True):
    ax.vlines(codebook[codebook > 0], 0, 1, color=colour, linewidth=0.7)
    ax.set(yticks=[], xscale="log", xlim=(1e-7, 1.2))
    ax.set_ylabel(name, rotation=0, ha="right", va="center")
axes[0].set_title("The 256 entries of each codebook (for m, the positive half)")
axes[2].set_xlabel("fraction of the largest in the block")
for name, codebook in rows.items():
    print(f"{name:15} smallest positive {codebook[codebook > 0][0]:.2g}, minimum {codebook[0]:.3f}")

# %% [markdown]
# Half of the entries are in the top decade, and only one or two in the lowest. The smallest entry
# of m's codebook is −0.993, so a −1 is rounded with an error of 0.7 %. Zero is entry 127 of the
# signed codebook and entry 0 of the unsigned one.
#
# How large is the rounding error? Plot the worst relative error in each decade.


# %%
def worst_by_decade(codebook):
    """Return the largest |x − nearest| / x in each of the seven decades below 1."""
    middles = ((codebook[:-1] + codebook[1:]) / 2).double()
    x = torch.logspace(-7, 0, 70_001, dtype=torch.float64)
    error = (codebook.double()[torch.bucketize(x, middles)] - x).abs() / x
    return error[:-1].view(7, -1).amax(1)


fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
at = torch.arange(7)
for shift, (name, codebook), colour in zip(
    (-0.27, 0, 0.27), rows.items(), ("C0", "C2", "#cc6677"), strict=True
):
    worst = worst_by_decade(codebook)
    axes.bar(at + shift, 100 * worst, width=0.25, color=colour, label=name)
    print(f"{name:15}", "  ".join(f"{100 * e:5.1f} %" for e in worst))
axes.set_xticks(at, [f"$10^{{{d - 7}}}$ … $10^{{{d - 6}}}$" for d in range(7)])
axes.set(xlabel="fraction of the largest", ylabel="worst error in %", ylim=(0, 119))
axes.set_title("Worst relative rounding error in each decade")
_ = axes.legend(frameon=False, ncols=3, loc="upper right")

# %% [markdown]
# In the top decade even steps are better. Two decades lower their worst error is 100 % (rounding to
# 0); the dynamic codebooks' are 11 % and 18 %.
#
# All entries lie between −1 and 1. So divide each **block** of 256 elements by its absmax, and
# store the absmax as the block's *scale*. An outlier then affects only its own block. To decode,
# look up each code and multiply by the scale:


# %%
def decode(codes, scales, codebook):
    """Return float32 (n,): entry codes[k] of the codebook times the block's scale."""
    scale = scales.repeat_interleave(256)[: len(codes)]
    return codebook[codes.int()] * scale


# %% [markdown]
# ### Exercise 9.2: blockwise quantization
#
# About 15 minutes. `x` is a float32 tensor of any shape with n elements. `codebook` has
# 256 sorted values, including 0 and 1. Return `(codes, scales)`: uint8 (n,) and float32 (⌈n/256⌉,),
# not views. Don't change the arguments.
#
# - Scale: absmax of the block. The last block may be short.
# - Code: index of the nearest entry. A zero gets the index of 0.0, also in a block of zeros.
# - Memory: at most 64 bytes per element at the peak, `x` included. `torch.bucketize(a, b)`
#   counts the elements of `b` below each `a`.


# %%
def encode(x, codebook):
    ### BEGIN SOLUTION memlab.reference.adam8bit.encode
    n = x.numel()
    blocks = F.pad(x.flatten(), (0, -n % 256)).view(-1, 256)
    scales = blocks.abs().amax(1)
    fractions = blocks / scales.where(scales > 0, 1).view(-1, 1)
    thresholds = (codebook[:-1] + codebook[1:]) / 2
    codes = torch.bucketize(fractions, thresholds, out_int32=True).to(torch.uint8)
    return codes.flatten()[:n].clone(), scales
    ### END SOLUTION


# %%
encode = exercise("9.2", encode)

# %% [markdown]
# Compare your function with the library's, which works in chunks of 1 MiB and finds codes with a
# lookup table. (For elements almost halfway between two entries, the two can round differently.)

# %%
x = torch.randn(100_003) ** 3
codes, scales = encode(x, SIGNED)
library = quantize_blockwise(x, codebook=SIGNED)
equal = (codes == library.codes).float().mean().item()
print(f"more than 99.9 % of the codes are equal: {equal > 0.999}")
print(f"all scales are equal: {torch.equal(scales, library.scales)}")
print(f"float32: {x.nbytes:,} bytes; codes + scales: ", end="")
print(f"{codes.nbytes:,} + {scales.nbytes:,} bytes")

# %% [markdown]
# ## The optimizer step
#
# A step decodes both moments, updates them, updates the weight, and encodes the moments again. The
# order matters: the weight is updated *before* the new moments are rounded. So the rounding errors
# of a step affect only the next steps.

# %% [markdown]
# ### Exercise 9.3: Adam with 8-bit state
#
# About 20 minutes. Update one weight tensor in place. `gradient` is flat, `weight` is not. Don't
# change `gradient`. `state` is a dict, empty before the first step. Store t and the moments in it
# (`signed` and `unsigned` are the codebooks):
#
# - with n ≥ 4096 elements: `encode(m, signed)` and `self.encode_v(v, unsigned)` (equal to `encode`
#   for now), 2n + 8⌈n/256⌉ bytes
# - with fewer elements: m and v in float32
#
# At step t = 1, 2, …, starting from moments of zero:
#
# m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², w ← w − lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + eps)


# %%
class ByWeight(torch.optim.Optimizer):
    """Calls `step_weight` for each weight tensor. Subclasses implement `step_weight`."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                self.step_weight(weight, weight.grad.flatten(), self.state[weight], group)


# %%
class Adam8bit(ByWeight):
    codebooks = dynamic_code(True), dynamic_code(False)
    encode_v = staticmethod(encode)

    def step_weight(self, weight, gradient, state, group):
        ### BEGIN SOLUTION memlab.reference.adam8bit.Adam8bit.step_weight
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        signed, unsigned = self.codebooks
        if not state:
            m, v = torch.zeros_like(gradient), torch.zeros_like(gradient)
        elif len(gradient) < 4096:
            m, v = state["m"], state["v"]
        else:
            m, v = decode(*state["m"], signed), decode(*state["v"], unsigned)
        state["step"] = t = state.get("step", 0) + 1
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        root = (v / (1 - beta2**t)).sqrt() + eps
        weight -= lr * (m / (1 - beta1**t) / root).view_as(weight)
        if len(gradient) >= 4096:
            m, v = encode(m, signed), self.encode_v(v, unsigned)
        state["m"], state["v"] = m, v
        ### END SOLUTION
        ### BEGIN STUB
        # # Begin with these two lines:
        # # lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        # # signed, unsigned = self.codebooks
        # raise NotImplementedError("exercise 9.3, about 14 lines")
        ### END STUB


# %%
Adam8bit = exercise("9.3", Adam8bit)

# %% [markdown]
# Train the text model with your optimizer, then with even steps for both moments.


# %%
class EvenSteps(Adam8bit):
    codebooks = torch.arange(-127, 129) / 128, EVEN


def is_within(percent, losses):
    """Return whether the mean of the last five losses is within `percent` of 32-bit Adam's."""
    wanted = sum(runs["32-bit Adam"][0][-5:])
    return abs(sum(losses[-5:]) / wanted - 1) < percent / 100


def has_diverged(loss):
    """Return whether the loss is inf, nan or at least 10. The exact value varies by machine."""
    return not loss < 10


nearest = train(lambda model: Adam8bit(model.parameters(), lr=3e-3))
even = train(lambda model: EvenSteps(model.parameters(), lr=3e-3), steps=12)
print(f"state of your 8-bit Adam: {format_bytes(state_bytes(nearest[1]))}")
zeros = (fractions < UNSIGNED[1] / 2).sum().item()
print(f"second moments that the dynamic codebook rounds to 0: {zeros} of {fractions.numel():,}")
print(f"dynamic codebook: the loss is within 1 % of 32-bit Adam's: {is_within(1, nearest[0])}")
print(f"even steps: the loss is {even[0][0]:.1f} at step 1; at step 12 it is above 10: ", end="")
print(has_diverged(even[0][-1]))

# %% [markdown]
# With the dynamic codebook, the losses of 8-bit and 32-bit Adam are nearly equal. With even steps,
# many v become 0, and training diverges within a dozen steps. (The two codebooks, 2 KiB, are class
# attributes here, so they do not count as state.)

# %% [markdown]
# ## Why a zero makes the step explode
#
# Suppose that rounding sets a weight's v to zero. At the next step, v is (1−β₂)g², from the
# *current* gradient g alone, while m averages about ten gradients. If g happens to be small, m is
# divided by a value near zero. Only eps limits the step, to lr · m / eps.

# %% [markdown]
# The dynamic codebook has a zero, too. v becomes 0 below 1.6 · 10⁻⁷ of the block's largest v. This
# happens if gradients are below 1/2500 (4 · 10⁻⁴) of the block's largest. m becomes 0 only below
# 3 · 10⁻⁷ of the largest m. With gradients between 3 · 10⁻⁷ and 4 · 10⁻⁴ of the largest, a weight
# keeps its m and loses its v.

# %% [markdown]
# To test this, train 8192 weights with gradients of size exp(2z), z normal (*heavy tails*: the
# largest size in a block is about 10⁵ times the smallest). The **longest step** is the
# largest change of any weight, in units of lr.

# %%
SIZES = (2 * torch.randn(8192, generator=torch.Generator().manual_seed(0))).exp()


def longest_steps(make, sizes=SIZES, steps=100):
    """Return the longest step in each of `steps` optimizer steps, and the final weights."""
    generator, lr = torch.Generator().manual_seed(1), 1e-3
    weight, longest = torch.nn.Parameter(torch.zeros(8192)), []
    optimizer = make([weight], lr=lr)
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = sizes * torch.randn(8192, generator=generator)
        optimizer.step()
        longest.append(((weight.detach() - before).abs().max() / lr).item())
    return longest, weight.detach()


heavy_tails = {"32-bit Adam": longest_steps(partial(optim.AdamW, weight_decay=0))}
heavy_tails["8 bits, nearest codes"] = longest_steps(Adam8bit)
for name, (longest, _) in heavy_tails.items():
    print(f"{name:22} the longest of 100 steps is above {10 ** int(log10(max(longest))):,} · lr")

# %% [markdown]
# For any gradients, 32-bit Adam's steps are at most lr · (1−β₁) / √((1−β₂)(1−β₁²/β₂)) = 7.27 · lr.
# In the first 100 steps, the bound is √(1−β₂¹⁰⁰) = 0.31 times as large: 2.24 · lr.
#
# ### Exercise 9.4: never round a positive v to zero
#
# About 6 minutes. Write `encode_positive`: `encode` for an `x` without negative elements and a
# codebook whose entry 0 is zero. **A positive element never gets code 0**: it gets code 1 instead.
# A zero still gets code 0, and all other elements get the nearest code.


# %%
def encode_positive(x, codebook):
    ### BEGIN SOLUTION memlab.reference.adam8bit.encode_positive
    codes, scales = encode(x, codebook)
    codes[(x.flatten() > 0) & (codes == 0)] = 1
    return codes, scales
    ### END SOLUTION


# %%
encode_positive = exercise("9.4", encode_positive)


# %%
class SafeAdam8bit(Adam8bit):
    encode_v = staticmethod(encode_positive)


heavy_tails["8 bits, with the rule"] = longest_steps(SafeAdam8bit)
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for (name, (longest, _)), colour in zip(heavy_tails.items(), ("k", "#cc6677", "C0"), strict=True):
    axes.semilogy(range(1, 101), longest, color=colour, label=name, linewidth=1.4)
axes.set(xlabel="step", ylabel="longest step, in lr", ylim=(0.5, 1e6))
axes.set_title("Longest step with heavy-tailed gradients")
axes.legend(frameon=False, ncols=3, loc="upper center")
print(f"with the rule: at most {max(heavy_tails['8 bits, with the rule'][0]):.1f} · lr")

# %%
_, wanted = heavy_tails["32-bit Adam"]
_, with_rule = heavy_tails["8 bits, with the rule"]
sizes = SIZES.view(-1, 256)
small = (sizes / sizes.amax(1, keepdim=True) < 1 / 2500).flatten()
error = with_rule - wanted
share = (error[small] ** 2).sum() / (error**2).sum()
relative = error.norm() / wanted.norm()
print("8 bits, with the rule, after 100 steps:")
print(f"  error: {relative:.0%} of the distance that 32-bit Adam moves the weights")
print("weights with gradients below 1/2500 of the block's largest:")
print(f"  {small.float().mean():.0%} of all weights, {share:.0%} of the squared error")
moved = with_rule[small].norm() / wanted[small].norm()
print(f"  they move {moved:.1f} of the distance that 32-bit Adam moves them")

# %% [markdown]
# The rule needs no extra memory, and no step explodes. The price: a tiny v becomes larger, 3 · 10⁻⁷
# of the block's largest, so the step becomes *shorter*. With these tails the error is large, 35 %
# of the distance, but on the safe side: 75 % of the squared error comes from weights with tiny
# gradients, which move too little.
#
# Did training with even steps diverge because they are coarse, or because of their zero? Apply the
# rule to even steps:


# %%
class SafeEvenSteps(EvenSteps):
    encode_v = staticmethod(encode_positive)


safe_even = train(lambda model: SafeEvenSteps(model.parameters(), lr=3e-3))
print(f"even steps, with the rule: within 3 % of 32-bit Adam's loss: {is_within(3, safe_even[0])}")

# %% [markdown]
# The cause was the zero.
#
# ## Does it happen in real training?
#
# It did not happen in the text model above: after its 20 steps, the dynamic codebook rounds none of
# its v to 0. An explosion needs heavy tails *and* gradients much larger than eps, because a step is
# at most lr · m / eps.
#
# Here is a model with heavy tails: word vectors (*skip-gram*: predict a nearby word). The input
# vectors of rare words rarely get gradients. Train with the mean of the losses of a batch, and with
# their sum.

# %%
WORDS, WIDTH, BATCH = 512, 16, 512
words = re.findall(r"[A-Za-z_]+", bytes(TEXT.tolist()).decode(errors="ignore"))
common = {word: n for n, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
ids = torch.tensor([common.get(word, WORDS - 1) for word in words])


def skip_gram(make, reduction, steps=40):
    """Return the last loss per word, and the longest step."""
    rng, longest, lr = torch.Generator().manual_seed(0), 0.0, 1e-2
    tables = [torch.nn.Parameter(0.1 * torch.randn(WORDS, WIDTH, generator=rng)) for _ in range(2)]
    optimizer = make(tables, lr=lr)
    for _ in range(steps):
        at = torch.randint(len(ids) - 2, (BATCH,), generator=rng)
        nearby = at + torch.randint(1, 3, (BATCH,), generator=rng)
        loss = F.cross_entropy(tables[0][ids[at]] @ tables[1].T, ids[nearby], reduction=reduction)
        optimizer.zero_grad()
        loss.backward()
        before = [weight.detach().clone() for weight in tables]
        optimizer.step()
        moved = max((w - b).abs().max().item() for w, b in zip(tables, before, strict=True))
        longest = max(longest, moved / lr)
    return loss.item() / (BATCH if reduction == "sum" else 1), longest


# %%
same_loss = {}  # whether the loss is within 1 % of 32-bit Adam's
optimizers = {"32-bit": torch.optim.Adam, "nearest codes": Adam8bit, "with the rule": SafeAdam8bit}
for reduction in ("mean", "sum"):
    results = {name: skip_gram(make, reduction) for name, make in optimizers.items()}
    for name, (loss, longest) in results.items():
        same_loss[reduction, name] = abs(loss / results["32-bit"][0] - 1) < 0.01
        nats = "above 10" if has_diverged(loss) else f"{loss:.1f}"
        print(f"{reduction:4} {name:13} loss per word {nats}, longest step ", end="")
        print("within Adam's bound" if longest < 7.28 else "above Adam's bound")

# %% [markdown]
# With a **mean**, the usual choice, nearest codes cause long steps, but the loss is the same. With
# a **sum**, gradients are 512 times larger, eps is negligible, and training with nearest codes
# diverges. 32-bit Adam works with both.
#
# Two small models prove nothing about large ones. They show what to check in your training: is the
# loss a mean, and how heavy are the tails of the gradients?

# %% [markdown]
# ## Four optimizers
#
# Train the text model again and compare the bytes of state. The 8-bit Adam is the library's: it has
# the rule, and its two codebooks count. Lion has its own learning rate, 2 · 10⁻³. (20 steps are too
# few to rank optimizers by loss.)

# %%
partition = optim.gpt_partition(CONFIG.hidden_size // CONFIG.heads)
runs["Lion"] = train(lambda model: optim.Lion(model.parameters(), lr=2e-3))
runs["Adam-mini"] = train(
    lambda model: optim.AdamMini(
        model.named_parameters(), partition=partition, lr=3e-3, weight_decay=0
    )
)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 2), layout="constrained")
styles = {"32-bit Adam": ("0.75", 5), "8-bit Adam": ("C0", 1.5)}
styles |= {"Lion": ("#cc6677", 1.5), "Adam-mini": ("C2", 1.5)}
for n, (name, (losses, optimizer)) in enumerate(runs.items()):
    colour, width = styles[name]
    left.plot(range(1, 21), losses, color=colour, linewidth=width, label=name)
    size = state_bytes(optimizer)
    right.barh(name, size / 1024, color=colour)
    right.text(size / 1024 + 15, n, f"{size / 1024:.0f} KiB", va="center")
    print(f"{name:12}{format_bytes(size):>11}, {size / 123_200:.2f} bytes per weight")
left.set(xlabel="step", ylabel="loss in nats", title="Loss on torch's source code")
left.set_xticks((1, 5, 10, 15, 20))
left.legend(frameon=False)
right.set(xlabel="KiB of state", xlim=(0, 1300), title="Optimizer state between steps")
right.invert_yaxis()

# %% [markdown]
# The blue line lies on the gray one: 8-bit Adam has nearly the same losses as 32-bit Adam, with a
# state four times smaller. Lion and Adam-mini halve the state by storing fewer elements; 8-bit Adam
# stores all of them in lower precision. You can combine both: Lion with 8-bit momentum needs one
# byte per weight.
#
# ## Comparison with bitsandbytes and torchao
#
# Both packages are optional. To install them, run `pip install -e ".[oracles]"` in the repository.

# %%
bnb, ao = imported("bitsandbytes.optim"), imported("torchao.optim")

# %% tags=["nbval-ignore-output"] reason="the packages are optional"
if bnb:
    create = importlib.import_module("bitsandbytes.functional").create_dynamic_map
    print(f"bitsandbytes' signed codebook is bitwise equal: {torch.equal(create(True), SIGNED)}")
    print(f"bitsandbytes' unsigned codebook is, too: {torch.equal(create(False), UNSIGNED)}")
else:
    print(f"bitsandbytes is {MISSING}")
if ao:
    create = importlib.import_module("torchao.optim.quant_utils").create_dynamic_map
    theirs = torch.tensor(create(True))
    print(f"torchao's signed codebook is bitwise equal: {torch.equal(theirs, SIGNED)}")
else:
    print(f"torchao is {MISSING}")

# %% [markdown]
# Compare your two 8-bit Adams, memlab's, bitsandbytes' and torchao's after 100 steps on 8192
# weights, with normal gradients and with heavy tails:
#
# - the bytes of state for n = 8192, and for n = 8200, not a multiple of the block size
# - the relative distance of the final weights to 32-bit Adam's and to yours (with the rule)
# - the longest step
#
# torchao normally compiles its step. Here it runs without torch.compile.


# %%
def state_bytes_of(make, n):
    weight = torch.nn.Parameter(torch.zeros(n))
    optimizer, weight.grad = make([weight], lr=1e-3), torch.ones(n)
    optimizer.step()
    return state_bytes(optimizer)


def distance(end, other):
    return ((end - other).norm() / other.norm()).item()


# %% tags=["nbval-ignore-output"] reason="the packages are optional"
optimizers = {"nearest codes": Adam8bit, "with the rule": SafeAdam8bit}
optimizers["memlab"] = partial(optim.Adam8bit, weight_decay=0)
optimizers |= {"bitsandbytes": bnb.Adam8bit} if bnb else {}
optimizers |= {"torchao": ao.Adam8bit} if ao else {}
_, adams = longest_steps(partial(optim.AdamW, weight_decay=0), sizes=1)
_, yours = longest_steps(SafeAdam8bit, sizes=1)
print("                bytes of state    normal: distance     heavy tails: distance")
print("              n=8192   n=8200   to Adam  to yours      to Adam   longest step")
with torch.compiler.set_stance("force_eager"):
    for name, make in optimizers.items():
        sizes = (state_bytes_of(make, n) for n in (8192, 8200))
        (_, normal), (longest, heavy) = longest_steps(make, sizes=1), longest_steps(make)
        print("{:13}{:>7,} {:>8,}".format(name, *sizes), end="")
        print(f"{distance(normal, adams):>10.1%} {distance(normal, yours):>9.2%}", end="")
        print(f"{distance(heavy, wanted):>13.0%} {max(longest):>9,.1f} · lr")

# %% [markdown]
# With normal gradients, the weights of all five differ from 32-bit Adam's by 2.2 %. torchao's
# weights differ from yours by 0.01 %, bitsandbytes' by 0.7 %. The 2,048 extra bytes are the two
# codebooks, and torchao's 4 extra bytes are its step count. torchao keeps moments in float32 unless
# the weight's size is a multiple of 256.
#
# With heavy tails, torchao's steps explode, as yours did with nearest codes. bitsandbytes' do
# **not**.

# %% [markdown]
# On a CPU, bitsandbytes quantizes with a lookup table of 65,536 even steps from −1 to 1. All
# fractions from 0 to 3 · 10⁻⁵ get the same nonzero code. So v is too large and the step too short,
# and with heavy tails the error is larger than with the rule: 57 % instead of 35 %. (On a GPU it
# uses the nearest code, zero included; not measured here.)

# %% [markdown]
# bitsandbytes' table has another cost: an exact 0 does not decode to 0. What happens to weights
# whose gradient is *always* zero, such as embedding rows of tokens that never occur? Take 4096
# weights and 500 steps:
#
# - first block of 256: every second weight has gradients
# - second block: one weight has gradients
# - other blocks: no gradients


# %%
def drift(make):
    """Return how far weights without gradients move, in lr, for the three kinds of blocks."""
    generator, weight = torch.Generator().manual_seed(0), torch.nn.Parameter(torch.zeros(4096))
    has_gradient = torch.zeros(4096)
    has_gradient[0:256:2], has_gradient[256] = 1, 1
    optimizer = make([weight], lr=1e-3)
    for _ in range(500):
        weight.grad = has_gradient * torch.randn(4096, generator=generator)
        optimizer.step()
    parts = weight.detach()[1:256:2], weight.detach()[257:512], weight.detach()[512:]
    return [part.abs().max().item() / 1e-3 for part in parts]


print("with the rule: {:.1f}, {:.1f} and {:.1f} · lr".format(*drift(SafeAdam8bit)))

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if bnb:
    print("bitsandbytes: {:.1f}, {:.1f} and {:.1f} · lr".format(*drift(bnb.Adam8bit)))
    functional = importlib.import_module("bitsandbytes.functional")
    block = F.one_hot(torch.tensor(0), 256).float()  # 1, and zeros
    for name, code in {"signed": SIGNED, "unsigned": UNSIGNED}.items():
        codes, scale = functional.quantize_blockwise(block, code=code, blocksize=256)
        zero = functional.dequantize_blockwise(codes, scale)[1]
        print(f"{name}: a 0 in a block with absmax 1 decodes to {zero:.2e}")
else:
    print(f"bitsandbytes is {MISSING}")

# %% [markdown]
# With bitsandbytes, weights without gradients move by up to 1.4 · lr in 500 steps, and by 0 if the
# whole block has no gradients. This matters only if some weights must stay unchanged.
#
# ## At scale: 7 billion parameters
#
# Compute the optimizer state of a 7B model by formula and in a dry run. Its 32 transformer blocks
# are identical, so measure models with one and two of them and extrapolate.


# %%
def moments_bytes(sizes, moments, codebooks):
    """Return state bytes: 8 bits from 4096 elements, else float32, plus 1 KiB per codebook."""
    per_moment = (n + 4 * -(-n // 256) if n >= 4096 else 4 * n for n in sizes)
    return moments * sum(per_moment) + 1024 * codebooks


def dry_state(make, layers):
    """Return the bytes of state after a first step, and of its temporaries at the peak."""
    model = GPT(replace(PRESETS["llama-2-7b"], layers=layers), dtype=torch.bfloat16)
    optimizer = make(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    trace = memlab.measure(optimizer.step, model=model, optimizer=optimizer)
    return trace.at_end["optimizer_state"], trace.at_peak["optimizer_temporaries"]


# %%
with memlab.dry_run():
    sizes = [w.numel() for w in GPT(PRESETS["llama-2-7b"], dtype=torch.bfloat16).parameters()]
formulas = {
    optim.AdamW: 8 * sum(sizes),
    optim.Adam8bit: moments_bytes(sizes, 2, 2),
    optim.Lion8bit: moments_bytes(sizes, 1, 1),
}
at_7b = {}
for make, formula in formulas.items():
    with memlab.dry_run():
        (one, temporaries), (two, _) = (dry_state(make, layers) for layers in (1, 2))
    at_7b[make] = size = one + 31 * (two - one)
    print(f"{make.__name__:9}{format_bytes(size):>10}, {size / sum(sizes):.2f} bytes ", end="")
    print(f"per weight; equals the formula: {size == formula}; ", end="")
    print(f"temporaries {format_bytes(temporaries)}")

# %% [markdown]
# 8-bit Adam reduces the state from 50 to 13 GiB. With bfloat16 weights and gradients, 12.6 GiB
# each, the total is 38 GiB. Lion with 8-bit momentum halves the state again.
#
# The library's temporaries are small because it updates 262,144 elements at a time. Your version
# decodes whole tensors. Measure this for the embedding alone, 131 million elements:

# %%
with memlab.dry_run():
    embedding = torch.nn.Parameter(torch.zeros(32_000, 4096))
    embedding.grad = torch.zeros_like(embedding)
    optimizer = SafeAdam8bit([embedding])
    trace = memlab.measure(optimizer.step, optimizer=optimizer)
print(f"yours: {format_bytes(trace.at_peak['optimizer_temporaries'])} of temporaries", end="")
print(f" for a state of {format_bytes(trace.at_end['optimizer_state'])}")

# %% [markdown]
# For this one tensor, your 8-bit step needs more memory than 32-bit Adam, whose two moments need 1
# GiB. Measure the peak of any library that you use.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the bill's step on it with three optimizers.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    for name in ("plain", "adam8bit", "lion8bit"):
        training = build(replace(SETTING, device=gpu.type), TECHNIQUES[name])
        training.step()
        trace = measured(training)
        print(f"{name}: {format_bytes(trace.peak_bytes)}, ", end="")
        print(f"reserved {format_bytes(trace.reserved_bytes or 0)}")
        del training
else:
    print(stored_on_a_gpu("day 9"))

# %% [markdown]
# ## Rules on trial
#
# For 32-bit Adam, one guide gives 12 bytes per parameter, another 8. The difference is a float32
# copy of the weights (Day 4's *master weights*).

# %%
per_weight = {make: size / sum(sizes) for make, size in at_7b.items()}
before, after = per_weight[optim.AdamW], per_weight[optim.Adam8bit]
in_words = (
    f"7B model: {before:.2f} bytes per parameter in 32 bits, {after:.2f} in 8 bits; with float32 "
    f"master weights {before + 4:.2f} and {after + 4:.2f}"
)
verdict(
    "19a",
    abs(after - 8) < 0.1 or abs(after + 4 - 8) < 0.1,
    in_words,
    otherwise=f"{after:.2f} instead of 8, or {after + 4:.2f} instead of 12 with master weights",
)

# %%
saved_gb = before - after  # of 1e9 parameters, in 1e9 bytes
verdict(
    "19b",
    abs(after - 2) < 0.05 and abs(saved_gb - 6) < 0.05,
    f"{in_words}; for 1B parameters {saved_gb:.2f} GB less",
    condition="for weights of at least 4096 elements (scales add 0.03 bytes per parameter)",
)

# %%
text_rule, text_nearest = is_within(1, runs["8-bit Adam"][0]), is_within(1, nearest[0])
words_rule, words_nearest = same_loss["sum", "with the rule"], same_loss["sum", "nearest codes"]
verdict(
    "19c",
    text_rule and text_nearest,
    f"loss within 1 % of 32-bit Adam's: text model {text_rule}, with nearest codes "
    f"{text_nearest}; word vectors with a summed loss {words_rule}, with nearest codes "
    f"{words_nearest}",
    condition="if no positive v is rounded to 0, or if gradients are small relative to eps",
)

# %% [markdown]
# One more rule: "8-bit Adam costs a slight CPU overhead." How much longer does the step take on
# a CPU? The extra time does not grow with the number of tokens, but forward and backward do. So
# express it in tokens: forward and backward of how many tokens take as long?


# %%
def seconds(call):
    """Return the minimum CPU time of seven calls."""
    times = []
    for _ in range(7):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


model = GPT(CONFIG)
tokens, targets = next(batches(TEXT, 8, 64, seed=0))
forward_backward = seconds(lambda: model(tokens, targets).backward())
adam, adam_8bit = (make(model.parameters()) for make in (optim.AdamW, optim.Adam8bit))
step_32, step_8 = seconds(adam.step), seconds(adam_8bit.step)
more_tokens = (step_8 - step_32) / (forward_backward / tokens.numel())

# %% tags=["nbval-ignore-output"] reason="a time"
print(f"CPU time of the 8-bit step: {step_8 / step_32:.1f}× the 32-bit step's")
print(f"the extra time equals forward and backward of {more_tokens:.0f} tokens")

# %% tags=["nbval-ignore-output"] reason="times of a CPU, and a GPU's where one is stored"
from memlab.course import time_on_a_gpu

measured_times = (
    f"on a CPU, the optimizer step takes more than 2× as long as in 32 bits: "
    f"{step_8 > 2 * step_32}; the extra time is below forward and backward of 2,000 tokens: "
    f"{more_tokens < 2000} (times: benchmarks/optim.py); a whole step on a GPU relative to "
    f"AdamW's: {time_on_a_gpu('adam8bit')}"
)
condition = (
    "for steps of many thousand tokens; with few tokens the slower optimizer step is a large part"
)
verdict("19d", more_tokens < 2000, measured_times, condition=condition)

# %% [markdown]
# ## Summary
#
# | optimizer | bytes per weight | state of a 7B model |
# | --- | --- | --- |
# | Adam, 32 bits | 8 | 50.21 GiB |
# | Lion, 32 bits | 4 | 25.10 GiB |
# | Adam, 8 bits | 2.03 | 12.75 GiB |
# | Lion, 8 bits | 1.02 | 6.37 GiB |
#
# You can now explain a codebook's spacing and why each block has a scale. In an 8-bit optimizer,
# check how it stores small tensors and sizes other than multiples of the block size, how much it
# decodes at once, and whether it rounds small v to zero.
#
# Tomorrow: FlashAttention, which never stores all T² attention scores.

# %% [markdown]
# ## The running bill
#
# The bill's step trains the 124M model on 8 × 640 tokens. Today, Day 8's Lion stores its momentum
# in 8 bits. Its bfloat16 weights keep stochastic rounding. 8-bit Adam would need one more byte per
# weight, for its second moment. The bill only minimizes the peak: in your own training, Adam may be
# worth that byte.

# %%
with memlab.dry_run():
    small = [weight.numel() for weight in GPT(PRESETS["124m"]).parameters()]
lion, adam = moments_bytes(small, 1, 1), moments_bytes(small, 2, 2)
print(f"8-bit Lion's state: {format_bytes(lion)}, {lion / sum(small):.2f} bytes per weight")
print(f"8-bit Adam's state: {format_bytes(adam)}, {adam / sum(small):.2f} bytes per weight")
print(f"difference: {(adam - lion) / 2**30:.2f} GiB")

# %%
running_bill(9)

# %% [markdown]
# ## Sources
#
# - Dettmers et al. 2021: [8-bit Optimizers via Block-wise
#   Quantization](https://arxiv.org/abs/2110.02861)
# - Li et al. 2023: [Memory Efficient Optimizers with 4-bit
#   States](https://arxiv.org/abs/2309.01507)
# - bitsandbytes: [8-bit optimizers](https://huggingface.co/docs/bitsandbytes/main/en/optimizers)
# - PyTorch: [torchao](https://github.com/pytorch/ao)
#
# The rules on trial are from:
#
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
# - "Day 19: Memory Optimization", author and address unknown
