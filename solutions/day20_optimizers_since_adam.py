# %% [markdown]
# # Day 20: Optimizers since Adam
#
# **Muon, GaLore, APOLLO, Shampoo, SOAP: which of them need less memory than AdamW, and at what
# moment of a step do they need more?**
#
# After today you have built Muon's and GaLore's steps. You can say what each optimizer keeps for a
# matrix of any shape, what it takes for a moment, and why embeddings stay with AdamW.
#
# About 85 minutes, 50 of them for four exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As before: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 20.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# AdamW keeps two numbers per weight. Day 8 dropped one of them (Lion), or shared one (Adam-mini).
# Day 9 stored both in 8 bits. All of those treat a weight as a list of numbers.
#
# The optimizers since then look at **matrices**. Muon orthogonalizes a momentum. GaLore and APOLLO
# keep moments of a projection. Shampoo and SOAP multiply gradients by matrices from both sides.
# What does that cost?

# %%
import time
from dataclasses import replace
from functools import cache, partial

import matplotlib.pyplot as plt
import torch
from torch import nn

import memlab
from memlab import optim
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu
from memlab.course.bill import SETTING
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.monitoring.counters import counters_for
from memlab.optim.apollo import MINI
from memlab.planner import memory_named
from memlab.reference.soap import shampoo_, soap_
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# Llama 2 7B with its optimizer state in float32. AdamW's is 50.2 GiB. How many GiB does it take
# with
#
# 1. Muon, which keeps one momentum?
# 2. GaLore, which projects gradients to rank 1,024? (The hidden size is 4,096.)
# 3. SOAP, which keeps AdamW's moments and four square matrices for each matrix?

# %%
### BEGIN SOLUTION
guess("20.1", muon_gib=25, galore_gib=12.5, soap_gib=75)  # half; a quarter; half as much again
### END SOLUTION
### BEGIN STUB
# guess("20.1", muon_gib=..., galore_gib=..., soap_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# A step of the running bill's 124M model with Muon, as a dry run. (`memlab measure` and `memlab
# plan` know Muon, GaLore and APOLLO-Mini by name.)

# %%
dry, count = dry_trace(SETTING, combined("muon")), SETTING.config.parameters
held = dry.at_end["optimizer_state"]
print(f"Muon: {format_bytes(held)} of state, {held / count:.2f} bytes per weight; AdamW has 8")
table = SETTING.config.vocab_size * SETTING.config.hidden_size
print(f"the embedding has {table / count:.0%} of the weights")

# %% [markdown]
# Muon takes more than 4 bytes. The embedding has a third of this model's weights, and stays with
# AdamW. Which weights are matrices of hidden layers, then?


# %%
@cache
def sides_of(config):
    """The short and long side of each hidden layer's matrix, and how many other weights exist."""
    with torch.device("meta"):
        matrices, others = optim.matrix_groups(GPT(config))
    sides = [tuple(sorted(weight.shape)) for _, weight in matrices["params"]]
    return sides, sum(weight.numel() for _, weight in others["params"])


seven = PRESETS["llama-2-7b"]
sides, others = sides_of(seven)
for shape in sorted(set(sides)):
    print(f"{sides.count(shape):3} matrices of {shape[0]:,} × {shape[1]:,}")
print(f"{others:,} other weights: {others / seven.parameters:.1%} of all")

# %% [markdown]
# A hidden layer's matrix multiplies activations: rotating its input or output is a rotation of the
# problem. An **embedding** is a table: a step reads some of its rows, and most rows have a gradient
# of zero. The **output layer** has a row per token. Norms are vectors. All four papers leave those
# to AdamW.
#
# ## What Adam does to a matrix
#
# A small text model gets 15 steps of AdamW. Here are the singular values of one gradient, and of
# the steps that two optimizers make of it.

# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def train(make, steps, seed=1):
    """The mean of the last five losses, the model, and its optimizer."""
    torch.manual_seed(0)
    model, losses = GPT(CONFIG), []
    optimizer, drawn = make(model), batches(TEXT, 8, 64, seed=seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(drawn))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-5:]) / 5, model, optimizer


_, model, adamw = train(lambda model: optim.AdamW(model.parameters(), lr=3e-3), 15)
weight = model.blocks[1].mlp.up.weight
gradient, state = weight.grad, adamw.state[weight]
adams_step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)


# %%
def spectrum(matrix):
    """Its singular values, the largest first, as shares of the largest."""
    values = torch.linalg.svdvals(matrix)
    return values / values[0]


u, _, v = torch.linalg.svd(state["exp_avg"], full_matrices=False)
shown = {"the gradient": gradient, "AdamW's step": adams_step, "U Vᵀ of the momentum": u @ v}
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, matrix in shown.items():
    axes.semilogy(spectrum(matrix), label=name)
axes.set(xlabel="direction", ylabel="singular value / the largest", ylim=(1e-3, 2))
axes.set_title("Singular values: how far a step moves in each direction of the matrix")
axes.legend(frameon=False)
half = spectrum(gradient).square().cumsum(0) / spectrum(gradient).square().sum()
print(f"16 of 64 directions hold more than 80 % of the gradient's squares: {half[15] > 0.8}")

# %% [markdown]
# A gradient has a few large directions and many small ones. AdamW evens that out number by number,
# and only a little. **Muon** evens it out completely: it replaces the momentum U Σ Vᵀ by U Vᵀ, the
# nearest orthogonal matrix. Small directions then move as far as large ones.
#
# An SVD at every step would be slow. An odd polynomial does it with matmuls: for X = U Σ Vᵀ
#
# $$aX + b(XX^T)X + c(XX^T)^2X = U\,(a\Sigma + b\Sigma^3 + c\Sigma^5)\,V^T$$

# %%
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
a, b, c = COEFFICIENTS
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
start = torch.logspace(-4, 0, 400)
sigma = start.clone()
for step in range(1, 6):
    sigma = a * sigma + b * sigma**3 + c * sigma**5
    axes.semilogx(start, sigma, label=f"after {step}", color=plt.cm.viridis(step / 6))
axes.set(xlabel="singular value at first", ylabel="singular value", ylim=(0, 1.3))
axes.set_title("Newton–Schulz: five steps bring values from 0.002 to 1 near 1")
_ = axes.legend(frameon=False, ncols=5, loc="lower right")

# %% [markdown]
# The polynomial must start from values of at most 1, so X is first divided by its norm. It doesn't
# converge to 1. Its coefficients are chosen to lift small values fast: 0.68 to 1.21 is near enough.

# %% [markdown]
# ### Exercise 20.1: Newton–Schulz
#
# About 12 minutes. Return about U Vᵀ of `matrix`, in its shape and dtype, with `matrix` unchanged.
# Divide it by its (Frobenius) norm, but by at least 1e-7. Then take `steps` steps of the polynomial
# with `COEFFICIENTS`. Work on the transpose of a tall matrix, so that X Xᵀ is the smaller square:
# no product may be larger than `matrix`, and no square larger than its short side.


# %%
def newton_schulz(matrix, steps=5):
    ### BEGIN SOLUTION memlab.reference.muon.newton_schulz
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # (short, long)
    x = x / x.norm().clamp(min=1e-7)  # every σ is at most 1
    for _ in range(steps):
        gram = x @ x.T  # (short, short): U Σ² Uᵀ
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
    ### END SOLUTION


# %%
newton_schulz = exercise("20.1", newton_schulz)

# %%
momentum = state["exp_avg"].T.double()  # (64, 192)
before = torch.linalg.svdvals(momentum) / momentum.norm()
made = torch.linalg.svdvals(newton_schulz(momentum))
inside = (made > 0.68) & (made < 1.21)
print(f"the smallest singular value is less than a hundredth of the largest: "
      f"{before[-1] < before[0] / 100}")  # fmt: skip
