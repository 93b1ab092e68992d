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
# As before: you **guess**, **measure**, and **build** the code that explains the gap. In each
# exercise, replace `raise NotImplementedError` with your own code; the cell below it checks your
# answer. If you are stuck, run `memlab hint 9.1` in a terminal. You can skip an exercise.

# %% [markdown]
# ## The question
#
# Adam keeps two moments per weight: m, a running mean of its gradients, and v, a running mean of
# their squares. In float32 they need 8 bytes per weight, twice the weights themselves. Lion and
# Adam-mini drop half of the state. Today you keep both moments, in **one byte** each.
#
# A byte is an index from 0 to 255. Which 256 values should the **codebook** hold?

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
# Train a small text model of 123,200 weights for 20 steps. Make two guesses:
#
# 1. How many KiB does Adam's state need with one byte per moment, everything included?
# 2. Quantize v with *even steps*: divide the range from 0 to the largest v of a block (256
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


def learn(make, steps=20):
    """Train a new model; return its losses and its optimizer."""
    torch.manual_seed(0)
    model, losses = GPT(CONFIG), []
    optimizer, drawn = make(model), batches(TEXT, 8, 64, seed=1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(drawn))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def state_bytes(optimizer):
    return memlab.measure(lambda: None, optimizer=optimizer).at_end["optimizer_state"]


# %%
learnt = {
    "32-bit Adam": learn(lambda model: optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)),
    "8-bit Adam": learn(lambda model: optim.Adam8bit(model.parameters(), lr=3e-3, weight_decay=0)),
}
exact, eight = (optimizer for _, optimizer in learnt.values())
print(f"state of 32-bit Adam: {format_bytes(state_bytes(exact))}")

# %%
moments = [state["exp_avg_sq"].flatten() for state in exact.state.values()]
blocks = torch.cat([v.view(-1, 256) for v in moments if len(v) >= 4096])
fractions = blocks / blocks.amax(1, keepdim=True)  # of the block's largest
zeros = (fractions * 255).round() == 0
gone = round(100 * zeros.float().mean().item(), 1)
reveal("9.1", state_kib=state_bytes(eight), zeros_percent=gone)

# %% [markdown]
# 241 KiB would be two bytes per weight. The gap has three parts:
#
# - one float32 scale per block of 256 elements and moment (explained below)
# - two codebooks of 256 float32 entries, 2 KiB in all
# - weights of fewer than 4096 elements (here five norms), which stay in float32 because there is
#   little to save
#
# Even steps round 2.5 % of the second moments to 0. Is that a problem? Adam divides by √v.

# %% [markdown]
# ## The distribution of v
#
# The histogram shows all 122,880 second moments, each as a fraction of the largest in its block, on
# logarithmic axes. Below it are the even steps.

# %%
fig, (above, below) = plt.subplots(
    2, sharex=True, figsize=(9, 3.2), height_ratios=(4, 1), layout="constrained"
)
decades = torch.logspace(-6, 0, 61).tolist()
above.hist(fractions.flatten().numpy(), bins=decades, color="#4477aa", log=True)
above.set(ylabel="second moments", title="v as a fraction of the largest in its block of 256")
above.axvspan(1e-6, 0.5 / 255, color="#cc6677", alpha=0.25, linewidth=0)
above.text(3e-6, 800, f"{gone} % of all v", color="#882233")
below.vlines(torch.arange(1, 256) / 255, 0, 1, color="#cc6677", linewidth=0.8)
below.axvspan(1e-6, 0.5 / 255, color="#cc6677", alpha=0.25, linewidth=0)
below.text(3e-6, 0.4, "rounded to 0", color="#882233")
below.set(yticks=[], xscale="log", xlim=(1e-6, 1), xlabel="fraction of the largest")
_ = below.set_ylabel("even steps", rotation=0, ha="right", va="center")

