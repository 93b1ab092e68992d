# %% [markdown]
# # Day 15: Post-hoc EMA, from disk
#
# **How long should weights be averaged, when only the end of training can tell?**
#
# After today you can track averages that forget a fixed share of the training, make any other
# length of them afterwards, say how good it will be before you read a byte, and do it all in a few
# megabytes.
#
# About 105 minutes, 60 of them for five exercises. You need a laptop; a GPU is not needed. Nothing
# is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 15.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# A gradient is that of a batch, so weights tremble around where they are going; and the larger the
# steps, the more. Their **average** over the last steps trembles less. Too short an average still
# trembles; too long a one remembers what has long been unlearned. Which length is best? Try each,
# and each takes a copy of the weights while training, chosen before it begins. Or choose *post
# hoc*, afterwards: that is for today.

# %%
import tempfile
import time
import warnings
from dataclasses import replace
from itertools import accumulate as running_sums
from itertools import count as counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import memlab
from memlab import ema
from memlab.configs.gpus import GPUS
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.optional import MISSING, imported
from memlab.data import source_bytes
from memlab.ema import inner_product, power_profile, profile_error
from memlab.model import GPT, PRESETS
from memlab.units import format_bytes

# %% [markdown]
# Here is a training with large steps and small batches, on the source of Python's own library. Two
# averages are kept beside it, and both go to the disk, as **snapshots**, at every 40th step. (What
# is inside of `PostHocEMA` you will build.)

# %%
STEPS, EVERY = 640, 40
text = source_bytes("1 MiB").long()
seen, unseen = text[: -(2**16)], text[-(2**16) :]


def a_batch(of, size, length, seed):
    random = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(of) - length - 1, (size,), generator=random)
    rows = torch.stack([of[begin : begin + length + 1] for begin in begins])
    return rows[:, :-1], rows[:, 1:]


def a_model():
    torch.manual_seed(0)
    return GPT(replace(PRESETS["tiny"], layers=1))


# %%
folder = tempfile.TemporaryDirectory()
model, live = a_model(), {}
adam = torch.optim.AdamW(model.parameters(), lr=0.04, foreach=True)
tracker = ema.PostHocEMA(model, folder.name, (0.05, 0.10), snapshot_every=EVERY)
for step in range(1, STEPS + 1):
    adam.zero_grad()
    model(*a_batch(seen, 2, 32, step)).backward()
    adam.step()
    tracker.update(step)
    if step % EVERY == 0:
        live[step] = {name: w.detach().clone() for name, w in model.state_dict().items()}
snapshots = ema.find_snapshots(folder.name)
print(f"{len(snapshots)} snapshots of {snapshots[0].nbytes:,} bytes")

# %%
questions = a_batch(unseen, 64, 64, 0)


@torch.no_grad()
def loss_of(tensors):
    """On text that was not trained on."""
    model.load_state_dict(tensors, strict=False)
    return float(model(*questions))


# %%
def averaged(snapshot):
    return {
        name: snapshot.read(name, 0, w.numel()).view(w.shape) for name, w in live[EVERY].items()
    }


fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
times = sorted(live)
axes.plot(times, [loss_of(live[t]) for t in times], ".-", color="#b0b0b8", label="the weights")
tenth = [s for s in snapshots if s.sigma == 0.10]
axes.plot(times, [loss_of(averaged(s)) for s in tenth], ".-", color="#00798c", label="an average")
axes.set(xlabel="steps", ylabel="loss on other text, in nats", title="An average trembles less")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
live_loss = loss_of(live[STEPS])
print(f"at the end the average is better: {loss_of(averaged(tenth[-1])) < live_loss}")

# %% [markdown]
# ## Guess
#
# 1. Four other averages are made of 20 snapshots of a model of 16 MiB, and written to files. How
#    many MiB does that take, beside the files?
# 2. The linear system that says how, of 32 snapshots: how many KiB?
# 3. Of 100 snapshots the last 20 are kept. By how many percent is a long average's profile off, in
#    squares?
# 4. An average, 5 % of the training wide, is updated at each tenth step by a rule for each: how
#    wide is it, in percent?

# %%
### BEGIN SOLUTION
guess("15.1", buffers_mib=180, system_kib=1000, pruned_percent=10, wide_percent=5)
### END SOLUTION
### BEGIN STUB
# guess("15.1", buffers_mib=..., system_kib=..., pruned_percent=..., wide_percent=...)
### END STUB

# %% [markdown]
# ## A memory that grows with the training
#
# The usual average, the *exponential moving average* or EMA, avg ← 0.999 · avg + 0.001 · w,
# remembers about a thousand steps: all of a short training, random weights included, and a moment
# of a long one. Better that the memory be a fixed **share** of the training. Let the weights of
# moment τ count by a power of τ:
#
# $$\theta_\gamma(t) = \frac{\gamma+1}{t^{\gamma+1}} \int_0^t \tau^\gamma\, \theta(\tau)\, d\tau$$
#
# At τ = 0, where weights are random, that is nothing. A large γ means a short memory.

# %%
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
tau = np.linspace(0, 1, 500)
for sigma, colour in ((0.05, "#00798c"), (0.10, "#4477aa"), (0.20, "#999933"), (0.28, "#cc6677")):
    gamma = ema.gamma_from_sigma(sigma)
    axes.plot(
        tau, (gamma + 1) * tau**gamma, color=colour, label=f"σ = {sigma:.2f}, γ = {gamma:.2f}"
    )