print(
    f"all that start above 0.002 end within 0.68 … 1.21: {inside[: (before > 0.002).sum()].all()}"
)
first = torch.zeros_like(momentum)
shampoo_(first, momentum, {}, lr=1.0, eps=1e-20)
print(f"Shampoo's first step, singular values all within 1 %: {spectrum(first)[-1] > 0.99}")

# %% [markdown]
# **Shampoo** (2018) arrives at the same matrix: its first step is (G Gᵀ)^(−1/4) G (Gᵀ G)^(−1/4),
# and that is U Vᵀ. It keeps sums of G Gᵀ and Gᵀ G to do so: two square matrices. Muon keeps
# neither.

# %% [markdown]
# ### Exercise 20.2: Muon's step
#
# About 10 minutes. Update one matrix in place. `state` is yours, empty at first: keep **one**
# tensor in it. M ← μM + (1 − μ)G is the momentum. Look one gradient ahead: X = (1 − μ)G + μM. Cast
# X to `dtype`, orthogonalize it, and cast back. Then W ← W − lr · weight_decay · W, and W ← W − lr
# · √max(1, rows / columns) · O.


# %%
def muon_(weight, gradient, state, lr, momentum=0.95, weight_decay=0.1, dtype=torch.bfloat16):
    ### BEGIN SOLUTION memlab.reference.muon.muon_
    rows, columns = weight.shape
    m = state.get("m", torch.zeros_like(gradient))
    state["m"] = m = momentum * m + (1 - momentum) * gradient
    ahead = (1 - momentum) * gradient + momentum * m
    weight *= 1 - lr * weight_decay
    weight -= lr * max(1, rows / columns) ** 0.5 * newton_schulz(ahead.to(dtype)).to(weight.dtype)
    ### END SOLUTION


# %%
muon_ = exercise("20.2", muon_)