# %% [markdown]
# Squaring doubles the range in decades: if a gradient is 100 times smaller than its neighbor's, its
# v is 10,000 times smaller. Even steps were enough for Day 7's activations. Moments need small
# steps near zero and large steps near the maximum, so that the **relative** error stays small.
#
# Floating-point formats do this with a fixed number of exponent bits. A *dynamic* codebook varies
# that number: small values spend bits on the exponent, and large values on the mantissa.

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
    values = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1, parts + 1)
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
for one, (name, code), colour in zip(axes, rows.items(), ("C0", "C2", "#cc6677"), strict=True):
    one.vlines(code[code > 0], 0, 1, color=colour, linewidth=0.7)
    one.set(yticks=[], xscale="log", xlim=(1e-7, 1.2))
    one.set_ylabel(name, rotation=0, ha="right", va="center")
axes[0].set_title("The 256 entries of each codebook (for m, the positive half)")
axes[2].set_xlabel("fraction of the largest in the block")
for name, code in rows.items():
    print(f"{name:15} smallest positive {code[code > 0][0]:.2g}, minimum {code[0]:.3f}")

# %% [markdown]
# Half of the entries are in the top decade, and only one or two in the lowest. The smallest entry
# of m's codebook is −0.993: it has no −1, so a −1 loses 0.7 %. Zero is entry 127 of the signed
# codebook and entry 0 of the unsigned one.
#
# How large is the rounding error? The next cell plots the worst relative error in each decade.


# %%
def worst_by_decade(code):
    """Return the largest |x − nearest| / x in each of the seven decades below 1."""
    middles = ((code[:-1] + code[1:]) / 2).double()
    x = torch.logspace(-7, 0, 70_001, dtype=torch.float64)
    error = (code.double()[torch.bucketize(x, middles)] - x).abs() / x
    return error[:-1].view(7, -1).amax(1)


fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
at = torch.arange(7)
for shift, (name, code), colour in zip(
    (-0.27, 0, 0.27), rows.items(), ("C0", "C2", "#cc6677"), strict=True
):
    worst = worst_by_decade(code)
    axes.bar(at + shift, 100 * worst, width=0.25, color=colour, label=name)
    print(f"{name:15}", "  ".join(f"{100 * e:5.1f} %" for e in worst))
axes.set_xticks(at, [f"$10^{{{d - 7}}}$ … $10^{{{d - 6}}}$" for d in range(7)])
axes.set(xlabel="fraction of the largest", ylabel="worst error in %", ylim=(0, 119))
axes.set_title("Worst relative rounding error in each decade")
_ = axes.legend(frameon=False, ncols=3, loc="upper right")

# %% [markdown]
# In the top decade even steps are better. Two decades lower they round everything to 0 (an error of
# 100 %), while the dynamic codebooks have errors of 11 % and 18 %.
#
# A codebook ranges from −1 to 1. So each **block** of 256 elements is divided by its absmax, which
# is stored as the block's *scale*. An outlier then affects only its own block. To decode, look up
# each code and multiply by the scale:


# %%
def decode(codes, scales, code):
    """Return float32 (n,): entry codes[k] of the codebook times the block's scale."""
    each = scales.repeat_interleave(256)[: len(codes)]
    return code[codes.int()] * each


# %% [markdown]
# ### Exercise 9.2: blockwise quantization
#
# About 15 minutes. `x` is a float32 tensor of any shape with n elements. `code` is a sorted
# codebook of 256 values that has 0 and ends at 1. Return `(codes, scales)`: uint8 (n,) and float32
# (⌈n/256⌉,), with no larger storage behind them.
#
# - Scale: absmax of the block. The last block may be short.
# - Code: index of the nearest entry. A zero gets the code of zero, also in a block of zeros.
# - Memory: at most 64 bytes per element. `torch.bucketize(a, b)` counts the elements of `b` below
#   each `a`.


# %%
def encode(x, code):
    ### BEGIN SOLUTION memlab.reference.adam8bit.encode
    n = x.numel()
    blocks = F.pad(x.flatten(), (0, -n % 256)).view(-1, 256)
    scales = blocks.abs().amax(1)
    fractions = blocks / scales.where(scales > 0, 1).view(-1, 1)
    thresholds = (code[:-1] + code[1:]) / 2
    codes = torch.bucketize(fractions, thresholds, out_int32=True).to(torch.uint8)
    return codes.flatten()[:n].clone(), scales
    ### END SOLUTION