axes.set(xlabel="τ, as a share of the training so far", ylabel="counts", ylim=(0, 18.5))
axes.set_title("What the weights of each moment count")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Such a curve is an average's **profile**. Its γ says little; its **width** σ says more: the
# standard deviation of τ under the profile, as a share of t. The mean of τⁿ is (γ+1) / (γ+1+n), so
# the variance, mean of the square less square of the mean, is
#
# $$\sigma^2 = \frac{\gamma+1}{\gamma+3} - \Big(\frac{\gamma+1}{\gamma+2}\Big)^2
# = \frac{\gamma+1}{(\gamma+2)^2\,(\gamma+3)}$$
#
# γ = 0 counts all alike, and is 1/√12 = 0.2887 wide. Wider there is none, with γ not below 0.

# %% [markdown]
# ### Exercise 15.1: the exponent of a width
#
# About 10 minutes. Given σ, return γ. The formula above, multiplied out, is a cubic in γ:
# `np.roots` takes its coefficients, the highest power's first. Of three roots one is right. A σ
# that no γ from 0 on has, or that is not above 0, wants a `ValueError`.


# %%
def exponent(sigma):
    ### BEGIN SOLUTION memlab.reference.post_hoc_ema.exponent
    if not 0 < sigma <= 12**-0.5:
        raise ValueError(f"got sigma {sigma}, wanted one above 0 and up to 0.2887")
    inverse = sigma**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 15.1, about 4 lines")
    ### END STUB


# %%
exponent = exercise("15.1", exponent)

# %% [markdown]
# What if nobody refuses? A published package's examples ask for σ = 0.4 and 0.5. There the cubic's
# largest roots are complex, and their real part is an answer to nothing:

# %%
for sigma in (0.4, 0.5):
    inverse = sigma**-2
    gamma = np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max()
    print(
        f"σ = {sigma}: the real part of the largest root is {gamma:.3f}; below −1 nothing is left"
    )
    if gamma > -1:
        width = ((gamma + 1) / (gamma + 2) ** 2 / (gamma + 3)) ** 0.5
        print(f"    that profile is {width:.3f} wide, and counts the first weights most")

# %% [markdown]
# ## Tracking one
#
# The integral need not be done at the end. Between two updates, at times s and t, the weights are
# taken to be what they are at t:
#
# $$\theta_\gamma(t) = \beta\,\theta_\gamma(s) + (1-\beta)\,\theta(t), \qquad
# \beta = \Big(\frac{s}{t}\Big)^{\gamma+1} = \Big(1-\frac{\Delta}{t}\Big)^{\gamma+1}$$
#
# with Δ = t − s. What was divided by s^(γ+1) is to be divided by t^(γ+1). The first time s is 0,
# so β is 0.

# %% [markdown]
# ### Exercise 15.2: an update of an average
#
# About 10 minutes. `update(weights, time)` takes in the weights as they are at `time`, in place,
# with no more than a tensor's bytes beside. Updates may come at any times. The average has no
# graph.
#
# (Weights are in float32 here. Of weights in 16 bits the averages have to be in 32 all the same: a
# share of a thousandth is less than a 16-bit number's last digit.)


# %%
class Average:
    def __init__(self, weights, gamma):
        self.gamma, self.time = gamma, 0
        self.values = [weight.detach().clone() for weight in weights]

    def update(self, weights, time):
        ### BEGIN SOLUTION memlab.reference.post_hoc_ema.Average.update
        share = 1 - (1 - (time - self.time) / time) ** (self.gamma + 1)
        for value, weight in zip(self.values, weights, strict=True):
            value.lerp_(weight.detach(), share)
        self.time = time
        ### END SOLUTION
        ### BEGIN STUB
        # raise NotImplementedError("exercise 15.2, about 4 lines")
        ### END STUB


# %%
Average = exercise("15.2", Average)

# %% [markdown]
# The check is one that every such average can be given: let the weights of each moment be a
# direction of their own, and the average itself says what they count. Here for 1,000 steps, with
# updates at each step, each tenth and each hundredth; and an average with the β of one step, taken
# at each tenth.


# %%
def counted(update_of, every, steps=1000):
    """What each step counts, by an average that is updated now and then."""
    for step in range(every, steps + 1, every):
        direction = torch.zeros(steps)
        direction[step - 1] = 1
        average = update_of(direction, step)
    return average


def yours(sigma):
    average = Average([torch.zeros(1000)], exponent(sigma))
    return lambda w, step: (average.update([w], step), average.values[0])[1]


def of_one_step(sigma):
    """β is (1 − 1/t)^(γ+1), however many steps have gone by."""
    gamma, kept = exponent(sigma), torch.zeros(1000)
    return lambda w, step: kept.lerp_(w, 1 - (1 - 1 / (step + 1)) ** (gamma + 1))


for name, make, every in (("yours", yours, 1), ("yours", yours, 10), ("yours", yours, 100),
                          ("β of one step", of_one_step, 10)):  # fmt: skip
    width = ema.relative_width(range(1, 1001), counted(make(0.05), every))
    print(f"{name:14} updates {every:3} steps apart: {width:.4f} wide, 0.0500 was asked for")

# %% [markdown]
# Yours is right all three times. Where updates are 100 steps apart, an average 50 steps wide is a
# sum of a few: coarse, and no rule can help.
#
# With Δ left out the average is five times too long: the guess of question 4. That is no invention.
# `ema-pytorch` has this β, and its examples update at each tenth step (it is optional here). Asked
# at each step it is right, which ought to be said as loud:


# %%
class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))


def of_the_package(every):
    weights = Weights()
    average = package.KarrasEMA(weights, sigma_rel=0.05, update_every=every)
    for step in range(1000):
        weights.weight.data.zero_()[step] = 1
        average.update()
    return average.ema_model.weight.detach()


