# %% [markdown]
# # Day 4: Mixed precision
#
# **Half the bits: half the bytes?**
#
# After today you can say which bytes of a training step halve when numbers of 16 bits take the
# place of 32, which do not, and what has to be built so that nothing is lost with the other half.
#
# About 85 minutes, 59 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 4.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Yesterday's step (124M weights, one sequence of 640 tokens at a time) takes 2.66 GiB, all in
# float32. Everybody says: *turn on mixed precision, that halves it*. It is one line around the
# forward pass: under `torch.autocast` products of matrices are computed in bfloat16, 2 bytes a
# number, and what is delicate stays in float32.
#
# ## Guess
#
# What does the step take with that line? Write a number in place of the dots.

# %%
import json
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from math import log2

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import plot
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.bill import STORED
from memlab.course.ledger import state_bytes
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS, GPTConfig
from memlab.optim import RoundedAdamW
from memlab.precision import MasterWeights
from memlab.rounding import kahan_add_
from memlab.trace import Trace
from memlab.train import Plugs, Setting, build, combined, measured
from memlab.units import format_bytes

# %%
### BEGIN SOLUTION
guess("4.1", autocast_gib=1.33)  # half
### END SOLUTION
### BEGIN STUB
# guess("4.1", autocast_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# A dry run of two of the eight sequences: from the second on, each does what the last one did (its
# tokens, 10 KiB, aside). Yesterday's bytes are those of the bill.

# %%
one_at_a_time = combined("accumulation")
lowered = replace(one_at_a_time, around_forward=combined("autocast").around_forward)


def step_of(setting: Setting, technique: Plugs) -> Trace:
    with memlab.dry_run():
        training = build(setting, technique)
        for weight in training.model.parameters():
            weight.grad = torch.zeros_like(weight)
        training.optimizer.step()  # makes Adam's state
        return measured(training)


two = Setting("124m", batch=2, seq_len=640)
cast = step_of(two, lowered)
yesterday = json.loads(STORED.read_text(encoding="utf-8"))["day 3: one sequence at a time"]
reveal("4.1", autocast_gib=cast.peak_bytes)
print(f"{'at the peak':22}{'yesterday':>12}{'autocast':>12}")
for kind, bytes_ in yesterday.items():
    print(f"{kind:22}{format_bytes(bytes_):>12}{format_bytes(cast.at_peak[kind]):>12}")

# %% [markdown]
# It takes **more**. Weights, gradients and Adam's state have not lost a byte: autocast leaves them
# in float32. Activations have even grown. What is new among them?

# %% [markdown]
# ## Where the casts are
#
# To multiply by a float32 matrix in bfloat16, autocast needs a bfloat16 copy of it, a *cast*. Here
# are all of them, over the step: tensors with two dimensions, made by `_to_copy` in forward.


# %%
def casts_alive(trace: Trace) -> list[int]:
    """Bytes of the casts of matrices that are alive after each event."""
    kind = ("aten._to_copy.default", "bfloat16", 2, "forward")
    made = {e.storage for e in trace.events if (e.operator, e.dtype, len(e.shape), e.phase) == kind}
    return list(accumulate(e.bytes if e.storage in made else 0 for e in trace.events))


everything = [n / 2**20 for n in accumulate(e.bytes for e in cast.events)]
casts = [n / 2**20 for n in casts_alive(cast)]
first = next(n for n, e in enumerate(cast.events) if e.phase != "before")
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
axes.fill_between(
    range(first, len(casts)), everything[first:], color="#d9d9de", label="all tensors"
)
axes.fill_between(range(first, len(casts)), casts[first:], color="#d1495b", label="casts")
axes.set(xlabel="allocations and frees", ylabel="MiB", ylim=(0, None), xlim=(first, len(casts)))
axes.set_title("Two micro-batches under autocast, and the casts of the weights")
axes.legend(frameon=False, loc="upper left", ncols=2)
print(f"casts at their fullest: {format_bytes(max(casts_alive(cast)))}")
times = sum(before == 0 < now for before, now in pairwise(casts))
print(f"made anew {times} times: once in each micro-batch")

# %% [markdown]
# Forward makes them, layer by layer, and autocast keeps each in a *cache* until its `with` ends: a
# matrix that is used twice is cast once. After that backward holds on to them, for it multiplies by
# the same matrices, and lets each go when its layer is through. So all are there when backward
# begins, where the peak is: **2 bytes for each weight** that something is multiplied by.
#
# With more tokens, what activations save outweighs that: here from about 980, and at 1024 by 0.3 %.

# %% [markdown]
# ## The formats
#
# A number has a sign, an *exponent* (its range) and a *mantissa* (its digits). The 16 bits can be
# spent in two ways. FP8 has two, too, and says them in its names: e4m3 is 4 bits of exponent and 3
# of mantissa.