# %%
encode = exercise("9.2", encode)

# %% [markdown]
# Compare your function with the library's, which works in chunks of 1 MiB and finds codes with a
# lookup table. (In rare cases an element lies halfway between two entries, and the last bit
# decides.)

# %%
numbers = torch.randn(100_003) ** 3
codes, scales = encode(numbers, SIGNED)
library = quantize_blockwise(numbers, codebook=SIGNED)
equal = (codes == library.codes).float().mean().item()
print(f"more than 99.9 % of the codes are equal: {equal > 0.999}")
print(f"all scales are equal: {torch.equal(scales, library.scales)}")
print(f"float32: {numbers.nbytes:,} bytes; codes + scales: ", end="")
print(f"{codes.nbytes:,} + {scales.nbytes:,} bytes")

# %% [markdown]
# ## The optimizer step
#
# A step decodes both moments, updates them, updates the weight, and encodes the moments again. The
# order matters: the weight is updated with the *exact* new moments, and only the stored moments are
# rounded. So each rounding error enters the moments once per step, not twice.

# %% [markdown]
# ### Exercise 9.3: Adam with 8-bit state
#
# About 20 minutes. Update one weight in place. `gradient` is flat, `weight` is not. `state` is a
# dict, empty before the first step. Store t and the moments in it:
#
# - from 4096 elements: `encode(m, signed)` and `self.encode_v(v, unsigned)` (equal to `encode` for
#   now), 2n + 8⌈n/256⌉ bytes
# - below 4096 elements: m and v in float32
#
# At step t = 1, 2, …, starting from moments of zero:
#
# m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², w ← w − lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + eps)


# %%
class ByWeight(torch.optim.Optimizer):
    """Loop over the weights; a subclass implements `step_weight`."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                self.step_weight(weight, weight.grad.flatten(), self.state[weight], group)


# %%
class Adam8bit(ByWeight):
    codes = dynamic_code(True), dynamic_code(False)
    encode_v = staticmethod(encode)

    def step_weight(self, weight, gradient, state, group):
        ### BEGIN SOLUTION memlab.reference.adam8bit.Adam8bit.step_weight
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        signed, unsigned = self.codes
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
        # # signed, unsigned = self.codes
        # raise NotImplementedError("exercise 9.3, about 14 lines")
        ### END STUB


# %%
Adam8bit = exercise("9.3", Adam8bit)

# %% [markdown]
# Train the text model with your optimizer, then with even steps for both moments.


# %%
class EvenSteps(Adam8bit):
    codes = torch.arange(-127, 129) / 128, EVEN


def within(loss, percent):
    """Return whether the mean of the last five losses is within `percent` of 32-bit Adam's."""
    wanted = sum(learnt["32-bit Adam"][0][-5:])
    return abs(sum(loss[-5:]) / wanted - 1) < percent / 100


def is_lost(loss):
    """Return whether training diverged. Machines give different losses, even inf and nan."""
    return not loss < 10


nearest = learn(lambda model: Adam8bit(model.parameters(), lr=3e-3))
even = learn(lambda model: EvenSteps(model.parameters(), lr=3e-3), steps=12)
print(f"state of your 8-bit Adam: {format_bytes(state_bytes(nearest[1]))}")
lost = (fractions < UNSIGNED[1] / 2).sum().item()
print(f"second moments that the dynamic codebook rounds to 0: {lost} of {fractions.numel():,}")
print(f"dynamic codebook: the loss is within 1 % of 32-bit Adam's: {within(nearest[0], 1)}")
print(f"even steps: the loss starts at {even[0][0]:.1f}; after 12 steps it is above 10: ", end="")
print(is_lost(even[0][-1]))

# %% [markdown]
# With the dynamic codebook, the losses of 8-bit and 32-bit Adam are nearly equal. With even steps,
# 2.5 % of zeros are enough to make the training diverge within a dozen steps. (The two codebooks, 2
# KiB, are class attributes here and not counted as state.)

