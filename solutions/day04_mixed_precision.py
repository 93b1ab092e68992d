# %% [markdown]
# # Day 4: Mixed precision
#
# **Half the bits: half the bytes?**
#
# After today you can say which bytes of a training step halve with 16-bit formats and which do not,
# and build what recovers the lost range and precision: a loss scaler, stochastic rounding and
# master weights.
#
# About 85 minutes, 59 of them for four exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before: **guess**, **measure**, then **build** what explains the gap. In an exercise, replace
# `raise NotImplementedError` with your own lines; the cell below it checks them. If you are stuck,
# run `memlab hint 4.1` in a terminal. You can skip an exercise: the lesson then uses the reference.

# %% [markdown]
# ## The question
#
# Yesterday's step (124M weights, eight sequences of 640 tokens, one at a time) needs 2.66 GiB, all
# in float32. Common advice says: *turn on mixed precision, it halves the memory*. It is one line
# around the forward pass: under `torch.autocast`, matmuls run in bfloat16 (2 bytes per element),
# and sensitive operations stay in float32.
#
# ## Guess
#
# How many GiB does the step need under autocast? Replace the dots with a number.

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
# Each sequence after the first repeats the same allocations, so this is a dry run of only two of
# the eight sequences. (Each other sequence would add its tokens and targets, 10 KiB.) Yesterday's
# bytes come from the running bill.

# %%
one_at_a_time = combined("accumulation")
under_autocast = replace(one_at_a_time, around_forward=combined("autocast").around_forward)


def step_of(setting: Setting, technique: Plugs) -> Trace:
    with memlab.dry_run():
        training = build(setting, technique)
        for weight in training.model.parameters():
            weight.grad = torch.zeros_like(weight)
        training.optimizer.step()  # creates Adam's state
        return measured(training)


two = Setting("124m", batch=2, seq_len=640)
cast = step_of(two, under_autocast)
yesterday = json.loads(STORED.read_text(encoding="utf-8"))["day 3: one sequence at a time"]
reveal("4.1", autocast_gib=cast.peak_bytes)
print(f"{'at the peak':22}{'yesterday':>12}{'autocast':>12}")
for kind, bytes_ in yesterday.items():
    print(f"{kind:22}{format_bytes(bytes_):>12}{format_bytes(cast.at_peak[kind]):>12}")

# %% [markdown]
# Autocast needs **more** memory. Weights, gradients and Adam's state need the same bytes: autocast
# leaves them in float32. Activations have even grown. Which tensors are new?

# %% [markdown]
# ## Weight casts
#
# To run a matmul in bfloat16, autocast needs a bfloat16 copy of the float32 weight, a *cast*. The
# next cell tracks all casts over the step: two-dimensional tensors, created by `_to_copy` in
# forward.


# %%
def casts_alive(trace: Trace) -> list[int]:
    """Return the bytes of weight casts alive after each event."""
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
axes.set_title("Two micro-batches under autocast: all tensors, and casts of weights")
axes.legend(frameon=False, loc="upper left", ncols=2)
print(f"casts, maximum: {format_bytes(max(casts_alive(cast)))}")
times = sum(before == 0 < now for before, now in pairwise(casts))
print(f"created {times} times: once per micro-batch")

# %% [markdown]
# Forward creates the casts layer by layer. Autocast *caches* them until its `with` block ends, so
# each micro-batch casts each weight once. Backward multiplies by the same matrices, so it keeps
# each cast until its layer is done. At the start of backward, where the peak is, all casts are
# alive: **2 bytes for each weight** used in a matmul.
#
# The other activations shrink. With longer sequences this outweighs the casts: in this dry run from
# about 980 tokens per sequence. At 1024 tokens, autocast's peak is 0.3% below float32's.

# %% [markdown]
# ## The formats
#
# A floating-point number has a sign, an *exponent* (its range) and a *mantissa* (its precision).
# float16 and bfloat16 split the 16 bits differently. FP8 also has two formats, named after their
# split: e4m3 has 4 exponent bits and 3 mantissa bits.

