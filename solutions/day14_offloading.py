# %% [markdown]
# # Day 14: Offloading
#
# **The GPU is full; the host and the disk are not. What may wait there, and what does the way
# cost?**
#
# After today you can say what may leave a GPU and how many bytes travel for it, have built the
# hooks, the optimizer and the stream of layers that do it, and a commit that no power failure can
# hurt.
#
# About 110 minutes, 77 of them for five exercises. You need a laptop; a GPU is not needed. Nothing
# is downloaded, and nothing stays on the disk.

# %% [markdown]
# The day divides well into two: the second begins with the weights. As before: you **guess**,
# **measure**, and **build** what explains the gap. In an exercise, put your own lines in place of
# `raise NotImplementedError`; the cell below it checks them. If you are stuck, type `memlab hint
# 14.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# A model of seven billion weights takes 18 bytes a weight to train (Day 4's 16; but in the step the
# gradient is there in float32, 4 bytes in place of 2): 121 GB. A card has 24. Around it there is
# room, further and further away: the host's memory, behind the bus *PCIe*; disks on the same bus,
# which are called NVMe; and disks on an older one, SATA. These are published figures, each of one
# product; what a program reaches is less.

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
STORES = {  # bytes, bytes a second: of what, who says so
    "a GPU's own memory": (24e9, 1008e9, "RTX 4090: NVIDIA, Ada architecture whitepaper"),
    "the host's, by PCIe": (192e9, 31.5e9, "4.0 × 16: PCI-SIG; 192 GB for an i9-14900K: Intel"),
    "a disk, NVMe": (4000e9, 7.45e9, "990 PRO, 4 TB, reading: Samsung, data sheet"),
    "a disk, SATA": (4000e9, 0.56e9, "870 EVO, 4 TB, reading: Samsung, data sheet"),
}
N = PRESETS["llama-2-7b"].parameters
print(f"Adam's state of 7B, read and written: {16 * N / 1e9:.1f} GB. By these figures, that takes")
for name, (size, speed, whose) in STORES.items():
    print(f"{16 * N / speed:8.1f} s   {name:20} {size / 1e9:5,.0f} GB   ({whose})")

# %%
fig, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
colours = ("#00798c", "#4477aa", "#999933", "#cc6677")
# Between two speeds, half-way as a logarithm counts it.
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
axes.set(xlabel="bytes a second, less and less", ylabel="bytes", xticks=(), yticks=(1e10, 1e12))
axes.minorticks_off()
axes.set_title("Further down there is more room, and a slower way to it")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Two questions each time: how many bytes does it **save**, and how many **travel** in a step? From
# here on we reckon with 25 GB/s to the host and 3 GB/s to a disk, which is what a good program may
# hope for. Seconds are never measured today: bytes are, and speeds are assumed.

# %% [markdown]
# ## Guess
#
# On *this* machine, without a GPU: which share of the activations does torch's way of offloading
# them to the CPU save? Of 7B: how many GB travel in a step if Adam's state lives elsewhere, how
# many times as long does a step of 2,048 tokens take if it comes by PCIe and nothing is hidden, and
# how many GB remain on the card if *everything* that can be elsewhere is?

# %%
### BEGIN SOLUTION
guess("14.1", host_saves_percent=50, moved_gb=54, slower_times=2.5, left_gb=14)
### END SOLUTION
### BEGIN STUB
# guess("14.1", host_saves_percent=..., moved_gb=..., slower_times=..., left_gb=...)
### END STUB

# %% [markdown]
# ## A win that is none
#
# Activations go to a **store** and come back for backward: `store.put(key, tensor)`,
# `store.get(key)`, `store.delete(key)`. `HostStore` keeps them in the host's memory, `DiskStore` in
# files of a temporary folder, which goes when the store is closed. Here are torch's `save_on_cpu`
# and both stores, with a tiny model: what is alive when backward begins?


# %%
def a_model(layers=4, **settings):
    torch.manual_seed(0)
    return GPT(replace(PRESETS["tiny"], layers=layers), **settings)


tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(1))
batch = tokens[:, :-1], tokens[:, 1:]