# %%
formats = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
print(f"{'':15}{'bytes':>5}{'exponent + mantissa':>21}", end="")
print(f"{'largest':>10}{'smallest':>10}{'1 and a step':>14}")
for name in formats:
    info = torch.finfo(getattr(torch, name))
    mantissa = round(-log2(info.eps))
    split = f"{info.bits - 1 - mantissa} + {mantissa}"  # one bit is the sign
    print(f"{name:15}{info.bits // 8:5}{split:>21}{info.max:10.3g}", end="")
    print(f"{info.smallest_normal * info.eps:10.2g}{1 + info.eps:14.8g}")

# %% [markdown]
# **float16** has the digits and lacks the range: nothing above 65,504, nothing below 6e-8.
# **bfloat16** is the upper half of a float32: its range, and steps of 1/128 above 1. Each choice
# has its price, and each price its remedy. First the bytes.

# %% [markdown]
# ## Bytes a weight
#
# Five ways to train, the *policies*:
#
# | policy | weights | gradients | moments | beside |
# | --- | --- | --- | --- | --- |
# | `"float32"` | float32 | float32 | float32 | |
# | `"autocast"` | float32 | float32 | float32 | bfloat16 casts |
# | `"bfloat16"` | bfloat16 | bfloat16 | bfloat16 | |
# | `"master"` | bfloat16 | bfloat16 | float32 | a float32 copy of each weight |
# | `"master32"` | bfloat16 | float32 | float32 | a float32 copy of each weight |
#
# Such a copy is a *master weight*: the optimizer steps it, and the model gets it rounded.

# %% [markdown]
# Torch makes each gradient in its weight's dtype. In `"master32"` it is turned to float32, and
# *gathered* in the copy's gradient, as soon as it is made.

# %% [markdown]
# ### Exercise 4.1: bytes of each policy
#
# About 15 minutes. What is there when backward ends (master copies count as parameters), and the
# casts that are there when it begins. `config.parameters` is N. Adam's counters are 4 bytes for
# each tensor: a block has 9, and outside are 2, or 3 if untied. What is cast are the matrices that
# something is multiplied by: not the norms, C weights each (2 in a block, 1 at the end); the
# embedding (V × C) only where it scores the tokens too, that is if `config.tied`.


# %%
def held_bytes(config: GPTConfig, policy: str) -> dict[str, int]:
    """Bytes of "parameters", "gradients", "optimizer_state" and "casts"."""
    ### BEGIN SOLUTION
    weight, gradient, moment, cast = {
        "float32": (4, 4, 4, 0),
        "autocast": (4, 4, 4, 2),
        "bfloat16": (2, 2, 2, 0),
        "master": (2 + 4, 2, 4, 0),
        "master32": (2 + 4, 4, 4, 0),
    }[policy]
    N, L, C = config.parameters, config.layers, config.hidden_size
    looked_up = 0 if config.tied else config.vocab_size * C
    return {
        "parameters": weight * N,
        "gradients": gradient * N,
        "optimizer_state": 2 * moment * N + 4 * (9 * L + (2 if config.tied else 3)),
        "casts": cast * (N - (2 * L + 1) * C - looked_up),
    }
    ### END SOLUTION


# %%
held_bytes = exercise("4.1", held_bytes)

# %% [markdown]
# Held against the meter: real steps of the tiny model, 8 × 64 tokens, with each policy.
# `MasterWeights` is the library's; you build yours later today.

# %%
POLICIES = ("float32", "autocast", "bfloat16", "master", "master32")
tokens, targets = next(batches(source_bytes("64 KiB"), 8, 64, seed=0))
adamw = partial(torch.optim.AdamW, foreach=False)


def step_by(policy: str, dtype=torch.bfloat16, config=PRESETS["tiny"]) -> Trace:
    torch.manual_seed(0)
    whole = policy in ("float32", "autocast")
    model = GPT(config, dtype=torch.float32 if whole else dtype)
    masters = partial(MasterWeights, optimizer=adamw, gather_at_once=policy == "master32")
    optimizer = (masters if policy.startswith("master") else adamw)(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=policy == "autocast"):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()

    step()
    inner = getattr(optimizer, "optimizer", optimizer)
    return memlab.measure(step, model=model, optimizer=inner)


# %%
found = {}
for policy in POLICIES:
    trace = step_by(policy)
    last = max(n for n, e in enumerate(trace.events) if e.phase == "backward")
    held = Trace(trace.events[: last + 1]).at_end  # when backward ends
    kinds = ("parameters", "gradients", "optimizer_state")
    found[policy] = {kind: held[kind] for kind in kinds} | {"casts": max(casts_alive(trace))}
    equal = found[policy] == held_bytes(PRESETS["tiny"], policy)
    ended, stepped = (
        sum(at[kind] for kind in kinds) / PRESETS["tiny"].parameters for at in (held, trace.at_end)
    )
    print(f"{policy:9} formula = meter, to the byte: {equal}; {ended:.2f} bytes a weight", end="")
    print("" if stepped == ended else f", {stepped:.2f} when the optimizer has stepped")
    found[policy]["activations"] = trace.at_peak["activations"] - found[policy]["casts"]

