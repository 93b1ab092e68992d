# %% [markdown]
# # Day 14: Offloading
#
# **The GPU is full; the host and the disk are not. What can you move there, and what does the
# transfer cost?**
#
# Today you build the hooks, the optimizer and the layer streaming that offload tensors, and a
# commit that survives a power failure. Afterwards you can say which tensors can leave a GPU, and
# how many bytes they transfer per step.
#
# About 110 minutes, 77 of them for five exercises. You need a laptop; no GPU is needed. Nothing is
# downloaded, and nothing stays on the disk.

# %% [markdown]
# You can split this day in two; the second half begins with the weights. As before: **guess**,
# **measure**, then **build** what explains the gap. In an exercise, replace `raise
# NotImplementedError` with your own lines; the cell below it checks them. If you are stuck, run
# `memlab hint 14.1` in a terminal. You can skip an exercise: the lesson then uses the reference.

# %% [markdown]
# ## The question
#
# Training a 7B model needs 121 GB, or 18 bytes per weight: Day 4's 16 bytes, and 2 more during the
# step, when the gradient is float32. A GPU has 24 GB. Larger memories are slower to reach:
#
# - host memory, over the PCIe bus
# - NVMe disks, over the same bus
# - SATA disks, over an older bus
#
# The next cell uses the published speed of one product of each kind. Real programs are slower.

# %%
import itertools
import json
import subprocess
import sys
import tempfile
import weakref
from contextlib import nullcontext
from dataclasses import replace
from inspect import getsource
from itertools import accumulate as running_sums

import matplotlib.pyplot as plt
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import memlab
from memlab.checkpointing import checkpoint_blocks, uniform_schedule
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.losses import chunked_cross_entropy
from memlab.model import GPT, PRESETS
from memlab.offload import DiskStore, HostStore, OffloadedOptimizer, offloaded_activations
from memlab.offload.layers import stream_layers
from memlab.precision import MasterWeights
from memlab.units import format_bytes

# %%
STORES = {  # bytes, bytes per second, source
    "GPU memory": (24e9, 1008e9, "RTX 4090: NVIDIA, Ada architecture whitepaper"),
    "host, over PCIe": (192e9, 31.5e9, "4.0 x16: PCI-SIG; 192 GB for an i9-14900K: Intel"),
    "NVMe disk": (4000e9, 7.45e9, "990 PRO, 4 TB, reading: Samsung, data sheet"),
    "SATA disk": (4000e9, 0.56e9, "870 EVO, 4 TB, reading: Samsung, data sheet"),
}
N = PRESETS["llama-2-7b"].parameters
print(f"Reading and writing Adam's state of 7B, 2 × {8 * N / 1e9:.1f} GB, takes:")
for name, (size, speed, source) in STORES.items():
    print(f"{16 * N / speed:8.1f} s   {name:16} {size / 1e9:5,.0f} GB   ({source})")

# %%
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
colours = ("#00798c", "#4477aa", "#999933", "#cc6677")
# Edges near the geometric mean of two speeds.
edges = [2e12, 1.8e11, 1.5e10, 2e9, 2e8]
for place, (name, (size, speed, _)) in enumerate(STORES.items()):
    left, right = edges[place + 1], edges[place]
    axes.fill_between((left, right), size, 1e9, color=colours[place], alpha=0.8, linewidth=0)
    middle = (left * right) ** 0.5
    axes.text(middle, size * 1.25, name, ha="center")
    axes.text(middle, 1.6e9, f"{size / 1e9:,.0f} GB\n{speed / 1e9:,.4g} GB/s", ha="center",
              color="white", fontsize=11)  # fmt: skip
axes.axhline(18 * N, color="0.25", linestyle="--", linewidth=1)
axes.text(1.9e12, 18 * N * 1.2, "training 7B: 121 GB", fontsize=9)
axes.set(xscale="log", yscale="log", xlim=(2e12, 2e8), ylim=(1e9, 2e13))
axes.set(xlabel="bandwidth (slower to the right)", ylabel="bytes", xticks=(), yticks=(1e10, 1e12))
axes.minorticks_off()
axes.set_title("Larger memories are slower")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Two numbers matter each time: how many bytes does offloading **save**, and how many does it
# **transfer** per step? From here on we assume 25 GB/s to the host and 3 GB/s to a disk, which a
# good program can reach. Today measures bytes only; times follow from these assumed speeds.

# %% [markdown]
# ## Guess
#
# - On *this* machine, without a GPU: what percentage of the activations does torch's CPU offloading
#   save?
# - 7B: how many GB does a step transfer if Adam's state is offloaded?
# - 7B: how many times slower is a step of 2,048 tokens then, over PCIe and without overlap?
# - 7B: how many GB remain on the GPU if *everything* possible is offloaded?

# %%
### BEGIN SOLUTION
guess("14.1", host_saves_percent=50, moved_gb=54, slower_times=2.5, left_gb=14)
### END SOLUTION
### BEGIN STUB
# guess("14.1", host_saves_percent=..., moved_gb=..., slower_times=..., left_gb=...)
### END STUB

# %% [markdown]
# ## Does CPU offloading save memory on a CPU?
#
# Activations go to a **store** and come back for backward: `store.put(key, tensor)`,
# `store.get(key)`, `store.delete(key)`. `HostStore` keeps them in host memory. `DiskStore` keeps
# them in files of a temporary folder, which is deleted when the store is closed. Compare torch's
# `save_on_cpu` and both stores on a tiny model: how many bytes are alive when backward begins?