# %% tags=["nbval-ignore-output"] reason="the package is optional"
if package := imported("ema_pytorch"):
    for every in (1, 10, 100):
        response = of_the_package(every)
        width = ema.relative_width(range(1, 1001), response)
        print(f"ema-pytorch, update_every={every:3}: {width:.4f} wide, 0.0500 was asked for")
else:
    print(f"ema-pytorch is {MISSING}")

# %% [markdown]
# ## Two averages make any other
#
# An average is *linear* in the weights. So a sum of two averages is an average, too: its profile is
# the sum of their profiles. Snapshots of two averages at sixteen times are 32 profiles; which sum
# of them comes near to the one that is wanted? No weight is needed to tell: only times and
# exponents.

# %% [markdown]
# **Least squares.** With xᵢ for each snapshot, p for the target, make
#
# $$\int \Big(\sum_i x_i\,p_i - p\Big)^2 d\tau = x^\top A\,x - 2\,b^\top x + \langle p, p\rangle$$
#
# small, where A holds the overlaps ⟨pᵢ, pⱼ⟩ of snapshots with each other (the integrals of their
# products), and b those with the target. `inner_product(p, q)` gives an overlap, in closed form:
# powers are easy to integrate.

# %%
a, b = power_profile(0.05, 800), power_profile(0.10, 750)
print(f"a profile is a time and an exponent: t = {a.t}, gamma = {a.gamma:.4f}")
print(f"overlap with itself {inner_product(a, a):.6f}, with another {inner_product(a, b):.6f};")
tau = (np.arange(10**6) + 0.5) * 800 / 10**6
p, q = ((s.gamma + 1) * (tau / s.t) ** s.gamma / s.t * (tau <= s.t) for s in (a, b))
print(f"by a sum over a million moments {(p * p).mean() * 800:.6f} and {(p * q).mean() * 800:.6f}")

# %% [markdown]
# ### Exercise 15.3: the least squares
#
# About 15 minutes. Given profiles (`.t`, `.gamma`) and the target's, return a weight for each.
# Least is where A·x = b. Snapshots later than the target get 0: they know too much. And divide by
# the sum, so that the weights **sum to one**: what never moved must come out as it is. In float64.


# %%
def solve(snapshots, target):
    ### BEGIN SOLUTION memlab.reference.post_hoc_ema.solve
    chosen = [n for n, snapshot in enumerate(snapshots) if snapshot.t <= target.t]
    known = [snapshots[n] for n in chosen]
    overlaps = np.array([[inner_product(p, q) for q in known] for p in known])
    x = np.linalg.solve(overlaps, [inner_product(p, target) for p in known])
    weights = np.zeros(len(snapshots))
    weights[chosen] = x / x.sum()
    return weights
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 15.3, about 7 lines")
    ### END STUB


# %%
solve = exercise("15.3", solve)

# %% [markdown]
# How near does it come? `profile_error` is that integral, as a share of the target's own ⟨p, p⟩. It
# is known before a snapshot is read. Twice as many snapshots: how much nearer?

# %%
print("  times      σ = 0.07   σ = 0.15   σ = 0.25")
errors = {}
for n in (2, 4, 8, 16, 32):
    profiles = [power_profile(s, t) for t in range(1, n + 1) for s in (0.05, 0.10)]
    for sigma in (0.07, 0.15, 0.25):
        target = power_profile(sigma, n)
        errors[n, sigma] = profile_error(profiles, target, solve(profiles, target))
    print(f"{n:7}   " + "".join(f"{errors[n, s]:11.1e}" for s in (0.07, 0.15, 0.25)))
slope = np.log2(errors[8, 0.15] / errors[32, 0.15]) / 2
print(f"from 8 to 32, at σ = 0.15, the error falls by the number's power of {slope:.1f}")

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
tau = np.linspace(0, 1, 800)
for axes, n in ((left, 4), (right, 16)):
    profiles = [power_profile(s, t / n) for t in range(1, n + 1) for s in (0.05, 0.10)]
    target = power_profile(0.15, 1)
    total = np.zeros_like(tau)
    for x, p in zip(solve(profiles, target), profiles, strict=True):
        part = x * (p.gamma + 1) * (tau / p.t) ** p.gamma / p.t * (tau <= p.t)
        axes.plot(tau, part, color="#c9c9d0", linewidth=0.7)
        total += part
    axes.plot(tau, total, color="#00798c", label="the sum")
    axes.plot(tau, (target.gamma + 1) * tau**target.gamma, "--", color="#cc6677", label="wanted")
    axes.set(xlabel="τ, as a share of the training", ylim=(-5, 12))
    axes.set_title(f"snapshots at {n} times")
    axes.spines[["top", "right"]].set_visible(False)
left.set_ylabel("counts")
left.legend(frameon=False)
_ = fig.suptitle("σ = 0.15, of averages 0.05 and 0.10 wide: each one's part, in grey")

# %% [markdown]
# From four times the sum goes round what is wanted in waves; from sixteen it can hardly be told
# from it. Some parts are below zero: they take off where others count too much.

# %% [markdown]
# ## The synthesis
#
# Now the weights. Forty snapshots of a large model don't fit into memory together, and one guide
# says that they must. But number 5 of the result needs number 5 of each snapshot, and nothing else.
# A file that is **mapped** looks like memory: what is touched is read, and the system may drop it
# again.

# %% [markdown]
# ### Exercise 15.4: a synthesis under a budget
#
# About 15 minutes. Several averages at once: `shares[n][k]` is what snapshot n counts in target k.
# `snapshots[n].read(name, start, stop)` gives numbers in 16 bits, mapped: the file's, so don't
# write to them. `write(k, name, start, numbers)` takes finished ones, in float32, each once. A few
# pieces are there at a time, whatever the number of snapshots; each number is read once.


