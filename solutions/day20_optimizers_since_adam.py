# %% [markdown]
# # Day 20: Optimizers since Adam
#
# **Muon, GaLore, APOLLO, Shampoo, SOAP: which keep less state than AdamW, and which need large
# temporaries?**
#
# After today you have built Muon's and GaLore's steps, and can compute their temporaries. For each
# optimizer you can say what it keeps for a matrix of any shape, and which weights stay with AdamW.
#
# About 85 minutes, 50 of them for four exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks them. If you are
# stuck, type `memlab hint 20.1` in a terminal. You can skip an exercise and go on.

# %% [markdown]
# ## The question
#
# AdamW keeps two moments per weight. Day 8 dropped one (Lion) or shared one (Adam-mini). Day 9
# stored both in 8 bits.
#
# Newer optimizers treat **matrices** as a whole:
#
# - Muon orthogonalizes a momentum.
# - GaLore and APOLLO keep moments of a low-rank projection of the gradient.
# - Shampoo and SOAP multiply the gradient by square matrices from both sides.
#
# How much memory do they need?

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
# Take Llama 2 7B with float32 optimizer state. AdamW's state is 50.2 GiB. How many GiB is the state
# of
#
# 1. Muon, which keeps one momentum?
# 2. GaLore, which projects gradients to rank 1,024? (The hidden size is 4,096.)
# 3. SOAP, which keeps AdamW's moments and four square matrices per matrix?

# %%
### BEGIN SOLUTION
guess("20.1", muon_gib=25, galore_gib=12.5, soap_gib=75)  # a half, a quarter, one and a half
### END SOLUTION
### BEGIN STUB
# guess("20.1", muon_gib=..., galore_gib=..., soap_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# Dry-run a step of the bill's 124M model with Muon. (`memlab measure` and `memlab plan` also accept
# Muon, GaLore and APOLLO-Mini by name.)

# %%
trace, count = dry_trace(SETTING, combined("muon")), SETTING.config.parameters
state = trace.at_end["optimizer_state"]
print(f"Muon: {format_bytes(state)} of state, {state / count:.2f} bytes per weight (AdamW: 8)")
embedding = SETTING.config.vocab_size * SETTING.config.hidden_size
print(f"the embedding has {embedding / count:.0%} of the weights")

# %% [markdown]
# Muon needs more than 4 bytes per weight. The embedding has 31 % of this model's weights, and
# AdamW updates it. So which weights does Muon update? List the matrices of hidden layers in Llama 2
# 7B:


# %%
@cache
def sides_of(config):
    """Return the short and long side of each hidden matrix, and the number of other weights."""
    with torch.device("meta"):
        matrices, others = optim.matrix_groups(GPT(config))
    sides = [tuple(sorted(weight.shape)) for _, weight in matrices["params"]]
    return sides, sum(weight.numel() for _, weight in others["params"])


LLAMA_2_7B = PRESETS["llama-2-7b"]
sides, others = sides_of(LLAMA_2_7B)
for shape in sorted(set(sides)):
    print(f"{sides.count(shape):3} matrices of {shape[0]:,} × {shape[1]:,}")
print(f"{others:,} other weights: {others / LLAMA_2_7B.parameters:.1%} of all weights")

# %% [markdown]
# These optimizers update the matrices of hidden layers, which multiply activations. They leave the
# other weights to AdamW:
#
# - The **embedding** is a table. A step reads a few rows. Unless the table is tied to the output
#   layer, all other rows have a zero gradient.
# - The **output layer** has a row per vocabulary entry. In experiments, AdamW trains it better than
#   Muon.
# - Norms are vectors.

# %% [markdown]
# ## What Adam does to a matrix
#
# Train a small text model for 15 steps of AdamW. Plot the singular values of one gradient, of
# AdamW's step, and of U Vᵀ (Muon's step, explained below):

# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, layers=2, kv_heads=4, intermediate_size=192)
TEXT = source_bytes("256 KiB")