# %%
def a_model(layers=4, **settings):
    torch.manual_seed(0)
    return GPT(replace(PRESETS["tiny"], layers=layers), **settings)


tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(1))
batch = tokens[:, :-1], tokens[:, 1:]


def alive_before_backward(context, model=None):
    """Return the bytes alive after forward, and the trace."""
    model, loss = model or a_model(), []

    def forward():
        with context:
            loss.append(model(*batch))

    trace = memlab.measure(forward, model=model)
    return sum(event.bytes for event in trace.events if event.phase != "before"), trace


# %%
host, disk = HostStore(), DiskStore()
at_backward = {}
for name, context in (
    ("no offloading", nullcontext()),
    ("torch's save_on_cpu", torch.autograd.graph.save_on_cpu()),
    ("HostStore", offloaded_activations(host, minimum=1)),
    ("DiskStore", offloaded_activations(disk, minimum=1)),
):
    at_backward[name], _ = alive_before_backward(context)
    print(f"{name:20} {format_bytes(at_backward[name]):>10} alive when backward begins")
print(f"written to the HostStore {format_bytes(host.traffic.written)}, ", end="")
print(f"to the DiskStore {format_bytes(disk.traffic.written)}")
disk.close()

# %% [markdown]
# On a CPU, device memory **is** host memory. torch's `save_on_cpu` returns the same tensor, so
# nothing moves. HostStore makes a copy in the same memory. If a laptop test reports a saving here,
# the test is wrong; the meter counts every byte.
#
# So today's stores use the **disk**: their tensors really leave memory. On a GPU a HostStore works
# the same way over PCIe, and its traffic is counted the same way.

# %% [markdown]
# ## Activations
#
# Saved-tensor hooks (Days 5 and 7): during forward, `pack` receives each tensor that backward
# needs, and the graph saves what `pack` returns. Your `pack` returns a tuple with a `Kept`. A
# `Kept` represents elements in the store, and deletes them when the graph frees it.