# %% [markdown]
# ## The zero that explodes
#
# Suppose that rounding sets a weight's v to zero. At the next step, v is (1−β₂)g², from the
# *current* gradient g alone, while m averages about ten gradients. If g happens to be small, m is
# divided by a value near zero. Only eps limits the step, to m / eps.

# %% [markdown]
# The dynamic codebook has a zero, too. If v is below 1.6 · 10⁻⁷ of the block's largest, it becomes
# 0. Such a gradient is 1 / 2500 of the block's largest, but its m is only rounded to 0 below 3 ·
# 10⁻⁷. In the three decades between, weights have an m but no v.
#
# To test this, train 8192 weights whose gradients have very different sizes, exp(2z) with z normal
# (*heavy tails*: the largest in a block is tens of thousands of times the smallest).

# %%
SIZES = (2 * torch.randn(8192, generator=torch.Generator().manual_seed(0))).exp()


def longest_steps(make, sizes=SIZES, steps=100):
    """Return the longest step of any weight, in lr, at each step, and the final weights."""
    random, lr = torch.Generator().manual_seed(1), 1e-3
    weight, longest = torch.nn.Parameter(torch.zeros(8192)), []
    optimizer = make([weight], lr=lr)
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = sizes * torch.randn(8192, generator=random)
        optimizer.step()
        longest.append(((weight.detach() - before).abs().max() / lr).item())
    return longest, weight.detach()


heavy = {"32-bit Adam": longest_steps(partial(optim.AdamW, weight_decay=0))}
heavy["8 bits, nearest codes"] = longest_steps(Adam8bit)
for name, (longest, _) in heavy.items():
    print(f"{name:22} the longest of 100 steps is above {10 ** int(log10(max(longest))):,} · lr")

# %% [markdown]
# For any gradients, 32-bit Adam's steps are at most lr · (1−β₁) / √((1−β₂)(1−β₁²/β₂)) = 7.27 · lr.
# In the first 100 steps the bound is smaller by a factor of √(1−β₂¹⁰⁰): 2.24 · lr. This bound is
# the reason why you can choose lr.
#
# ### Exercise 9.4: never round a positive v to zero
#
# About 6 minutes. Write `encode` for an `x` without negative elements and a codebook whose entry 0
# is zero. **A positive element never gets code 0**: it gets code 1 instead. A zero still gets code
# 0, and all other elements get the nearest code.


# %%
def encode_positive(x, code):
    ### BEGIN SOLUTION memlab.reference.adam8bit.encode_positive
    codes, scales = encode(x, code)
    codes[(x.flatten() > 0) & (codes == 0)] = 1
    return codes, scales
    ### END SOLUTION


# %%
encode_positive = exercise("9.4", encode_positive)


# %%
class SafeAdam8bit(Adam8bit):
    encode_v = staticmethod(encode_positive)


heavy["8 bits, with the rule"] = longest_steps(SafeAdam8bit)
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for (name, (longest, _)), colour in zip(heavy.items(), ("k", "#cc6677", "C0"), strict=True):
    axes.semilogy(longest, color=colour, label=name, linewidth=1.4)
axes.set(xlabel="step", ylabel="longest step of any weight, in lr", ylim=(0.5, 1e6))
axes.set_title("Longest step with heavy-tailed gradients")
axes.legend(frameon=False, ncols=3, loc="upper center")
print(f"with the rule: at most {max(heavy['8 bits, with the rule'][0]):.1f} · lr")

# %%
_, to_32 = heavy["32-bit Adam"]
_, ruled = heavy["8 bits, with the rule"]
sizes = SIZES.view(-1, 256)
small = (sizes / sizes.amax(1, keepdim=True) < 1 / 2500).flatten()
error = ruled - to_32
share = (error[small] ** 2).sum() / (error**2).sum()
print(f"error after 100 steps: {error.norm() / to_32.norm():.0%} of 32-bit Adam's distance")
print("weights with gradients below 1/2500 of the block's largest:")
print(f"  {small.float().mean():.0%} of all weights, {share:.0%} of the squared error")
print(f"  they move {ruled[small].norm() / to_32[small].norm():.1f} of 32-bit Adam's distance")