# %%
def synthesize(snapshots, shares, sizes, write, piece):
    """`sizes` has the number of numbers of each tensor, by name."""
    ### BEGIN SOLUTION memlab.reference.post_hoc_ema.synthesize
    for name, size in sizes.items():
        for start in range(0, size, piece):
            stop = min(start + piece, size)
            sums = torch.zeros(len(shares[0]), stop - start)
            for snapshot, of_each in zip(snapshots, shares, strict=True):
                part = snapshot.read(name, start, stop).float()
                for total, share in zip(sums, of_each, strict=True):
                    total.add_(part, alpha=share)
            for target, total in enumerate(sums):
                write(target, name, start, total)
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 15.4, about 10 lines")
    ### END STUB


# %%
synthesize = exercise("15.4", synthesize)

# %% [markdown]
# All lengths of our training, in one pass over the snapshots on the disk: chosen now, after it.
# Beside it the library's, which makes the sum of one a side condition of the least squares, in
# place of dividing; that comes to nearly the same.

# %%
sigmas = [0.02, 0.03, 0.05, 0.07, 0.10, 0.13, 0.16, 0.19, 0.22, 0.25, 0.28]
targets = [power_profile(sigma, STEPS) for sigma in sigmas]
profiles = [snapshot.profile for snapshot in snapshots]
shares = np.stack([solve(profiles, target) for target in targets], axis=1).tolist()
shapes = {name: weight.shape for name, weight in live[STEPS].items()}
sizes = {name: shape.numel() for name, shape in shapes.items()}
made = [{name: torch.empty(size) for name, size in sizes.items()} for _ in sigmas]


def write(target, name, start, numbers):
    made[target][name][start : start + len(numbers)] = numbers


synthesize(snapshots, shares, sizes, write, piece=2**12)
made = [{name: tensors[name].view(shapes[name]) for name in shapes} for tensors in made]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # at 0.02 and 0.28 it warns: see the picture
    theirs = ema.synthesize(folder.name, sigmas)
apart = [
    max((a[n] - b[n]).abs().max().item() for n in a) for a, b in zip(made, theirs, strict=True)
]
print(f"at most 0.005 from the library's, from 0.05 to 0.16: {max(apart[2:7]) <= 0.005}")

# %%
losses = [loss_of(tensors) for tensors in made]
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
axes.axhline(live_loss, color="#b0b0b8", linestyle="--", linewidth=1)
axes.annotate("the last weights", (0.02, live_loss), (0, 3), textcoords="offset points",
              ha="left", fontsize=9)  # fmt: skip
near = [profile_error(profiles, target) < 0.01 for target in targets]
axes.plot(sigmas, losses, color="#00798c")
axes.scatter(sigmas, losses, c=["#00798c" if n else "white" for n in near], edgecolor="#00798c",
             zorder=3)  # fmt: skip
axes.set(xlabel="width, σ (hollow: profile off by over 1 %)", ylabel="loss on other text, in nats")
axes.set_title("Chosen after training: the length that gives the smallest loss")
axes.spines[["top", "right"]].set_visible(False)
print(f"the worst length costs over 0.02 nats: {max(losses) - min(losses) > 0.02}")
print(f"the best is better than the last weights: {min(losses) < live_loss}")

# %% [markdown]
# The best length is another for each training, and for each measure of what is good. That is why it
# is worth choosing late.
#
# And the bytes? A made-up model of 16 MiB, ten times, two averages; four targets, to files. Beside
# it the usual loop, snapshot by snapshot; a model of half the size; half of the times.


# %%
class Made(nn.Module):
    def __init__(self, mib):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(512, 512) for _ in range(mib))


def fill(place, mib, count, walk=0, **settings):
    """Snapshots of two averages at so many times; the weights move by random steps of this size."""
    model, random = Made(mib), torch.Generator().manual_seed(0)
    tracker = ema.PostHocEMA(model, place, snapshot_every=1, **settings)
    for step in range(1, count + 1):
        for weight in model.parameters() if walk else ():
            weight.data.add_(torch.randn(weight.shape, generator=random), alpha=walk)
        tracker.update(step)
    return ema.find_snapshots(place)


# %%
def usual_loop(found, sigmas, names=None, dtype=torch.float32):
    """Whole sums of the tensors named, to which each snapshot is added when it is loaded."""
    shapes = {n: found[0].shapes[n] for n in names or found[0].shapes}
    sums = [{n: torch.zeros(shape, dtype=dtype) for n, shape in shapes.items()} for _ in sigmas]
    known, end = [s.profile for s in found], found[-1].step
    shares = [solve(known, power_profile(sigma, end)) for sigma in sigmas]
    for snapshot, *of_each in zip(found, *shares, strict=True):
        loaded = {n: snapshot.read(n, 0, w.numel()).to(dtype) for n, w in sums[0].items()}
        for total, share in zip(sums, of_each, strict=True):
            for name, weight in loaded.items():
                total[name].add_(weight.view_as(total[name]), alpha=share)
    return sums


# %%
def taken(call, mapped=()):
    """The most bytes that were there beside those before; what is mapped is the system's."""
    events = memlab.measure(call).events
    made = running_sums(event.bytes for event in events if event.phase != "before")
    return max(made, default=0) - sum(snapshot.nbytes for snapshot in mapped)


# %%
FOUR, beside = (0.06, 0.08, 0.12, 0.15), {}
for mib, count in ((16, 10), (8, 10), (16, 5)):
    with tempfile.TemporaryDirectory() as place:
        found = fill(place, mib, count)
        outs = [Path(place, f"{sigma}.safetensors") for sigma in FOUR]
        pieces = taken(lambda s=found, o=outs: ema.synthesize(s, FOUR, out=o), found)
        usual = taken(lambda s=found: usual_loop(s, FOUR), found)
    beside[mib, count] = pieces, usual
    by_pieces, by_snapshots = map(format_bytes, beside[mib, count])
    print(f"{mib} MiB, {count} times: by pieces {by_pieces}, by snapshots {by_snapshots}")