# %%
def whole(tensor):
    """Return all elements of a tensor's storage, flat and detached."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


# %%
class Kept:
    """Elements in a store, deleted when this object is."""

    keys = itertools.count()

    def __init__(self, store, elements):
        self.store, self.key = store, f"kept/{next(Kept.keys)}"
        store.put(self.key, elements)

    def get(self):
        return self.store.get(self.key)

    def __del__(self):
        self.store.delete(self.key)


# %% [markdown]
# `pack` must find an existing Kept without keeping it alive. Use a **weak reference**:

# %%
store = DiskStore()
kept = Kept(store, torch.ones(1000))
known = weakref.ref(kept)
print(f"known() is the Kept: {known() is kept}; in the store {format_bytes(store.nbytes)}")
del kept
print(f"known() is {known()}; in the store {format_bytes(store.nbytes)}")
store.close()

# %% [markdown]
# ### Exercise 14.1: offload saved tensors
#
# About 20 minutes; do Exercise 7.5 first. Return `pack` and `unpack`.
#
# - Put each storage of at least `minimum` elements into the store **once**, for all its views.
#   Leave out the weights' storages.
# - For these tensors, `unpack` returns the same view, with its strides and dtype. Don't keep the
#   original tensor alive.
# - `pack` returns all other tensors detached, in the same memory.
# - When the graph is freed, the store must delete the graph's elements, even if an offloaded tensor
#   (such as x) is still alive.


# %%
def hooks(weights, store, minimum):
    """Return (pack, unpack) for saved_tensors_hooks."""
    ### BEGIN SOLUTION
    left_alone = {weight.untyped_storage() for weight in weights}
    known = weakref.WeakKeyDictionary()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage in left_alone or len(whole(tensor)) < minimum:
            return tensor.detach()
        kept = known[storage]() if storage in known else None
        if kept is None:
            kept = Kept(store, whole(tensor))
            known[storage] = weakref.ref(kept)
        return kept, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        kept, dtype, *view = packed
        return kept.get().view(dtype).as_strided(*view)

    return pack, unpack
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 14.1, about 18 lines")
    ### END STUB


# %%
hooks = exercise("14.1", hooks)

# %% [markdown]
# Backward reads one tensor after another, and the GPU idles during each transfer. But the order is
# known: about the **reverse** of the order of `put`. So prefetch the next tensor while the current
# one is used. `store.prefetch(key)` allocates the bytes at once and returns; a thread (on a GPU a
# *stream*) fills them, and `get` waits for it.

# %% [markdown]
# ### Exercise 14.2: prefetch one tensor
#
# About 10 minutes. Write a wrapper around a store. After each `get`, prefetch exactly one tensor,
# if any is left: the most recently put one that has not been read yet. A key can be read twice, or
# deleted before it is read. `delete` also deletes the key from the store.


# %%
class Ahead:
    def __init__(self, store):
        self.store, self.waiting = store, []

    def put(self, key, tensor):
        self.store.put(key, tensor)
        self.waiting.append(key)

    def get(self, key):
        ### BEGIN SOLUTION
        tensor = self.store.get(key)
        if key in self.waiting:
            self.waiting.remove(key)
        if self.waiting:
            self.store.prefetch(self.waiting[-1])
        return tensor
        ### END SOLUTION

    def delete(self, key):
        ### BEGIN SOLUTION
        self.store.delete(key)
        if key in self.waiting:
            self.waiting.remove(key)
        ### END SOLUTION


# %%
Ahead = exercise("14.2", Ahead)


# %%
def a_step(model, context=None):
    """Run forward in `context`, then backward."""
    model.zero_grad()
    with context or nullcontext():
        loss = model(*batch)
    loss.backward()


def activation_bytes(trace):
    """Return the bytes of activations and temporaries alive after each event."""
    others = ("parameters", "buffers", "gradients", "inputs")
    return list(running_sums(e.bytes * (e.category not in others) for e in trace.events))


plain, ours, store = a_model(), a_model(), DiskStore()
context = saved_tensors_hooks(*hooks(ours.parameters(), Ahead(store), 1))
before = memlab.measure(lambda: a_step(plain), model=plain)
after = memlab.measure(lambda: a_step(ours, context), model=ours)
pairs = zip(plain.parameters(), ours.parameters(), strict=True)
print(f"gradients equal bit for bit: {all(torch.equal(a.grad, b.grad) for a, b in pairs)}")
print(f"traffic of a step: {store.traffic}; left in the store: {len(store.keys())}")
print(f"peak: {format_bytes(before.peak_bytes)} before, {format_bytes(after.peak_bytes)} now")
store.close()

# %%
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
for name, trace, colour in (("no offloading", before, "#c9c9d0"), ("yours", after, "#00798c")):
    alive = [bytes_ / 2**20 for bytes_ in activation_bytes(trace)]
    turn = next(n for n, event in enumerate(trace.events) if event.phase == "backward")
    places = [n / turn if n < turn else 1 + (n - turn) / (len(alive) - turn)
              for n in range(len(alive))]  # fmt: skip
    axes.fill_between(places, alive, color=colour, linewidth=0, label=name)
axes.axvline(1, color="0.25", linestyle=":", linewidth=1)
axes.set(xlabel="forward, then backward", ylabel="MiB", xticks=())
axes.set_title("Activations and temporaries on the device")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# After forward, almost no activations are in memory. Each storage was written once, but read **more
# often** where several operators saved views of it, because each view is read separately. (The
# library's `offloaded_activations` follows the graph's order of operators, and reuses what is still
# in memory.)
#
# How does offloading differ from checkpointing? Checkpointing recomputes a block; offloading
# transfers its bytes. You can combine both: offload the few inputs that checkpoints save.

# %% [markdown]
# ## The optimizer state
#
# Adam's m and v, 8 bytes per weight, are needed only briefly, once per step. So keep them in the
# store. Divide the weights, which stay on the device, into **sub-groups**, and load the state of
# one sub-group after another. While one sub-group is stepped, the next one's state is read. The
# device holds the state of two sub-groups, however large the model is.

# %% [markdown]
# ### Exercise 14.3: offload the optimizer state
#
# About 20 minutes. `groups` is a list of lists of weights, all with gradients; `adams[n]` steps
# `groups[n]`.
#
# - `send(n)` puts the moments of a sub-group under key n as one list, keeps each weight's step
#   counter in `self.steps[n]`, and leaves `adams[n].state` empty. (`adams[n].state[w]` has `step`,
#   `exp_avg`, `exp_avg_sq`.)
# - `bring(n)` reverses this.
# - `step` clips by one norm of all gradients, then steps the sub-groups in turn. Before each
#   `adam.step()` it prefetches the next one's state. Before the first step there is no state. After
#   a step nothing is being prefetched.


# %%
class OffloadedAdam:
    def __init__(self, groups, store, lr):
        self.groups, self.store, self.steps = groups, store, {}
        self.adams = [torch.optim.AdamW(group, lr=lr, foreach=False) for group in groups]

    def send(self, n):
        ### BEGIN SOLUTION memlab.reference.offloaded_optimizer.OffloadedAdam.send
        of_each = [self.adams[n].state.pop(w) for w in self.groups[n]]
        self.steps[n] = [kept["step"] for kept in of_each]
        self.store.put(n, [kept[m] for kept in of_each for m in ("exp_avg", "exp_avg_sq")])
        ### END SOLUTION

    def bring(self, n):
        ### BEGIN SOLUTION memlab.reference.offloaded_optimizer.OffloadedAdam.bring
        moments = iter(self.store.get(n))
        for w, step in zip(self.groups[n], self.steps[n], strict=True):
            m, v = next(moments), next(moments)
            self.adams[n].state[w] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
        ### END SOLUTION

    def step(self, max_norm):
        ### BEGIN SOLUTION memlab.reference.offloaded_optimizer.OffloadedAdam.step
        clip_grad_norm_([w for group in self.groups for w in group], max_norm)
        for n, adam in enumerate(self.adams):
            if n in self.steps:
                self.bring(n)
            if n + 1 in self.steps:
                self.store.prefetch(n + 1)
            adam.step()
            self.send(n)
        ### END SOLUTION


# %%
OffloadedAdam = exercise("14.3", OffloadedAdam)

# %% [markdown]
# Compare yours with the library's `OffloadedOptimizer`, which works with any optimizer that steps
# each weight separately: Adam, Lion, Day 9's 8-bit Adam. The next cells compare the second step of
# each with AdamW's, without offloading.


# %%
def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def by_hand(model, store):
    weights = list(model.parameters())
    groups = [weights[n : n + 6] for n in range(0, len(weights), 6)]
    optimizer = OffloadedAdam(groups, store, 3e-3)
    return lambda: optimizer.step(max_norm=1.0)


def by_library(model, store, **settings):
    optimizer = OffloadedOptimizer(adamw(model), store, sub_group=2**14, **settings)
    return lambda: (optimizer.clip_grad_norm_(1.0), optimizer.step())


def second_step(build, dtype=torch.float32, store=None, **settings):
    """Return the weights after an optimizer's second step, and the step's traffic."""
    model, store = a_model(dtype=dtype), store or DiskStore()
    update = build(model, store, **settings)
    for _ in range(2):
        store.traffic.reset()
        a_step(model)
        update()
    return parameters_to_vector(model.parameters()), store.traffic


# %%
def nothing_offloaded(model, store):
    adam = adamw(model)
    return lambda: (clip_grad_norm_(model.parameters(), 1.0), adam.step())


count = sum(w.numel() for w in a_model().parameters())
exact, _ = second_step(nothing_offloaded)
for name, build, settings in (
    ("state (yours)", by_hand, {}),
    ("state", by_library, {}),
    ("+ float32 weights", by_library, {"weights": True}),
    ("+ gradients", by_library, {"weights": True, "gradients": True}),
):
    weights, moved = second_step(build, **settings)
    same = torch.equal(weights, exact)
    read, written = moved.read / count, moved.written / count
    print(f"{name:18}read {read:.2f}, written {written:.2f} bytes per weight; exact: {same}")
_, moved = second_step(by_library, torch.bfloat16, HostStore(), weights=True, on="host")
read, written = moved.read / count, moved.written / count
print(f"{'step on the host':18}read {read:.2f}, written {written:.2f} bytes per weight, bfloat16")

# %% [markdown]
# Bytes transferred per step, for N weights:
#
# - state: **8 N + 8 N**
# - state and float32 weights: **12 N + 12 N**
# - gradients too: each is sent as soon as it is computed, and comes back for the step. In float32
#   (here) this adds 4 bytes each way, in bfloat16 2: 14 N + 14 N.
#
# (Offloaded gradients are not in .grad, so use the optimizer's own `clip_grad_norm_`.)

# %% [markdown]
# The printed "step on the host" is **ZeRO-Offload**: the host computes the *step*, so the state
# isn't transferred at all. Gradients are written to the host, and updated weights read back, 2
# bytes each: **4 N** (4Ψ in the paper), a sixth of 24 N. The cost is the host's slow arithmetic.
# This does not work with a disk, which cannot compute.

# %% [markdown]
# ## The weights
#
# A layer's weights are needed only in its forward and its backward. In between, they can be in the
# store. This is ZeRO-3 (Day 12) with a disk instead of seven other ranks. As on Day 12, a layer has
# a flat w and two functions, and only inputs are saved.


# %%
def forward_of(w, x):
    """Run one layer; the flat w is a matrix with one row per column of x."""
    return torch.tanh(x @ w.view(x.shape[1], -1))


def backward_of(w, x, dy):
    """Return the gradients of w (flat) and of x."""
    matrix = w.view(x.shape[1], -1)
    dz = dy * (1 - torch.tanh(x @ matrix) ** 2)
    return (x.T @ dz).flatten(), dz @ matrix.T


# %% [markdown]
# ### Exercise 14.4: stream the layers' weights
#
# About 12 minutes. `layers` are the store's keys in execution order; `dy_of(y)` returns the
# gradient of the last output. Run forward and backward, and return the gradient of x.
#
# - Put each layer's weights after a step of gradient descent, `w - lr * dw`, into the store under
#   the same key.
# - Read each layer twice and write it once.
# - Hold at most two layers' weights at a time, and each layer's input once. (Prefetching is not
#   required.)


# %%
def streamed_step(store, layers, x, dy_of, lr):
    ### BEGIN SOLUTION
    inputs = [x]
    for key in layers:
        w = store.get(key)
        inputs.append(forward_of(w, inputs[-1]))
        del w
    dy = dy_of(inputs.pop())
    for key in reversed(layers):
        w = store.get(key)
        dw, dy = backward_of(w, inputs.pop(), dy)
        store.put(key, w - lr * dw)
        del w, dw
    return dy
    ### END SOLUTION


# %%
streamed_step = exercise("14.4", streamed_step)

# %% [markdown]
# The library does the same for any model with `stream_layers(model, store)`, which puts hooks
# around each layer. While a weight is in the store, its tensor remains, but the storage is empty.
# Loading fills the same storage, so views that autograd saved are valid again. The next layer is
# prefetched while one runs, so **two** are in memory.

# %%
streamed = a_model(layers=12)
everything = sum(w.nbytes for w in streamed.parameters())
store = DiskStore()
stream = stream_layers(streamed, store)
a_step(streamed)
store.traffic.reset()
trace = memlab.measure(lambda: a_step(streamed), model=streamed)
loaded = list(running_sums(e.bytes * (e.category == "parameters") for e in trace.events))
one, rest = stream.layer_bytes[0], everything - sum(stream.layer_bytes)
print(f"all weights: {everything:,} bytes; maximum in memory: {max(loaded):,} bytes")
print(f"equal to rest + 2 layers = {rest:,} + 2 × {one:,}: {max(loaded) == rest + 2 * one}")
print(f"each layer is read {store.traffic.read / sum(stream.layer_bytes):.0f} times, ", end="")
print(f"{store.traffic.prefetched / store.traffic.read:.1%} of the bytes prefetched")
store.close()

# %%
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.axhline(everything / 2**10, color="0.25", linestyle="--", linewidth=1)
axes.text(20, everything / 2**10 * 0.91, "all weights", fontsize=9)
held = [n / 2**10 for n in loaded]
axes.fill_between(range(len(loaded)), held, color=memlab.plot.COLOURS["parameters"], linewidth=0)
axes.axhline(rest / 2**10, color="white", linestyle=":", linewidth=1)
turn = next(n for n, event in enumerate(trace.events) if event.phase == "backward")
axes.annotate("embedding and norm stay", (120, rest / 2**10), (0, 200), fontsize=9,
              arrowprops={"arrowstyle": "-", "color": "0.25"})  # fmt: skip
axes.axvline(turn, color="0.25", linestyle=":", linewidth=1)
axes.text(turn, everything / 2**10 * 0.78, " backward", fontsize=9)
axes.set(xlabel="allocations and frees, in order", ylabel="KiB of weights", ylim=(0, None))
axes.set_xlim(0, None)
axes.set_title("Twelve streamed layers, two in memory at a time")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# At each notch, one layer is freed before another is loaded. The dashed line shows all weights.

# %% [markdown]
# ## What if the process is killed?
#
# Now weights and moments are on a disk. So after a crash, training could resume from there. But a
# crash can come in the *middle* of a step, when some files are from this step and some from the
# previous one. A power failure also loses data that was written but has not reached the disk.

# %% [markdown]
# The rule: **never overwrite a file still in use.**
#
# 1. Write new files beside the old ones.
# 2. `fsync` them, which forces their bytes to the disk.
# 3. Replace the *manifest*, the file that lists the current files, with a rename. A rename happens
#    completely or not at all.
#
# The next cell simulates a disk. The check's disk fails before each operation in turn; a file
# without fsync then loses half of its bytes. (A real disk may also lose file names; fsync its
# folder, too.)


# %%
class Disk:
    """Files by name, in memory."""

    def __init__(self):
        self.files, self.forced = {}, set()

    def write(self, name, data):
        self.files[name] = data
        self.forced.discard(name)  # not forced to the disk yet

    def fsync(self, name):
        self.forced.add(name)

    def rename(self, old, new):  # replaces an existing file `new`
        self.files[new] = self.files.pop(old)
        self.forced = self.forced - {new} if old not in self.forced else self.forced | {new}

    def remove(self, name):
        del self.files[name]

    def names(self):
        return list(self.files)


# %%
def resume(disk):
    """Return the manifest's step, and its values."""
    manifest = json.loads(disk.files["manifest"])
    return manifest["step"], {key: disk.files[name] for key, name in manifest["files"].items()}