# %% [markdown]
# The rule needs no extra memory, and no step explodes. The price: a tiny v becomes larger, 3 · 10⁻⁷
# of the block's largest, so the step becomes *shorter*. With these tails the error is 35 % of the
# distance that 32-bit Adam moves. That is large, but safe: 75 % of the squared error is the
# smallest weights moving too little.
#
# Was the cause the coarse even steps, or their zero? Apply the rule to even steps:


# %%
class SafeEvenSteps(EvenSteps):
    encode_v = staticmethod(encode_positive)


safe_even = learn(lambda model: SafeEvenSteps(model.parameters(), lr=3e-3))
print(f"even steps, with the rule: within 3 % of 32-bit Adam's loss: {within(safe_even[0], 3)}")

# %% [markdown]
# The cause was the zero.
#
# ## Does it happen in real training?
#
# It did not happen in the text model above: the dynamic codebook rounds none of its v to 0. An
# explosion needs heavy tails *and* gradients that are large relative to eps, because m / eps is the
# limit.
#
# Here is a model with heavy tails: word vectors (*skip-gram*: predict a nearby word). Rare words
# rarely get gradients. The loss is the mean over the batch in one run and the sum in another.

# %%
WORDS, WIDTH, BATCH = 512, 16, 512
words = re.findall(r"[A-Za-z_]+", bytes(TEXT.tolist()).decode(errors="ignore"))
common = {word: n for n, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
ids = torch.tensor([common.get(word, WORDS - 1) for word in words])


def skip_gram(make, reduction, steps=40):
    """Return the last loss per word, and the longest step of any weight in lr."""
    random, longest, lr = torch.Generator().manual_seed(0), 0.0, 1e-2
    pair = [torch.nn.Parameter(0.1 * torch.randn(WORDS, WIDTH, generator=random)) for _ in "io"]
    optimizer = make(pair, lr=lr)
    for _ in range(steps):
        at = torch.randint(len(ids) - 2, (BATCH,), generator=random)
        near = at + torch.randint(1, 3, (BATCH,), generator=random)
        loss = F.cross_entropy(pair[0][ids[at]] @ pair[1].T, ids[near], reduction=reduction)
        optimizer.zero_grad()
        loss.backward()
        before = [weight.detach().clone() for weight in pair]
        optimizer.step()
        moved = max((w - b).abs().max().item() for w, b in zip(pair, before, strict=True))
        longest = max(longest, moved / lr)
    return loss.item() / (BATCH if reduction == "sum" else 1), longest


# %%
near = {}  # whether the loss is within 1 % of 32-bit Adam's
trained = {"32-bit": torch.optim.Adam, "nearest codes": Adam8bit, "with the rule": SafeAdam8bit}
for reduction in ("mean", "sum"):
    found = {name: skip_gram(make, reduction) for name, make in trained.items()}
    for name, (loss, longest) in found.items():
        near[reduction, name] = abs(loss / found["32-bit"][0] - 1) < 0.01
        nats = "above 10" if is_lost(loss) else f"{loss:.1f}"
        print(f"{reduction:5}{name:14} loss per word {nats}, longest step ", end="")
        print("within Adam's bound" if longest < 7.28 else "above Adam's bound")

# %% [markdown]
# With a **mean**, the usual choice, nearest codes cause long steps, but the loss is the same. With
# a **sum**, gradients are 512 times larger, eps is negligible, and the training diverges. 32-bit
# Adam works with both.
#
# Two small models prove nothing about large ones. They show what to check in your training: is the
# loss a mean, and how heavy are the tails? The rule is free in memory.

# %% [markdown]
# ## Four optimizers
#
# Train the text model again and compare the bytes of state. 8-bit Adam is the library's, with the
# rule and with its codebooks counted. Lion has its own learning rate, 2 · 10⁻³. (20 steps are too
# few to rank optimizers by loss.)

# %%
partition = optim.gpt_partition(CONFIG.hidden_size // CONFIG.heads)
learnt["Lion"] = learn(lambda model: optim.Lion(model.parameters(), lr=2e-3))
learnt["Adam-mini"] = learn(
    lambda model: optim.AdamMini(
        model.named_parameters(), partition=partition, lr=3e-3, weight_decay=0
    )
)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 2), layout="constrained")
styles = {"32-bit Adam": ("0.75", 5), "8-bit Adam": ("C0", 1.5)}
styles |= {"Lion": ("#cc6677", 1.5), "Adam-mini": ("C2", 1.5)}
for n, (name, (losses, optimizer)) in enumerate(learnt.items()):
    colour, width = styles[name]
    left.plot(losses, color=colour, linewidth=width, label=name)
    held = state_bytes(optimizer)
    right.barh(name, held / 1024, color=colour)
    right.text(held / 1024 + 15, n, f"{held / 1024:.0f} KiB", va="center")
    print(f"{name:12}{format_bytes(held):>11}, {held / 123_200:.2f} bytes per weight")