def train(make, steps, seed=1):
    """Return the mean of the last five losses, the model and its optimizer."""
    torch.manual_seed(0)
    model, losses = GPT(CONFIG), []
    optimizer, data = make(model), batches(TEXT, 8, 64, seed=seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-5:]) / 5, model, optimizer


_, model, adamw = train(lambda model: optim.AdamW(model.parameters(), lr=3e-3), 15)
weight = model.blocks[1].mlp.up.weight
gradient, state = weight.grad, adamw.state[weight]
adamw_step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)  # up to a constant factor


# %%
def spectrum(matrix):
    """Return the singular values, largest first, relative to the largest."""
    values = torch.linalg.svdvals(matrix)
    return values / values[0]


u, _, v = torch.linalg.svd(state["exp_avg"], full_matrices=False)
shown = {"the gradient": gradient, "AdamW's step": adamw_step, "U Vᵀ of the momentum": u @ v}
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, matrix in shown.items():
    axes.semilogy(spectrum(matrix), label=name)
axes.set(
    xlabel="direction (singular vector)", ylabel="singular value / the largest", ylim=(1e-3, 2)
)
axes.set_title("Singular values: how far a step moves in each direction")
axes.legend(frameon=False)
share = spectrum(gradient).square().cumsum(0) / spectrum(gradient).square().sum()
print(f"16 of 64 directions hold more than 99 % of the squared norm of the gradient: "
      f"{share[15] > 0.99}")  # fmt: skip

# %% [markdown]
# A gradient has a few large directions and many small ones. AdamW scales each element on its own,
# which evens out the directions only partly. **Muon** evens them out completely: it replaces the
# momentum U Σ Vᵀ by U Vᵀ, which sets every singular value to 1 (it *orthogonalizes* the momentum).
# Then small directions move as far as large ones.
#
# An SVD at every step would be slow. **Newton–Schulz** approximates U Vᵀ with an odd polynomial,
# applied several times. For X = U Σ Vᵀ:
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
axes.set(xlabel="singular value before", ylabel="singular value after", ylim=(0, 1.3))
axes.set_title("Newton–Schulz: after five steps, values between 0.002 and 1 are near 1")
_ = axes.legend(frameon=False, loc="upper left")

# %% [markdown]
# The polynomial needs singular values of at most 1, so first divide X by its norm. The values do
# not converge to 1: the coefficients raise small values fast, and 0.68 to 1.21 is close enough.

# %% [markdown]
# ### Exercise 20.1: Newton–Schulz
#
# About 12 minutes. Return approximately U Vᵀ of `matrix`, in its shape and dtype. Don't change
# `matrix`.
#
# 1. If the matrix is tall, work on its transpose, so that X Xᵀ is the smaller square.
# 2. Divide by the Frobenius norm, but by at least 1e-7.
# 3. Apply the polynomial `steps` times with `COEFFICIENTS`.
#
# No intermediate result may have more elements than `matrix`.


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
after = torch.linalg.svdvals(newton_schulz(momentum))
inside = (after > 0.68) & (after < 1.21)
print(f"before: the smallest singular value is below 1 % of the largest: "
      f"{before[-1] < before[0] / 100}")  # fmt: skip
print(f"after: all values that were above 0.002 are between 0.68 and 1.21: "
      f"{inside[: (before > 0.002).sum()].all()}")  # fmt: skip

# %% [markdown]
# **Shampoo** (2018) computes the same matrix in its first step: (G Gᵀ)^(−1/4) G (Gᵀ G)^(−1/4) = U
# Vᵀ. For this, it keeps the sums of G Gᵀ and Gᵀ G over all steps, and computes their inverse fourth
# roots. Muon keeps neither sum.

# %%
first = torch.zeros_like(momentum)
shampoo_(first, momentum, {}, lr=1.0, eps=1e-20)
print(f"Shampoo's first step: the smallest singular value is more than 0.99 of the largest: "
      f"{spectrum(first)[-1] > 0.99}")  # fmt: skip