def alive_before_backward(around, model=None):
    """Bytes that forward leaves behind, and the trace."""
    model, loss = model or a_model(), []

    def forward():
        with around:
            loss.append(model(*batch))

    trace = memlab.measure(forward, model=model)
    return sum(event.bytes for event in trace.events if event.phase != "before"), trace


# %%
host, disk = HostStore(), DiskStore()
left = {}
for name, around in (
    ("all kept", nullcontext()),
    ("torch's save_on_cpu", torch.autograd.graph.save_on_cpu()),
    ("HostStore", offloaded_activations(host, minimum=1)),
    ("DiskStore", offloaded_activations(disk, minimum=1)),
):
    left[name], _ = alive_before_backward(around)
    print(f"{name:20} {format_bytes(left[name]):>10} alive when backward begins")
print(f"written to the host's store {format_bytes(host.traffic.written)}, ", end="")
print(f"to the disk's {format_bytes(disk.traffic.written)}")
disk.close()

# %% [markdown]
# On a CPU the device's memory **is** the host's. torch's way hands back the very tensor: nothing
# moves. HostStore does copy, and its copies are in the same memory. A test on a laptop that calls
# this a success measures nothing. The meter sees it.
#
# So today's stores are on the **disk**: what goes there has left. What a HostStore does on a GPU is
# the same with another road, and its traffic counts the same.

# %% [markdown]
# ## Activations
#
# Saved-tensor hooks (Days 5 and 7): forward hands `pack` each tensor that backward will want, and
# the graph keeps what it returns. That will be a `Kept`: it stands for numbers in the store, and
# when the graph drops it, they are deleted.