system = np.array([[inner_product(p, q) for p in profiles] for q in profiles])
print(f"the linear system of {len(profiles)} snapshots: {format_bytes(system.nbytes)}")

# %% [markdown]
# By pieces 6 MiB, of whatever model and however many snapshots: four sums of a piece of 131,072
# numbers, a few snapshots' pieces, in 16 bits and in 32. The usual loop takes the model once for
# each target, and more for what is loaded. `benchmarks/ema.py` says the same of a process as a
# whole, of a model of 128 MiB.
#
# `out=model` writes into weights that are there, and no file is made.

# %% [markdown]
# ## What the guide calls less effective
#
# **Batches of parameters.** The usual loop can sum a batch of tensors, write it, and go on with the
# next batch. The guide saw no significant saving. Here are 8 tensors of 1 MiB and four targets:

# %%
shelf = tempfile.TemporaryDirectory()
KINDS = {"float32": torch.float32, "float16": torch.float16, "int8": "int8"}
files = {name: Path(shelf.name, name) for name in KINDS}
for name, dtype in KINDS.items():
    fill(files[name], 8, 4, walk=1, snapshot_dtype=dtype)


def in_batches(found, size, keep):
    names = list(found[0].shapes)
    for start in range(0, len(names), size):
        keep(usual_loop(found, FOUR, names[start : start + size])[0])


whole, batch_bytes = usual_loop(ema.find_snapshots(files["float16"]), FOUR)[0], {}
kept = {}
for size in (1, 4, 8):
    found = ema.find_snapshots(files["float16"])
    batch_bytes[size] = taken(lambda s=found, n=size: in_batches(s, n, lambda sums: None), found)
    print(f"batches of {size}: {format_bytes(batch_bytes[size])}")
in_batches(found, 1, kept.update)
same_bits = all(torch.equal(kept[name], whole[name]) for name in whole)
print(f"one by one and all at once give the same bits: {same_bits}")

# %% [markdown]
# Memory is proportional to the batch: six copies of each tensor in it, four sums and two that are
# loaded. Every element sees the same additions in the same order, so the bits agree. A piece is
# smaller than a batch of one tensor: a tensor of 64 MiB would take 384 MiB, in pieces 6 MiB.
#
# **float16.** It can round the files, the sums, or both. Which one costs accuracy? The error is
# relative to a sum in float64 of float32 files, for σ = 0.07.

# %%
rounding, sums_bytes = {}, {}
exact = usual_loop(ema.find_snapshots(files["float32"]), [0.07], dtype=torch.float64)[0]
norm = sum(w.square().sum() for w in exact.values()).sqrt()
for in_files in ("float32", "float16"):
    for sums in (torch.float32, torch.float16):
        found = ema.find_snapshots(files[in_files])
        made = usual_loop(found, [0.07], dtype=sums)[0]
        off_by = sum((made[n].double() - w).square().sum() for n, w in exact.items()).sqrt()
        rounding[in_files, sums] = float(off_by / norm)
        below = 10.0 ** np.ceil(np.log10(rounding[in_files, sums]))
        print(f"files in {in_files}, sums in {str(sums)[6:]}: error below {below:.0e}")
lost_by_files = rounding["float16", torch.float32]
sums_lose_more = rounding["float32", torch.float16] > 1.5 * lost_by_files
print(f"sums lose over 1.5 × as much as files: {sums_lose_more}")

# %%
for sums in (torch.float32, torch.float16):
    found = ema.find_snapshots(files["float16"])
    sums_bytes[sums] = taken(lambda s=found, d=sums: usual_loop(s, FOUR, dtype=d), found)
print("whole sums:", ", ".join(map(format_bytes, sums_bytes.values())))

# %% [markdown]
# Sums lose more than files do. A file is rounded once, a sum after each snapshot. So keep float16
# files and float32 sums. Whole sums in float16 take a third, because loaded tensors need no cast;
# pieces take an eighth, with sums in float32.
#
# **int8.** Smaller files must be decoded. This compares the CPU time of a synthesis.


# %%
def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


took = {name: [] for name in KINDS}
for _ in range(2):
    for name, spent in took.items():
        spent.append(seconds(lambda n=name: ema.synthesize(files[n], 0.07)))
took = {name: min(spent) / min(took["float32"]) for name, spent in took.items()}

# %% tags=["nbval-ignore-output"] reason="a time"
print(", ".join(f"{name} files {ratio:.2f} ×" for name, ratio in took.items()))

# %% [markdown]
# `benchmarks/ema.py --section decoding` repeats this with a larger model, from the page cache:
# int8 files take about twice the time of float32 files, and float16 files two thirds.
#
# ## One step for every parameter
#
# The guide names a challenge of going parameter by parameter: consistency. All tensors must be
# averages over the same steps. What if they are not? Here every other tensor comes from the first
# snapshot, and the others from the last.

# %%
narrow = {s.step: averaged(s) for s in snapshots if s.sigma == 0.05}
early, late = narrow[EVERY], narrow[STEPS]
mixed = {name: (early, late)[n % 2][name] for n, name in enumerate(sorted(late))}
of_early, of_late, of_mixed = map(loss_of, (early, late, mixed))
print(f"the mixture is worse than either, by over 1 nat: {of_mixed > max(of_early, of_late) + 1}")


# %% [markdown]
# Three properties rule that out. First, the coefficients depend on times alone, so they are the
# same for every tensor. Below, row k of each tensor is 1 at step k, so each column shows what a
# tensor counts each step.