# %% [markdown]
# ### Exercise 20.2: Muon's step
#
# About 10 minutes. Update one matrix in place. Don't change `gradient`. `state` is an empty
# dictionary at first; keep **one** tensor in it, the momentum M. μ is `momentum`.
#
# 1. Update the momentum, which starts at 0: M ← μM + (1 − μ)G.
# 2. Nesterov momentum: X = (1 − μ)G + μM. Cast X to `dtype`, orthogonalize it (O), and cast O back.
# 3. Decay: W ← W − lr · weight_decay · W.
# 4. Step: W ← W − lr · √max(1, rows / columns) · O.


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
def after_two_steps(make, shape=(256, 1024)):
    """Return the weight after two steps, and the bytes of temporaries and state."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    step, optimizer = make(weight)
    for _ in range(2):
        weight.grad = torch.randn(shape)
        trace = memlab.measure(step, optimizer=optimizer)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    state = trace.at_end.get("optimizer_state", 0)
    return weight.detach(), trace.peak_bytes - before, state


def yours(weight):
    state = {}
    return torch.no_grad()(lambda: muon_(weight, weight.grad, state, lr=0.02)), None


def of_class(optimizer_class, **settings):
    def make(weight):
        optimizer = optimizer_class([weight], lr=0.02, **settings)
        return optimizer.step, optimizer

    return make


# %%
m, n = 256, 1024
your_weight, _, _ = after_two_steps(yours)
for name, make in {
    "torch.optim.Muon": of_class(torch.optim.Muon),
    "memlab.optim.Muon": of_class(optim.Muon, adjust_lr="original", weight_decay=0.1, chunk=2**14),
}.items():
    weight, temporaries, size = after_two_steps(make)
    print(f"{name:18} state {size:,} bytes, temporaries {temporaries:,} bytes; ", end="")
    print(f"weights match yours within 0.002: {(your_weight - weight).abs().max() < 0.002}")
print(f"4·m·n = {4 * m * n:,} bytes; 4·m·n + 2·m² = {4 * m * n + 2 * m * m:,} bytes")

# %% [markdown]
# The **state** is half of AdamW's. The **temporaries** exist for one matrix at a time, because both
# optimizers update one weight after another. memlab's are two m × n matrices and an m × m square in
# bfloat16, 4·m·n + 2·m² bytes (float32 work is done in chunks of `chunk` elements). torch's also
# hold a float32 matrix and a second square.

# %% [markdown]
# ### Muon's compute
#
# For a square matrix of width m, the matmuls of a step need 30·m³ operations. Forward and backward
# need 6·m² per token. The ratio is 5·m / tokens:

# %%
for tokens in (2_048, 65_536, 4_194_304):
    print(f"{tokens:9,} tokens per step, width 4,096: {5 * 4096 / tokens:8.1%} more operations")

# %% [markdown]
# Muon suits large batches. At 2,048 tokens on one GPU, it needs ten times the operations of forward
# and backward. Muon also needs whole matrices, but a ZeRO shard has only a part of a matrix.

# %% [markdown]
# ## GaLore: moments of a projection
#
# Muon keeps one tensor of the matrix's size. **GaLore** keeps smaller ones. Sixteen of 64
# directions hold most of the gradient, so GaLore runs Adam on a projection: R = Pᵀ G. The columns
# of P are the first r left singular vectors of a gradient (m × n, m ≤ n). Then GaLore projects the
# step back.
#
# GaLore computes P every 200 steps. It keeps P (m · r) and two moments (r · n each).

# %% [markdown]
# ### Exercise 20.3: GaLore's step
#
# About 18 minutes. Update one matrix in place. Don't change `gradient`.
#
# 1. If rows ≥ columns, work on the transposes (views): the short side comes first.
# 2. At steps 1, 1 + `gap`, 1 + 2·`gap`, …, set P to the first `rank` columns of U from
#    `torch.linalg.svd(gradient, full_matrices=False)`.
# 3. Run Adam on R to get N: bias corrections (Day 8), no weight decay.
# 4. W ← W − lr · scale · P N.
#
# Keep only `state["P"]`, R's moments `state["m"]` and `state["v"]` (kept when P changes), and a
# step count. The check counts bytes kept alive.


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
# A slice `u[:, :rank]` is a view. It keeps **all** of U in memory, m · m elements instead of m · r.
# The authors' package (galore-torch 1.0) keeps such a slice if gradients are float32. Compare it
# with a copy:

# %%
u = torch.linalg.svd(torch.randn(256, 1024), full_matrices=False)[0]
for name, tensor in {"slice": u[:, :64], "copy": u[:, :64].clone()}.items():
    print(f"{name}: {tensor.numel() * 4:,} bytes of elements, "
          f"{tensor.untyped_storage().nbytes():,} kept alive")  # fmt: skip

# %% [markdown]
# A step with an SVD needs more temporaries than the other steps:

# %%
for gap, kind in ((1, "with an SVD:"), (200, "without SVD:")):
    make = of_class(optim.GaLore, rank=64, gap=gap, chunk=2**14)
    _, temporaries, size = after_two_steps(make)
    print(f"a step {kind} temporaries {temporaries:>9,} bytes, state {size:,} bytes")
print(f"U, Σ and Vᵀ: {4 * (m * m + m + m * n):,} bytes; ", end="")
print(f"P and two moments: {4 * 64 * (m + 2 * n):,} bytes")

# %% [markdown]
# With an SVD, the measured temporaries are its *results*. The library behind it (LAPACK, cuSOLVER)
# also allocates a workspace, which neither the meter nor `memlab.predict` can see. So a prediction
# is a lower bound.

# %% [markdown]
# ## APOLLO: no SVD, no projection back
#
# **APOLLO** projects with a random matrix and draws it again from a seed: no P to keep, and no SVD.
# It does not project the step back. Instead, it computes how much Adam would scale each column of
# R, and scales the same column of the *full* gradient by that factor. **APOLLO-Mini** uses rank 1
# and one factor for the whole matrix.

# %%
small = {
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=3e-3),
    "Muon": lambda model: optim.Muon(optim.matrix_groups(model), lr=3e-3),
    "GaLore, rank 16": lambda model: optim.GaLore(optim.matrix_groups(model), lr=1e-2, rank=16),
    "APOLLO-Mini": lambda model: optim.Apollo(optim.matrix_groups(model), lr=3e-3, **MINI),
}
results = {name: train(make, 25) for name, make in small.items()}
for name, (loss, _, optimizer) in results.items():
    size = memlab.measure(lambda: None, optimizer=optimizer).at_end["optimizer_state"]
    near = loss < 1.1 * results["AdamW"][0]
    print(f"{name:16} state {format_bytes(size):>10}; loss at most 10 % above AdamW's: {near}")

# %% [markdown]
# Twenty-five steps of a small model cannot rank optimizers. To compare them, tune the learning rate
# of each.

# %% [markdown]
# ## SOAP: Adam in an eigenbasis
#
# **SOAP** runs Adam in the eigenbasis of Shampoo's matrices. Every 10 steps, it updates the
# eigenvectors with a QR decomposition. It keeps:
#
# - the average of G Gᵀ and its eigenvectors, m · m each
# - the average of Gᵀ G and its eigenvectors, n · n each
# - both moments, m · n each

# %% [markdown]
# ### Exercise 20.4: the state of a matrix
#
# About 10 minutes. Return a dictionary with the number of **elements** that each optimizer keeps
# for a matrix of `rows` × `columns` and this `rank`. Ignore scalars, such as step counts and seeds.
#
# | key | state to count |
# | --- | --- |
# | `"adamw"` | two moments |
# | `"muon"` | one momentum |
# | `"galore"` | P, and two moments of R |
# | `"apollo"` | two moments of R |
# | `"shampoo"` | sums of G Gᵀ and Gᵀ G (no momentum, no roots) |
# | `"soap"` | as listed above |
#
# If `rank` is not below the short side, GaLore and APOLLO keep as many elements as AdamW.


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
def measured_elements(step_):
    """Return the elements that an optimizer keeps for a matrix of 48 × 96."""
    weight, gradient, state = torch.zeros(48, 96), torch.randn(48, 96), {}
    trace = memlab.measure(lambda: step_(weight, gradient, state, lr=0.1))
    return sum(event.bytes for event in trace.events if event.phase != "before") // 4


formula = elements_kept(48, 96, 8)
for name, step_ in {"muon": muon_, "galore": partial(galore_, rank=8), "shampoo": shampoo_,
                    "soap": soap_}.items():  # fmt: skip
    print(f"{name:8} {measured_elements(step_):6,} elements measured, formula {formula[name]:6,}")

# %% [markdown]
# ## At scale: Llama 2 7B
#
# Compute the float32 state with a rank of 1,024, and the temporaries of the largest matrix, 4,096 ×
# 11,008. (memlab's AdamW and APOLLO update a matrix in chunks, of 1 MiB on a CPU and 16 MiB on a
# GPU. Shampoo's and SOAP's temporaries depend on how you compute roots and eigenvectors.)


# %%
def state_bytes(name, config, rank):
    """Return the state bytes: your formula for matrices, AdamW's state for other weights."""
    sides, others = sides_of(config)
    return 4 * (sum(elements_kept(*shape, rank)[name] for shape in sides) + 2 * others)


