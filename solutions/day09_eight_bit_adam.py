# %% [markdown]
# # Day 9: Eight-bit Adam
#
# **Two bytes instead of eight?**
#
# After today you have built an optimizer whose state is a quarter of Adam's, know which 256 numbers
# it needs and why, have seen one of them blow a training up, and know the line that stops it.
#
# About 85 minutes, 53 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 9.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Adam keeps two moments of each weight: m, a mean of its gradients, and v, a mean of their squares.
# In float32 that is 8 bytes a weight, twice the weights themselves. Lion and Adam-mini drop half of
# it. Today both moments stay, and get **one byte** each.
#
# A byte is a number from 0 to 255. What should the 256 stand for?

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
# A small text model of 123,200 weights, 20 steps of Adam. How many KiB does its state take if each
# moment takes a byte (and what else it needs)? Then the obvious way to write v: cut the range from
# 0 to the largest of 256 neighbours into 255 even steps. How many percent of the second moments
# become exactly 0?

# %%
### BEGIN SOLUTION
guess("9.1", state_kib=241, zeros_percent=0.5)  # two bytes a weight; hardly any
### END SOLUTION
### BEGIN STUB
# guess("9.1", state_kib=..., zeros_percent=...)
### END STUB

# %% [markdown]
# ## Measure
#
# The model reads torch's own source, once with 32-bit Adam and once with the library's
# 8-bit one.

# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def learn(make, steps=20):
    """The losses of the model, made anew, and its optimizer."""
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
print(f"in 32 bits: {format_bytes(state_bytes(exact))}")

# %%
moments = [state["exp_avg_sq"].flatten() for state in exact.state.values()]
blocks = torch.cat([v.view(-1, 256) for v in moments if len(v) >= 4096])
fractions = blocks / blocks.amax(1, keepdim=True)  # of the largest of each block
zeros = (fractions * 255).round() == 0
gone = round(100 * zeros.float().mean().item(), 1)
reveal("9.1", state_kib=state_bytes(eight), zeros_percent=gone)

# %% [markdown]
# 241 KiB are two bytes a weight. The gap: one float32 for each 256 numbers of each moment (you will
# see what for); the two tables of 256 float32 that you are about to write, 2 KiB; and weights of
# fewer than 4096 numbers (here five norms), which stay in float32: nothing is to be won there.
#
# And 2.5 % of the v's are gone. Is that little? Adam divides by √v.

# %% [markdown]
# ## What v looks like
#
# All 122,880 second moments, each as a fraction of the largest of its block, on logarithmic axes;
# below, where the even steps lie.

# %%
fig, (above, below) = plt.subplots(
    2, sharex=True, figsize=(9, 3.2), height_ratios=(4, 1), layout="constrained"
)
decades = torch.logspace(-6, 0, 61).tolist()
above.hist(fractions.flatten().numpy(), bins=decades, color="#4477aa", log=True)
above.set(ylabel="second moments", title="v as a fraction of the largest of its block of 256")
above.axvspan(1e-6, 0.5 / 255, color="#cc6677", alpha=0.25, linewidth=0)
above.text(3e-6, 800, f"{gone} % of them", color="#882233")
below.vlines(torch.arange(1, 256) / 255, 0, 1, color="#cc6677", linewidth=0.8)
below.axvspan(1e-6, 0.5 / 255, color="#cc6677", alpha=0.25, linewidth=0)
below.text(3e-6, 0.4, "all of this becomes 0", color="#882233")
below.set(yticks=[], xscale="log", xlim=(1e-6, 1), xlabel="fraction of the largest")
_ = below.set_ylabel("even steps", rotation=0, ha="right", va="center")

# %% [markdown]
# Squares spread twice as far as what is squared: a gradient of a hundredth of its neighbour's has a
# v of a ten-thousandth. Day 7's activations could live with even steps. Moments want steps that are
# fine near zero and coarse near the top: an error **relative** to the number.
#
# Floating-point does that with a fixed number of bits for the exponent. A *dynamic* code lets it
# vary: small numbers spend bits on the exponent; large ones have them left for digits.