# %% [markdown]
# ### Exercise 14.5: a commit that survives
#
# About 15 minutes. Write `values` (bytes by key) to the disk so that `resume` finds step `step`
# with all its values. If the power fails during commit, `resume` must find either this step or the
# previously committed one, complete. (Steps need not be consecutive: step 12 may follow step 2.)
#
# The manifest is the file `manifest`: `json.dumps({"step": step, "files": {key: name}}).encode()`.
# After commit, the disk has no other files, even if an earlier crash left some.


# %%
def commit(disk, step, values):
    ### BEGIN SOLUTION
    files = {key: f"{key}.{step}" for key in values}
    for key, data in values.items():
        disk.write(files[key], data)
        disk.fsync(files[key])
    disk.write("manifest.new", json.dumps({"step": step, "files": files}).encode())
    disk.fsync("manifest.new")
    disk.rename("manifest.new", "manifest")
    for name in disk.names():
        if name not in ("manifest", *files.values()):
            disk.remove(name)
    ### END SOLUTION


# %%
commit = exercise("14.5", commit)

# %%
small = Disk()
for step in (1, 2):
    commit(small, step, {"m": b"m of step %d" % step, "v": b"v of step %d" % step})
print(f"on the disk: {', '.join(sorted(small.names()))}")
print(f"resume finds step {resume(small)[0]}")