# %%
def whole(tensor):
    """All numbers of a tensor's storage, flat and without a graph."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


# %%
class Kept:
    """Numbers in a store, for as long as this is alive."""

    keys = itertools.count()

    def __init__(self, store, numbers):
        self.store, self.key = store, f"kept/{next(Kept.keys)}"
        store.put(self.key, numbers)

    def get(self):
        return self.store.get(self.key)

    def __del__(self):
        self.store.delete(self.key)


# %% [markdown]
# You will look for a Kept that exists already, and must not keep it alive by that. A **weak
# reference** does not:

# %%
store = DiskStore()
kept = Kept(store, torch.ones(1000))
known = weakref.ref(kept)
print(f"known() is the Kept: {known() is kept}; in the store {format_bytes(store.nbytes)}")
del kept
print(f"known() is {known()}; in the store {format_bytes(store.nbytes)}")
store.close()

# %% [markdown]
# ### Exercise 14.1: saved tensors wait in a store
#
# About 20 minutes; do 7.5 before. Return `pack` and `unpack`. A storage of at least `minimum`
# numbers that is no weight's goes into the store, **once** for all its views; back comes the same
# view of it, strides and dtype included. Everything else stays where it is, detached. The tensor
# itself must be free to die. When the graph is gone, nothing of it is in the store, even if a
# tensor that was packed (x, say) still lives.


# %%
def hooks(weights, store, minimum):
    """(pack, unpack) for saved_tensors_hooks"""
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
# Backward asks for one tensor after another, and waits each time, while the GPU idles. But it is
# known what comes next: about the **reverse** of the order in which tensors were put. So while one
# is used, the next can be on its way: `store.prefetch(key)` takes its bytes at once and returns; a
# thread (on a GPU a *stream*, a queue of work of its own) fills it; `get` waits for that.

# %% [markdown]
# ### Exercise 14.2: one ahead
#
# About 10 minutes. A store before a store. After each `get` one more is on its way, and only one:
# of the keys that nobody has asked for yet, the one that was put last. A key may be asked for
# twice, or be deleted before anybody has asked for it. What is deleted leaves the store, too.


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
def a_step(model, around=None):
    """Forward under the hooks, and backward."""
    model.zero_grad()
    with around or nullcontext():
        loss = model(*batch)
    loss.backward()


def passing(trace):
    """After each event the bytes that are alive of activations and temporaries."""
    made = ("parameters", "buffers", "gradients", "inputs")
    return list(running_sums(e.bytes * (e.category not in made) for e in trace.events))


plain, ours, store = a_model(), a_model(), DiskStore()
around = saved_tensors_hooks(*hooks(ours.parameters(), Ahead(store), 1))
before = memlab.measure(lambda: a_step(plain), model=plain)
after = memlab.measure(lambda: a_step(ours, around), model=ours)
pairs = zip(plain.parameters(), ours.parameters(), strict=True)
print(f"gradients equal bit for bit: {all(torch.equal(a.grad, b.grad) for a, b in pairs)}")
print(f"traffic of a step: {store.traffic}; left in the store: {len(store.keys())}")
print(f"peak of all: {format_bytes(before.peak_bytes)}, now {format_bytes(after.peak_bytes)}")
store.close()

# %%
fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
for name, trace, colour in (("all kept", before, "#c9c9d0"), ("yours", after, "#00798c")):
    alive = [bytes_ / 2**20 for bytes_ in passing(trace)]
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
# Forward leaves next to nothing behind. Each storage was written once; it was read **more often**
# where several operators saved views of it: each view is brought by itself. (The library's
# `offloaded_activations` asks in the order of operators, which the graph numbers, and gives out
# what is still there.)
#
# With bytes in their way, what is the difference to checkpointing? There a block runs again, here
# its bytes travel. And both go together: the few inputs that checkpoints keep can wait elsewhere.

# %% [markdown]
# ## The optimizer's state
#
# Adam's m and v, 8 bytes a weight, are wanted once a step, for a moment. So they live in the store,
# and are brought for one **sub-group** of weights after the other: while one is stepped, the next
# is on its way, and the last one on its way back. On the device are two sub-groups of state,
# however large the model is.

# %% [markdown]
# ### Exercise 14.3: the optimizer's state, a sub-group at a time
#
# About 20 minutes. `groups` is a list of lists of weights, all with gradients; `adams[n]` steps
# `groups[n]`. `send(n)` puts the moments of a sub-group under key n, as one list, keeps each
# weight's step counter in `self.steps[n]`, and leaves `adams[n].state` empty. (`adams[n].state[w]`
# has `step`, `exp_avg`, `exp_avg_sq`.) `bring(n)` undoes that. `step` clips, by one norm of all
# gradients; then it steps the sub-groups in turn, the next one's state on its way meanwhile. Before
# the first step nothing is there to bring; after a step nothing is on its way.


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
# Beside it the library's `OffloadedOptimizer`, which takes any optimizer that steps weight by
# weight: Adam, Lion, Day 9's eight bits. The second step of each, against AdamW with nothing
# offloaded.


# %%
def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)


def by_hand(model, store):
    weights = list(model.parameters())
    made = OffloadedAdam([weights[n : n + 6] for n in range(0, len(weights), 6)], store, 3e-3)
    return lambda: made.step(max_norm=1.0)


def by_library(model, store, **settings):
    made = OffloadedOptimizer(adamw(model), store, sub_group=2**14, **settings)
    return lambda: (made.clip_grad_norm_(1.0), made.step())


def second_step(made, dtype=torch.float32, store=None, **settings):
    """Of what was made: the weights after it, and what it moved."""
    model, store = a_model(dtype=dtype), store or DiskStore()
    update = made(model, store, **settings)
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
for name, made, settings in (
    ("state, by yours", by_hand, {}),
    ("state", by_library, {}),
    ("and weights", by_library, {"weights": True}),
    ("and gradients", by_library, {"weights": True, "gradients": True}),
):
    weights, moved = second_step(made, **settings)
    same = torch.equal(weights, exact)
    read, written = moved.read / count, moved.written / count
    print(f"{name:16} read {read:.2f}, written {written:.2f} bytes a weight; exact: {same}")
_, moved = second_step(by_library, torch.bfloat16, HostStore(), weights=True, on="host")
up, down = moved.read / count, moved.written / count
print(f"{'on the host':16} up {up:.2f}, down {down:.2f}, in bfloat16")

# %% [markdown]
# So **8 N + 8 N**; with the float32 weights **12 N + 12 N**; each gradient goes there as soon as it
# is made, and comes back for the step: here 4 bytes each way, for all is float32; of a model in
# bfloat16 2, so 14 N + 14 N. (clip_grad_norm_ must be the optimizer's
# own then: there is no .grad to look at.)

# %% [markdown]
# The last line is **ZeRO-Offload**: the *step* is computed where the state is. Then the state
# doesn't travel at all: gradients go down and stepped weights come up, 2 bytes each: **4 N** (its
# paper writes 4Ψ), a sixth of 24. What was bought with it is the host's arithmetic, which is slow;
# a disk can't do any.

# %% [markdown]
# ## The weights
#
# Last, the weights: a layer's are wanted in forward and again in backward, and for nothing else.
# Between, they can be away. This is Day 12's stage 3 with a disk in place of seven other ranks. As
# there, a layer is a flat w and two functions, and only inputs are kept.


# %%
def forward_of(w, x):
    """One layer: w, flat, is a matrix of (width of x, …)."""
    return torch.tanh(x @ w.view(x.shape[1], -1))


def backward_of(w, x, dy):
    """The gradients of w, flat, and of x."""
    matrix = w.view(x.shape[1], -1)
    dz = dy * (1 - torch.tanh(x @ matrix) ** 2)
    return (x.T @ dz).flatten(), dz @ matrix.T


# %% [markdown]
# ### Exercise 14.4: a layer's weights at a time
#
# About 12 minutes. `layers` are keys of the store, in running order; `dy_of(y)` gives the gradient
# of the last output. Run forward and backward, and put into the store, under the same keys, the
# weights after a step of gradient descent, `w - lr * dw`. Return the gradient of x. Each layer is
# read twice and written once, and no more than two layers' weights are here at a time. (You need
# not ask ahead.)


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
# The library does the same with any model: `stream_layers(model, store)`, by hooks around each
# layer. A weight that is away keeps its tensor, whose storage is emptied: autograd's saved views
# find the numbers there again. The next layer is on its way while one runs, so **two** are there.

# %%
streamed = a_model(layers=12)
everything = sum(w.nbytes for w in streamed.parameters())
store = DiskStore()
stream = stream_layers(streamed, store)
a_step(streamed)
store.traffic.reset()
trace = memlab.measure(lambda: a_step(streamed), model=streamed)
here = list(running_sums(e.bytes * (e.category == "parameters") for e in trace.events))
one, rest = stream.layer_bytes[0], everything - sum(stream.layer_bytes)
print(f"weights in all {everything:,} bytes; at most {max(here):,} at a time, which is")
print(f"rest + 2 layers = {rest:,} + 2 × {one:,}: {max(here) == rest + 2 * one}")
print(f"read {store.traffic.read / sum(stream.layer_bytes):.0f} times in a step, ", end="")
print(f"{store.traffic.prefetched / store.traffic.read:.1%} of it ahead")
store.close()

# %%
fig, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
axes.axhline(everything / 2**10, color="0.25", linestyle="--", linewidth=1)
axes.text(20, everything / 2**10 * 0.91, "all weights", fontsize=9)
held = [n / 2**10 for n in here]
axes.fill_between(range(len(here)), held, color=memlab.plot.COLOURS["parameters"], linewidth=0)
axes.axhline(rest / 2**10, color="white", linestyle=":", linewidth=1)
turn = next(n for n, event in enumerate(trace.events) if event.phase == "backward")
axes.annotate("the rest stays", (120, rest / 2**10), (0, 200), fontsize=9,
              arrowprops={"arrowstyle": "-", "color": "0.25"})  # fmt: skip
axes.axvline(turn, color="0.25", linestyle=":", linewidth=1)
axes.text(turn, everything / 2**10 * 0.78, " backward", fontsize=9)
axes.set(xlabel="allocations and frees, in order", ylabel="KiB of weights", ylim=(0, None))
axes.set_xlim(0, None)
axes.set_title("Twelve layers, two at a time: there and back")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Each tooth is a layer that comes while another goes. All twelve would be the dashed line.

# %% [markdown]
# ## What if it is killed?
#
# Now the training is on a disk: weights, moments and all. That ought to be worth something: after a
# crash it could go on from there. But a crash comes in the *middle* of a step, when some files are
# of this step and some of the last, and a power failure takes what was written and has not
# reached the disk yet.

# %% [markdown]
# The rule: **never write over what counts.** New files beside the old; `fsync`, which forces their
# bytes down; and one file, the *manifest*, that names those which count. It changes by a rename,
# which happens wholly or not at all. Here is a disk to try that on; the check's own fails before
# each operation in turn, and halves what was not forced down. (A real one may also forget names:
# its folder wants an fsync, too.)


# %%
class Disk:
    """Files by name, in memory."""

    def __init__(self):
        self.files, self.forced = {}, set()

    def write(self, name, data):
        self.files[name] = data
        self.forced.discard(name)  # of this, half is lost with the power

    def fsync(self, name):
        self.forced.add(name)

    def rename(self, old, new):  # takes the place of a file `new`
        self.files[new] = self.files.pop(old)
        self.forced = self.forced - {new} if old not in self.forced else self.forced | {new}

    def remove(self, name):
        del self.files[name]

    def names(self):
        return list(self.files)


# %%
def resume(disk):
    """The step of the manifest, and its values."""
    manifest = json.loads(disk.files["manifest"])
    return manifest["step"], {key: disk.files[name] for key, name in manifest["files"].items()}


# %% [markdown]
# ### Exercise 14.5: a commit that survives
#
# About 15 minutes. Put `values` (bytes by key) on the disk so that `resume` finds step `step` and
# all of them, or, whenever the power fails, the step committed before and all of its (step 12 may
# follow step 2: not every step is committed). The manifest is the file `manifest`:
# `json.dumps({"step": step, "files": {key: name}}).encode()`. When commit has returned, nothing
# else is left on the disk, whatever an earlier crash left there.


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
# `DiskStore` commits this way, with a checksum of every file. And now for real: another **process**
# trains on the disk. In the middle of its third step, when one sub-group is stepped and the next is
# not, it is killed: `kill -9`, of which a process hears nothing. Then this notebook goes on where
# the folder ends.


# %%
def trained(store, steps):
    """Where it began, and the weights at the end; all that is drawn follows from the step."""
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
    """After step 2 it takes one sub-group more, says so, and waits to be killed."""
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
print(f"went on after step {begun}; equal bit for bit to a run that nobody killed: ", end="")
print(torch.equal(weights, unbroken))
folder.cleanup()

# %% [markdown]
# Step 3's half is gone, step 2 is whole, and steps 3 to 5 are what they would have been. (Because
# nothing is drawn from a generator whose state is lost: data and dropout follow from the step's
# number.) The price: two generations of files while a step runs. A test of the library kills a
# training at twenty points, with and without power.

# %% [markdown]
# ## At scale: seven billion on a card of 24 GB
#
# By dry run, on fake tensors: a store then counts bytes and moves none. One block of Llama 2 7B,
# with embedding and head: bfloat16, float32 weights for Adam, 2,048 tokens, checkpointed, logits
# in chunks. A further block adds what stays of it at the peak, in bytes a weight: 18 of all; 4
# with state and float32 weights away, which are weights and gradients in 16 bits (a gradient
# becomes float32 a sub-group at a time); 2 with gradients away too; nothing with everything away.

# %%
WAYS = {"nothing": 18, "state and float32 weights": 4, "and gradients": 2, "everything": 0}


def adamw_of(weights):
    return torch.optim.AdamW(weights, foreach=False)


def optimizer_of(model, store, way):
    if way == "nothing":
        return MasterWeights(model.parameters(), optimizer=adamw_of)
    settings = {"weights": True, "gradients": way != "state and float32 weights"}
    return OffloadedOptimizer(adamw_of(model.parameters()), store, **settings)


# %%
def on_the_card(config, way):
    """The second step of a training, offloaded that way; the first is one with zeros."""
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
    """Of all blocks: the first one measured, the others by formula."""
    one, two = (replace(config, layers=n) for n in (1, 2))
    with memlab.dry_run():
        trace = on_the_card(one, way)
    block = two.parameters - one.parameters
    return trace.peak_bytes + (config.layers - 1) * block * WAYS[way]


# %%
seven, card = PRESETS["llama-2-7b"], 24 * 2**30  # sold as 24 GB; less is free (Day 16)
thirteen = replace(
    seven, layers=40, hidden_size=5120, heads=40, kv_heads=40, intermediate_size=13824
)
peaks = {way: peak_of(seven, way) for way in WAYS}
for way in ("and gradients", "everything"):
    peaks[way, 13] = peak_of(thirteen, way)
for name, peak in peaks.items():
    way, size = (name, 7) if isinstance(name, str) else name
    fits = "fits" if peak < card else "does not fit"
    print(f"{size:2}B, offloaded: {way:25}{peak / 1e9:7.2f} GB, {fits}")

# %% [markdown]
# The first line is the 121 GB we began with, and a step's temporaries. With everything away 3.67
# GB are left, and they are no layer's: the peak is where the **embedding** is stepped. It is one
# tensor of 131M weights, and tensors are not cut: its float32 weights, gradient, m, v and Adam's
# temporaries are there together. A hundred layers would change nothing. And what travels?

# %% [markdown]
# By formula. Arithmetic: 8 operations a weight and token (2 forward, 4 backward, 2 for the second
# forward of checkpoints), at half of what NVIDIA states for the card, 165 · 10¹² a second in
# bfloat16. Roads: 25 and 3 GB/s. A host that steps reads and writes 28 bytes a weight in its own
# memory, at 89.6 GB/s (Intel, i9-14900K). Where **nothing is hidden** a step takes the sum; where
# **all** is that can be, the longer of the two. Both are proportional to N, so N drops out.

# %%
FLOPS, HOST, NVME = 165.2e12 / 2, 25e9, 3e9
STEPPED_THERE = 4 / HOST + 28 / 89.6e9  # seconds a weight: by PCIe, and the host's own step
MOVED = {  # bytes a weight and step, both ways
    "state": 8 + 8,
    "state and float32 weights": 12 + 12,
    "and gradients": 14 + 14,
    "everything": 16 + 18,
}


def slower(travel, tokens, hidden=False):
    """Times as long as with nothing offloaded; `travel` is in seconds a weight."""
    compute = 8 * tokens / FLOPS
    return max(travel, compute) / compute if hidden else (travel + compute) / compute


print(f"7B, 2,048 tokens: {8 * N * 2048 / FLOPS:.1f} s of arithmetic. What travels in a step:")
stepped_there = f"{4 * N / 1e9:6.1f} GB, by PCIe and there {STEPPED_THERE * N:4.1f} s"
print(f"{'state, stepped on the host':28}{stepped_there}")
for name, moved in MOVED.items():
    to_host, to_disk = moved * N / HOST, moved * N / NVME
    print(f"{name:28}{moved * N / 1e9:6.1f} GB, by PCIe {to_host:4.1f} s, disk {to_disk:4.1f} s")

# %%
fig, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
powers = [2**n for n in range(10, 19)]
for name, travel, colour in (
    ("stepped on the host", STEPPED_THERE, "#4477aa"),
    ("state and float32 weights, by PCIe", 24 / HOST, "#00798c"),
    ("state and float32 weights, to a disk", 24 / NVME, "#cc6677"),
):
    plainly = [slower(travel, tokens) for tokens in powers]
    hidden = [slower(travel, tokens, hidden=True) for tokens in powers]
    axes.fill_between(powers, hidden, plainly, color=colour, alpha=0.3, linewidth=0)
    axes.plot(powers, plainly, color=colour, label=name)
axes.set_xscale("log", base=2)
axes.set_xticks(powers, [f"{tokens:,}" for tokens in powers])
axes.set(ylim=(0.8, 12), xlabel="tokens in a step", ylabel="times as long as with all there")
axes.set_title("Nothing hidden (line) to all hidden (lower edge): it is the tokens that decide")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The traffic is once a **step**, the arithmetic is for each **token**. So accumulate micro-batches
# (Day 3): at 65,536 tokens a step even the disk is no more than a factor of 2.3. (With gradients in
# the store each micro-batch moves those, too, and streamed weights are read for each.)
#
# ## Explain the gap

# %%
found = {
    "host_saves_percent": 100 * (1 - left["torch's save_on_cpu"] / left["all kept"]),
    "moved_gb": 16 * N,
    "slower_times": slower(16 / HOST, 2048),
    "left_gb": peaks["everything"],
}
reveal("14.1", **found)

# %% [markdown]
# The gaps. The host saves nothing where host and device are one. State is read **and** written: 8
# and 8 bytes. 4.3 s of travel stand against 1.3 s of arithmetic. And what remains is neither half
# nor a tenth of anything: it is the largest piece that cannot be cut, here the embedding's step.

# %% [markdown]
# ## On your GPU
#
# There, copies run on streams of their own from **pinned** memory (from other memory "non-blocking"
# copies block). How much they save and hide is measured by `benchmarks/gpu.py`; on a CPU, with the
# disk, by `benchmarks/offload.py`.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if gpu := torch.accelerator.current_accelerator(check_available=True):
    from memlab.monitoring.counters import counters_for

    counters = counters_for(gpu)
    for name, store in (("all kept", None), ("HostStore", HostStore())):
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
# One guide has a table: "CPU 50–80 %, 2–3 × slower; NVMe 90 %+, 5–10 ×". Its example for the CPU
# offloads state and weights, that for NVMe the *state alone*. What is saved we have from the dry
# runs above, and tokens follow from slowdowns by turning the formula round.


# %%
def tokens_for(travel, times):
    """In a step that takes so many times as long, nothing hidden."""
    return travel / (times - 1) * FLOPS / 8


share = {way: 1 - peaks[way] / peaks["nothing"] for way in WAYS}
in_words = ", ".join(f"{way} {share[way]:.0%}" for way in list(WAYS)[1:])
few, many, most = (
    [round(tokens_for(travel, times)) for times in ends]
    for travel, ends in ((STEPPED_THERE, (3, 2)), (24 / HOST, (3, 2)), (24 / NVME, (10, 5)))
)
state = share["state and float32 weights"]
verdict(
    "23a",
    0.5 <= state <= 0.8 and 2 <= slower(24 / HOST, 8192) <= 3,
    f"7B, 1 × 2,048 tokens, dry run: of the peak are saved {in_words}; 2–3 × slower at "
    f"{few[0]:,}–{few[1]:,} tokens a step if the host steps (4 bytes a weight by PCIe, 25 GB/s, "
    f"28 in its memory), at {many[0]:,}–{many[1]:,} if they travel (24 bytes)",
    condition="for the state and the float32 weights, in steps of two to ten thousand tokens (by "
    "formula, nothing hidden); with more tokens the time is less, and with gradients away too "
    "more than 80 % are saved",
    otherwise="the savings are others",
)

# %%
verdict(
    "23b",
    state >= 0.9,
    f"state, which the guide's example offloads, and float32 weights {state:.0%}; everything "
    f"{share['everything']:.0%}; 5–10 × slower at {most[0]:,}–{most[1]:,} tokens a step (24 bytes "
    f"a weight, 3 GB/s)",
    otherwise="where bytes go changes nothing about how many: a disk saves what the host does, and "
    "the guide's example no more than that; more than 90 % are saved with gradients, weights "
    "and activations away too, to either; 5–10 × is for steps of ten to twenty thousand tokens",
)

# %%
v100, left_13 = 32 * 2**30, peaks["and gradients", 13]
verdict(
    "23c",
    left_13 < v100,
    f"13.0B with state, float32 weights and gradients away: a peak of {left_13 / 1e9:.1f} GB, of "
    f"which 26.0 are weights; with everything away {peaks['everything', 13] / 1e9:.1f} GB",
    condition="for a GPU of 32 GB, which is what its paper used, and a host with 14 bytes a "
    "weight, 182 GB; one of 24 GB wants weights streamed, too",
    otherwise="the weights alone are too large",
)

# %% [markdown]
# The examples are configs of DeepSpeed. `memlab plan --deepspeed ds_config.json` says of each key
# what it costs and saves. Here are both, for 7B on one GPU: as they stand, and with 16-bit weights
# and checkpointing, as in the dry runs. By formula; DeepSpeed itself does not run here.

# %%
from memlab.configs.deepspeed import CHECKPOINTING, parse_deepspeed
from memlab.planner.deepspeed import DeepSpeedStep

CONFIGS = {
    "CPU": """{"zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true}}}""",
    "NVMe": """{"zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}}""",
}
in_deepspeed = {}
for name, text in CONFIGS.items():
    given = parse_deepspeed(text)
    better = given.with_value("bf16.enabled", True).with_value(CHECKPOINTING, True)
    for how, config in (("as it stands", given), ("bf16, checkpoints", better)):
        step = in_deepspeed[name, how] = DeepSpeedStep(seven, config, seq_len=2048)
        places = step.gpu_bytes, step.host_bytes, step.disk_bytes
        print(f"{name:5}{how:18}", end="")
        words = zip(("GPU", "host", "NVMe"), places, strict=True)
        print(", ".join(f"{place} {count / 1e9:6.1f} GB" for place, count in words))