# %%
class OneHots(nn.Module):
    def __init__(self, steps, widths):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(steps, width) for width in widths)


with tempfile.TemporaryDirectory() as place:
    hot = OneHots(64, (1, 100, 5000))
    tracker = ema.PostHocEMA(hot, place, snapshot_every=4, snapshot_dtype=torch.float32)
    for step in range(1, 65):
        for weight in hot.weights:
            weight.data.zero_()[step - 1] = 1
        tracker.update(step)
    columns = torch.cat(list(ema.synthesize(place, 0.07).values()), dim=1)
uneven = (columns - columns[:, :1]).abs().max().item()
print(f"{columns.shape[1]:,} columns count each step alike, within 1e-6: {uneven < 1e-6}")
print(f"the last step counts {columns[-1, 0]:.3f}, the one before {columns[-2, 0]:.3f}")

# %% [markdown]
# Second, averages after an interrupted update can't be written: the tracker refuses until `load()`
# restores a whole state. Third, a snapshot is written under another name and renamed when it is
# complete (`tests/ema/` interrupts both between two tensors). And each tensor has a checksum: here
# one is replaced by the same tensor of an earlier step.

# %%
before, last = tenth[-2:]
at = last.file.places["embedding.weight"]
swapped, span = bytearray(last.path.read_bytes()), slice(at.offset, at.offset + at.nbytes)
swapped[span] = before.path.read_bytes()[span]
with tempfile.TemporaryDirectory() as place:
    copy = Path(place, last.path.name)
    copy.write_bytes(swapped)
    try:
        refused = not ema.synthesize([copy], 0.10)
    except ValueError as error:
        refused = "the checksum of its tensor 'embedding.weight'" in str(error)
print(f"the tensor of another step is refused: {refused}")

# %% [markdown]
# ## Which to keep
#
# Forty snapshots of a large model fill a disk. One guide says that to drop any loses accuracy. The
# error's closed form says how much, before one is dropped. It depends on *which*.
#
# ### Exercise 15.5: which snapshots to keep
#
# About 10 minutes. Of `times`, in order, return `count`, so that averages of any width can be made
# at the end. The last time is always among them. Even distances are good; no average's error may be
# three times theirs.