# %% [markdown]
# `DiskStore` commits this way, with a checksum of every file. Now test it for real: another
# **process** trains on the disk. In the middle of its third step, with two of five sub-groups
# stepped, it is killed with `kill -9`, which a process cannot catch. Then this notebook
# resumes from the folder.


# %%
def trained(store, steps):
    """Resume and train; return the first step and the final weights. Data depends on the step."""
    torch.manual_seed(0)
    model = GPT(replace(PRESETS["tiny"], layers=1))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    optimizer = OffloadedOptimizer(adam, store, weights=True, sub_group=2**12)
    begun = optimizer.resume()
    for step in range(begun, steps):
        random = torch.Generator().manual_seed(step)
        text = torch.randint(256, (2, 17), generator=random)
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return begun, parameters_to_vector(model.parameters()).detach()


IMPORTS = """
import sys, time, torch
from dataclasses import replace
from torch.nn.utils import parameters_to_vector
from memlab.model import GPT, PRESETS
from memlab.offload import DiskStore, OffloadedOptimizer
"""

# %%
STOPS = '''
class Stops(DiskStore):
    """Stops after two sub-groups of step 3, prints a line, and waits to be killed."""
    def put(self, key, *args, **settings):
        super().put(key, *args, **settings)
        if self.step == 2 and key == "optimizer/1":
            print("in the middle of step 3", flush=True)
            time.sleep(600)

trained(Stops(sys.argv[1]), 5)
'''
folder = tempfile.TemporaryDirectory()
source = IMPORTS + getsource(trained) + STOPS
words = [sys.executable, "-c", source, folder.name]
with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
    print(f"the other process is {child.stdout.readline().strip()}")
    child.kill()