# %%
names = ("parameters", "gradients", "optimizer_state", "activations")
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
for place, (policy, colour) in enumerate(zip(POLICIES, plt.cm.viridis.colors[::60], strict=True)):
    shares = [found[policy][name] / found["float32"][name] for name in names]
    where = [n + 0.16 * (place - 2) for n in range(len(names))]
    axes.bar(where, shares, width=0.14, color=colour, label=policy)
axes.axhline(0.5, color="black", linewidth=1, linestyle="--")
axes.set(
    xticks=range(len(names)),
    ylabel="bytes; float32's are 1",
    title="Which bytes halve? (line: half)",
)
axes.set_xticklabels([name.replace("_", " ") for name in names])
axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.1))
for policy in ("autocast", "bfloat16"):
    share = found[policy]["activations"] / found["float32"]["activations"]
    print(f"{policy}: {share:.2f} of the activations, without casts")

# %% [markdown]
# Only **bfloat16** throughout halves weights, gradients and moments. Of the three, `"master"`
# halves only gradients, and pays with the copy: 16 bytes again. While the optimizer steps, the
# copies' gradients are float32: then `"master"` holds 18 bytes, too. Autocast halves none of the
# three.
#
# Activations never halve here. Autocast keeps norms, the sums after attention and MLP, and
# log-probabilities in float32; and the CPU's norm of bfloat16 numbers keeps a float32 version of
# them. CUDA's does not: more below.

# %% [markdown]
# ## What float16 loses
#
# Gradients are small. The loss is a *mean* over tokens, so each token's gradient is divided by
# their number. Let us look at real ones: the tiny model, after 80 steps on torch's own source, and
# its gradients in float32 for the 5,120 tokens of the bill's step.

# %%
text = source_bytes("256 KiB").long()


def learn(model, optimizer, steps, data, seed=0, batch=8):
    """Train, and the loss of each step."""
    drawn, losses = batches(data, batch, 64, seed), []
    for _ in range(steps):
        optimizer.zero_grad()
        tokens, targets = next(drawn)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
model = GPT(PRESETS["tiny"])
losses = learn(model, adamw(model.parameters(), lr=3e-3), 80, text)
print(f"the loss went down: {losses[-1] < losses[0]}")

# %% [markdown]
# ## Guess
#
# The first gradient that backward makes is that of the logits, one number for each token and each
# of the 256 bytes that could come next. Which share of these would be **zero** in float16?

# %%
### BEGIN SOLUTION
guess("4.2", zero_percent=1)  # the format was made for this, after all
### END SOLUTION
### BEGIN STUB
# guess("4.2", zero_percent=...)
### END STUB

# %%
many, their_targets = next(batches(text, 80, 64, seed=1))


def of_weights(dtype=None, scale=1.0):
    """The gradient of all weights, found under autocast, at a scale that is divided out."""
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(many, their_targets)
    (loss * scale).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()]) / scale


def share_of_zeros(gradient) -> float:
    return (gradient.half() == 0).float().mean().item()


exact = of_weights()
logits = model(many)
loss = F.cross_entropy(logits.flatten(0, 1), their_targets.flatten())
of_logits = torch.autograd.grad(loss, logits)[0].flatten()
zero, scaled_zero = share_of_zeros(of_logits), share_of_zeros(of_logits * 2**16)
reveal("4.2", zero_percent=50 * round(2 * zero))  # to the nearest half: it depends on the CPU
print(f"times 2¹⁶, fewer than one in a thousand are zero: {scaled_zero < 0.001}")

# %%
fig, panels = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, layout="constrained")
bins = [n / 2 for n in range(-72, 34)]
for axes, scale, title in zip(panels, (1, 2**16), ("as they are", "times 2¹⁶"), strict=True):
    axes.axvspan(-36, -25, color="#d1495b", alpha=0.25, linewidth=0)
    axes.axvspan(-25, -14, color="#edae49", alpha=0.25, linewidth=0)
    axes.axvspan(16, 18, color="#d1495b", alpha=0.25, linewidth=0)
    for gradient, name in ((of_logits, "of the logits"), (exact, "of the weights")):
        size = (gradient[gradient != 0].abs() * scale).log2()
        share = torch.full_like(size, 100 / len(size))
        axes.hist(size, bins, weights=share, histtype="step", linewidth=1.6, label=name)
    axes.set(ylabel="% of them", title=f"Gradients over 5,120 tokens, {title}", xlim=(-36, 18))
    axes.margins(y=0.3)