left.set(xlabel="step", ylabel="loss in nats", title="Loss on torch's source code")
left.legend(frameon=False)
right.set(xlabel="KiB of state", xlim=(0, 1300), title="Optimizer state between steps")
right.invert_yaxis()

# %% [markdown]
# The blue line covers the grey one: 8-bit Adam has the same losses as 32-bit Adam, with a state
# four times smaller. Lion and Adam-mini halve the state by keeping fewer elements; 8-bit Adam keeps
# all of them in lower precision. You can combine both: Lion with 8-bit momentum needs one byte per
# weight.
#
# ## Comparison with bitsandbytes and torchao
#
# Both packages are optional. To install them, run `pip install -e ".[oracles]"` in the repository's
# folder.

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
# Now run all five for 100 steps on 8192 weights, with normal gradients and with heavy tails. The
# table shows:
#
# - the bytes of state, also for 8200 weights, which are not a multiple of the block size
# - the relative distance to the final weights of 32-bit Adam and of yours
# - the longest step
#
# torchao normally compiles its step; here it runs eagerly.


# %%
def held_by(make, n):
    weight = torch.nn.Parameter(torch.zeros(n))
    optimizer, weight.grad = make([weight], lr=1e-3), torch.ones(n)
    optimizer.step()
    return state_bytes(optimizer)


def apart(end, other):
    return ((end - other).norm() / other.norm()).item()


# %% tags=["nbval-ignore-output"] reason="the packages are optional"
rivals = {"nearest codes": Adam8bit, "with the rule": SafeAdam8bit}
rivals["memlab"] = partial(optim.Adam8bit, weight_decay=0)
rivals |= {"bitsandbytes": bnb.Adam8bit} if bnb else {}
rivals |= {"torchao": ao.Adam8bit} if ao else {}
_, in_32 = longest_steps(partial(optim.AdamW, weight_decay=0), sizes=1)
_, yours = longest_steps(SafeAdam8bit, sizes=1)
print("               bytes of state     normal: off from   tails: off from")
print("                8192     8200     Adam     yours      Adam    longest step")
with torch.compiler.set_stance("force_eager"):
    for name, make in rivals.items():
        held, ragged = (held_by(make, n) for n in (8192, 8200))
        (_, level), (longest, tailed) = longest_steps(make, sizes=1), longest_steps(make)
        print(f"{name:13}{held:>7,}  {ragged:>7,}", end="")
        print(f"{apart(level, in_32):>9.1%} {apart(level, yours):>9.2%}", end="")
        print(f"{apart(tailed, to_32):>10.0%} {max(longest):>12,.1f} · lr")

# %% [markdown]
# On normal gradients all five are equally far from 32-bit Adam, within 0.1 %. torchao is 0.01 %
# from yours, bitsandbytes 0.7 %. The 2,048 extra bytes are the two codebooks, and torchao's 4 extra
# bytes are its step count. torchao keeps a weight in float32 unless its size is a multiple of 256.
#
# With heavy tails, torchao's nearest codes explode like yours did. bitsandbytes' do **not** on a
# CPU. Why?