with DiskStore(folder.name) as store:
    begun, weights = trained(store, 5)
with DiskStore() as store:
    _, unbroken = trained(store, 5)
print(f"resumed after step {begun}; equal bit for bit to an uninterrupted run: ", end="")
print(torch.equal(weights, unbroken))
folder.cleanup()

# %% [markdown]
# The half-finished step 3 is discarded, step 2 is complete, and steps 3 to 5 equal the
# uninterrupted run. (No random state is lost, because each step's data depends only on its
# number.) The cost: two generations of files during a step. A test of the library kills a training
# at twenty points, with and without a power failure.

# %% [markdown]
# ## At scale: 7B on a GPU with 24 GB
#
# The next cells are dry runs on fake tensors: a store only counts bytes. The model is one block of
# Llama 2 7B with embedding and head: bfloat16, float32 weights for Adam, 2,048 tokens,
# checkpointing, chunked loss. Each further block adds these bytes per weight to the peak:
#
# | offloaded | bytes per weight | on the GPU |
# | --- | --- | --- |
# | nothing | 18 | everything |
# | state and float32 weights | 4 | 16-bit weights and gradients |
# | + gradients | 2 | 16-bit weights |
# | everything | 0 | nothing |

# %%
WAYS = {"nothing": 18, "state and float32 weights": 4, "+ gradients": 2, "everything": 0}


def adamw_of(weights):
    return torch.optim.AdamW(weights, foreach=False)


def optimizer_of(model, store, way):
    if way == "nothing":
        return MasterWeights(model.parameters(), optimizer=adamw_of)
    settings = {"weights": True, "gradients": way != "state and float32 weights"}
    return OffloadedOptimizer(adamw_of(model.parameters()), store, **settings)


# %%
def on_the_card(config, way):
    """Return the trace of a training's second step; the first step has zero gradients."""
    inputs, store = torch.zeros(1, 2048, dtype=torch.long), DiskStore()
    model = GPT(config, dtype=torch.bfloat16, loss=chunked_cross_entropy)
    checkpoint_blocks(model, uniform_schedule(config.layers, every=1))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    if way == "everything":
        stream_layers(model, store)
    optimizer = optimizer_of(model, store, way)
    optimizer.step()

    def step():
        optimizer.zero_grad()
        with offloaded_activations(store) if way == "everything" else nullcontext():
            loss = model(inputs, inputs)
        loss.backward()
        optimizer.step()

    return memlab.measure(step, model=model, optimizer=optimizer)


# %%
def peak_of(config, way):
    """Return the peak of all blocks: one measured, the others by formula."""
    one, two = (replace(config, layers=n) for n in (1, 2))
    with memlab.dry_run():
        trace = on_the_card(one, way)
    block = two.parameters - one.parameters
    return trace.peak_bytes + (config.layers - 1) * block * WAYS[way]


# %%
seven, card = PRESETS["llama-2-7b"], 24 * 2**30  # sold as 24 GB; less is free (Day 16)
thirteen = replace(  # Llama 2 13B
    seven, layers=40, hidden_size=5120, heads=40, kv_heads=40, intermediate_size=13824
)
peaks = {way: peak_of(seven, way) for way in WAYS}
for way in ("+ gradients", "everything"):
    peaks[way, 13] = peak_of(thirteen, way)
for name, peak in peaks.items():
    way, size = (name, 7) if isinstance(name, str) else name
    fits = "fits" if peak < card else "does not fit"
    print(f"{size:2}B, offloaded: {way:25}{peak / 1e9:7.2f} GB, {fits}")

# %% [markdown]
# Without offloading the peak is 122.34 GB: the 121 GB of the question, and a step's temporaries.
# With everything offloaded, 3.67 GB remain. This peak comes when the optimizer steps the
# **embedding**, one tensor of 131M weights. A tensor is not split, so its float32 weights,
# gradient, m, v and Adam's temporaries are alive together: 3.15 GB. The 16-bit embedding and head,
# 0.52 GB, are not streamed. More layers would not raise this peak.

# %% [markdown]
# How long do the transfers take? The formulas assume:
#
# - compute: 8 FLOPs per weight and token (2 forward, 4 backward, 2 recompute), at half of the
#   RTX 4090's 165 TFLOP/s in bfloat16
# - transfers: 25 GB/s to the host, 3 GB/s to a disk
# - a step on the host: 28 bytes per weight, at host memory's 89.6 GB/s (Intel, i9-14900K)
#
# **Without overlap** a step takes the sum of compute and transfer; with **full overlap**, the
# longer of the two. The *slowdown*, relative to compute alone, does not depend on N.