# %%
formats = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
print(f"{'':15}{'bytes':>5}{'exponent + mantissa':>21}", end="")
print(f"{'largest':>10}{'smallest':>10}{'next after 1':>14}")
for name in formats:
    info = torch.finfo(getattr(torch, name))
    mantissa = round(-log2(info.eps))
    split = f"{info.bits - 1 - mantissa} + {mantissa}"  # one bit is the sign
    print(f"{name:15}{info.bits // 8:5}{split:>21}{info.max:10.3g}", end="")
    print(f"{info.smallest_normal * info.eps:10.2g}{1 + info.eps:14.8g}")

# %% [markdown]
# **float16** has more precision but less range: nothing above 65,504, nothing below 6e-8.
# **bfloat16** is the upper 16 bits of a float32: the same range, but steps of 1/128 above 1. Today
# you build remedies for both: for float16's range and for bfloat16's precision. First, count the
# bytes.

# %% [markdown]
# ## Bytes per weight
#
# Five ways to train (*policies*):
#
# | policy | weights | gradients | moments | also |
# | --- | --- | --- | --- | --- |
# | `"float32"` | float32 | float32 | float32 | |
# | `"autocast"` | float32 | float32 | float32 | bfloat16 casts |
# | `"bfloat16"` | bfloat16 | bfloat16 | bfloat16 | |
# | `"master"` | bfloat16 | bfloat16 | float32 | a float32 copy of each weight |
# | `"master32"` | bfloat16 | float32 | float32 | a float32 copy of each weight |
#
# The float32 copy is a *master weight*: the optimizer steps it, and the model gets its rounded
# value.

# %% [markdown]
# Torch computes each gradient in its weight's dtype. `"master32"` casts each gradient to float32
# immediately, and accumulates it in the master weight's gradient.

# %% [markdown]
# ### Exercise 4.1: bytes of each policy
#
# About 15 minutes. Return the bytes at the end of backward (master weights count as parameters),
# and of the casts at its start. N is `config.parameters`, V `vocab_size`, C `hidden_size`; `layers`
# counts the blocks.
#
# - Adam's state has a 4-byte counter per tensor: 9 per block, and 2 outside (3 if untied).
# - Autocast casts the weights used in matmuls.
# - It does not cast norms: C weights each, 2 per block and 1 at the end.
# - It casts the embedding (V × C) only if `config.tied`: then the embedding computes the logits.


# %%
def held_bytes(config: GPTConfig, policy: str) -> dict[str, int]:
    """Return the bytes of "parameters", "gradients", "optimizer_state" and "casts"."""
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
# Compare your formula with the meter: real steps of the tiny model on 8 × 64 tokens, with each
# policy. `MasterWeights` is the library's; you build your own later today.

# %%
POLICIES = ("float32", "autocast", "bfloat16", "master", "master32")
tokens, targets = next(batches(source_bytes("64 KiB"), 8, 64, seed=0))
adamw = partial(torch.optim.AdamW, foreach=False)


def step_by(policy: str, dtype=torch.bfloat16, config=PRESETS["tiny"]) -> Trace:
    torch.manual_seed(0)
    keep_float32 = policy in ("float32", "autocast")
    model = GPT(config, dtype=torch.float32 if keep_float32 else dtype)
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
    print(f"{policy:9} formula = meter, to the byte: {equal}; {ended:.2f} bytes/weight", end="")
    print("" if stepped == ended else f", {stepped:.2f} after the step")
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
    ylabel="bytes relative to float32",
    title="Which bytes halve? (dashed line: half)",
)
axes.set_xticklabels([name.replace("_", " ") for name in names])
axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.1))
for policy in ("autocast", "bfloat16"):
    share = found[policy]["activations"] / found["float32"]["activations"]
    print(f"{policy}: activations {share:.2f} × float32's, without casts")