# %% [markdown]
# On a CPU, bitsandbytes quantizes with a lookup table of 65,536 even steps from −1 to 1. All
# fractions from 0 to 3 · 10⁻⁵ get the same nonzero code. Their v is too large and their step too
# short, so with tails its error is larger than the rule's: 57 % instead of 35 %. (On a GPU it uses
# the nearest code, zero included; not measured here.)

# %% [markdown]
# bitsandbytes' table has another cost: an exact 0 does not decode to 0. What happens to weights
# whose gradient is *always* zero, such as embedding rows of tokens that never occur? Take 4096
# weights and 500 steps:
#
# - first block of 256: every second weight has gradients
# - second block: one weight has gradients
# - other blocks: no gradients


# %%
def strayed(make):
    """Return how far weights without gradients move, in lr, for the three kinds of blocks."""
    random, weight = torch.Generator().manual_seed(0), torch.nn.Parameter(torch.zeros(4096))
    lives = torch.zeros(4096)
    lives[0:256:2], lives[256] = 1, 1
    optimizer = make([weight], lr=1e-3)
    for _ in range(500):
        weight.grad = lives * torch.randn(4096, generator=random)
        optimizer.step()
    parts = weight.detach()[1:256:2], weight.detach()[257:512], weight.detach()[512:]
    return [part.abs().max().item() / 1e-3 for part in parts]


print("with the rule: {:.1f}, {:.1f} and {:.1f} · lr".format(*strayed(SafeAdam8bit)))

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if bnb:
    print("bitsandbytes: {:.1f}, {:.1f} and {:.1f} · lr".format(*strayed(bnb.Adam8bit)))
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
# whole block has no gradients. This rarely matters, unless some rows must stay unchanged.
#
# ## At scale: 7 billion parameters
#
# Compute the optimizer state of a 7B model by formula and in a dry run. Its 32 blocks are equal, so
# models of one and two blocks are enough.