# %%
FLOPS, HOST, NVME = 165.2e12 / 2, 25e9, 3e9
# On the host, a step reads and writes state and float32 weight (12 + 12 bytes), reads the gradient
# (2) and writes the 16-bit weight (2).
STEPPED_THERE = 4 / HOST + 28 / 89.6e9  # seconds per weight: PCIe, and the step on the host
MOVED = {  # bytes per weight and step, both ways
    "state": 8 + 8,
    "state and float32 weights": 12 + 12,
    "+ gradients": 14 + 14,
    # 16-bit weights too: read twice, written once. Checkpoints' inputs add less than 1 %.
    "everything": 18 + 16,
}


def slower(transfer, tokens, overlap=False):
    """Return the slowdown of a step; `transfer` is in seconds per weight."""
    compute = 8 * tokens / FLOPS
    return (max(transfer, compute) if overlap else transfer + compute) / compute


print(f"7B, 2,048 tokens: compute {8 * N * 2048 / FLOPS:.1f} s. Transfers per step:")
stepped_there = f"{4 * N / 1e9:6.1f} GB, PCIe and host step {STEPPED_THERE * N:4.1f} s"
print(f"{'state, stepped on the host':28}{stepped_there}")
for name, moved in MOVED.items():
    to_host, to_disk = moved * N / HOST, moved * N / NVME
    print(f"{name:28}{moved * N / 1e9:6.1f} GB, PCIe {to_host:4.1f} s, disk {to_disk:4.1f} s")

# %%
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
powers = [2**n for n in range(10, 19)]
for name, transfer, colour in (
    ("stepped on the host", STEPPED_THERE, "#4477aa"),
    ("state and float32 weights, host", 24 / HOST, "#00798c"),
    ("state and float32 weights, disk", 24 / NVME, "#cc6677"),
):
    without = [slower(transfer, tokens) for tokens in powers]
    overlapped = [slower(transfer, tokens, overlap=True) for tokens in powers]
    axes.fill_between(powers, overlapped, without, color=colour, alpha=0.3, linewidth=0)
    axes.plot(powers, without, color=colour, label=name)
axes.set_xscale("log", base=2)
axes.set_xticks(powers, [f"{tokens:,}" for tokens in powers])
axes.set(ylim=(0.8, 12), xlabel="tokens per step", ylabel="slowdown")
axes.set_title("Slowdown without overlap (line) and with full overlap (lower edge)")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Transfers happen once per **step**, compute grows with each **token**. So accumulate micro-batches
# (Day 3): at 65,536 tokens per step, even state and float32 weights on a disk slow a step down by
# only 2.3×, without overlap. (Offloaded gradients and streamed weights are transferred in every
# micro-batch.)
#
# ## Explain the gap

# %%
found = {
    "host_saves_percent": 100
    * (1 - at_backward["torch's save_on_cpu"] / at_backward["no offloading"]),
    "moved_gb": 16 * N,
    "slower_times": slower(16 / HOST, 2048),
    "left_gb": peaks["everything"],
}
reveal("14.1", **found)

# %% [markdown]
# - torch's CPU offloading saves nothing if host and device share memory.
# - State is read **and** written: 8 + 8 bytes per weight.
# - The transfer takes 4.3 s, the computation 1.3 s.
# - The remaining 3.67 GB are mostly the step of the largest tensor, the embedding.

# %% [markdown]
# ## On your GPU
#
# On a GPU, copies run on their own streams, from **pinned** memory (from other memory,
# "non-blocking" copies block). `benchmarks/offload.py` measures the overlap on a CPU with a disk.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    from memlab.monitoring.counters import counters_for

    counters = counters_for(gpu)
    for name, store in (("no offloading", None), ("HostStore", HostStore())):
        model, (x, y) = a_model().to(gpu), (part.to(gpu) for part in batch)
        with offloaded_activations(store, minimum=1) if store else nullcontext():
            loss = model(x, y)
        print(f"{name}: {format_bytes(counters.read().allocated_bytes)} when backward begins")
        loss.backward()
else:
    print(stored_on_a_gpu("offload"))

# %% [markdown]
# ## Rules on trial
#
# One guide has a table: "CPU 50–80 %, 2–3 × slower; NVMe 90 %+, 5–10 ×". Its CPU example offloads
# state and weights, its NVMe example the *state alone*. The verdicts take the savings from the dry
# runs above. The next cell solves the formula for the tokens per step at which a step is 2, 3, 5 or
# 10 times slower.


# %%
def tokens_for(transfer, times):
    """Return the tokens per step at which a step is `times` slower, without overlap."""
    return transfer / (times - 1) * FLOPS / 8


share = {way: 1 - peaks[way] / peaks["nothing"] for way in WAYS}
savings = ", ".join(f"{way} {share[way]:.0%}" for way in list(WAYS)[1:])
on_host, over_pcie, from_disk = (
    [round(tokens_for(transfer, times)) for times in ends]
    for transfer, ends in ((STEPPED_THERE, (3, 2)), (24 / HOST, (3, 2)), (24 / NVME, (10, 5)))
)
state = share["state and float32 weights"]

# %%
verdict(
    "23a",
    0.5 <= state <= 0.8 and 2 <= slower(24 / HOST, 8192) <= 3,
    f"saved (7B, 1 × 2,048 tokens, dry run): {savings}; 2–3× slower at "
    f"{on_host[0]:,}–{on_host[1]:,} tokens per step with the step on the host, at "
    f"{over_pcie[0]:,}–{over_pcie[1]:,} with 24 bytes per weight transferred",
    condition="for state and float32 weights, with 2,000 to 10,000 tokens per step (by formula, "
    "without overlap)",
)