# %% [markdown]
# ### Exercise 9.1: 256 numbers for seven decades
#
# About 12 minutes. Decade i = 0 … 6 reaches from 0.1 · 10ⁱ⁻⁶ to 10ⁱ⁻⁶. Cut 0.1 … 1 into 2ⁱ equal
# parts (`signed=False`: 2ⁱ⁺¹). The code has their middles, times 10.0 ** (i − 6); if `signed`, with
# both signs; and 0 and 1. Give the 256 numbers as float32, rising.
#
# Compute in float32, in that order: edges (`torch.linspace`), means of two, power of ten. Then they
# are to the bit those of bitsandbytes, with which files of 8-bit states were written.


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
axes[0].set_title("What the 256 codes stand for (of m's, the positive half)")
axes[2].set_xlabel("fraction of the largest in the block")
for name, code in rows.items():
    print(f"{name:15} smallest above zero {code[code > 0][0]:.2g}, lowest {code[0]:.3f}")

# %% [markdown]
# Half of the numbers are in the top decade, and one or two are left for the seventh. m's lowest is
# −0.993: there is no −1, and a −1 loses 0.7 %. Zero is number 127 of the signed code, number 0 of
# the other.
#
# How wrong can each be? The worst relative error of the nearest number, decade by decade:


# %%
def worst_by_decade(code):
    """The largest |x − nearest| / x in each of the seven decades below 1."""
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
axes.set_title("The nearest number: how far off at worst, decade by decade")
_ = axes.legend(frameon=False, ncols=3, loc="upper right")

# %% [markdown]
# At the very top even steps are the better ones. Two decades below they are no use, and the dynamic
# codes still know a number to a fifth or a tenth. An error of 100 % means: it becomes 0.
#
# A code reaches from −1 to 1. So each **block** of 256 neighbours is divided by its largest |x|,
# and that is kept, as the block's *scale*. An outlier spoils no more than its own block. Decoding
# is a look-up and a product:


# %%
def decode(codes, scales, code):
    """float32 (n,): code number codes[k], times the scale of its block."""
    each = scales.repeat_interleave(256)[: len(codes)]
    return code[codes.int()] * each


# %% [markdown]
# ### Exercise 9.2: the nearest number, block by block
#
# About 15 minutes. `x`: float32, any shape, n numbers, flattened; `code`: 256 rising numbers up to
# 1, zero among them. Return `(codes, scales)`: uint8 (n,) and float32 (⌈n/256⌉,), holding on to no
# byte more. A scale is its block's largest |x|; `decode` gives the nearest (at a tie,
# either). The last block may be short. A zero gets the code of zero, in a block of zeros, too.
#
# Take at most 64 bytes a number on the way. `torch.bucketize(a, b)` counts numbers of a sorted
# `b` below each `a`.


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
# Held against the library's, which looks its codes up and takes chunks of 1 MiB: the same codes and
# scales? (The last bit may tip a number that lies in the middle.)

# %%
numbers = torch.randn(100_003) ** 3
codes, scales = encode(numbers, SIGNED)
library = quantize_blockwise(numbers, codebook=SIGNED)
equal = (codes == library.codes).float().mean().item()
print(f"more than 99.9 % of the codes are equal: {equal > 0.999}")
print(f"all scales are equal: {torch.equal(scales, library.scales)}")
print(f"{numbers.nbytes:,} bytes are {codes.nbytes:,} + {scales.nbytes:,}")

# %% [markdown]
# ## Adam on two bytes
#
# A step decodes both moments, brings them up to date, steps the weight, and encodes them again. The
# order matters: the weight is stepped by the *exact* new moments, and only what is kept is rounded.
# An error then lasts, but never counts twice in one step.

# %% [markdown]
# ### Exercise 9.3: Adam on two bytes
#
# About 20 minutes. Write one weight's step, in place. `gradient` is flat, `weight` is not; `state`
# is a dict, empty at first and yours to fill; counting t is yours. From 4096 numbers on keep
# `encode(m, signed)` and `self.encode_v(v, unsigned)` (that is `encode`, for now): 2n + 8⌈n/256⌉
# bytes. Smaller weights keep m and v in float32. At step t = 1, 2, … from moments of zero:
#
# m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², w ← w − lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + eps)


# %%
class ByWeight(torch.optim.Optimizer):
    """The loop over weights; a subclass brings `step_weight`."""

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
        # # Begin with these two:
        # # lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        # # signed, unsigned = self.codes
        # raise NotImplementedError("exercise 9.3, about 14 lines")
        ### END STUB