# %% [markdown]
# Only `"bfloat16"` halves weights, gradients and moments. `"master"` halves only the gradients and
# adds the copy: 16 bytes per weight again. Its optimizer step casts the gradients to float32, so it
# reaches 18 bytes, as `"master32"` does. Autocast halves none of the three.
#
# Activations don't halve here. Autocast keeps norms, residual sums and log-probabilities in
# float32. With bfloat16 weights, the CPU's norm saves a float32 version of its input. CUDA's norm
# does not (see *Rules on trial*).

# %% [markdown]
# ## Underflow in float16
#
# Gradients are small: the loss is a *mean* over tokens, so each token's gradient is divided by the
# number of tokens. To measure real gradients, train the tiny model in float32 for 80 steps on
# torch's own source code. Then compute its gradients for 5,120 tokens, as many as in the bill's
# step.

# %%
text = source_bytes("256 KiB").long()


def learn(model, optimizer, steps, data, seed=0, batch=8):
    """Train, and return the loss of each step."""
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
# Backward first computes the gradient of the logits: one element for each token and each of the 256
# possible next bytes. What percentage of these elements would be **zero** in float16?

# %%
### BEGIN SOLUTION
guess("4.2", zero_percent=1)  # the format was designed for training
### END SOLUTION
### BEGIN STUB
# guess("4.2", zero_percent=...)
### END STUB

# %%
many, their_targets = next(batches(text, 80, 64, seed=1))


def weight_gradients(dtype=None, scale=1.0):
    """Return all gradients of the scaled loss, divided by `scale`. Autocast if `dtype` is given."""
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(many, their_targets)
    (loss * scale).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()]) / scale


def share_of_zeros(gradient) -> float:
    return (gradient.half() == 0).float().mean().item()


exact = weight_gradients()
logits = model(many)
loss = F.cross_entropy(logits.flatten(0, 1), their_targets.flatten())
logit_gradients = torch.autograd.grad(loss, logits)[0].flatten()
zero, scaled_zero = share_of_zeros(logit_gradients), share_of_zeros(logit_gradients * 2**16)
reveal("4.2", zero_percent=50 * round(2 * zero))  # to a multiple of 50%: CPUs differ
print(f"times 2¹⁶, less than 0.1% are zero: {scaled_zero < 0.001}")

# %%
fig, panels = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, layout="constrained")
bins = [n / 2 for n in range(-72, 34)]
for axes, scale, title in zip(panels, (1, 2**16), ("unscaled", "times 2¹⁶"), strict=True):
    axes.axvspan(-36, -25, color="#d1495b", alpha=0.25, linewidth=0)
    axes.axvspan(-25, -14, color="#edae49", alpha=0.25, linewidth=0)
    axes.axvspan(16, 18, color="#d1495b", alpha=0.25, linewidth=0)
    for gradient, name in ((logit_gradients, "of the logits"), (exact, "of the weights")):
        size = (gradient[gradient != 0].abs() * scale).log2()
        share = torch.full_like(size, 100 / len(size))
        axes.hist(size, bins, weights=share, histtype="step", linewidth=1.6, label=name)
    axes.set(ylabel="% of elements", title=f"Gradients over 5,120 tokens, {title}", xlim=(-36, 18))
    axes.margins(y=0.3)
names = ((-35.6, "zero in float16"), (-24.6, "subnormal"), (-13.6, "normal"), (16.2, "inf"))
for x, words in names:
    panels[0].text(x, panels[0].get_ylim()[1] * 0.87, words, fontsize=9)
panels[0].legend(frameon=False, loc="center right", bbox_to_anchor=(0.955, 0.5))
_ = panels[1].set_xlabel("log₂ of the magnitude")