names = ((-35.6, "zero in float16"), (-24.6, "subnormal"), (-13.6, "normal"), (16.2, "inf"))
for x, words in names:
    panels[0].text(x, panels[0].get_ylim()[1] * 0.87, words, fontsize=9)
panels[0].legend(frameon=False, loc="center right", bbox_to_anchor=(0.955, 0.5))
_ = panels[1].set_xlabel("log₂ of the size")

# %% [markdown]
# Below 2⁻²⁵ float16 rounds to zero. From there to 2⁻¹⁴ its numbers are *subnormal*: all in steps of
# 2⁻²⁴, with ever fewer digits. (The share of zeros is rounded to tens: machines differ a little.)
# What is zero here never reaches a weight.
#
# By the chain rule, a loss times 2¹⁶ has all gradients times 2¹⁶, and there is room above. Divided
# again in float32, they are right. That is **loss scaling**.

# %%
in_bfloat16 = of_weights(torch.bfloat16)
gradients = of_weights(torch.float16), of_weights(torch.float16, 2.0**16), in_bfloat16
unscaled, scaled, brain = (((g - exact).norm() / exact.norm()).item() for g in gradients)
fig, axes = plt.subplots(figsize=(9, 1.8), layout="constrained")
names, errors = ("float16", "float16, times 2¹⁶", "bfloat16"), (unscaled, scaled, brain)
colours = ("#d1495b", "#00798c", "#edae49")
bars = axes.barh(names, [100 * error for error in errors], color=colours)
axes.bar_label(bars, [f"{100 * error:.2g} %" for error in errors], padding=4)
axes.invert_yaxis()
axes.margins(x=0.1)
axes.set(xlabel="% off", title="The gradient of all weights, under autocast, against float32's")
print(f"float16 is off by more than 2 %: {unscaled > 0.02}")
print(f"float16 times 2¹⁶, by less than 0.5 %: {scaled < 0.005}")
print(f"bfloat16, by less than 2 %: {brain < 0.02}, and more than scaled float16: {brain > scaled}")

# %% [markdown]
# Without a scale, what became zero is missing. With it float16 is the nearest of the three, for it
# has three bits of mantissa more than bfloat16.

# %% [markdown]
# ### Exercise 4.2: a loss scaler
#
# About 20 minutes. Too large a scale shows as inf or nan. `train` takes one step:
#
# 1. drop old gradients, send back each micro-batch's loss times the scale;
# 2. if the gradients of all groups are finite: divide, clip to `max_norm`, step;
# 3. else no step, scale × ½;
# 4. after `interval` steps in a row (`fine_steps` counts), scale × 2, at most 2¹²⁷.
#
# `losses` is any iterable; weights: `group["params"]` of each of `optimizer.param_groups`. Never
# hold two micro-batches' graphs, nor a copy of the gradients; call no `torch._…`. Return whether it
# stepped.


# %%
class Scaler:
    def __init__(self, scale: float, interval: int):
        self.scale, self.interval, self.fine_steps = scale, interval, 0

    def train(self, optimizer, losses, max_norm: float) -> bool:
        ### BEGIN SOLUTION memlab.reference.loss_scaling.Scaler.train
        optimizer.zero_grad()
        for loss in losses:
            (loss * self.scale).backward()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.scale, self.fine_steps = self.scale / 2, 0
            return False
        for gradient in gradients:
            gradient /= self.scale
        nn.utils.clip_grad_norm_(weights, max_norm)
        optimizer.step()
        self.fine_steps += 1
        if self.fine_steps == self.interval:
            self.scale, self.fine_steps = min(2 * self.scale, 2.0**127), 0
        return True
        ### END SOLUTION


# %%
Scaler = exercise("4.2", Scaler)

# %% [markdown]
# ## Watch the scale
#
# A training in float16, under autocast. To see both directions in 30 steps it begins far too high,
# at 2²⁴, and grows after 5 fine steps. (Torch begins at 2¹⁶ and grows after 2000.)

# %%
torch.manual_seed(0)
half = GPT(PRESETS["tiny"])
optimizer, scaler = adamw(half.parameters(), lr=3e-3), Scaler(2.0**24, 5)
drawn, scales, stepped, half_losses = batches(text, 2, 64, seed=0), [], [], []
for _ in range(30):
    with torch.autocast("cpu", torch.float16):
        loss = half(*next(drawn))
    scales.append(torch.tensor(scaler.scale).log2().item())
    stepped.append(bool(scaler.train(optimizer, [loss], 1.0)))
    half_losses.append(loss.item())

fig, (above, below) = plt.subplots(2, 1, figsize=(9, 4), sharex=True, layout="constrained")
above.step(range(30), scales, where="mid", color="black", linewidth=1)
for fine, colour, name in ((True, "#00798c", "stepped"), (False, "#d1495b", "overflow: skipped")):
    at = [n for n in range(30) if stepped[n] is fine]
    above.scatter(at, [scales[n] for n in at], color=colour, s=18, zorder=3, label=name)