# %%
Adam8bit = exercise("9.3", Adam8bit)

# %% [markdown]
# It reads torch's own source, beside the same with even steps for both moments.


# %%
class EvenSteps(Adam8bit):
    codes = torch.arange(-127, 129) / 128, EVEN


def within(loss, percent):
    """Whether the mean of the last five losses is that of 32-bit Adam, nearly."""
    wanted = sum(learnt["32-bit Adam"][0][-5:])
    return abs(sum(loss[-5:]) / wanted - 1) < percent / 100


def is_lost(loss):
    """Whether a training is lost. By how much, machines differ, down to infinite and nan."""
    return not loss < 10


nearest = learn(lambda model: Adam8bit(model.parameters(), lr=3e-3))
even = learn(lambda model: EvenSteps(model.parameters(), lr=3e-3), steps=12)
print(f"8 bits: {format_bytes(state_bytes(nearest[1]))} of state")
lost = (fractions < UNSIGNED[1] / 2).sum().item()
print(f"second moments that the dynamic code loses: {lost} of {fractions.numel():,}")
print(f"dynamic code: the loss is within 1 % of 32-bit Adam's: {within(nearest[0], 1)}")
print(f"even steps: the loss began at {even[0][0]:.1f}; after 12 steps it is above 10: ", end="")
print(is_lost(even[0][-1]))

# %% [markdown]
# With the dynamic code the losses of 8 and 32 bits are nearly one curve. With even steps 2.5 % of
# zeros was enough: the training is lost within a dozen steps. (The two tables, 2 KiB, are the
# class's here, and not counted.)

# %% [markdown]
# ## The zero that explodes
#
# What does a zero do? Let g be a weight's gradient, and its v forgotten. At the next step v is
# (1−β₂)g² of *today's* gradient alone, while m remembers the last ten. If today's happens to be
# small, m is divided by next to nothing. Nothing bounds that step but m / eps.

# %% [markdown]
# The dynamic code has a zero, too. A v below 1.6 · 10⁻⁷ of its block's largest becomes 0. That is a
# gradient of 1 / 2500 of the largest; but the m of such a gradient is still known, down to
# 3 · 10⁻⁷. Between the two are three decades of weights with an m and no v.
#
# So: 8192 weights, each with gradients of a size of its own, exp(2z) with z normal (*heavy
# tails*: the largest of a block is tens of thousands of times its smallest).

# %%
SIZES = (2 * torch.randn(8192, generator=torch.Generator().manual_seed(0))).exp()


def longest_steps(make, sizes=SIZES, steps=100):
    """The longest step of any weight, over lr, at each step; and the weights at the end."""
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
# Exact Adam never steps further than lr · (1−β₁) / √((1−β₂)(1−β₁²/β₂)), whatever the gradients are:
# that is 7.27 · lr; within the first 100 steps that times √(1−β₂¹⁰⁰), 2.24 · lr. So lr is a number
# one can choose.
#
# ### Exercise 9.4: the rule that stops it
#
# About 6 minutes. As `encode`, for an `x` that is never negative and a code whose number 0 is zero:
# **a positive number never gets code 0**; it gets 1. A zero still gets 0, and all other codes are
# the nearest.


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
axes.set_title("Gradients whose sizes differ by decades")
axes.legend(frameon=False, ncols=3, loc="upper center")
print(f"with the rule: at most {max(heavy['8 bits, with the rule'][0]):.1f} · lr")

# %%
_, to_32 = heavy["32-bit Adam"]
_, ruled = heavy["8 bits, with the rule"]
sizes = SIZES.view(-1, 256)
small = (sizes / sizes.amax(1, keepdim=True) < 1 / 2500).flatten()
error = ruled - to_32
print(f"after 100 steps {error.norm() / to_32.norm():.0%} of the way are off 32-bit Adam's")
print(f"gradients below 1/2500 of the largest: {small.float().mean():.0%} of the weights,", end="")
print(f" {(error[small] ** 2).sum() / (error**2).sum():.0%} of the squared error; ", end="")
print(f"they go {ruled[small].norm() / to_32[small].norm():.1f} of their way")

# %% [markdown]
# No byte more, and no explosion. What the rule gives instead of a v that is too small is one that
# is too large: 3 · 10⁻⁷ of the block's largest. Such a step is too *short*. That is the price. With
# tails like these a third of the way is off: not a small error, but in a safe direction, and three
# quarters of it is the smallest weights moving too little.
#
# Was it the coarseness of even steps, or their zero? The rule fits them, too:


# %%
class SafeEvenSteps(EvenSteps):
    encode_v = staticmethod(encode_positive)


safe_even = learn(lambda model: SafeEvenSteps(model.parameters(), lr=3e-3))
print(f"even steps, with the rule: within 3 % of 32-bit Adam's loss: {within(safe_even[0], 3)}")

# %% [markdown]
# It was the zero.
#
# ## Does it happen in real training?
#
# Not in the text model above: it has no v that the dynamic code loses, and nearest codes did it no
# harm. What it takes is tails *and* gradients that are large against eps, as m / eps is the limit.
#
# Here is a model with tails: word vectors (*skip-gram*: from a word guess one nearby). Rare words
# have rare gradients. The loss is once the mean over the batch, once the sum.

# %%
WORDS, WIDTH, BATCH = 512, 16, 512
words = re.findall(r"[A-Za-z_]+", bytes(TEXT.tolist()).decode(errors="ignore"))
common = {word: n for n, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
ids = torch.tensor([common.get(word, WORDS - 1) for word in words])


def skip_gram(make, reduction, steps=40):
    """The last loss of a word, and the longest step of any weight over lr."""
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
        print(f"{reduction:5}{name:14} loss of a word {nats}, the longest step is ", end="")
        print("Adam's at most" if longest < 7.28 else "longer than Adam's can be")

# %% [markdown]
# With a **mean**, as nearly everybody trains, there are long steps with nearest codes, and the loss
# does not mind. With a **sum** gradients are 512 times as large, eps is nothing beside them, and
# the training is lost. 32-bit Adam takes both alike.
#
# Two small models prove nothing about large ones. But they show what to ask of a training: is its
# loss a mean, and how long are its tails? And the rule costs no byte.

# %% [markdown]
# ## Four optimizers
#
# The text model again, with the bytes of each state. 8-bit Adam is the library's, as at first: with
# the rule, and with its tables. Lion has a learning rate of its own, here 2 · 10⁻³. (20 steps are
# no verdict about optimizers.)

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
    print(f"{name:12}{format_bytes(held):>11}, {held / 123_200:.2f} bytes a weight")
left.set(xlabel="step", ylabel="loss in nats", title="Loss on torch's own source")
left.legend(frameon=False)
right.set(xlabel="KiB of state", xlim=(0, 1300), title="What is kept between steps")
right.invert_yaxis()

# %% [markdown]
# The blue line lies on the grey one: a quarter of the bytes, and the same losses. Lion and
# Adam-mini halve the state by keeping less; 8 bits keep it all, coarsely. They go together: Lion's
# one moment in 8 bits is one byte a weight.
#
# ## Held against bitsandbytes and torchao
#
# Both are optional here: `pip install -e ".[oracles]"` in the repository's folder brings them.

# %%
bnb, ao = imported("bitsandbytes.optim"), imported("torchao.optim")

# %% tags=["nbval-ignore-output"] reason="the packages are optional"
if bnb:
    create = importlib.import_module("bitsandbytes.functional").create_dynamic_map
    print(f"bitsandbytes' signed code, to the bit: {torch.equal(create(True), SIGNED)}")
    print(f"bitsandbytes' unsigned code, to the bit: {torch.equal(create(False), UNSIGNED)}")
else:
    print(f"bitsandbytes is {MISSING}")
if ao:
    create = importlib.import_module("torchao.optim.quant_utils").create_dynamic_map
    print(f"torchao's signed code, to the bit: {torch.equal(torch.tensor(create(True)), SIGNED)}")
else:
    print(f"torchao is {MISSING}")

# %% [markdown]
# Now all of them, 100 steps of 8192 weights, with gradients of one size (normal) and with tails:
# how far they end from 32-bit Adam and from yours, and the longest step. And bytes of state, of
# 8200 weights, too, which are no whole blocks. torchao compiles its step; here it runs as it is
# written.


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
print("                  state of          normal: off       tails: off")
print("                8192     8200     Adam     yours      Adam    longest step")
with torch.compiler.set_stance("force_eager"):
    for name, make in rivals.items():
        held, ragged = (held_by(make, n) for n in (8192, 8200))
        (_, level), (longest, tailed) = longest_steps(make, sizes=1), longest_steps(make)
        print(f"{name:13}{held:>7,}  {ragged:>7,}", end="")
        print(f"{apart(level, in_32):>9.1%} {apart(level, yours):>9.2%}", end="")
        print(f"{apart(tailed, to_32):>10.0%} {max(longest):>12,.1f} · lr")

# %% [markdown]
# On normal gradients all five end equally far from 32-bit Adam, to a tenth of a percent; torchao
# ends 0.01 % from yours, bitsandbytes 0.7 %. The 2,048 bytes more are the two tables; torchao's 4
# are its step count. And torchao leaves a weight of no whole blocks in float32.
#
# torchao's nearest codes explode as yours did. bitsandbytes' do **not** on a CPU. Why?

# %% [markdown]
# Its quantizer there looks fractions up in a table of 65,536 even steps from −1 to 1; from 0 to
# 3 · 10⁻⁵ all get one code, that is not zero. A v so far too large makes a step too short: with
# tails it ends further from 32-bit Adam than the rule does. (On a GPU it takes the nearest, zero
# included; not measured here.)

# %% [markdown]
# There is one price more: not even an exact 0 comes back as 0. So what becomes of weights whose
# gradient is *always* zero, such as the rows of tokens that never occur? 4096 of them, 500 steps.
# In the first block of 256 every second weight has gradients; in the second a single one; the rest
# of the blocks have none.


# %%
def strayed(make):
    """How far, over lr, weights go that never have a gradient: beside many, beside one, alone."""
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
        print(f"{name}: a 0 beside a 1 comes back as {zero:.2e}")
else:
    print(f"bitsandbytes is {MISSING}")

# %% [markdown]
# About one step's worth after five hundred steps, and nothing at all where a whole block has no
# gradients. Harmless for most; good to know when rows have to stay what they are.
#
# ## At scale: seven billion
#
# The state of a 7B model's optimizer, by formula, and by a dry run. Its 32 blocks are alike, so
# models of one and of two are enough.


# %%
def moments_bytes(sizes, moments, tables):
    """In 8 bits from 4096 numbers on, in float32 below; and a table of 1 KiB for each code."""
    one = (n + 4 * -(-n // 256) if n >= 4096 else 4 * n for n in sizes)
    return moments * sum(one) + 1024 * tables


def dry_state(make, layers):
    """State bytes of a first step in a dry run, and the most that it takes on the way."""
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
        (one, way), (two, _) = (dry_state(make, layers) for layers in (1, 2))
    at_7b[make] = held = one + 31 * (two - one)
    print(f"{make.__name__:9}{format_bytes(held):>10}, {held / sum(sizes):.2f} bytes ", end="")
    print(f"a weight; the formula's: {at_7b[make] == formula}; {format_bytes(way)} on the way")

# %% [markdown]
# 50 GiB become 13. What is left are weights and gradients in bfloat16, 12.6 GiB each, and 38 GiB in
# all: the state has become as small as they are. With Lion in 8 bits it is half of that.
#
# "On the way": the library steps 262,144 numbers at a time. Yours decodes whole tensors. For the
# embedding alone, 131 million numbers:

# %%
with memlab.dry_run():
    embedding = torch.nn.Parameter(torch.zeros(32_000, 4096))
    embedding.grad = torch.zeros_like(embedding)
    whole = SafeAdam8bit([embedding])
    trace = memlab.measure(whole.step, optimizer=whole)
print(f"yours: {format_bytes(trace.at_peak['optimizer_temporaries'])} on the way", end="")
print(f" to a state of {format_bytes(trace.at_end['optimizer_state'])}")

# %% [markdown]
# An 8-bit optimizer that decodes a large tensor at once takes more at its peak than one that never
# encoded it: Adam's two moments of this embedding are 1 GiB in float32. Whether a library does so
# is worth a measurement.

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes the bill's step on it, with three optimizers. (In
# `memlab.kernels` a step of a weight is one kernel, in Triton: same states, same codes.)

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
# Two guides, and two numbers for the same thing. The difference is a float32 copy of the weights,
# Day 4's *master weights*: who counts it with the optimizer has 12 bytes before.

# %%
per_weight = {make: held / sum(sizes) for make, held in at_7b.items()}
before, after = per_weight[optim.AdamW], per_weight[optim.Adam8bit]
in_words = (
    f"a 7B model's moments: {before:.2f} bytes a parameter in 32 bits, {after:.2f} in 8; with a "
    f"float32 master copy beside them {before + 4:.2f} and {after + 4:.2f}"
)
verdict(
    "19a",
    abs(after - 8) < 0.1 or abs(after + 4 - 8) < 0.1,
    in_words,
    otherwise=f"12 counts a float32 master copy; then it is {after + 4:.2f} instead of 12, "
    f"otherwise {after:.2f} instead of 8",
)

# %%
saved_gb = 1e9 * (before - after) / 1e9
verdict(
    "19b",
    abs(after - 2) < 0.05 and abs(saved_gb - 6) < 0.05,
    f"{in_words}; for 1B parameters {saved_gb:.2f} GB less",
    condition="for weights of 4096 numbers and more (the scales take 0.03 bytes each); the guide's "
    "12 bytes of Adam, elsewhere, count a master copy",
)

# %%
verdict(
    "19c",
    within(learnt["8-bit Adam"][0], 1) and within(nearest[0], 1),
    f"a text model's loss after 20 steps within 1 % of 32-bit Adam's: "
    f"{within(learnt['8-bit Adam'][0], 1)}, with nearest codes too: {within(nearest[0], 1)}; word "
    f"vectors' with a loss that is a sum: {near['sum', 'with the rule']}, with nearest codes: "
    f"{near['sum', 'nearest codes']}",
    condition="if no positive second moment becomes 0, or if gradients are small against eps, as "
    "with a loss that is a mean",
)

# %% [markdown]
# One more rule: "8-bit Adam costs a slight CPU overhead." But the work is done where the weights
# are, on a GPU mostly. How much is it, here on a CPU? It does not grow with the tokens of a step;
# forward and backward do. So as a number of tokens: how many more would take as much CPU time?


# %%
def seconds(call):
    """CPU time, the least of seven."""
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
print(f"the optimizer's step takes {step_8 / step_32:.1f} × the CPU time of it in 32 bits")
print(f"the difference is that of forward and backward of {more_tokens:.0f} tokens")

# %% tags=["nbval-ignore-output"] reason="times of a CPU, and a GPU's where one is stored"
from memlab.course import time_on_a_gpu

verdict(
    "19d",
    more_tokens < 2000,
    f"on a CPU the optimizer's own step takes more than twice as long as in 32 bits: "
    f"{step_8 > 2 * step_32}; the difference is less than forward and backward of 2,000 tokens "
    f"take: {more_tokens < 2000} (times: benchmarks/optim.py); a "
    f"whole step on a GPU, beside AdamW's, {time_on_a_gpu('adam8bit')}",
    condition="for steps of many thousand tokens; the optimizer's own step takes several times as "
    "long, and with few tokens that is felt",
)

# %% [markdown]
# ## What you can do now
#
# | optimizer | bytes a weight | state of a 7B model |
# | --- | --- | --- |
# | Adam, 32 bits | 8 | 50.2 GiB |
# | Lion, 32 bits | 4 | 25.1 GiB |
# | Adam, 8 bits | 2.03 | 12.7 GiB |
# | Lion, 8 bits | 1.02 | 6.4 GiB |
#
# You can say what a code spends its numbers on, why a scale belongs to a block, and what to look
# for in an 8-bit optimizer: weights of no whole blocks, small tensors, what it decodes at once, and
# its zero.
#
# Tomorrow: where did N² go?

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Today the momentum of Day 8's Lion gets 8
# bits, and its weights, in bfloat16, are still rounded at random. Why not 8-bit Adam? It keeps two
# moments: a byte a weight more. On the bill what counts is the peak; in your own training, a
# learning rate you already know may be worth that byte.

# %%
with memlab.dry_run():
    small = [weight.numel() for weight in GPT(PRESETS["124m"]).parameters()]
lion, adam = moments_bytes(small, 1, 1), moments_bytes(small, 2, 2)
print(f"Lion in 8 bits keeps {format_bytes(lion)}, {lion / sum(small):.2f} bytes a weight")
print(f"Adam in 8 bits keeps {format_bytes(adam)}, {adam / sum(small):.2f}: ", end="")
print(f"the bar would be {(adam - lion) / 2**30:.2f} GiB longer")

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