# %%
cpu, nvme = (in_deepspeed[name, "bf16, checkpoints"] for name in CONFIGS)
verdict(
    "23d",
    nvme.gpu_bytes <= cpu.gpu_bytes,
    f"7B, 1 × 2,048 tokens, by formula: the GPU holds {cpu.gpu_bytes / 1e9:.1f} GB with the first "
    f"config and {nvme.gpu_bytes / 1e9:.1f} with the second, of which "
    f"{nvme.terms['weights'] / 1e9:.1f} are weights; the host {cpu.host_bytes / 1e9:.1f} and "
    f"{nvme.host_bytes / 1e9:.1f}; as they stand, without bf16, both train in float32",
    condition="for the GPU and the host",
    otherwise="the second config leaves the weights on the GPU, so a GPU holds a smaller model "
    "with it; it spares the host, not the GPU: for larger models add offload_param",
)

# %%
plain = a_model(layers=12)
trace = memlab.measure(lambda: a_step(plain), model=plain)
as_ever = max(running_sums(e.bytes * (e.category == "parameters") for e in trace.events))
verdict(
    "24",
    as_ever < everything,
    f"twelve layers, which run one after the other: {as_ever:,} bytes of weights at a time, of "
    f"{everything:,}; streamed, at most {max(here):,}: the rest and two layers; 7B with "
    f"everything away {share['everything']:.0%} less at the peak",
    condition="as it is worded",
    otherwise="layers always run one after the other, and that saves nothing: all their weights "
    "are there meanwhile; it is true of keeping a layer's weights on the device only while it "
    "runs, at the price of reading them twice a step",
)

# %% [markdown]
# ## What you can do now
#
# | away | saves, bytes a weight | travels in a step, bytes a weight |
# | --- | --- | --- |
# | Adam's state | 8 | 8 + 8 |
# | and float32 weights, and with them float32 gradients | 14 | 12 + 12 |
# | the same, stepped on the host | 14 | 4 |
# | and gradients | 16 | 14 + 14 |
# | and weights | all but rest + 2 layers | 16 + 18 |
# | activations | what waits for backward | that, there and back |
#
# You can tell a win from a copy in the same memory, say from how many tokens on a road is wide
# enough, and make a training survive a kill.
#
# Tomorrow: averages of weights, chosen after training, from snapshots on the disk.

# %% [markdown]
# ## The running bill
#
# One training step of 124M weights on 8 × 640 tokens. So far it had come down to weights and
# gradients in bfloat16, Lion's state of 8 bits, the inputs of twelve checkpoints, and the loss's
# temporaries. Now three of these go to the disk: Lion's state, each gradient as soon as it is made,
# and the inputs.

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