above.set(ylabel="log₂ of the scale", title="The scale finds its place, and tries the next one up")
above.legend(frameon=False)
below.plot(half_losses, color="#00798c")
below.set(xlabel="step", ylabel="loss in nats", title="Loss on torch's own source")
print(
    f"it skipped steps, and the scale grew again: {not all(stepped)}, {scales[-1] != min(scales)}"
)
print(f"the loss went down: {half_losses[-1] < half_losses[0]}")

# %% [markdown]
# While it falls nothing is learnt; then now and then a step is the price of a try. Torch's own has
# no floor: where the loss itself is nan, it halves on to 0.0 and trains nothing, without a word.
# `memlab.precision.LossScaler` raises there.
#
# bfloat16 needs none of this: its range is that of float32. What it lacks are digits.

# %% [markdown]
# ## What bfloat16 loses
#
# 1 + 1/1000 is 1, however often. 256 + 1 is 256 (yesterday's drift), for 258 is the next bfloat16.
# And Adam's second moment, which loses a thousandth in a step, never falls. A remedy that costs no
# byte: **round at random**, up with a probability equal to the fraction of the way to the next
# number. In the mean, nothing is lost.

# %%
one = torch.tensor(1.0, dtype=torch.bfloat16)
print(f"1 + 1/1000 = {(one + 1 / 1000).item()}, 256 + 1 = {(256 * one + 1).item()}")
print(f"0.999 · 1.5 = {(0.999 * (1.5 * one)).item()}")

# %% [markdown]
# ### Exercise 4.3: round at random
#
# About 12 minutes. `numbers` is float32 of any shape; return bfloat16. The upper 16 bits of a
# float32 are a bfloat16; the lower 16 say how far it is to the next, as a fraction of 2¹⁶.
# `.view(torch.int32)` shows the bits. Random numbers come from `generator` only, one for each
# number. inf and nan stay what they are; `numbers` is left as it is. Meanwhile at most 24 bytes a
# number, and no tensor in a dtype of 8 bytes.