# %%
def keep(times, count):
    ### BEGIN SOLUTION
    return [times[(n + 1) * len(times) // count - 1] for n in range(count)]
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 15.5, one line")
    ### END STUB


# %%
keep = exercise("15.5", keep)

# %%
hundred = list(range(1, 101))
WAYS = {
    "all of them": hundred,
    "20, even distances": keep(hundred, 20),
    "the last 20": hundred[-20:],
    "20, log-spaced": ema.log_spaced(hundred, 20),
}
off = {}
WIDTHS = (0.07, 0.15, 0.25, 0.28)
print("of 100 times              σ = 0.07   σ = 0.15   σ = 0.25   σ = 0.28")
for name, kept in WAYS.items():
    of_these = [power_profile(s, t) for t in kept for s in (0.05, 0.10)]
    for sigma in WIDTHS:
        off[name, sigma] = profile_error(of_these, power_profile(sigma, 100))
    print(f"{name:24}" + "".join(f"{off[name, sigma]:11.1e}" for sigma in WIDTHS))

# %% [markdown]
# Four of five dropped, at even distances: nothing to speak of up to 0.15, less than a percent at
# 0.25, three at 0.28, the widest there is. (The error is one of squares: 0.4 % are 6 % as a
# distance.) The last twenty, which is what a program keeps that is told "keep 20", can make no long
# average at all: of the time before, they know too little.
#
# Log-spaced from the end is better for short averages, and ten times worse for long ones.

# %% [markdown]
# ## At scale: seven billion
#
# What does it take beside a training of 7B? By dry run, of two blocks, in bfloat16: the averages,
# in float32, and what an update takes beside them. Then, by formula, snapshots and a synthesis,
# which reads each once.

# %%
config = PRESETS["llama-2-7b"]
N, two_blocks = config.parameters, replace(config, layers=2)
with memlab.dry_run():
    seven = GPT(two_blocks, dtype=torch.bfloat16)
    two = ema.PostHocEMA(seven, "nowhere", (0.05, 0.10))
    of_an_update = taken(lambda: two.update(1))
print(f"two averages are 2 · 4 bytes a weight: {two.nbytes == 8 * two_blocks.parameters}")
print(f"so of 7B {8 * N / 1e9:.1f} GB; ", end="")
print(f"beside them an update takes {format_bytes(of_an_update)}")
print(f"snapshots of both {4 * N / 1e9:.1f} GB, of 12 times {12 * 4 * N / 1e9:.0f} GB")
print(f"to read these at 3 GB/s takes {12 * 4 * N / 3e9:.0f} s, for any number of targets")

# %% [markdown]
# So it is the **tracking** that takes memory, not the synthesis: 8 bytes a weight for two averages,
# as much as Adam has. Two settings reduce it.
#
# `only=` tracks a part of the model. It takes names, patterns or a function, as in `synthesize`,
# and snapshots hold that part alone.

# %%
with memlab.dry_run():
    seven = GPT(two_blocks, dtype=torch.bfloat16)
    part = ema.PostHocEMA(seven, "nowhere", only="blocks.*.attention")
in_attention = sum(w.numel() for n, w in seven.named_parameters() if ".attention." in n)
print(f"8 bytes for each weight of attention: {part.nbytes == 8 * in_attention}")
print(f"of both averages of these two blocks: {part.nbytes / two.nbytes:.1%}")

# %% [markdown]
# `device="cpu"` keeps the averages in the host's memory. This predicts the GPU's memory in an
# update, for a made-up model of 16 MiB:

# %%
on_the_card = {}
for where in (None, "cpu"):

    def build(where=where):
        model, steps = Made(16).cuda(), counter(1)
        average = ema.PostHocEMA(model, "nowhere", device=where)
        return lambda: average.update(next(steps)), model, None

    on_the_card[where] = memlab.predict(build).peak_bytes
    print(f"averages on {where or 'the GPU'}: {format_bytes(on_the_card[where])} on the GPU")

# %% [markdown]
# The host holds the other 32 MiB, and 1 MiB for the chunk that is being copied. An update sends
# each weight once, for any number of averages. How much slower is it? By formula, from data sheets,
# for float32 weights: on the GPU, two averages read and write 24 bytes a weight; to the host, 4
# bytes a weight cross the bus.

# %%
slower = {}
for name in ("a100-80", "h100"):
    gpu = GPUS[name]
    on_it, by_the_bus = 24 / gpu.memory_bandwidth, 4 / gpu.host_bandwidth
    slower[name] = by_the_bus / on_it
    print(f"{name}: an update by the bus takes at least {slower[name]:.0f} × the time on the GPU;")
    print(f"    for 7B, {on_it * N * 1e3:.0f} ms on the GPU and {by_the_bus * N * 1e3:.0f} ms")

# %% [markdown]
# The right Δ makes updates ten steps apart as good as any, so the bus is needed seldom.
#
# ## Explain the gap

# %%
found = {
    "buffers_mib": beside[16, 10][0],
    "system_kib": system.nbytes,
    "pruned_percent": 100 * off["the last 20", 0.25],
    "wide_percent": 100 * ema.relative_width(range(1, 1001), counted(of_one_step(0.05), 10)),
}
reveal("15.1", **found)

# %% [markdown]
# The gaps. The bytes are those of a piece, because the loops were turned round. The system has a
# row for each snapshot, not for each weight. Long averages reach back beyond the last 20 of 100.
# And who leaves out nine steps of ten must not count the tenth as one.
#
# ## On your GPU
#
# This measures the bytes and the time of an update, on the GPU and with `device="cpu"`.
# `benchmarks/gpu.py --section ema` does so beside a training step. No GPU has run either yet.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
from memlab.monitoring.counters import counters_for

if gpu := torch.accelerator.current_accelerator(check_available=True):
    counters = counters_for(gpu)
    on_gpu, spent = Made(64).to(gpu), {}
    for where in (None, "cpu"):
        average = ema.PostHocEMA(on_gpu, "nowhere", device=where)
        average.update(1)
        counters.reset_peak()
        before = counters.read().allocated_bytes
        start = time.perf_counter()
        for step in range(2, 22):
            average.update(step)
        torch.accelerator.synchronize()
        spent[where] = time.perf_counter() - start
        beside_it = counters.read().peak_bytes - before
        print(f"on {where or 'the GPU'}: {format_bytes(average.nbytes)} of averages, ", end="")
        print(f"{format_bytes(beside_it)} beside them in an update")
    print(f"updates on the host take {spent['cpu'] / spent[None]:.1f} × the time")
else:
    print(stored_on_a_gpu("ema"))

# %% [markdown]
# ## Rules on trial
#
# One guide tells what its authors learned when their synthesis took too much memory. Each of its
# statements, tried: first what it calls fundamental.

# %%
by_pieces = [pieces for pieces, _ in beside.values()]
sizes_text = ", ".join(f"{mib} MiB × {count}" for mib, count in beside)
verdict(
    "25a",
    max(by_pieces) > 1.01 * min(by_pieces),
    f"models and times {sizes_text}: {format_bytes(max(by_pieces))} each time, by pieces; by "
    f"snapshots {', '.join(format_bytes(usual) for _, usual in beside.values())}",
    otherwise="all snapshots are read and none is kept: with mapped files, a piece of a tensor at "
    "a time, memory depends on neither the model nor their number",
)

# %%
verdict(
    "25b",
    system.nbytes > 2**20,
    f"32 snapshots: {format_bytes(system.nbytes)}, from times and exponents alone, which stand in "
    f"the files' headers",
    otherwise="no weight is in that system: it has a row for each snapshot",
)

# %%
bytes_of = {name: ema.find_snapshots(place)[0].nbytes for name, place in files.items()}
weights, found = Made(8), ema.find_snapshots(files["int8"])
in_place = taken(lambda: ema.synthesize(found, 0.05, out=weights), found)
one_layer = ema.synthesize(found, 0.05, only="layers.1")
a_copy = taken(lambda: [w.clone() for w in weights.parameters()])
a_dict = taken(weights.state_dict)
in_files = ", ".join(f"{name} {format_bytes(size)}" for name, size in bytes_of.items())
of_pieces, sequential = beside[16, 10]
verdict(
    "25c",
    of_pieces > sequential / 2,
    f"16 MiB, ten times, four targets: snapshot after snapshot {format_bytes(sequential)}, by "
    f"pieces {format_bytes(of_pieces)}",
    otherwise="snapshots one after another keep whole sums, and pieces are what saves",
)

# %%
verdict(
    "25d",
    not (
        of_pieces < sequential / 2
        and len(one_layer) == 1
        and in_place < 2**23
        and bytes_of["int8"] < bytes_of["float32"] / 3
    ),
    f"by pieces as above; one layer of 8: {len(one_layer)} tensor; of int8's files, in place: "
    f"{format_bytes(in_place)} beside the model; a snapshot of 8 MiB in {in_files}",
    otherwise="all four are done: streaming, parts of a model, in place, compressed snapshots",
)

# %% [markdown]
# In place, the guide asks for numerical stability. Each weight is written once, when its sum is
# complete. So does it have the bits of a synthesis into tensors of its own?

# %%
apart = ema.synthesize(found, 0.05)
same = all(torch.equal(weight, apart[name]) for name, weight in weights.named_parameters())
print(f"{len(apart)} tensors, in place and apart, have the same bits: {same}")

# %%
verdict(
    "25e",
    a_dict == 0,
    f"of a model of 8 MiB a copy takes {format_bytes(a_copy)}, a state dict {a_dict} B; the sums "
    f"of the usual loop a model for each target",
    condition="for one parameter at a time and for no copies of the model; a state dict refers to "
    "the weights and takes nothing, and a cache that is emptied has not been needed",
    otherwise="a state dict takes bytes",
)

# %%
verdict(
    "25f",
    batch_bytes[1] > batch_bytes[8] / 2,
    "8 tensors of 1 MiB, four targets: "
    + ", ".join(f"{size} at a time {format_bytes(b)}" for size, b in batch_bytes.items())
    + f"; the same bits: {same_bits}",
    otherwise="memory is proportional to the batch, and pieces of a tensor save most",
)

# %%
kept_32, kept_16 = (sums_bytes[dtype] for dtype in (torch.float32, torch.float16))
verdict(
    "25g",
    kept_32 / kept_16 < beside[8, 10][1] / beside[8, 10][0],
    f"sums in float16 take {kept_32 / kept_16:.1f} × less, pieces "
    f"{beside[8, 10][1] / beside[8, 10][0]:.1f} × less (8 MiB, four targets); "
    f"by float16 files σ = 0.07 is off by {lost_by_files:.1e}, by float16 sums over 1.5 × as "
    f"much: {sums_lose_more}",
    condition="for the sums, where float16 loses more than in the files; float16 files halve the "
    "disk",
)

# %%
verdict(
    "25h",
    uneven > 1e-6 or not refused,
    f"{columns.shape[1]:,} columns of three tensors count each step alike, within 1e-6: "
    f"{uneven < 1e-6}; a tensor of another step in a file is refused: {refused}; with every other "
    f"tensor of step {EVERY}, not {STEPS}, the loss is over 1 nat worse than either's: "
    f"{of_mixed > max(of_early, of_late) + 1}",
    otherwise="the coefficients are the same for every tensor; what has to be of one step is the "
    "snapshot, which is written whole or not at all",
)

# %%
verdict(
    "25i",
    bytes_of["int8"] < bytes_of["float16"] < bytes_of["float32"] and took["int8"] > 1.2,
    f"a snapshot of 8 MiB in {in_files}; a synthesis of int8 files takes over 1.2 × the CPU time "
    f"of float32 files: {took['int8'] > 1.2} (times: benchmarks/ema.py)",
    condition="for int8; memory in the synthesis is a chunk's either way, so the trade is of disk "
    "against time",
)

# %%
verdict(
    "25j",
    on_the_card["cpu"] < on_the_card[None] and min(slower.values()) > 1,
    f"an update of two averages of 16 MiB, predicted: {format_bytes(on_the_card[None])} on the "
    f"GPU, {format_bytes(on_the_card['cpu'])} with averages on the CPU; the bus alone takes "
    + " and ".join(f"{times:.0f} × ({name})" for name, times in slower.items())
    + " the time of an update on the GPU, by formula",
    condition="for tracking, by prediction and formula, as no GPU has timed it; one update can "
    "replace ten",
)

# %%
verdict(
    "25k",
    part.nbytes == 8 * in_attention < two.nbytes,
    f"attention alone of two 7B blocks, with embedding and logits: {part.nbytes / two.nbytes:.1%} "
    f"of the averages' bytes",
    condition="for tracking, in proportion to the part; a synthesis takes a chunk's memory for any "
    "part",
)

# %%
verdict(
    "26",
    off["20, even distances", 0.15] > 0.01,
    "of 100 times, two averages, 20 kept; σ = 0.07, 0.15, 0.25, 0.28 off by "
    + "; ".join(
        f"{name.removeprefix('20, ')} " + ", ".join(f"{off[name, sigma]:.0e}" for sigma in WIDTHS)
        for name in list(WAYS)[1:]
    ),
    otherwise="every fifth and the last make averages up to a width of 0.25 with less than a "
    "percent of error, and the widest with three; it is true of keeping the last ones, which "
    "cannot make a long one",
)

# %% [markdown]
# ## What you can do now
#
# | what | bytes |
# | --- | --- |
# | tracking K averages | 4·K a weight, on the GPU or the host; with `only=`, of the part |
# | a snapshot of one | 2 a weight, on the disk; 1.02 in int8 |
# | the linear system of S snapshots | 8·S² |
# | a synthesis of T targets | T sums of a piece and a few pieces, whatever the model |
#
# You can say how wide an average is and prove it by its response, choose the width after training,
# know the error before reading a byte, and keep the right fifth of the snapshots.
#
# Tomorrow, the last day: what was everything for? A model and a card are named, and you say whether
# it fits.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens, and now two averages are kept beside it. On
# the disk, where the rest is: a tensor of each comes for an update, and goes.

# %%
running_bill(15)

# %% [markdown]
# ## Sources
#
# - Karras et al. 2023: [Analyzing and Improving the Training Dynamics of Diffusion
#   Models](https://arxiv.org/abs/2312.02696)
# - Hugging Face: [Safetensors](https://huggingface.co/docs/safetensors)
#
# The rules on trial are from:
#
# - nextml-code: [Learnings from RAM Optimization in
#   PostHocEMA](https://github.com/nextml-code/pytorch-posthoc-ema/blob/485021c95b0477536c9e915cdb8c4f35d177b384/notes/MINIMIZE_RAM_LEARNED.md)