# %%
def next_step(make, shape=(256, 1024)):
    """The weight after two steps; the second step's temporaries, and the state's bytes."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    step, kept = make(weight)
    for _ in range(2):
        weight.grad = torch.randn(shape)
        trace = memlab.measure(step, optimizer=kept)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    state = trace.at_end.get("optimizer_state", 0)
    return weight.detach(), trace.peak_bytes - before, state


def yours(weight):
    state = {}
    return torch.no_grad()(lambda: muon_(weight, weight.grad, state, lr=0.02)), None


def by(make, **settings):
    def made(weight):
        optimizer = make([weight], lr=0.02, **settings)
        return optimizer.step, optimizer

    return made


# %%
m, n = 256, 1024
own, copies, _ = next_step(yours)
for name, make in {
    "torch.optim.Muon": by(torch.optim.Muon),
    "memlab.optim.Muon": by(optim.Muon, adjust_lr="original", weight_decay=0.1, chunk=2**14),
}.items():
    weight, temporaries, kept = next_step(make)
    print(f"{name:18} state {kept:,}, temporaries {temporaries:,}; ", end="")
    print(f"yours within 0.002: {(own - weight).abs().max() < 0.002}")
print(f"4·m·n = {4 * m * n:,}; 4·m·n + 2·m² = {4 * m * n + 2 * m * m:,}")

# %% [markdown]
# The **state** is half of AdamW's. The **temporaries** are those of one matrix in bfloat16, because
# the loop steps one weight after another. memlab's has two matrices and a square at a time. A loop
# over all matrices at once would have all of them.
#
# ### What it costs
#
# For a square matrix of width m the matmuls take 30·m³ operations. The model itself takes 6·m² per
# token. The ratio is 5·m / tokens:

# %%
for tokens in (2_048, 65_536, 4_194_304):
    print(f"{tokens:9,} tokens per step, width 4,096: {5 * 4096 / tokens:8.1%} more operations")

# %% [markdown]
# Muon is for large batches. At 2,048 tokens on one GPU, the optimizer takes ten times the model's
# own time. (memlab plan counts it.) And it needs whole matrices: a shard of ZeRO has part of one.

# %% [markdown]
# ## GaLore: moments of a projection
#
# Muon keeps one tensor of the matrix's size. **GaLore** keeps none. Sixteen of 64 directions hold
# most of the gradient, so Adam gets only those: R = Pᵀ G, where P has the r largest singular
# vectors of a gradient (m × n, m ≤ n). The step is projected back.
#
# P is found once in 200 steps. What it keeps is P, m · r, and two moments, r · n each.

# %% [markdown]
# ### Exercise 20.3: GaLore's step
#
# About 18 minutes. Update one matrix in place, tall or wide. If rows ≥ columns, work on the
# transposes (views: they share memory), so the short side comes first. P: the first `rank` columns
# of U, from `torch.linalg.svd(gradient, full_matrices=False)`, at steps 1, 1 + `gap`, 1 + 2·`gap`,
# … Keep it as `state["P"]`, and R's moments as `state["m"]` and `state["v"]`: no byte more. Adam's
# step N has bias corrections, as in Day 8, without weight decay. W ← W − lr · scale · P N.


# %%
def galore_(weight, gradient, state, lr, rank, gap=200, scale=0.25, betas=(0.9, 0.999), eps=1e-8):
    ### BEGIN SOLUTION memlab.reference.galore.galore_
    beta1, beta2 = betas
    if weight.shape[0] >= weight.shape[1]:  # the short side is projected; of a square, columns
        weight, gradient = weight.T, gradient.T
    state["t"] = t = state.get("t", 0) + 1
    if (t - 1) % gap == 0:
        u, _, _ = torch.linalg.svd(gradient, full_matrices=False)
        state["P"] = u[:, :rank].clone()  # a slice would keep all of U alive
    low = state["P"].T @ gradient  # (r, n)
    zeros = torch.zeros_like(low)
    state["m"] = m = beta1 * state.get("m", zeros) + (1 - beta1) * low
    state["v"] = v = beta2 * state.get("v", zeros) + (1 - beta2) * low**2
    step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
    weight -= lr * scale * state["P"] @ step  # (m, n)
    ### END SOLUTION


# %%
galore_ = exercise("20.3", galore_)

# %% [markdown]
# A slice `u[:, :rank]` is a view: it keeps **all** of U in memory, m · m numbers, not m · r. The
# authors' package (galore-torch 1.0) does that with float32 gradients. You can see it:

# %%
u = torch.linalg.svd(torch.randn(256, 1024), full_matrices=False)[0]
for name, tensor in {"slice": u[:, :64], "copy": u[:, :64].clone()}.items():
    print(f"{name}: {tensor.numel() * 4:,} bytes of numbers, "
          f"{tensor.untyped_storage().nbytes():,} kept alive")  # fmt: skip

# %% [markdown]
# And the step with the SVD needs more than the others:

# %%
for gap, when in ((1, "with an SVD"), (200, "without")):
    _, temporaries, kept = next_step(by(optim.GaLore, rank=64, gap=gap, chunk=2**14))
    print(f"a step {when:12} temporaries {temporaries:>9,}, state {kept:,}")
print(f"U, Σ and Vᵀ: {4 * (m * m + m + m * n):,}; P and two moments: {4 * 64 * (m + 2 * n):,}")

# %% [markdown]
# Those are the SVD's *results*. The library behind it (LAPACK, cuSOLVER) takes a workspace too,
# which neither the meter nor `memlab.predict` sees. A prediction of such a step is a lower bound.
#
# ## APOLLO: no SVD, and one number
#
# **APOLLO** projects with random numbers, drawn again from a seed: no P, no SVD. It doesn't project
# its step back. It asks how much Adam would have scaled each column of R, and scales the column of
# the *full* gradient by as much. **APOLLO-Mini** uses rank 1, and one number for the whole matrix.

# %%
small = {
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=3e-3),
    "Muon": lambda model: optim.Muon(optim.matrix_groups(model), lr=3e-3),
    "GaLore, rank 16": lambda model: optim.GaLore(optim.matrix_groups(model), lr=1e-2, rank=16),
    "APOLLO-Mini": lambda model: optim.Apollo(optim.matrix_groups(model), lr=3e-3, **MINI),
}
learned = {name: train(make, 25) for name, make in small.items()}
for name, (loss, _, optimizer) in learned.items():
    kept = memlab.measure(lambda: None, optimizer=optimizer).at_end["optimizer_state"]
    ahead = "" if name == "AdamW" else "; within 10 % of AdamW's loss, or below: "
    reached = "" if name == "AdamW" else loss < 1.1 * learned["AdamW"][0]
    print(f"{name:16} state {format_bytes(kept):>10}{ahead}{reached}")

# %% [markdown]
# Twenty-five steps of a small model say that all of them learn, and not more. The papers compare
# them at up to 7B. Each needs its own learning rate.
#
# ## SOAP: more state, fewer steps
#
# **SOAP** runs Adam in the eigenvectors of Shampoo's matrices: it keeps G Gᵀ's average L and its
# eigenvectors, m · m each, the same for Gᵀ G, n · n each, and both moments.

# %% [markdown]
# ### Exercise 20.4: the state of a matrix
#
# About 10 minutes. Return a dictionary of **elements** kept for a matrix of `rows` × `columns`:
# `"adamw"`, `"muon"`, `"galore"` and `"apollo"` (channel by channel, its seed and norm not counted)
# at this `rank`, `"shampoo"` (no momentum, no roots kept) and `"soap"`. If `rank` is not below the
# short side, GaLore and APOLLO keep what AdamW does.


# %%
def elements_kept(rows, columns, rank):
    ### BEGIN SOLUTION
    short, long = sorted((rows, columns))
    whole = 2 * short * long
    projected = rank < short
    return {
        "adamw": whole,
        "muon": short * long,
        "galore": rank * (short + 2 * long) if projected else whole,
        "apollo": 2 * rank * long if projected else whole,
        "shampoo": short**2 + long**2,
        "soap": 2 * short**2 + 2 * long**2 + whole,
    }
    ### END SOLUTION


# %%
elements_kept = exercise("20.4", elements_kept)


# %%
def kept_by(step_):
    """Elements that a reference keeps for a matrix of 48 × 96, by the meter."""
    weight, gradient, state = torch.zeros(48, 96), torch.randn(48, 96), {}
    trace = memlab.measure(lambda: step_(weight, gradient, state, lr=0.1))
    return sum(event.bytes for event in trace.events if event.phase != "before") // 4


formula = elements_kept(48, 96, 8)
for name, step_ in {"muon": muon_, "galore": partial(galore_, rank=8), "shampoo": shampoo_,
                    "soap": soap_}.items():  # fmt: skip
    print(f"{name:8} {kept_by(step_):6,} elements by the meter, {formula[name]:6,} by the formula")

# %% [markdown]
# ## At scale: Llama 2 7B
#
# State in float32, with a rank of 1,024; and the transient of the largest matrix, 4,096 × 11,008.
# (Shampoo's and SOAP's depend on how their roots are computed.)


# %%
def state_bytes(name, config, rank):
    """Of all weights: matrices by your formula, others by AdamW."""
    sides, others = sides_of(config)
    return 4 * (sum(elements_kept(*shape, rank)[name] for shape in sides) + 2 * others)


m, n = 4_096, 11_008
TRANSIENTS = {
    "adamw": 0,  # chunks of a few MiB
    "muon": 4 * m * n + 2 * m * m,  # bfloat16
    "galore": 4 * (m * m + m + m * n),  # of an SVD, once in 200 steps, and its workspace
    "apollo": 0,
}
STATES = {name: state_bytes(name, seven, 1_024) for name in elements_kept(2, 2, 1)}
STATES["apollo, rank 1"] = state_bytes("apollo", seven, 1)
for name, count in STATES.items():
    print(f"{name:15} state {format_bytes(count):>10}, {count / STATES['adamw']:4.0%} of AdamW's",
          end="")  # fmt: skip
    needs = TRANSIENTS.get(name.split(",")[0])
    print("" if needs is None else f"; transient {needs / 2**20:.0f} MiB")

# %%
reveal("20.1", muon_gib=STATES["muon"], galore_gib=STATES["galore"], soap_gib=STATES["soap"])

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for row, count in enumerate(STATES.values()):
    matrices = count - 8 * others
    axes.barh(row, matrices / 2**30, color="#4477aa", label=None if row else "matrices")
    axes.barh(row, 8 * others / 2**30, left=matrices / 2**30, color="#ddaa33",
              label=None if row else "embedding, output layer, norms: AdamW")  # fmt: skip
    axes.text(count / 2**30 + 1, row, f"{count / 2**30:.1f} GiB", va="center", fontsize=9)
axes.set_yticks(range(len(STATES)), list(STATES))
axes.invert_yaxis()
axes.set(xlabel="GiB of state in float32", title="Llama 2 7B: what each optimizer keeps")
axes.legend(frameon=False, loc="lower right")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Explain the gap
#
# **Muon** is half of AdamW's and a little: embedding and output layer keep both moments. **GaLore**
# at a quarter of the width is a third, not a quarter: P, and moments along the *long* side.
#
# **SOAP** is more than three times AdamW's. For 4,096 × 11,008 the square of the long side,
# 11,008², is as large as 2.7 such matrices. (The paper's one-sided version keeps the short side's
# alone.)

# %% [markdown]
# **Transients** exist once, if weights are stepped one after another. An optimizer that steps all
# weights at once, as torch's `foreach` does, needs them all together. With `step_in_backward` (Day
# 8) gradients go the same way: one at a time.

# %% [markdown]
# ## Claims on trial
#
# GaLore's paper: up to 65.5 % less optimizer memory, and pre-training 7B on 24 GB, without
# checkpointing or offloading. Its setup: bfloat16, steps in backward, moments in 8 bits. Here is a
# step of 256 tokens, with moments and P in bfloat16 first. `tests/course/test_day20.py` makes this
# prediction, for all 32 blocks; it takes half a minute.


# %%
def galore_step(config, tokens):
    """A step in bfloat16 that frees each gradient in backward."""
    model = GPT(config, dtype=torch.bfloat16).to("cuda")
    groups, brain = optim.matrix_groups(model), torch.bfloat16
    inner = optim.GaLore(groups, rank=1024, moment_dtype=brain, rounding="stochastic")
    optimizer = optim.step_in_backward(inner)
    batch = torch.zeros(1, tokens, dtype=torch.long, device="cuda")

    def step():
        optimizer.zero_grad()
        model(batch, batch).backward()
        optimizer.step()

    return step, model, inner


RESERVED = 24_899_485_696  # memlab.predict(partial(galore_step, seven, 256)).reserved_bytes

# %%
brain = STATES["galore"] // 2  # two bytes a number
eight = round(STATES["galore"] / 4 * (1 + 4 / 256))  # one byte, and a scale for each 256
budget = memory_named("rtx4090").budget_bytes
CLAIMS = {
    "65.5 % less optimizer memory (GaLore)":
        f"{1 - STATES['galore'] / STATES['adamw']:.1%} for 7B at rank 1,024",
    "82.5 % less with 8-bit moments, against bfloat16's AdamW (GaLore)":
        f"{1 - eight / (STATES['adamw'] // 2):.1%}, by formula",
    "7B on 24 GB without checkpointing (GaLore), moments in bfloat16":
        f"{format_bytes(RESERVED)} reserved, without the SVD's workspace, of "
        f"{format_bytes(budget)}: {budget >= RESERVED}",
    "7B on 24 GB without checkpointing, moments in 8 bits":
        f"{format_bytes(RESERVED - brain + eight)}: {budget >= RESERVED - brain + eight}",
    "APOLLO-Mini: the memory of SGD (APOLLO)":
        f"{format_bytes(STATES['apollo, rank 1'])}, nearly all of it for {others:,} other weights",
}  # fmt: skip
for claim, found in CLAIMS.items():
    print(f"{claim}\n    {found}")

# %% [markdown]
# ## On your GPU
#
# Where there is a GPU, this takes one step of each optimizer for the matrices of one 7B block, and
# compares times. The SVD's workspace shows in the allocator's peak, if cuSOLVER takes it there.


# %%
def on_gpu(make, gpu):
    """Milliseconds of a step, and GiB at its peak beyond what is there before."""
    counters = counters_for(gpu)
    weights = [torch.randn(s, device=gpu).requires_grad_() for s in sides[:7]]
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    torch.accelerator.synchronize()
    counters.reset_peak()
    before, begin = counters.read().allocated_bytes, time.perf_counter()
    optimizer.step()
    torch.accelerator.synchronize()
    spent = time.perf_counter() - begin
    return 1000 * spent, (counters.read().peak_bytes - before) / 2**30


# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    for name, make in {
        "AdamW": optim.AdamW, "Muon": optim.Muon, "APOLLO-Mini": partial(optim.Apollo, **MINI),
        "GaLore, with an SVD": partial(optim.GaLore, rank=1024, gap=1),
        "GaLore, without": partial(optim.GaLore, rank=1024),
    }.items():  # fmt: skip
        spent, extra = on_gpu(make, gpu)
        print(f"{name:20} {spent:8.1f} ms, {extra:.2f} GiB of temporaries")
else:
    print(stored_on_a_gpu("day 20"))

# %% [markdown]
# ## What you can do now
#
# | for a matrix of m × n, m ≤ n | elements kept | a step also needs |
# | --- | --- | --- |
# | AdamW | 2mn | chunks |
# | Muon | mn | 4mn + 2m² bytes, 15 matmuls |
# | GaLore, rank r | r(m + 2n) | an SVD, once in 200 steps |
# | APOLLO, rank r | 2rn | random numbers |
# | Shampoo | m² + n² | roots of both |
# | SOAP | 2m² + 2n² + 2mn | QR of both, once in 10 steps |
#
# Ask of any new optimizer: what does it keep per *shape*? What exists for a moment, and of how many
# weights at once? Which weights does it leave to AdamW? How many tokens pay for its matmuls?

# %% [markdown]
# ## The running bill
#
# The bill's optimizer state is on the disk since Day 14. Its step reads a few weights' state at a
# time. A smaller state would be read faster, and leave the peak as it is.

# %%
running_bill(20)

# %% [markdown]
# ## Sources
#
# - Jordan et al. 2024: [Muon: An optimizer for hidden layers in neural
#   networks](https://kellerjordan.github.io/posts/muon/)
# - Liu et al. 2025: [Muon is Scalable for LLM Training](https://arxiv.org/abs/2502.16982)
# - Zhao et al. 2024: [GaLore: Memory-Efficient LLM Training by Gradient Low-Rank
#   Projection](https://arxiv.org/abs/2403.03507)
# - Zhu et al. 2024: [APOLLO: SGD-like Memory, AdamW-level
#   Performance](https://arxiv.org/abs/2412.05270)
# - Gupta et al. 2018: [Shampoo: Preconditioned Stochastic Tensor
#   Optimization](https://arxiv.org/abs/1802.09568)
# - Vyas et al. 2024: [SOAP: Improving and Stabilizing Shampoo using
#   Adam](https://arxiv.org/abs/2409.11321)