# %%
def stochastic_round(numbers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each number as one of its two neighbours in bfloat16, its mean the number itself."""
    ### BEGIN SOLUTION
    chance = torch.randint(2**16, numbers.shape, generator=generator, dtype=torch.int32)
    bits = (chance + numbers.view(torch.int32)) & ~0xFFFF
    rounded = torch.where(numbers.isfinite(), bits.view(torch.float32), numbers)
    return rounded.bfloat16()
    ### END SOLUTION


# %%
stochastic_round = exercise("4.3", stochastic_round)

# %% [markdown]
# Tried beside **Kahan's** sum, which keeps what rounding took away in a second bfloat16 and adds it
# to the next update: 2 bytes a weight, and nothing left to chance. 4096 weights of 1 get 1000
# updates of 1/1000.

# %%
generator = torch.Generator().manual_seed(0)
nearest, chance, kahan = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(3))
taken, update = torch.zeros_like(kahan), torch.full_like(kahan, 1e-3)
paths = {"to the nearest": [], "at random, the mean": [], "one of them": [], "Kahan": []}
for _ in range(1000):
    nearest += update
    chance = stochastic_round(chance.float() + 1e-3, generator)
    kahan_add_(kahan, taken, update)
    now = nearest[0], chance.float().mean(), chance[0], kahan[0]
    for path, value in zip(paths.values(), now, strict=True):
        path.append(value.item())
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
looks = ("#d1495b", 2), ("#f1b36b", 5), ("#00798c", 0.8), ("black", 1.2)
for (name, path), (colour, width) in zip(paths.items(), looks, strict=True):
    axes.plot(path, label=name, color=colour, linewidth=width)
axes.set(xlabel="updates of 1/1000", ylabel="the weight")
axes.set_title("A weight of 1 in bfloat16: to the nearest, it stands still")
axes.legend(frameon=False)
ends = [path[-1] for path in paths.values()]
print(f"to the nearest {ends[0]:.2f}, at random {ends[1]:.2f} in the mean, Kahan {ends[3]:.2f}")

# %% [markdown]
# To the nearest, nothing ever arrives. At random one weight strays, and the mean of the 4096 is
# right; Kahan's (thin, upon the mean) is right for each.

# %% [markdown]
# The third remedy is the oldest, and float16 takes it, too: a float32 copy.
#
# ### Exercise 4.4: a step of master weights
#
# About 12 minutes. `weights` is a list of a model's, in 16 bits; `copies` the list of their float32
# copies, which `optimizer` steps. Backward of the loss times `scale` is done, without overflow.
# Take the step: gradients up to the copies, divided; step; the result down, rounded. A weight
# without a gradient stays as it is. At the end no gradient is left, of weights or copies; at no
# time are all there in both dtypes.


# %%
def master_step(weights, copies, optimizer, scale: float) -> None:
    ### BEGIN SOLUTION
    for weight, copy in zip(weights, copies, strict=True):
        if weight.grad is not None:
            copy.grad = weight.grad.float() / scale
            weight.grad = None
    optimizer.step()
    with torch.no_grad():
        for weight, copy in zip(weights, copies, strict=True):
            weight.copy_(copy)
            copy.grad = None
    ### END SOLUTION


# %%
master_step = exercise("4.4", master_step)

# %% [markdown]
# ## Does it learn?
#
# The model that has learnt source is to learn it in CAPITALS, as yesterday, at a low rate: 1e-4. In
# float32; in bfloat16 with updates to the nearest; with your master weights; and with
# `RoundedAdamW`, which rounds weights and moments at random: 8 bytes a weight.


# %%
class ByMasters:
    def __init__(self, parameters, lr: float):
        self.weights = list(parameters)
        self.copies = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.adamw = adamw(self.copies, lr=lr)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        master_step(self.weights, self.copies, self.adamw, 1.0)


at_random = partial(RoundedAdamW, generator=torch.Generator().manual_seed(0))
ways = {
    "float32": (torch.float32, adamw),
    "bfloat16, to the nearest": (torch.bfloat16, adamw),
    "bfloat16, master weights": (torch.bfloat16, ByMasters),
    "bfloat16, at random": (torch.bfloat16, at_random),
}
# Three of the four lie on one another: a broad one below, a dashed one above.
styles = {"float32": {"linewidth": 5, "alpha": 0.4}, "bfloat16, at random": {"linestyle": "--"}}

# %%
capitals = torch.where((text >= 97) & (text <= 122), text - 32, text)
held_out, judge = next(batches(capitals, 8, 64, seed=99)), GPT(PRESETS["tiny"])
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
reached, moved = {}, {}
for name, (dtype, make) in ways.items():
    learning = GPT(PRESETS["tiny"], dtype=dtype)
    learning.load_state_dict(model.state_dict())
    before = [weight.detach().clone() for weight in learning.parameters()]
    optimizer, curve = make(learning.parameters(), lr=1e-4), []
    for part in range(6):
        learn(learning, optimizer, 4, capitals, seed=part, batch=4)
        judge.load_state_dict(learning.state_dict())
        with torch.no_grad():
            curve.append(judge(*held_out).item())
    changed = [(b != w).flatten() for b, w in zip(before, learning.parameters(), strict=True)]
    reached[name], moved[name] = curve[-1], torch.cat(changed).float().mean().item()
    axes.plot(range(4, 25, 4), curve, label=name, **styles.get(name, {}))
    print(f"{name}: within 0.02 nats of float32: {reached[name] < reached['float32'] + 0.02}")
axes.set(xlabel="step", ylabel="loss in nats, held out", xticks=range(4, 25, 4))
axes.set_title("Learning CAPITALS at a low rate")
axes.legend(frameon=False)
lost = 1 - moved["bfloat16, to the nearest"]
print(f"to the nearest, more than a quarter of the weights never moved: {lost > 0.25}")

# %% [markdown]
# To the nearest it learns less: an update below half a step of its weight is lost, and more are the
# lower the rate is. Master weights and rounding at random learn what float32 learns; the one for 16
# bytes a weight, 18 during the step, the other for 8. So this is today's line of the bill: weights
# and moments in bfloat16, rounded at random.

# %% [markdown]
# ## At scale: seven billion
#
# Llama 2 7B when backward ends, by your formula; two of the policies held against a dry run. FP8
# would take one byte for each weight; what its recipes keep beside it they decide.


# %%
def dry_state(dtype: torch.dtype) -> dict[str, int]:
    with memlab.dry_run():
        seven = GPT(PRESETS["llama-2-7b"], dtype=dtype)
        for weight in seven.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW(seven.parameters(), fused=True)
        optimizer.step()
        return state_bytes(seven, optimizer)


of_seven = {policy: held_bytes(PRESETS["llama-2-7b"], policy) for policy in POLICIES}
for policy, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
    wanted = dry_state(dtype) | {"casts": 0}
    print(f"{policy}: formula = dry run, to the byte: {of_seven[policy] == wanted}")
print(f"weights in FP8: {format_bytes(PRESETS['llama-2-7b'].parameters)}")

# %%
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
left = [0.0] * len(POLICIES)
for kind in kinds:
    gib = [of_seven[policy][kind] / 2**30 for policy in POLICIES]
    axes.barh(POLICIES, gib, left=left, color=plot.COLOURS[kind], label=kind.replace("_", " "))
    left = [before + more for before, more in zip(left, gib, strict=True)]
for card in (24, 80):
    axes.axvline(card, color="black", linewidth=1, linestyle="--")
    axes.text(card + 0.7, -0.75, f"{card} GiB", fontsize=9)
axes.invert_yaxis()
axes.set(xlabel="GiB", title="Llama 2 7B when backward ends\n")
axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22))
for policy, total in zip(POLICIES, left, strict=True):
    print(f"{policy:9}{total:8.2f} GiB")
casts_of_seven = format_bytes(of_seven["autocast"]["casts"])
print(f"and under autocast, when backward begins, {casts_of_seven} of casts")

# %% [markdown]
# Only bfloat16 throughout fits a card of 80 GiB, and there is room for activations: yesterday's dry
# run of that whole step, on 2048 tokens, took 50.50 GiB. While the optimizer steps, `"master"`
# needs the 112.96 GiB of `"master32"`. The 24 GiB of Day 16 are still far. Moments are next (Days 8
# and 9), and gradients, which need not all be there at once.

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes the question's step on it: in float32, under autocast, and in
# bfloat16.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    on_gpu = replace(two, batch=8, device=gpu.type)
    low = replace(on_gpu, dtype=torch.bfloat16)
    rounded = replace(one_at_a_time, optimizer=combined("bfloat16").optimizer)
    for name, where, how in (
        ("float32", on_gpu, one_at_a_time),
        ("autocast", on_gpu, lowered),
        ("bfloat16, rounded at random", low, rounded),
    ):
        training = build(where, how)
        training.step()
        print(f"{name}: {format_bytes(measured(training).peak_bytes)}")
        del training
else:
    print(stored_on_a_gpu("day 4"))

# %% [markdown]
# ## Rules on trial
#
# From the same guides. For the first, a step of one block as CUDA would take it: there one fused
# kernel computes a norm. (Key and value get as many heads as query has, for a fused attention.)

# %%
one_block = replace(PRESETS["tiny"], layers=1, kv_heads=4)


def on_cuda(dtype: torch.dtype) -> Trace:
    def parts():
        model = GPT(one_block, dtype=dtype).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(tokens.cuda(), targets.cuda()).backward()
            optimizer.step()

        return step, model, optimizer

    return memlab.predict(parts)


predicted = [on_cuda(dtype).at_peak["activations"] for dtype in (torch.float32, torch.bfloat16)]
cuda_share = predicted[1] / predicted[0]

# %%
share = {
    (policy, kind): found[policy][kind] / found["float32"][kind]
    for policy in ("autocast", "bfloat16")
    for kind in ("activations", "gradients")
}
grown = cast.peak_bytes / sum(yesterday.values()) - 1
verdict(
    "13a",
    abs(cuda_share - 0.5) < 0.01 and share["bfloat16", "gradients"] == 0.5,
    f"weights in bfloat16: {share['bfloat16', 'gradients']:.2f} of the gradients, of the "
    f"activations {share['bfloat16', 'activations']:.2f} on a CPU and {cuda_share:.2f} predicted "
    f"for CUDA; autocast: {share['autocast', 'gradients']:.2f} of the gradients, "
    f"{share['autocast', 'activations']:.2f} of the activations (CPU), and 2 bytes a weight of "
    f"casts: yesterday's step {grown:+.1%}",
    condition="for weights in 16 bits, with CUDA's kernels; under autocast gradients stay float32, "
    "and with few tokens the casts outweigh what activations save",
)

# %%
both = [step_by("autocast", dtype) for dtype in (torch.bfloat16, torch.float16)]
verdict(
    "13b",
    both[0].at_peak == both[1].at_peak and brain < 0.02,
    f"under autocast both hold the same at the peak, to the byte: "
    f"{both[0].at_peak == both[1].at_peak}; without a scale the gradient over 5,120 tokens is more "
    f"than 2 % off in FP16: {unscaled > 0.02}, in BF16 less than 2 %: {brain < 0.02}, in scaled "
    f"FP16 less than 0.5 %: {scaled < 0.005}",
    condition="for tensors of one size; stable means range: with a scale, FP16 is the more precise",
)

# %% [markdown]
# The next is about speed. *Tensor cores* are the part of a GPU that multiplies small matrices in
# one go: in 16 bits, or in TF32, which is float32 with 10 bits of mantissa in place of 23.

# %% tags=["nbval-ignore-output"] reason="a GPU's time, where one is stored"
from memlab.course import time_on_a_gpu

# Dense, in 10¹² operations a second, from NVIDIA's data sheets: float32, TF32, 16 bits.
cards = {"V100": (15.7, None, 125), "A100": (19.5, 156, 312), "H100 SXM": (67, 494.7, 989.4)}
speed = {name: low / whole for name, (whole, _, low) in cards.items()}
against_tf32 = {name: low / tf32 for name, (_, tf32, low) in cards.items() if tf32}
verdict(
    "13c",
    min(speed.values()) > 7.9,
    "by the data sheets, 16 bits against float32: "
    + ", ".join(f"{name} {times:.1f} ×" for name, times in speed.items())
    + "; against TF32, float32's tensors on tensor cores: "
    + ", ".join(f"{name} {times:.1f} ×" for name, times in against_tf32.items())
    + f"; a step of the bill in bfloat16, beside one in float32, {time_on_a_gpu('bfloat16')}",
    condition="for large products of matrices, against float32 off the tensor cores; 8 × is a "
    "V100's limit, later cards have more, and 2 × against TF32; what else a step does reads and "
    "writes half the bytes: 2 × at best",
)

# %%
gap = reached["bfloat16, to the nearest"] - reached["float32"]
verdict(
    "13d",
    gap < 0.02,
    f"bytes a weight: 16 in float32, 8 in bfloat16; at a rate of 1e-4 more than a quarter of the "
    f"weights never moved: {lost > 0.25}, and the loss is more than 0.02 nats behind: "
    f"{gap > 0.02}; rounded at random within 0.02: "
    f"{reached['bfloat16, at random'] < reached['float32'] + 0.02}",
    otherwise="it costs the updates that are too small for its digits; master weights save them "
    "for 16 bytes a weight, as in float32, and 18 during the step; rounding at random does for 8 "
    "and noise",
)

# %%
by_scale = in_bfloat16, of_weights(torch.bfloat16, 2.0**16)
verdict(
    "14a",
    not torch.equal(*by_scale),
    f"gradients at scale 2¹⁶ and without one are the same to the bit: {torch.equal(*by_scale)}",
    otherwise="bfloat16 has float32's range, and a power of two changes no digit: a scaler moves "
    "nothing but its own number; what it still does is to skip steps with inf or nan",
)

# %%
verdict(
    "14b",
    found["autocast"]["gradients"] == found["float32"]["gradients"],
    f"bytes a weight: {found['autocast']['gradients'] / PRESETS['tiny'].parameters:.0f} under "
    f"autocast, {found['bfloat16']['gradients'] / PRESETS['tiny'].parameters:.0f} with "
    f"model.to(torch.bfloat16), scaler or not",
    condition="under autocast, because the weights are float32: torch makes a gradient in its "
    "weight's dtype; with bfloat16 weights it does not hold, unless each is gathered in float32, "
    "which is worth it where gradients are summed (Day 3)",
)

# %%
verdict(
    "14c",
    unscaled > 0.02 > brain,
    f"tiny model, mean over 5,120 tokens: in float16 more than a third of the logits' gradients is "
    f"zero: {zero > 1 / 3}, times 2¹⁶ less than a thousandth: {scaled_zero < 0.001}; the weights' "
    f"gradient is more than 2 % off without a scale: "
    f"{unscaled > 0.02}, less than 0.5 % with 2¹⁶: {scaled < 0.005}; bfloat16, without: less than "
    f"2 %: {brain < 0.02}",
    condition="the more so the more tokens the mean is over",
)

# %% [markdown]
# ## What you can do now
#
# | halves? | autocast | bfloat16 | master weights |
# | --- | --- | --- | --- |
# | weights | no, and casts on top | yes | no: 2 + 4 bytes |
# | gradients | no | yes | yes, unless gathered in float32 |
# | moments | no | yes | no |
# | activations | what products make | yes (CUDA; most of it on a CPU) | as bfloat16 |
# | needs | a scaler in float16 | rounding at random | a scaler in float16 |

# %% [markdown]
# **Half the bits are half the bytes if the weights have them.** Then range (float16) or digits
# (bfloat16) are missing: scale the loss for the one; for the other round at random, or keep copies.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Today: weights and moments in bfloat16,
# rounded at random. The gradients' sums over the sequences are float32, for sums drift: so it is
# 2 + 4 + 4 = 10 bytes a weight, not 8.

# %%
running_bill(4)

# %% [markdown]
# ## Sources
#
# - Micikevicius et al. 2018: [Mixed Precision Training](https://arxiv.org/abs/1710.03740)
# - Gupta et al. 2015: [Deep Learning with Limited Numerical
#   Precision](https://arxiv.org/abs/1502.02551)
# - Zamirai et al. 2020: [Revisiting BFloat16 Training](https://arxiv.org/abs/2010.06192)
# - PyTorch: [torch.amp](https://docs.pytorch.org/docs/stable/amp.html)
#
# The rules on trial are from:
#
# - thINKblots: [Multi-Platform Memory
#   Optimization](https://github.com/thINKblots/gearhead/blob/d9730c481ff0cc18e9e2b2e6981495e233b9f7b1/MEMORY_OPTIMIZATIONS.md)
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
# - "Day 19: Memory Optimization", author and address unknown