m, n = 4_096, 11_008
TEMPORARIES = {
    "adamw": 0,  # only chunks
    "muon": 4 * m * n + 2 * m * m,  # bfloat16
    "galore": 4 * (m * m + m + m * n),  # an SVD's results, every 200 steps, without its workspace
    "apollo": 4 * m * 1_024,  # a random matrix; then chunks
    "apollo, rank 1": 0,  # only chunks
}
STATES = {name: state_bytes(name, LLAMA_2_7B, 1_024) for name in elements_kept(2, 2, 1)}
STATES["apollo, rank 1"] = state_bytes("apollo", LLAMA_2_7B, 1)
for name, count in STATES.items():
    print(f"{name:15} state {format_bytes(count):>10}, {count / STATES['adamw']:4.0%} of AdamW's",
          end="")  # fmt: skip
    temporaries = TEMPORARIES.get(name)
    listed = f"{temporaries / 2**20:.0f} MiB" if temporaries else "a few chunks"
    print("" if temporaries is None else f"; temporaries {listed}")

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
axes.set(xlabel="GiB of float32 state", title="Llama 2 7B: the state of each optimizer")
axes.legend(frameon=False, loc="upper right")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Explain the gap
#
# - **Muon** needs a little more than half of AdamW's state: embedding and output layer keep both
#   moments.
# - **GaLore** with rank 1,024, a quarter of the hidden size, needs 35 % of AdamW's state, not 25 %:
#   it also keeps P, and both of AdamW's moments for embedding and output layer.
# - **SOAP** needs 3.6 times AdamW's state. An 11,008 × 11,008 square has 2.7 times as
#   many elements as a 4,096 × 11,008 matrix. (The paper's one-sided version keeps only squares of
#   the short side.)