# %% [markdown]
# Below 2⁻²⁵ float16 rounds to zero. From there to 2⁻¹⁴ its values are *subnormal*: their spacing is
# always 2⁻²⁴, so small values have fewer significant digits. (The exact percentage, about 45%,
# depends on the CPU, so the cell rounds it to a multiple of 50%.) A logit gradient of zero adds
# nothing to a weight's gradient.
#
# The remedy is **loss scaling**. By the chain rule, multiplying the loss by 2¹⁶ multiplies all
# gradients by 2¹⁶, and float16 has room for larger values. Then divide the gradients by 2¹⁶ in
# float32.

# %%
in_bfloat16 = weight_gradients(torch.bfloat16)
gradients = weight_gradients(torch.float16), weight_gradients(torch.float16, 2.0**16), in_bfloat16
unscaled, scaled, bf16 = (((g - exact).norm() / exact.norm()).item() for g in gradients)
fig, axes = plt.subplots(figsize=(9, 1.8), layout="constrained")
names, errors = ("float16", "float16, times 2¹⁶", "bfloat16"), (unscaled, scaled, bf16)
colours = ("#d1495b", "#00798c", "#edae49")
bars = axes.barh(names, [100 * error for error in errors], color=colours)
axes.bar_label(bars, [f"{100 * error:.2g} %" for error in errors], padding=4)
axes.invert_yaxis()
axes.margins(x=0.1)
axes.set(xlabel="distance from the float32 gradient, % of its norm")
axes.set_title("Error of the weights' gradients under autocast")
print(f"error of float16 above 2%: {unscaled > 0.02}")
print(f"error of float16 times 2¹⁶ below 0.5%: {scaled < 0.005}")
print(f"error of bfloat16 below 2%: {bf16 < 0.02}, above scaled float16's: {bf16 > scaled}")

# %% [markdown]
# Without a scale, the elements that underflowed are missing. With it, float16 is the most accurate
# of the three, because it has three mantissa bits more than bfloat16. But too large a scale makes
# gradients inf or nan.

# %% [markdown]
# ### Exercise 4.2: a loss scaler
#
# About 20 minutes. `fine_steps` counts steps since `scale` changed. `train` returns whether it
# stepped. In order:
#
# 1. Clear gradients; backward on each scaled loss.
# 2. If all gradients are finite: divide them by `scale`, clip their norm to `max_norm`, step,
#    `fine_steps` + 1.
# 3. Otherwise: scale × ½, `fine_steps` = 0.
# 4. If `fine_steps` is `interval`: scale × 2, at most 2¹²⁷; `fine_steps` = 0.
#
# `losses` is any iterable, a loss per micro-batch: keep only one graph alive. Weights:
# `group["params"]` for `group` in `optimizer.param_groups`; some have no gradient. Don't copy
# gradients. Don't use private `torch._…`.


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
# Train in float16 under autocast. The scale starts far too high, at 2²⁴, so it falls first. It
# doubles after 5 steps without overflow. (Torch's defaults: 2¹⁶ and 2000 steps.)

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
above.set(ylabel="log₂ of the scale", title="The scale falls, then tries to grow")
above.legend(frameon=False)
below.plot(half_losses, color="#00798c")
below.set(xlabel="step", ylabel="loss in nats", title="Loss on torch's own source code")
print(f"steps were skipped: {not all(stepped)}; the scale grew again: {scales[-1] != min(scales)}")
print(f"the loss went down: {half_losses[-1] < half_losses[0]}")

# %% [markdown]
# Each overflow skips a step, first because the scale starts too high, later because it grows too
# far. Torch's scaler has no lower limit: if the loss is nan in every step, the scale halves down to
# 0.0, and nothing is trained, without an error. `memlab.precision.LossScaler` has a lower limit,
# where it raises an error.
#
# bfloat16 needs no scaler, because it has float32's range. But it lacks precision.

# %% [markdown]
# ## Lost updates in bfloat16
#
# - 1 + 1/1000 stays 1, however often you add.
# - 256 + 1 is 256, because the next bfloat16 is 258.
# - 0.999 times a value is the same value again, so Adam's second moment never falls.
#
# **Stochastic rounding** fixes this without extra memory. A value 30% of the way from one bfloat16
# to the next is rounded to the next with a probability of 30%. On average, nothing is lost.