# %%
verdict(
    "23b",
    state >= 0.9,
    f"state and float32 weights {state:.0%}, everything {share['everything']:.0%}; 5–10× slower at "
    f"{from_disk[0]:,}–{from_disk[1]:,} tokens per step (24 bytes per weight, at 3 GB/s)",
    otherwise="a disk saves as many GPU bytes as the host; only offloading everything saves over "
    "90%",
)

# %%
v100, peak_13 = 32 * 2**30, peaks["+ gradients", 13]
verdict(
    "23c",
    peak_13 < v100,
    f"13.0B: peak {peak_13 / 1e9:.1f} GB (26.0 GB are weights) with state, float32 weights and "
    f"gradients offloaded; {peaks['everything', 13] / 1e9:.1f} GB with everything offloaded",
    condition="on a GPU with 32 GB, as in the ZeRO-Offload paper, and with 182 GB of host memory; "
    "with 24 GB, stream the weights too",
)

# %% [markdown]
# The guide's examples are DeepSpeed configs. `memlab plan --deepspeed ds_config.json` shows what a
# training with such a config holds, without activations. Compare both examples for 7B on one GPU,
# with 16-bit weights. (By formula; DeepSpeed itself does not run here.)

# %%
from memlab.planner.deepspeed import held, parse_deepspeed

CONFIGS = {
    "CPU": """{"bf16": {"enabled": true}, "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true}}}""",
    "NVMe": """{"bf16": {"enabled": true}, "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}}""",
}
in_deepspeed = {name: held(seven, parse_deepspeed(text)) for name, text in CONFIGS.items()}
for name, parts in in_deepspeed.items():
    for part in parts:
        places = zip(("GPU", "host", "NVMe"), (part.gpu, part.host, part.disk), strict=True)
        words = ", ".join(f"{place} {count / 1e9:5.1f} GB" for place, count in places if count)
        print(f"{name:6}{part.part:22}{words}")

# %%
on_gpu, on_host = (
    {name: sum(getattr(part, place) for part in parts) for name, parts in in_deepspeed.items()}
    for place in ("gpu", "host")
)
verdict(
    "23d",
    on_gpu["NVMe"] <= on_gpu["CPU"],
    f"7B, bf16, without activations: GPU {on_gpu['CPU'] / 1e9:.1f} GB with the first config, "
    f"{on_gpu['NVMe'] / 1e9:.1f} with the second; host {on_host['CPU'] / 1e9:.1f} and "
    f"{on_host['NVMe'] / 1e9:.1f} GB",
    otherwise="the second config keeps the weights on the GPU, so it fits smaller models; add "
    "offload_param",
)

# %%
plain = a_model(layers=12)
trace = memlab.measure(lambda: a_step(plain), model=plain)
sequential = max(running_sums(e.bytes * (e.category == "parameters") for e in trace.events))

# %%
verdict(
    "24",
    sequential < everything,
    f"twelve layers, run in sequence: {sequential:,} of {everything:,} bytes of weights in memory; "
    f"streamed: at most {max(loaded):,}",
    otherwise="layers always run in sequence, with all weights in memory; streaming the layers "
    "saves memory, and reads them twice per step",
)

# %% [markdown]
# ## What you can do now
#
# | offloaded | saves, bytes per weight | transfers per step, bytes per weight |
# | --- | --- | --- |
# | Adam's state | 8 | 8 + 8 |
# | + float32 weights (and float32 gradients, cast per sub-group) | 14 | 12 + 12 |
# | + gradients | 16 | 14 + 14 |
# | + 16-bit weights | 18, except two layers, embedding, head and norm | 18 + 16 |
# | Adam's state and float32 weights, stepped on the host | 14 | 4 |
# | activations | the saved tensors | the saved tensors, both ways |
#
# You can now
#
# - recognize a "saving" that only copies within the same memory
# - calculate how many tokens per step hide a transfer
# - resume a training run after the process was killed
#
# Tomorrow: averages of weights, chosen after training, from snapshots on the disk.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. So far it needs bfloat16 weights and
# gradients, 8-bit Lion's state, the inputs of twelve checkpoints, and the loss's temporaries. Today
# three of these go to the disk: Lion's state, each gradient as soon as it is computed, and the
# inputs.

# %%
running_bill(14)

# %% [markdown]
# ## Sources
#
# - Ren et al. 2021: [ZeRO-Offload: Democratizing Billion-Scale Model
#   Training](https://arxiv.org/abs/2101.06840)
# - Rajbhandari et al. 2021: [ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
#   Learning](https://arxiv.org/abs/2104.07857)
# - Pudipeddi et al. 2020: [Training Large Neural Networks with Constant Memory using a New
#   Execution Algorithm](https://arxiv.org/abs/2002.05645)
# - Rhu et al. 2016: [vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
#   Network Design](https://arxiv.org/abs/1602.08124)
# - DeepSpeed: [Configuration JSON](https://www.deepspeed.ai/docs/config-json/)
#
# The rules on trial are from:
#
# - maxvdboom: [DreaMS Memory Optimization
#   Strategies](https://github.com/maxvdboom/DreaMS/blob/757a414db1b8430e3ebed6665aa1f9d1b19eb376/MEMORY_OPTIMIZATION_GUIDE.md)
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
# - "Day 19: Memory Optimization", author and address unknown