# %% [markdown]
# **Temporaries** exist for one weight at a time if the optimizer updates one weight after another.
# torch's `foreach`, which updates all weights at once, needs the temporaries of all. With
# `step_in_backward` (Day 8), gradients also exist one at a time.

# %% [markdown]
# ## Claims on trial
#
# GaLore's paper claims up to 65.5 % less optimizer memory, and pre-training of 7B on 24 GB without
# checkpointing or offloading. Its setup: bfloat16 weights, the step inside backward, 8-bit moments.
#
# Predict a step of 256 tokens, with moments and P in bfloat16. `RESERVED` is the result. (The
# prediction takes half a minute; `tests/course/test_day20.py` repeats it.)


# %%
def galore_step(config, tokens):
    """Return a bfloat16 step that frees each gradient in backward, its model and its optimizer."""
    model = GPT(config, dtype=torch.bfloat16).to("cuda")
    groups, dtype = optim.matrix_groups(model), torch.bfloat16
    galore = optim.GaLore(groups, rank=1024, moment_dtype=dtype, rounding="stochastic")
    optimizer = optim.step_in_backward(galore)
    batch = torch.zeros(1, tokens, dtype=torch.long, device="cuda")

    def step():
        optimizer.zero_grad()
        model(batch, batch).backward()
        optimizer.step()

    return step, model, galore