# %%
def moments_bytes(sizes, moments, tables):
    """Return state bytes: 8 bits from 4096 elements, else float32, plus 1 KiB per codebook."""
    one = (n + 4 * -(-n // 256) if n >= 4096 else 4 * n for n in sizes)
    return moments * sum(one) + 1024 * tables


def dry_state(make, layers):
    """Return the state bytes after a first step in a dry run, and its peak of temporaries."""
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
        (one, scratch), (two, _) = (dry_state(make, layers) for layers in (1, 2))
    at_7b[make] = held = one + 31 * (two - one)
    print(f"{make.__name__:9}{format_bytes(held):>10}, {held / sum(sizes):.2f} bytes ", end="")
    print(f"per weight; equals the formula: {held == formula}; ", end="")
    print(f"temporaries {format_bytes(scratch)}")

# %% [markdown]
# 8-bit Adam reduces the state from 50 to 13 GiB. With bfloat16 weights and gradients, 12.6 GiB
# each, the total is 38 GiB. Lion with 8-bit momentum halves the state again.
#
# The temporaries are small because the library updates 262,144 elements at a time. Your version
# decodes whole tensors. Measure it for the embedding alone, 131 million elements:

# %%
with memlab.dry_run():
    embedding = torch.nn.Parameter(torch.zeros(32_000, 4096))
    embedding.grad = torch.zeros_like(embedding)
    whole = SafeAdam8bit([embedding])
    trace = memlab.measure(whole.step, optimizer=whole)
print(f"yours: {format_bytes(trace.at_peak['optimizer_temporaries'])} of temporaries", end="")
print(f" for a state of {format_bytes(trace.at_end['optimizer_state'])}")

# %% [markdown]
# An 8-bit optimizer that decodes a large tensor at once has a higher peak than 32-bit Adam, whose
# two moments of this embedding need 1 GiB. Measure the peak of any library that you use.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the bill's step on it with three optimizers. (`memlab.kernels`
# has a Triton kernel that does a whole step of one weight, with the same states and codes.)

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
# Two guides give different bytes per parameter. The difference is a float32 copy of the weights
# (Day 4's *master weights*): with it, 32-bit Adam needs 12 bytes instead of 8.

# %%
per_weight = {make: held / sum(sizes) for make, held in at_7b.items()}
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
saved_gb = 1e9 * (before - after) / 1e9
verdict(
    "19b",
    abs(after - 2) < 0.05 and abs(saved_gb - 6) < 0.05,
    f"{in_words}; for 1B parameters {saved_gb:.2f} GB less",
    condition="for weights of at least 4096 elements (scales add 0.03 bytes per parameter); the "
    "guide's 12 bytes elsewhere include master weights",
)

# %%
text_ruled, text_nearest = within(learnt["8-bit Adam"][0], 1), within(nearest[0], 1)
words_ruled, words_nearest = near["sum", "with the rule"], near["sum", "nearest codes"]
verdict(
    "19c",
    text_ruled and text_nearest,
    f"loss within 1 % of 32-bit Adam's: text model {text_ruled}, with nearest codes "
    f"{text_nearest}; word vectors with a summed loss {words_ruled}, with nearest codes "
    f"{words_nearest}",
    condition="if no positive v is rounded to 0, or if gradients are small relative to eps",
)

# %% [markdown]
# One more rule: "8-bit Adam costs a slight CPU overhead." In practice the step mostly runs on a
# GPU. What does it cost here, on a CPU? The cost does not grow with the number of tokens, but
# forward and backward do. So express it in tokens: forward and backward of how many tokens take the
# same CPU time?


# %%
def seconds(call):
    """Return the minimum CPU time of seven calls."""
    found = []
    for _ in range(7):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


model = GPT(CONFIG)
tokens, targets = next(batches(TEXT, 8, 64, seed=0))
a_pass = seconds(lambda: model(tokens, targets).backward())
whole, codes = (make(model.parameters()) for make in (optim.AdamW, optim.Adam8bit))
step_32, step_8 = seconds(whole.step), seconds(codes.step)
more_tokens = (step_8 - step_32) / (a_pass / tokens.numel())

# %% tags=["nbval-ignore-output"] reason="a time"
print(f"CPU time of the 8-bit step: {step_8 / step_32:.1f}× the 32-bit step's")
print(f"the extra time equals forward and backward of {more_tokens:.0f} tokens")

# %% tags=["nbval-ignore-output"] reason="times of a CPU, and a GPU's where one is stored"
from memlab.course import time_on_a_gpu

found = (
    f"on a CPU, the optimizer step takes more than 2× as long as in 32 bits: "
    f"{step_8 > 2 * step_32}; the extra time is below forward and backward of 2,000 tokens: "
    f"{more_tokens < 2000} (times: benchmarks/optim.py); a whole step on a GPU relative to "
    f"AdamW's: {time_on_a_gpu('adam8bit')}"
)
when = (
    "for steps of many thousand tokens; with few tokens the slower optimizer step is a large part"
)
verdict("19d", more_tokens < 2000, found, condition=when)

# %% [markdown]
# ## Summary
#
# | optimizer | bytes per weight | state of a 7B model |
# | --- | --- | --- |
# | Adam, 32 bits | 8 | 50.2 GiB |
# | Lion, 32 bits | 4 | 25.1 GiB |
# | Adam, 8 bits | 2.03 | 12.7 GiB |
# | Lion, 8 bits | 1.02 | 6.4 GiB |
#
# You can now explain a codebook's spacing and why each block has a scale. In an 8-bit optimizer,
# check four things: sizes that are not a multiple of the block size, small tensors, how much it
# decodes at once, and how it rounds to zero.
#
# Tomorrow: FlashAttention, which needs no N² scores.

# %% [markdown]
# ## The running bill
#
# The bill's step trains the 124M model on 8 × 640 tokens. Today Day 8's Lion gets 8-bit momentum.
# Its bfloat16 weights keep stochastic rounding. 8-bit Adam would need one more byte per weight for
# its second moment. The bill minimizes the peak; in your own training, a tuned learning rate for
# Adam may be worth that byte.

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