# %%
one = torch.tensor(1.0, dtype=torch.bfloat16)
print(f"1 + 1/1000 = {(one + 1 / 1000).item()}, 256 + 1 = {(256 * one + 1).item()}")
print(f"0.999 · 1.5 = {(0.999 * (1.5 * one)).item()}")

# %% [markdown]
# ### Exercise 4.3: stochastic rounding
#
# About 12 minutes. `numbers` is float32 of any shape; return bfloat16. The upper 16 bits of a
# float32 are a bfloat16. An integer n in the lower 16 means n/2¹⁶ of the way to the next bfloat16.
# `.view(torch.int32)` shows the bits.
#
# - Draw random numbers from `generator` only, one per element.
# - inf and nan stay unchanged. Do not change `numbers`.
# - Use at most 24 bytes per element besides `numbers`, and no 8-byte dtype.


# %%
def stochastic_round(numbers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round each element to a random bfloat16 neighbor whose expected value is the element."""
    ### BEGIN SOLUTION
    chance = torch.randint(2**16, numbers.shape, generator=generator, dtype=torch.int32)
    bits = (chance + numbers.view(torch.int32)) & ~0xFFFF
    rounded = torch.where(numbers.isfinite(), bits.view(torch.float32), numbers)
    return rounded.bfloat16()
    ### END SOLUTION


# %%
stochastic_round = exercise("4.3", stochastic_round)

# %% [markdown]
# Compare it with **Kahan summation**, which keeps the rounding error in a second bfloat16 and adds
# it to the next update: 2 more bytes per weight, and no randomness. 4096 weights of 1 get 1000
# updates of 1/1000.

# %%
generator = torch.Generator().manual_seed(0)
nearest, chance, kahan = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(3))
compensation, update = torch.zeros_like(kahan), torch.full_like(kahan, 1e-3)
paths = {"nearest": [], "stochastic, mean": [], "stochastic, one weight": [], "Kahan": []}
for _ in range(1000):
    nearest += update
    chance = stochastic_round(chance.float() + 1e-3, generator)
    kahan_add_(kahan, compensation, update)
    now = nearest[0], chance.float().mean(), chance[0], kahan[0]
    for path, value in zip(paths.values(), now, strict=True):
        path.append(value.item())
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
looks = ("#d1495b", 2), ("#f1b36b", 5), ("#00798c", 0.8), ("black", 1.2)
for (name, path), (colour, width) in zip(paths.items(), looks, strict=True):
    axes.plot(path, label=name, color=colour, linewidth=width)
axes.set(xlabel="updates of 1/1000", ylabel="weight")
axes.set_title("A bfloat16 weight of 1: round to nearest loses every update")
axes.legend(frameon=False)
ends = [path[-1] for path in paths.values()]
print(f"nearest {ends[0]:.2f}, stochastic (mean) {ends[1]:.2f}, Kahan {ends[3]:.2f}")

# %% [markdown]
# With round to nearest, no update changes the weight. With stochastic rounding a single weight
# fluctuates, but the mean of the 4096 is correct. Kahan summation (the thin black line) is correct
# for each weight.

# %% [markdown]
# The third remedy is the oldest: a float32 copy of each weight. float16 training uses it, too.
#
# ### Exercise 4.4: a step with master weights
#
# About 12 minutes. `weights` lists the model's 16-bit weights, and `copies` their float32 copies,
# which `optimizer` steps. Backward of the loss times `scale` has run without overflow.
#
# - Move the gradients to the copies: in float32, divided by `scale`. Step. Write the rounded copies
#   to the weights.
# - A weight without a gradient stays unchanged.
# - At the end, neither weights nor copies have gradients.
# - Only one gradient may exist in both dtypes at once.


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
# As yesterday, the model trained on source code now learns the same code in CAPITALS, at a learning
# rate of 1e-4. Compare:
#
# - float32
# - bfloat16 with round to nearest
# - bfloat16 with your master weights
# - bfloat16 with `RoundedAdamW`, which rounds weights and moments stochastically: 8 bytes per
#   weight


# %%
class MasterAdamW:
    def __init__(self, parameters, lr: float):
        self.weights = list(parameters)
        self.copies = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.adamw = adamw(self.copies, lr=lr)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        master_step(self.weights, self.copies, self.adamw, 1.0)


stochastic = partial(RoundedAdamW, generator=torch.Generator().manual_seed(0))
ways = {
    "float32": (torch.float32, adamw),
    "bfloat16, nearest": (torch.bfloat16, adamw),
    "bfloat16, master weights": (torch.bfloat16, MasterAdamW),
    "bfloat16, stochastic": (torch.bfloat16, stochastic),
}
# Three of the four curves overlap: draw one wide and one dashed.
styles = {"float32": {"linewidth": 5, "alpha": 0.4}, "bfloat16, stochastic": {"linestyle": "--"}}

# %%
capitals = torch.where((text >= 97) & (text <= 122), text - 32, text)
held_out, in_float32 = next(batches(capitals, 8, 64, seed=99)), GPT(PRESETS["tiny"])
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
reached, moved = {}, {}
for name, (dtype, make) in ways.items():
    learning = GPT(PRESETS["tiny"], dtype=dtype)
    learning.load_state_dict(model.state_dict())
    before = [weight.detach().clone() for weight in learning.parameters()]
    optimizer, curve = make(learning.parameters(), lr=1e-4), []
    for part in range(5):
        learn(learning, optimizer, 4, capitals, seed=part, batch=4)
        in_float32.load_state_dict(learning.state_dict())
        with torch.no_grad():
            curve.append(in_float32(*held_out).item())
    changed = [(b != w).flatten() for b, w in zip(before, learning.parameters(), strict=True)]
    reached[name], moved[name] = curve[-1], torch.cat(changed).float().mean().item()
    axes.plot(range(4, 21, 4), curve, label=name, **styles.get(name, {}))
    print(f"{name}: within 0.02 nats of float32: {reached[name] < reached['float32'] + 0.02}")
axes.set(xlabel="step", ylabel="loss in nats, held out", xticks=range(4, 21, 4))
axes.set_title("Learning CAPITALS at a learning rate of 1e-4")
axes.legend(frameon=False)
lost = 1 - moved["bfloat16, nearest"]
print(f"nearest: more than a quarter of the weights never changed: {lost > 0.25}")

# %% [markdown]
# With round to nearest the model learns less: an update below half the distance from its weight to
# the next bfloat16 is lost, and a lower learning rate loses more updates. Master weights and
# stochastic rounding learn what float32 learns. Master weights need 16 bytes per weight (18 during
# the optimizer step), stochastic rounding 8. So today's line of the bill is bfloat16 weights and
# moments with stochastic rounding.

# %% [markdown]
# ## At scale: 7B
#
# Apply your formula to Llama 2 7B at the end of backward, and check two policies with a dry run.
# FP8 weights would need one byte each; FP8 recipes differ in what else they keep.


# %%
def dry_state(dtype: torch.dtype) -> dict[str, int]:
    with memlab.dry_run():
        seven = GPT(PRESETS["llama-2-7b"], dtype=dtype)
        for weight in seven.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW(seven.parameters(), fused=True)
        optimizer.step()
        return state_bytes(seven, optimizer)


seven_b = {policy: held_bytes(PRESETS["llama-2-7b"], policy) for policy in POLICIES}
for policy, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
    wanted = dry_state(dtype) | {"casts": 0}
    print(f"{policy}: formula = dry run, to the byte: {seven_b[policy] == wanted}")
print(f"weights in FP8: {format_bytes(PRESETS['llama-2-7b'].parameters)}")

# %%
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
left = [0.0] * len(POLICIES)
for kind in kinds:
    gib = [seven_b[policy][kind] / 2**30 for policy in POLICIES]
    axes.barh(POLICIES, gib, left=left, color=plot.COLOURS[kind], label=kind.replace("_", " "))
    left = [before + more for before, more in zip(left, gib, strict=True)]
for card in (24, 80):
    axes.axvline(card, color="black", linewidth=1, linestyle="--")
    axes.text(card + 0.7, -0.75, f"{card} GiB", fontsize=9)
axes.invert_yaxis()
axes.set(xlabel="GiB", title="Llama 2 7B at the end of backward\n")
axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22))
for policy, total in zip(POLICIES, left, strict=True):
    print(f"{policy:9}{total:8.2f} GiB")
casts_of_seven = format_bytes(seven_b["autocast"]["casts"])
print(f"autocast also has {casts_of_seven} of casts at the start of backward")

# %% [markdown]
# Only `"bfloat16"` fits a GPU with 80 GiB. The chart has no activations, which backward frees.
# (Early in backward they exist, but almost no gradients do: yesterday's dry run of this model in
# bfloat16 on 2048 tokens peaked at 50.50 GiB, with 12.46 GiB of activations.)
# During the optimizer step, `"master"` needs as much as `"master32"`, 112.96 GiB. Day 16 trains
# this model on a GPU with 24 GB: Days 8 and 9 reduce the moments, and on Day 16 the gradients no
# longer all exist at once.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the question's step on it: in float32, under autocast, and in
# bfloat16.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    on_gpu = replace(two, batch=8, device=gpu.type)
    on_gpu_bfloat16 = replace(on_gpu, dtype=torch.bfloat16)
    rounded = replace(one_at_a_time, optimizer=combined("bfloat16").optimizer)
    for name, where, how in (
        ("float32", on_gpu, one_at_a_time),
        ("autocast", on_gpu, under_autocast),
        ("bfloat16, stochastic rounding", on_gpu_bfloat16, rounded),
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
# The rules come from the guides listed under *Sources*. For the first rule, predict a step of one
# block on CUDA (Day 2), where one fused kernel computes a norm. (Key and value get as many heads as
# query, so that attention is fused.)

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
gradients_16, gradients_autocast = (share[p, "gradients"] for p in ("bfloat16", "autocast"))
activations_16, activations_autocast = (share[p, "activations"] for p in ("bfloat16", "autocast"))

# %%
verdict(
    "13a",
    abs(cuda_share - 0.5) < 0.01 and gradients_16 == 0.5,
    f"bfloat16 weights: gradients {gradients_16:.2f} ×, activations {activations_16:.2f} × (CPU) "
    f"and {cuda_share:.2f} × (predicted for CUDA); autocast: gradients {gradients_autocast:.2f} ×, "
    f"activations {activations_autocast:.2f} × (CPU), and casts; yesterday's step under autocast: "
    f"peak {grown:+.1%}",
    condition="for 16-bit weights on CUDA; autocast keeps gradients in float32, and adds casts",
)

# %%
both = [step_by("autocast", dtype) for dtype in (torch.bfloat16, torch.float16)]
same_peak = both[0].at_peak == both[1].at_peak
verdict(
    "13b",
    same_peak and bf16 < 0.02,
    f"autocast peaks equal to the byte: {same_peak}; error of the gradient over 5,120 tokens: FP16 "
    f"above 2%: {unscaled > 0.02}, BF16 below 2%: {bf16 < 0.02}, FP16 times 2¹⁶ below 0.5%: "
    f"{scaled < 0.005}",
    condition="without a loss scale; with one, FP16 is more precise",
)

# %% [markdown]
# The next rule is about speed. *Tensor cores* are the GPU units that multiply small matrices in one
# instruction: in 16 bits, or in TF32, which is float32 with 10 mantissa bits instead of 23.

# %% tags=["nbval-ignore-output"] reason="a GPU's time, where one is stored"
from memlab.course import time_on_a_gpu

# Dense, in 10¹² operations a second, from NVIDIA's data sheets: float32, TF32, 16 bits.
cards = {"V100": (15.7, None, 125), "A100": (19.5, 156, 312), "H100 SXM": (67, 494.7, 989.4)}
speed = {name: bits16 / float32 for name, (float32, _, bits16) in cards.items()}
against_tf32 = {name: bits16 / tf32 for name, (_, tf32, bits16) in cards.items() if tf32}
faster, than_tf32 = (
    ", ".join(f"{name} {times:.1f} ×" for name, times in ratios.items())
    for ratios in (speed, against_tf32)
)
verdict(
    "13c",
    min(speed.values()) > 7.9,
    f"data sheets, 16 bits against float32: {faster}; against TF32: {than_tf32}; the bill's step "
    f"in bfloat16, relative to float32: {time_on_a_gpu('bfloat16')}",
    condition="for large matmuls, compared with float32 without tensor cores (8 × on a V100, 15 to "
    "16 × on newer GPUs); compared with TF32 2 ×",
)

# %%
gap = reached["bfloat16, nearest"] - reached["float32"]
close = reached["bfloat16, stochastic"] < reached["float32"] + 0.02
verdict(
    "13d",
    gap < 0.02,
    f"16 bytes per weight in float32, 8 in bfloat16; round to nearest: over a quarter of weights "
    f"never changed: {lost > 0.25}, loss over 0.02 nats higher: {gap > 0.02}; stochastic rounding "
    f"within 0.02: {close}",
    otherwise="updates below bfloat16's precision are lost; use stochastic rounding (8 bytes per "
    "weight) or master weights (16)",
)

# %%
by_scale = in_bfloat16, weight_gradients(torch.bfloat16, 2.0**16)
verdict(
    "14a",
    not torch.equal(*by_scale),
    f"gradients equal bit for bit with scale 2¹⁶ and without: {torch.equal(*by_scale)}",
    otherwise="bfloat16 has float32's range, so a scaler only skips steps with inf or nan",
)

# %%
under, in_16 = (
    found[policy]["gradients"] / PRESETS["tiny"].parameters for policy in ("autocast", "bfloat16")
)
verdict(
    "14b",
    found["autocast"]["gradients"] == found["float32"]["gradients"],
    f"bytes per weight: {under:.0f} under autocast, {in_16:.0f} with model.to(torch.bfloat16)",
    condition="under autocast; a gradient has its weight's dtype, so with bfloat16 weights it is "
    "bfloat16 unless you accumulate in float32 (Day 3)",
)

# %%
verdict(
    "14c",
    unscaled > 0.02 > bf16,
    f"5,120 tokens: over 1/3 of the logits' gradient is zero in float16: {zero > 1 / 3}, below "
    f"0.1% with scale 2¹⁶: {scaled_zero < 0.001}; weights' gradient error above 2% without scale: "
    f"{unscaled > 0.02}, below 0.5% with: {scaled < 0.005}, bfloat16 below 2%: {bf16 < 0.02}",
    condition="and becomes more important with more tokens",
)

# %% [markdown]
# ## What you can do now
#
# | halves? | autocast | bfloat16 | master weights |
# | --- | --- | --- | --- |
# | weights | no, plus casts | yes | no: 2 + 4 bytes |
# | gradients | no | yes | yes, unless accumulated in float32 |
# | moments | no | yes | no |
# | activations | partly | yes on CUDA, partly on a CPU | as with bfloat16 |
# | needs | a scaler in float16 | stochastic rounding | a scaler in float16 |

# %% [markdown]
# **Half the bits are half the bytes only if the weights themselves have 16 bits.** float16 lacks
# range: scale the loss. bfloat16 lacks precision: use stochastic rounding or master weights.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. Today: bfloat16 weights and moments with
# stochastic rounding. The gradients are summed over the sequences in float32, because bfloat16 sums
# lose small terms. So a weight needs 2 bytes, its gradient 4, its two moments 4: 10, not 8.

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