RESERVED = 24_899_485_696  # memlab.predict(partial(galore_step, LLAMA_2_7B, 256)).reserved_bytes

# %%
in_bfloat16 = STATES["galore"] // 2  # moments and P, two bytes per element
in_8_bits = round(STATES["galore"] / 4 * (1 + 4 / 256))  # one byte each, and a scale per 256
reserved_8_bits = RESERVED - in_bfloat16 + in_8_bits
budget = memory_named("rtx4090").budget_bytes
CLAIMS = {
    "65.5 % less optimizer memory (GaLore)":
        f"{1 - STATES['galore'] / STATES['adamw']:.1%} for 7B at rank 1,024",
    "82.5 % less with 8-bit moments than AdamW in bfloat16 (GaLore)":
        f"{1 - in_8_bits / (STATES['adamw'] // 2):.1%}, by formula, P in 8 bits too",
    "7B on 24 GB without checkpointing (GaLore), moments and P in bfloat16":
        f"{format_bytes(RESERVED)} reserved without the SVD's workspace, "
        f"{format_bytes(budget)} available on an RTX 4090; fits: {budget >= RESERVED}",
    "7B on 24 GB without checkpointing, moments and P in 8 bits":
        f"{format_bytes(reserved_8_bits)} by formula, without the workspace; "
        f"fits: {budget >= reserved_8_bits}",
    "APOLLO-Mini: the memory of SGD (APOLLO)":
        f"{format_bytes(STATES['apollo, rank 1'])} of state, nearly all AdamW's for the {others:,} "
        f"other weights",
}  # fmt: skip
for claim, result in CLAIMS.items():
    print(f"{claim}\n    {result}")

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell times one step of each optimizer for the matrices of one 7B block. If
# cuSOLVER gets the SVD's workspace from torch's allocator, the peak includes it.


# %%
def time_and_temporaries(make, gpu):
    """Return the milliseconds of a step, and the GiB of its temporaries at the peak."""
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
        "GaLore, without SVD": partial(optim.GaLore, rank=1024),
    }.items():  # fmt: skip
        spent, temporaries = time_and_temporaries(make, gpu)
        print(f"{name:20} {spent:8.1f} ms, {temporaries:.2f} GiB of temporaries")
else:
    print(stored_on_a_gpu("day 20"))

# %% [markdown]
# ## What you can do now
#
# | for a matrix of m × n, m ≤ n | elements kept | a step also needs |
# | --- | --- | --- |
# | AdamW | 2mn | a few chunks |
# | Muon | mn | 4mn + 2m² bytes, 15 matmuls |
# | GaLore, rank r | r(m + 2n) | an SVD, every 200 steps |
# | APOLLO, rank r | 2rn | a random matrix, 4mr bytes |
# | Shampoo | m² + n² | roots of both |
# | SOAP | 2m² + 2n² + 2mn | QR of both, every 10 steps |
#
# For any new optimizer, answer four questions:
#
# 1. How many elements does it keep for an m × n matrix?
# 2. Which temporaries does it allocate, and for how many weights at once?
# 3. Which weights does it leave to AdamW?
# 4. How many tokens per step make its matmuls affordable?

# %% [markdown]
# ## The running bill
#
# Since Day 14, the bill's optimizer state is on disk, and a step reads it in small parts. A smaller
# state would be read faster, but the peak would not change.

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
