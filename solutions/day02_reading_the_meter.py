# %% [markdown]
# # Day 2: Reading the meter
#
# **`nvidia-smi` shows 11 GiB, PyTorch shows 8. Which number is right? And why does a run fail at
# epoch 60?**
#
# After today you can:
#
# - tell apart the three numbers that people call "memory"
# - read an out-of-memory message
# - find the line that makes a run fail after hours
#
# About 100 minutes, 68 of them for six exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As yesterday, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks them. If you are
# stuck, type `memlab hint 2.1` in a terminal. You can skip an exercise and go on.

# %% [markdown]
# ## The question
#
# Three numbers are called "memory". All three are right, because they count different things.
#
# | number | reported by | counts |
# | --- | --- | --- |
# | **allocated** | `torch.cuda.memory_allocated()` | bytes of tensors, each rounded up |
# | **reserved** | `torch.cuda.memory_reserved()` | memory that torch obtained from the driver |
# | **in use** | `nvidia-smi`, `torch.cuda.mem_get_info()` | reserved + *context* of all processes |
#
# The CUDA context holds the driver's code and tables: several hundred MiB per process, depending on
# GPU and driver. The section *On your GPU* lists the same numbers for AMD, Apple and Intel.

# %%
import gc
import pickle
import random
import tempfile
import warnings
from bisect import bisect_left
from collections import Counter, namedtuple
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda import _memory_viz

import memlab
from memlab import plot
from memlab.allocator import Settings, simulate
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.ledger import activation_bytes
from memlab.data import batches, source_bytes
from memlab.explain import explain, summary
from memlab.model import GPT, PRESETS
from memlab.trace import Event, Trace
from memlab.units import format_bytes

MIB, GIB = 2**20, 2**30

# %% [markdown]
# Many training runs look like this one: four steps of yesterday's 124M model, 8 sequences a step,
# in float32. The sequence length differs from step to step. The code is written for `"cuda"`.

# %%
text = source_bytes("64 KiB")
lengths = (448, 512, 640, 576)


def build(device="cuda"):
    with torch.device(device):
        model = GPT(PRESETS["124m"])
    optimizer = torch.optim.AdamW(model.parameters())

    def four_steps():
        for seq_len in lengths:
            tokens, targets = next(batches(text, 8, seq_len, seed=0))
            optimizer.zero_grad()
            model(tokens.to(device), targets.to(device)).backward()
            optimizer.step()

    return four_steps, model, optimizer


# %% [markdown]
# ## Guess
#
# `memlab.predict` runs the steps on fake tensors, which have sizes but no memory, with the kernels
# that CUDA would use. At the peak, the tensors need 7.6 GiB. How many GiB will torch have
# **reserved** from the driver? Replace the dots with a number.

# %%
### BEGIN SOLUTION
guess("2.1", reserved_gib=8)  # the tensors, and a little more
### END SOLUTION
### BEGIN STUB
# guess("2.1", reserved_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# Requesting memory from the driver for every tensor would be slow, so torch has a *caching
# allocator*. It requests large *segments* from the driver, splits them into *blocks* for tensors,
# and keeps freed blocks for later tensors. `simulate` runs a trace through the allocator's rules.
# Today you implement these rules.
#
# (Yesterday's step peaked at 7.94 GiB on a CPU. This peak is lower, because CUDA's RMSNorm kernel
# saves one tensor fewer per norm.)

# %%
trace = memlab.predict(build, steps=1)  # one call of four_steps
simulated = simulate(trace)
requested = trace.peak_bytes - trace.at_peak["rounding"]
context = GIB // 2  # assumed; it depends on GPU and driver

reveal("2.1", reserved_gib=simulated.reserved_bytes)
print(f"requested by tensors  {format_bytes(requested)}")
print(f"allocated             {format_bytes(simulated.allocated_bytes)}   shown by PyTorch")
print(f"reserved              {format_bytes(simulated.reserved_bytes)}")
in_use = simulated.reserved_bytes + context
print(f"plus 0.5 GiB context  {format_bytes(in_use)}  shown by nvidia-smi")

# %% [markdown]
# None of this ran on a GPU: the tensors are *predicted*, and the allocator is *simulated*.
#
# The difference between reserved and allocated memory is free blocks, because torch keeps the
# memory of freed tensors. List the free blocks at the moment when torch requests its last large
# segment:

# %%
growth = [after - before for before, after in pairwise((0, *simulated.reserved))]
position = max(i for i, size in enumerate(growth) if size > 100 * MIB)
segments, request = simulated.segments(position), trace.events[position]
free = [block.bytes for s in segments for block in s.blocks if block.state == "free"]
print(f"free: {format_bytes(sum(free))} in {len(free)} blocks, the largest ", end="")
print(format_bytes(max(free)))
print(f"requested by {request.operator} in {request.phase}: {format_bytes(request.bytes)}")
for note in trace.notes:
    print(fill(f"note: {note}", 96))

# %% [markdown]
# 2.6 GiB were free, but no free block was large enough for the request. This is **fragmentation**.
#
# The notes describe the prediction: the kernels that it assumes, the kernels whose memory has not
# been measured on a GPU yet, and its error in the steps that were measured on GPUs.

# %% [markdown]
# ## Build, rule 1: block size and segment size
#
# | step | rule |
# | --- | --- |
# | request → *block* | round up to a multiple of 512 bytes |
# | block → *segment*, if no free block fits | block up to 1 MiB: 2 MiB |
# | | block above 1 MiB and below 10 MiB: 20 MiB |
# | | block of 10 MiB or more: its size, rounded up to a multiple of 2 MiB |
#
# ### Exercise 2.1: from a request to a block and a segment
#
# About 8 minutes. Assume that no free block fits. Return the sizes of the block and of the segment
# that torch requests from the driver.


# %%
def sizes(requested_bytes: int) -> tuple[int, int]:
    """Return the bytes of the block, and of the segment to request for it."""
    ### BEGIN SOLUTION memlab.reference.caching_allocator.sizes
    size = -(-requested_bytes // 512) * 512
    if size <= MIB:
        return size, 2 * MIB
    if size < 10 * MIB:
        return size, 20 * MIB
    return size, -(-size // (2 * MIB)) * 2 * MIB
    ### END SOLUTION


# %%
sizes = exercise("2.1", sizes)

# %% [markdown]
# Compare the request, your sizes, and the simulated allocator. Rounding matters most for the
# smallest tensor. The simulated block of the logits is a little larger than yours: it is the whole
# segment. Rule 2 explains why.

# %%
for what, requested in (("the loss", 4), ("a bias of 768", 3072), ("logits", 8 * 640 * 50257 * 4)):
    size, segment_size = sizes(requested)
    event = Event(requested, 1, "activations", "", "", "forward", "float32", ())
    one_tensor = simulate([event])
    print(f"{what:14}{requested:>13,} bytes, block {size:>13,}, segment {segment_size:>13,}")
    print(f"{'simulated':>33}, block {one_tensor.allocated_bytes:>13,}, ", end="")
    print(f"segment {one_tensor.reserved_bytes:>13,}")

# %% [markdown]
# ## Rule 2: best fit and split
#
# A segment is split into blocks, which are allocated or free. Small requests (at most 1 MiB) and
# large requests never share a segment. Each kind has its own *pool*: a list of the blocks of its
# segments, sorted by address.


# %%
@dataclass
class AllocatorBlock:
    segment: int  # the number of its segment
    address: int  # of its first byte
    bytes: int
    free: bool


# %% [markdown]
# - **Best fit**: choose the smallest free block that fits. If several have the same size, choose
#   the one with the lowest address.
# - **Split**: the request gets the lower part. If at least 512 bytes remain (small pool), or more
#   than 1 MiB (large pool), they become a free block, right behind it in the list. A smaller
#   remainder stays in the allocated block and is wasted.

# %% [markdown]
# ### Exercise 2.2: allocate a block
#
# About 15 minutes. `size` is already rounded up; up to 1 MiB, the pool is the small one. Return the
# block's address, or None if no free block fits.


# %%
def allocate(pool: list[AllocatorBlock], size: int) -> int | None:
    """Allocate `size` bytes in the pool, and return their address."""
    ### BEGIN SOLUTION memlab.reference.caching_allocator.allocate
    fitting = [block for block in pool if block.free and block.bytes >= size]
    if not fitting:
        return None
    best = min(fitting, key=lambda block: (block.bytes, block.address))
    remaining = best.bytes - size
    splits = remaining >= 512 if size <= MIB else remaining > MIB
    if splits:
        upper = AllocatorBlock(best.segment, best.address + size, remaining, free=True)
        pool.insert(pool.index(best) + 1, upper)
        best.bytes = size
    best.free = False
    return best.address
    ### END SOLUTION


# %%
allocate = exercise("2.2", allocate)

# %% [markdown]
# ## Rule 3: free and merge
#
# With splits alone, blocks would only get smaller. So a freed block **merges** with its free
# neighbors in the same segment. Blocks of two segments never merge, because torch can return a
# segment to the driver only as a whole.
#
# ### Exercise 2.3: free a block and merge
#
# About 10 minutes. Change the list in place, and return nothing.


# %%
def free_block(pool: list[AllocatorBlock], address: int) -> None:
    """Free the block at `address`, and merge it with its free neighbors."""
    ### BEGIN SOLUTION memlab.reference.caching_allocator.free_block
    index = next(i for i, block in enumerate(pool) if block.address == address)
    pool[index].free = True
    for i in (index, index - 1):  # merge with the block above, then with the one below
        if i >= 0 and i + 1 < len(pool):
            lower, upper = pool[i], pool[i + 1]
            if lower.free and upper.free and lower.segment == upper.segment:
                lower.bytes += upper.bytes
                del pool[i + 1]
    ### END SOLUTION


# %%
free_block = exercise("2.3", free_block)

# %% [markdown]
# These are all the rules. `Cache` has the two pools, calls your three functions, and requests a
# segment if no free block fits.


# %%
class Cache:
    def __init__(self):
        self.pools = {"small": [], "large": []}
        self.reserved = self.segments = 0
        self.active_blocks = {}  # storage: its pool and its address

    def malloc(self, storage: int, requested: int) -> None:
        size, segment_size = sizes(requested)
        pool = self.pools["small" if size <= MIB else "large"]
        address = allocate(pool, size)
        if address is None:
            pool.append(AllocatorBlock(self.segments, self.reserved, segment_size, free=True))
            self.segments += 1
            self.reserved += segment_size
            address = allocate(pool, size)
        self.active_blocks[storage] = pool, address

    def free(self, storage: int) -> None:
        free_block(*self.active_blocks.pop(storage))


# %% [markdown]
# Run all allocations of the four steps through your three functions. If you skipped an exercise,
# its reference solution runs instead.

# %%
cache = Cache()
for event in trace.events:
    if event.category == "rounding":
        continue  # `sizes` does the rounding
    if event.bytes > 0:
        cache.malloc(event.storage, event.bytes)
    else:
        cache.free(event.storage)
print(f"your allocator:   {cache.segments} segments, {format_bytes(cache.reserved)} reserved")
print(f"memlab.allocator: {simulated.segment_allocations} segments, ", end="")
print(f"{format_bytes(simulated.reserved_bytes)} reserved")
print(f"the same to the byte: {cache.reserved == simulated.reserved_bytes}")

# %% [markdown]
# ## Create fragmentation
#
# Four tensors of 5 MiB share a segment of 20 MiB. Free the first and the third: 10 MiB are free.
# Then request 6 MiB, once on a large GPU and once on a GPU with 24 MiB.

# %%
changes = (1, 5), (2, 5), (3, 5), (4, 5), (1, -5), (3, -5), (5, 6)  # storage, MiB
events = [
    Event(mib * MIB, storage, "activations", "aten.empty", "", "forward", "uint8", ())
    for storage, mib in changes
]
reserved = format_bytes(simulate(events).reserved_bytes)
print(f"on a large GPU: {reserved} reserved for 16 MiB of tensors")
plot.blocks(
    simulate(events, capacity_bytes=24 * MIB),
    title="10 MiB are free, but a request of 6 MiB does not fit",
)

# %% [markdown]
# Hatched memory is reserved but free. The allocator cannot move tensors to close the gaps, because
# the address of a tensor is fixed.

# %% [markdown]
# ## How much memory does the run need?
#
# A run can fit in less memory than it reserves on a large GPU. If the driver cannot provide a
# segment, torch releases all entirely free segments and requests again (a *retry*). A binary search
# in steps of 32 MiB finds the smallest GPU memory, besides the context, that the run fits in.


# %%
def step_starts(trace: Trace) -> list[int]:
    """Return the positions of the events that begin a forward pass, except the first pass."""
    phases = [event.phase for event in trace.events]
    return [i for i, pair in enumerate(pairwise(phases), 1) if pair == ("optimizer", "forward")]


def smallest_gpu(settings: str = "", **options) -> int:
    """Return the bytes of the smallest GPU memory that the run fits in."""
    capacities = range(7 * 1024, 10 * 1024, 32)  # MiB

    def fits(mib: int) -> bool:
        return simulate(trace, Settings.parse(settings, capacity_bytes=mib * MIB), **options).fits

    return capacities[bisect_left(capacities, True, key=fits)] * MIB


need = smallest_gpu()
print(f"allocated {format_bytes(simulated.allocated_bytes)} at the peak")
print(f"reserved  {format_bytes(simulated.reserved_bytes)} on a large GPU")
print(f"needed    {format_bytes(need)} besides the context")

# %% [markdown]
# **So which number is right?** A GPU with only the allocated bytes (PyTorch's number) is too small
# for the run. A GPU with fewer than the reserved bytes (most of `nvidia-smi`'s number) can still be
# large enough. The need lies between the two.
#
# ## What the settings change
#
# Set allocator options in an environment variable (`PYTORCH_CUDA_ALLOC_CONF` in older torch):
#
# ```
# PYTORCH_ALLOC_CONF=expandable_segments:True python train.py
# ```
#
# `torch.cuda.empty_cache()` releases all entirely free segments at once. In the second row of the
# next table, it is called before every step.

# %%
trials = {
    "nothing set": ("", {}),
    "empty_cache() before each step": ("", {"empty_cache_before": step_starts(trace)}),
    "max_split_size_mb:128": None,
    "roundup_power2_divisions:8": None,
    "garbage_collection_threshold:0.6": None,
    "per_process_memory_fraction:0.95": None,
    "expandable_segments:True": None,
}
Trial = namedtuple("Trial", "blocks calls smallest")
table = {}
print(f"{'on a GPU with 24 GiB':34}{'allocated':>10}{'reserved':>10}{'calls':>7}{'smallest':>10}")
for name, arguments in trials.items():
    settings, options = arguments or (name, {})
    ran = simulate(trace, Settings.parse(settings, capacity_bytes=24 * GIB), **options)
    calls = ran.segment_allocations + ran.segment_frees
    trial = table[name] = Trial(ran, calls, smallest_gpu(settings, **options))
    peaks = f"{ran.allocated_bytes / GIB:>10.2f}{ran.reserved_bytes / GIB:>10.2f}"
    print(f"{name:34}{peaks}{calls:>7}{trial.smallest / GIB:>10.2f}")

# %% [markdown]
# Sizes are in GiB. *Smallest* is the memory that the run needs besides the context. *Calls* counts
# `cudaMalloc` and `cudaFree`, or page mappings for expandable segments. No setting changes the
# tensors: `allocated` differs only by rounding.
#
# | setting | effect | here |
# | --- | --- | --- |
# | `max_split_size_mb` | does not split large blocks | reserves 17.1 GiB, needs 8.4 GiB |
# | `roundup_power2_divisions` | rounds up more, so that sizes repeat | reserves and needs more |
# | `garbage_collection_threshold` | releases free segments early | needs 8.5 GiB, not 9.0 |
# | `per_process_memory_fraction` | limits the process's memory | saves nothing |
# | `expandable_segments` | one segment that grows by pages | almost no waste: try it first |

# %% [markdown]
# ## What fails at epoch 60?
#
# Four people train a small model on torch's source code. Each has added a few lines that look
# harmless:
#
# - **Ada** records the loss on a *held-out* batch, which is not used for training.
# - **Ben** records the mean absolute value of the activations with a hook.
# - **Cleo** caches the soft targets of each batch, to compute them only once.
# - **Dora** trains on sequences of several lengths, and caches a table of positions per length.
#
# Here an epoch is two training batches. The next cells contain the shared code and Ada's loop.


# %%
def new_model():
    layers = nn.Embedding(256, 256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=True)


def train_on(model, optimizer, tokens, targets, positions=None):
    optimizer.zero_grad()
    embedded = model[0](tokens)  # (B, T, 256)
    if positions is not None:
        embedded = embedded + positions
    # .mT: (B, 256, T), because cross_entropy expects the classes in dimension 1
    F.cross_entropy(model[1:](embedded).mT, targets).backward()
    optimizer.step()


def soften(targets):
    """Return soft targets: 0.9 for the right byte, and 0.1 spread over all 256."""
    return 0.9 * F.one_hot(targets, 256) + 0.1 / 256


# %%
def ada(model, optimizer, data, times=1):
    """Record the loss on held-out text."""
    losses = []
    while True:
        for _ in range(2 * times):
            train_on(model, optimizer, *next(data))
        for _ in range(times):
            tokens, targets = next(data)
            losses.append(F.cross_entropy(model(tokens).mT, targets))
        yield  # the end of an epoch


# %% [markdown]
# Ada keeps *one loss* per held-out batch. How many more MiB are alive after each epoch than after
# the epoch before? A batch is 64 sequences of 512 bytes.

# %%
### BEGIN SOLUTION
guess("2.2", growth_mib=0)  # a loss has four bytes
### END SOLUTION
### BEGIN STUB
# guess("2.2", growth_mib=...)
### END STUB

# %% [markdown]
# Here are the other three loops. `model[2]` is the GELU; its hook runs in every forward pass.


# %%
def ben(model, optimizer, data):
    """Record the mean absolute value of the GELU's outputs."""
    outputs, scales = [], []
    model[2].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    while True:
        for _ in range(2):
            train_on(model, optimizer, *next(data))
        scales.append(sum(output.abs().mean().item() for output in outputs[-2:]) / 2)
        yield


# %%
def cleo(model, optimizer, data):
    """Compute the soft targets of a batch only once."""
    soft = {}
    while True:
        for _ in range(2):
            tokens, targets = next(data)
            if targets not in soft:
                soft[targets] = soften(targets)
            train_on(model, optimizer, tokens, soft[targets].mT)
        yield


def dora(model, optimizer, data, lengths=range(192, 513, 64), seed=7):
    """Add positions to the text, from one table per length."""
    drawn, tables = random.Random(seed), {}
    while True:
        for _ in range(2):
            tokens, targets = next(data)
            T = drawn.choice(lengths)
            if T not in tables:
                tables[T] = torch.zeros(T, 256)
            train_on(model, optimizer, tokens[:, :T], targets[:, :T], tables[T])
        yield


# %% [markdown]
# Run six epochs of each loop on fake tensors, which need no memory on your laptop. `lines=True`
# records the line that allocates each tensor.


# %%
def epochs_of(person, epochs, batch=64, **options) -> list[Trace]:
    with memlab.dry_run():
        model, optimizer = new_model()
        run = person(model, optimizer, batches(text, batch, 512, seed=0), **options)
        one_epoch = partial(next, run)
        return [
            memlab.measure(one_epoch, model=model, optimizer=optimizer, lines=True)
            for _ in range(epochs)
        ]


people = (ada, ben, cleo, dora)
runs = {person.__name__: epochs_of(person, 6) for person in people}
growth = runs["ada"][-1].live_bytes - runs["ada"][-2].live_bytes
reveal("2.2", growth_mib=growth)

# %% [markdown]
# A loss keeps its autograd *graph* alive, with every tensor that forward saved for backward. In
# training, `backward()` frees the saved tensors. Ada never calls it for a held-out loss, so its
# saved tensors are never freed. They make up the gap.

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, epochs in runs.items():
    alive = [epoch.live_bytes / MIB for epoch in epochs]
    axes.plot(range(1, 7), alive, marker="o", markersize=3, label=name.title())
axes.set(xlabel="epoch", ylabel="MiB alive after the epoch", ylim=(0, None))
axes.set_title("Memory still alive after each epoch")
axes.legend(frameon=False)
print("dora, MiB:", *(f"{epoch.live_bytes / MIB:.2f}" for epoch in runs["dora"]))

# %% [markdown]
# Three of the curves keep growing. Dora's curve, at the bottom, stops growing once she has a table
# for each of her six lengths. A cache that fills up is not a leak.

# %% [markdown]
# ### Exercise 2.4: find the leaking line
#
# About 12 minutes. You get one Trace per epoch. `epoch.alive()` returns an event for each tensor
# still alive at the end of the epoch, with its `bytes` and its `line`. Sum the bytes by line.
# Compare the last epoch with the middle epoch, `epochs[len(epochs) // 2]`, because the first epochs
# fill optimizer state and caches.


# %%
def leaks(epochs: list[Trace]) -> dict[str, int]:
    """Return the lines whose bytes grow, with their mean growth per epoch."""
    ### BEGIN SOLUTION
    middle = len(epochs) // 2
    between = len(epochs) - 1 - middle
    before, after = {}, {}
    for sums, epoch in ((before, epochs[middle]), (after, epochs[-1])):
        for event in epoch.alive():
            sums[event.line] = sums.get(event.line, 0) + event.bytes
    grown = {line: after[line] - before.get(line, 0) for line in after}
    return {line: size // between for line, size in grown.items() if size > 0}
    ### END SOLUTION


# %%
leaks = exercise("2.4", leaks)

# %%
for name, epochs in runs.items():
    print(f"{name}: {'leaks' if leaks(epochs) else 'no leak'}")
    for line, size in leaks(epochs).items():
        file, _, rest = line.partition(":")
        number, function = rest.split()
        where = file if file == "data.py" else f"line {number} of its cell"
        print(f"  {format_bytes(size)} per epoch, from {where}, in {function}")

# %% [markdown]
# `leaks` returns the line that *allocated* a tensor. (memlab's `data.py` allocates the batches.)
# Another line may keep it alive: Ben's hook keeps tensors that `train_on` allocated. `diff` also
# shows the tensors' module, shape and count.

# %%
for name in ("ada", "ben"):
    difference = runs[name][-2].diff(runs[name][-1])
    print(f"{name}: {format_bytes(difference.bytes)} more than an epoch ago")
    for kind, count in difference.rows[:4]:
        shape = "×".join(map(str, kind.shape))
        print(f"  {count} × {shape:12} {kind.operator:28} in module {kind.module or 'none'}")

# %% [markdown]
# ## When will it run out of memory?
#
# Ada's memory grows by the same bytes in each epoch. Her GPU has 11.2 GiB besides the context. From
# the peak of epoch 6 and the growth per epoch, compute the last epoch that fits. Then run 62 epochs
# through a simulated allocator with 11.2 GiB.


# %%
def whole_run(person, epochs, batch=64, lines=False, **options) -> Trace:
    """Return all epochs as one trace."""
    with memlab.dry_run():
        model, optimizer = new_model()
        run = person(model, optimizer, batches(text, batch, 512, seed=0), **options)
        with memlab.meter(model, optimizer, lines=lines) as meter:
            for _ in range(epochs):
                next(run)
    return meter.trace


adas_gpu = int(11.2 * GIB)
fit = len(runs["ada"]) + (adas_gpu - runs["ada"][-1].peak_bytes) // growth
print(f"the last epoch that fits, extrapolated: {fit}")

whole = whole_run(ada, 62)
adas_oom = simulate(whole, capacity_bytes=adas_gpu).out_of_memory
epoch = 1 + 62 * adas_oom.position // len(whole.events)
print(f"the epoch that fails in the simulated allocator: {epoch}")
print(f"reserved  {format_bytes(adas_oom.reserved_bytes)}")
print(f"allocated {format_bytes(adas_oom.allocated_bytes)}")

# %% [markdown]
# Almost all reserved memory is allocated, which is typical of a leak.
#
# Dora has no leak. She trains with batches of 1,024 sequences, on a GPU with 4.3 GiB besides the
# context. Her tensors need less than that at every moment.

# %%
doras_run = whole_run(dora, 12, batch=1024, seed=0)  # seed 0 draws the lengths in another order
on_large_gpu = simulate(doras_run)
print(f"allocated at the peak: {format_bytes(on_large_gpu.allocated_bytes)}")

doras_gpu = int(4.3 * GIB)
expandable = simulate(doras_run, expandable_segments=True, capacity_bytes=doras_gpu)
print(f"with expandable segments all 12 epochs fit: {expandable.fits}")

doras_oom = simulate(doras_run, capacity_bytes=doras_gpu).out_of_memory
free_blocks = doras_oom.free_block_bytes
epoch = 1 + 12 * doras_oom.position // len(doras_run.events)
print(f"without them, epoch {epoch} fails:")
print(f"  requested                {format_bytes(doras_oom.requested_bytes):>12}")
print(f"  free in reserved memory  {format_bytes(sum(free_blocks)):>12}", end=", ")
print(f"the largest block {format_bytes(free_blocks[0])}")
print(f"  not yet reserved         {format_bytes(doras_gpu - doras_oom.reserved_bytes):>12}")

# %% [markdown]
# The free reserved memory and the memory not yet reserved together exceed the request, but neither
# is large enough alone. Shorter sequences have smaller tensors, and the gaps that these tensors
# left are too small for the request.

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
events = len(doras_run.events)
position = [1 + 12 * i / events for i in range(events)]
allocated = [b / GIB for b in on_large_gpu.allocated]
axes.fill_between(position, allocated, color="#8c9bb3", linewidth=0, label="allocated")
axes.plot(position, [b / GIB for b in on_large_gpu.reserved], color="#1c1c1c", label="reserved")
axes.axhline(4.3, color="0.4", linestyle="--", linewidth=1, label="Dora's GPU, 4.3 GiB")
axes.set(xlabel="epoch", ylabel="GiB", ylim=(0, None), xticks=range(1, 13))
axes.set_title("Dora's run on a large GPU")
_ = axes.legend(frameon=False)

# %% [markdown]
# On a large GPU, her reserved memory jumps in epochs 1, 3 and 11, to more than twice the allocated
# peak. `nvidia-smi` shows only reserved memory, so this fragmentation looks like a leak. To tell
# the two apart, print `memory_allocated()` at the end of each epoch. If it stays flat, nothing
# leaks.

# %% [markdown]
# ## Fix the leaks
#
# The next loop has all three leaks. It runs on your CPU, not on fake tensors. For each line, check
# what it keeps alive. Every epoch gets new batches, and `notes` is kept for the whole run. `.mT`
# moves the classes to dimension 1, as `cross_entropy` expects.

# %% [markdown]
# ### Exercise 2.5: fix three leaks
#
# About 15 minutes. After each epoch, the same number of bytes must be alive. Within an epoch, at
# most one scalar per batch may accumulate. `register_forward_hook` returns a handle; its
# `remove()` removes the hook.

# %% [markdown]
# The results must stay the same:
#
# - the trained weights, each module's `training` flag, and other hooks
# - `notes["losses"]`: one Python float per held-out batch
# - `notes["scales"]`: one Python float per epoch, from training batches alone


# %%
def train_epoch(model, optimizer, training, held_out, notes):
    """Train on each batch, then record the losses on held-out text."""
    ### BEGIN SOLUTION
    seen = []
    hook = model[2].register_forward_hook(
        lambda module, args, output: seen.append(output.detach().abs().mean().item())
    )
    for tokens, targets in training:
        train_on(model, optimizer, tokens, soften(targets).mT)
    hook.remove()
    notes["scales"].append(sum(seen) / len(seen))
    with torch.no_grad():
        for tokens, targets in held_out:
            notes["losses"].append(F.cross_entropy(model(tokens).mT, targets).item())
    ### END SOLUTION
    ### BEGIN STUB
    # raise NotImplementedError("exercise 2.5, about 6 lines to change")  # delete me
    # seen, soft = [], notes["soft"]
    # model[2].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    # for tokens, targets in training:
    #     if targets not in soft:
    #         soft[targets] = soften(targets)
    #     train_on(model, optimizer, tokens, soft[targets].mT)
    # notes["scales"].append(torch.stack([output.abs().mean() for output in seen]).mean().item())
    # for tokens, targets in held_out:
    #     notes["losses"].append(F.cross_entropy(model(tokens).mT, targets))
    ### END STUB


# %%
train_epoch = exercise("2.5", train_epoch)

# %% [markdown]
# Train for twelve epochs on real text. Plot the loss, and the memory still alive after each
# epoch.

# %%
torch.manual_seed(0)
model, optimizer = new_model()
data, held_out = batches(text, 8, 64, seed=0), [next(batches(text, 16, 64, seed=1))]
notes, alive = {"losses": [], "scales": [], "soft": {}}, []
for _ in range(12):
    training = [next(data) for _ in range(2)]
    epoch = partial(train_epoch, model, optimizer, training, held_out, notes)
    alive.append(memlab.measure(epoch, model=model, optimizer=optimizer).live_bytes)
fig, (memory, learning) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
memory.plot(range(1, 13), [size / MIB for size in alive])
memory.set(xlabel="epoch", ylabel="MiB", ylim=(0, None), title="Alive after the epoch")
learning.plot(range(1, 13), notes["losses"])
learning.set(xlabel="epoch", ylabel="loss in nats", title="Loss on held-out source")
print(f"the same bytes are alive after each epoch: {len(set(alive)) == 1}")
print(f"the loss went down: {notes['losses'][-1] < notes['losses'][0]}")

# %% [markdown]
# ## What `gc.collect()` does
#
# Python frees a tensor as soon as its last reference is gone. The exception is a *reference cycle*:
# objects that refer to each other, and their tensors, stay alive until the garbage collector runs.


# %%
class Logger:
    def __init__(self):
        self.last = torch.zeros(2**18)  # 1 MiB
        self.callback = self.log  # a method refers to its object: a cycle

    def log(self): ...


# %%
def alive_bytes(make, then=lambda: None) -> int:
    """Drop the result of `make()`, call `then()`, and return the bytes still alive."""
    gc.disable()
    with memlab.meter() as meter:
        make()
        then()
    gc.enable()
    return meter.trace.live_bytes


print(f"a tensor, dropped: {format_bytes(alive_bytes(lambda: torch.zeros(2**18)))}")
print(f"a cycle, dropped: {format_bytes(alive_bytes(Logger))}")
print(f"a cycle, after gc.collect(): {format_bytes(alive_bytes(Logger, gc.collect))}")

# %% [markdown]
# ## Read an out-of-memory message
#
# On a GPU, Dora's run ends with this message from torch. The next cells fill in the numbers of her
# simulated run.


# %%
class Oom(NamedTuple):
    requested: int
    total: int  # the GPU's memory
    free: int  # the GPU's free memory
    process: int  # in use by this process, context included
    allocated: int
    unallocated: int  # reserved but unallocated


MESSAGE = """CUDA out of memory. Tried to allocate {requested}.
GPU 0 has a total capacity of {total} of which {free} is free.
Including non-PyTorch memory, this process has {process} memory in use.
Of the allocated memory {allocated} is allocated by PyTorch,
and {unallocated} is reserved by PyTorch but unallocated.
If reserved but unallocated memory is large try setting
PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."""


# %%
def message_numbers(oom, capacity: int, others: int = 0) -> Oom:
    """Return the message's numbers; `capacity` excludes the context and the other processes."""
    return Oom(
        requested=oom.requested_bytes,
        total=capacity + context + others,
        free=capacity - oom.reserved_bytes,
        process=oom.reserved_bytes + context,
        allocated=oom.allocated_bytes,
        unallocated=oom.reserved_bytes - oom.allocated_bytes,
    )


doras = message_numbers(doras_oom, doras_gpu)
print(MESSAGE.format(**{name: format_bytes(size) for name, size in doras._asdict().items()}))

# %% [markdown]
# The message contains all three numbers:
#
# | in the message | which of the three |
# | --- | --- |
# | allocated by PyTorch | **allocated** |
# | allocated + reserved but unallocated | **reserved** |
# | this process has … in use | reserved + context |
# | total capacity − free | **in use**, as in `nvidia-smi` |
#
# Torch raises this error only after it has released all entirely free segments. So the "reserved
# but unallocated" bytes are free blocks between tensors.

# %% [markdown]
# ### Exercise 2.6: diagnose the message
#
# About 8 minutes. Compute the bytes that this process *needs* without wasted memory: its context,
# its tensors and the request. Rounding always wastes a little, so count only 98 % of the memory as
# usable. Return the first true answer:
#
# - `"too much"`: the need exceeds 98 % of the GPU.
# - `"another process"`: the need exceeds 98 % of the memory that other processes do not use.
# - `"fragmentation"`: otherwise. Enough memory is free, but it is not contiguous.


# %%
def diagnose(oom: Oom) -> str:
    """Return why the request failed."""
    ### BEGIN SOLUTION
    need = oom.process - oom.unallocated + oom.requested
    others = oom.total - oom.free - oom.process
    if need > 0.98 * oom.total:
        return "too much"
    if need > 0.98 * (oom.total - others):
        return "another process"
    return "fragmentation"
    ### END SOLUTION


# %%
diagnose = exercise("2.6", diagnose)

# %% [markdown]
# Try it on three failures of today's runs. In the third, Dora uses expandable segments, but another
# process uses 1 GiB of her GPU.

# %%
left = doras_gpu - GIB
shared_gpu = simulate(doras_run, expandable_segments=True, capacity_bytes=left).out_of_memory
failures = {
    "Dora": doras,
    "Ada in epoch 60": message_numbers(adas_oom, adas_gpu),
    "Dora, shared GPU": message_numbers(shared_gpu, left, others=GIB),
}
print(f"{'':18}{'requested':>10}{'free':>12}{'unallocated':>13}")
for name, oom in failures.items():
    sizes_of = map(format_bytes, (oom.requested, oom.free, oom.unallocated))
    print(f"{name:18}{{:>10}}{{:>12}}{{:>13}}  {diagnose(oom)}".format(*sizes_of))

# %% [markdown]
# | diagnosis | remedy |
# | --- | --- |
# | too much | if `allocated` grows from epoch to epoch, find the leak; otherwise Day 3 |
# | another process | find it with `nvidia-smi`; end it, or choose another GPU |
# | fragmentation | set `expandable_segments:True`, use fewer sequence lengths |

# %% [markdown]
# ## Record every allocation
#
# The message has six numbers. A *snapshot* has every allocation with its stack. On CUDA, ROCm or
# XPU (`torch.xpu.memory`), add three statements to your own script:
#
# ```python
# torch.cuda.memory._record_memory_history(max_entries=200_000)  # keeps the newest entries
# try:
#     train()
# finally:  # also after an out-of-memory error
#     torch.cuda.memory._dump_snapshot("snapshot.pickle")
# ```
#
# Without a GPU, a Trace can write such a file. Write one for Ada's first six epochs:

# %%
yours = Path("progress.json").exists()  # a folder that `memlab start` made
path = Path("." if yours else tempfile.mkdtemp(), "ada.pickle")
whole_run(ada, 6, lines=True).to_snapshot(path)
print(f"{path.name} is {'next to this notebook' if yours else 'in the folder of `path`'}")

# %% [markdown]
# `device_traces` holds the history of each device. `segments` lists the reserved memory at the end,
# block by block. Summarize it with torch's own reader:

# %%
snapshot = pickle.loads(path.read_bytes())
print(dict(Counter(entry["action"] for entry in snapshot["device_traces"][0])))
alive_blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
largest = max(alive_blocks, key=lambda block: block["size"])
print(f"{len(alive_blocks)} blocks alive; one of the largest has {format_bytes(largest['size'])}")
print("its stack:", " in ".join(frame["name"] for frame in largest["frames"]))
totals = _memory_viz.segsum(snapshot).splitlines()
print(*(line for line in totals if line.startswith("total_")), sep=", ")

# %% [markdown]
# To view it, drop the file onto [pytorch.org/memory_viz](https://pytorch.org/memory_viz); it stays
# in your browser. Or write the page yourself with `python -m torch.cuda._memory_viz trace_plot
# ada.pickle -o ada.html`.
#
# | view | how to read it |
# | --- | --- |
# | *Active Memory Timeline* | a band is a tensor; click it for its stack |
# | *Allocator State History* | segments after each event, with the gaps of fragmentation |
#
# In the timeline, Ada's leak is a staircase. Each epoch adds bands that reach the right edge, so
# these tensors are still alive.

# %% [markdown]
# ## Read the snapshot with `memlab explain`
#
# In a terminal, `memlab explain ada.pickle` prints what occupied the memory, the likely cause and
# remedies. In Python:

# %%
found = explain(path)
cause = found.findings[0]
print(f"cause: {cause.cause.title} ({cause.word})")
for sentence in cause.evidence[:2]:
    print(f"  - {sentence}")
frame = found.situation.leaks[0].frame
print(f"line: {frame.line} of its cell, in {frame.name}")
for remedy in list(summary.advice(cause, found.replays))[:2]:
    print(f"remedy: {remedy}")

# %% [markdown]
# `explain` names the line from exercise 2.4 and the remedy from exercise 2.5. To predict how much a
# remedy saves, it replays the history through the simulated allocator. Record several epochs: three
# are too few for `explain` to find Ada's leak.

# %% [markdown]
# ## Monitor the loop
#
# A snapshot explains a run that failed. A monitor warns during training: wrap your loop in
# `with memlab.monitor():`. It reads memory counters after each `optimizer.step()`, and warns once
# of a leak, of fragmentation, or of nearly full memory. Monitor Ben's loop on your CPU:

# %% tags=["nbval-ignore-output"] reason="the memory of a process differs from run to run"
model, optimizer = new_model()
run = ben(model, optimizer, batches(text, 4, 128, seed=0))
with warnings.catch_warnings(record=True) as caught, memlab.monitor(every=20):
    warnings.simplefilter("always")
    for _ in range(30):
        next(run)
for warning in caught:
    print(fill(f"{warning.category.__name__}: {warning.message}", 96))
print(f"Ben keeps {format_bytes(4 * 128 * 512 * 4)} of GELU outputs per step")

# %% [markdown]
# Without `every`, the monitor prints nothing unless it warns. On a GPU it reads torch's counters.
# On the CPU it reads the memory of the process, which includes freed memory that the C library
# keeps. So on the CPU a warning may come late or never, and its MiB per step are only an estimate.

# %% [markdown]
# `log_to` sends the bytes to TensorBoard (a `SummaryWriter`), a W&B run, or a function. In the
# Trainer of transformers or Lightning, use `MemoryCallback()`, which logs the same names. Import it
# from `memlab.monitoring.transformers` or `memlab.monitoring.lightning`.

# %%
logged = []
log = memlab.monitor().log_to(lambda name, value, step: logged.append((step, name)), every=2)
with warnings.catch_warnings(), log:
    warnings.simplefilter("ignore")  # the warning of Ben's leak
    for _ in range(2):  # two steps each
        next(run)
for step, name in logged:
    print(f"step {step}: {name}")
print(f"8 × 1024**3 bytes are 8 GiB, and {8 * 1024**3 / 1e9:.2f} GB")

# %% [markdown]
# On a GPU, `memory/reserved` is logged too.
#
# One published guide prints `memory_allocated() / 1024**3` as "GB". The number is in GiB; in GB it
# is 7 % larger. It also shows only the moment of the call; the monitor shows each step's peak.

# %% [markdown]
# ## At scale
#
# Each loss that Ada records keeps all saved tensors of its forward pass alive. Compute their bytes
# for larger models in float32, with yesterday's formula:

# %%
for name, batch, seq_len in (("124m", 8, 640), ("1b", 1, 8192), ("llama-2-7b", 1, 4096)):
    kept_bytes = activation_bytes(PRESETS[name], batch, seq_len)
    print(f"{name:12}{batch} × {seq_len} tokens: {format_bytes(kept_bytes):>10} per kept loss")

# %% [markdown]
# With such a leak, a 7B run fails in epoch 2. In float32 with AdamW, weights, gradients and
# optimizer state need 100 GiB, so on a GPU with 180 GiB the second kept loss does not fit. Small
# models leak slowly, so their leaks are found late.

# %% [markdown]
# ## On your GPU
#
# | platform | in use, all processes | torch's counters |
# | --- | --- | --- |
# | NVIDIA | `nvidia-smi` | `torch.cuda.memory_allocated()`, `memory_reserved()` |
# | AMD | `rocm-smi --showmeminfo vram`, `amd-smi` | the same `torch.cuda` functions |
# | Intel | `xpu-smi` | `torch.xpu.memory_allocated()`, `memory_reserved()` |
# | Apple | `vm_stat` | `torch.mps.current_allocated_memory()`, `driver_allocated_memory()` |
#
# On Apple, `driver_allocated_memory()` returns the reserved memory, and `recommended_max_memory()`
# the maximum that Metal recommends. `vm_stat` counts pages, and its first line shows the page size.
# Activity Monitor shows the same numbers in a window.

# %% [markdown]
# Apple's GPU has *unified memory*: model, system and other programs share the same RAM. So other
# programs reduce the memory for your training, and offloading tensors to the CPU saves nothing.
#
# With a GPU, the next cell runs the four steps under the monitor, which reads the counters of your
# platform. On CUDA, the steps reserve about 10 GiB.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
gpu = torch.accelerator.current_accelerator(check_available=True)
if gpu is None:
    print(stored_on_a_gpu("day 2"))
else:
    four_steps, *_ = build(gpu.type)
    with memlab.monitor() as watching:
        four_steps()
    print(watching)
    print(f"predicted for CUDA: peak {format_bytes(simulated.allocated_bytes)}, ", end="")
    print(f"{format_bytes(simulated.reserved_bytes)} reserved")
    if gpu.type == "mps":
        print(f"Metal recommends at most {format_bytes(torch.mps.recommended_max_memory())}")
    else:
        left, total = torch.accelerator.get_memory_info()
        print(f"in use, by all processes: {format_bytes(total - left)}")

# %% [markdown]
# ## Rules on trial
#
# Five published guides state rules for saving memory. RULES.md has the verdict on each rule.
# Today's trials use predictions and the simulated allocator, not a GPU.
#
# First rule: clear the cache in every batch, and collect garbage every few steps. The guides don't
# say which "memory" this saves, so test all three numbers, with varying lengths and with one
# length.


# %%
same_length = whole_run(dora, 6, batch=1024, lengths=[512])

same = [
    simulate(same_length, empty_cache_before=positions).reserved_bytes
    for positions in ((), step_starts(same_length))
]
plain, emptied = table["nothing set"], table["empty_cache() before each step"]
saved = 1 - emptied.smallest / plain.smallest
saved_reserved = 1 - emptied.blocks.reserved_bytes / plain.blocks.reserved_bytes
measured = (
    f"with four lengths, clearing before each step reserves {saved_reserved:.0%} less and the run "
    f"needs {saved:.0%} less; with one length it reserves {1 - same[1] / same[0]:.0%} less; "
    f"{emptied.calls} driver calls with clearing, {plain.calls} without"
)
verdict(
    "6a",
    0.1 <= saved <= 0.2,
    measured,
    condition="for reserved memory if lengths vary, through empty_cache alone (gc.collect frees "
    "only reference cycles); tensors need the same memory, and expandable segments save more "
    "with fewer driver calls",
)

# %% [markdown]
# Second rule: monitor memory with `nvidia-smi`. Compare what it shows with what the run needs.

# %%
split = table["max_split_size_mb:128"]
shown = [trial.blocks.reserved_bytes / trial.smallest for trial in (plain, split)]
measured = (
    f"besides the context, nvidia-smi shows {plain.blocks.reserved_bytes / GIB:.2f} GiB for a run "
    f"that needs {plain.smallest / GIB:.2f} GiB; with max_split_size_mb:128, "
    f"{split.blocks.reserved_bytes / GIB:.2f} GiB for a run that needs "
    f"{split.smallest / GIB:.2f} GiB"
)
verdict(
    "6b",
    all(abs(ratio - 1) < 0.1 for ratio in shown),
    measured,
    otherwise="it shows the memory of all processes, not what the run needs; the need lies between "
    "max_memory_allocated and max_memory_reserved, and memory_allocated after each epoch shows a "
    "leak",
)

# %% [markdown]
# Third rule: limit the process to 95 %, and use "smaller chunks", which most likely means
# `max_split_size_mb`.

# %%
fraction = table["per_process_memory_fraction:0.95"]
measured = (
    f"on a GPU with 24 GiB the run reserves {fraction.blocks.reserved_bytes / GIB:.2f} GiB with "
    f"the limit and {plain.blocks.reserved_bytes / GIB:.2f} GiB without; it needs a GPU with "
    f"{fraction.smallest / GIB:.2f} GiB with the limit and {plain.smallest / GIB:.2f} GiB without"
)
verdict(
    "7a",
    fraction.smallest < plain.smallest,
    measured,
    otherwise="it saves nothing, and the run fails earlier; it only leaves memory for other "
    "processes",
)

# %%
expandable = table["expandable_segments:True"]
measured = (
    f"the run needs {plain.smallest / GIB:.2f} GiB with nothing set, {split.smallest / GIB:.2f} "
    f"with max_split_size_mb:128 and {expandable.smallest / GIB:.2f} with expandable segments; on "
    f"a large GPU, max_split_size_mb:128 reserves {split.blocks.reserved_bytes / GIB:.2f} GiB"
)
verdict(
    "7b",
    split.smallest < plain.smallest,
    measured,
    condition="with small savings, if the GPU is full and lengths vary; nvidia-smi shows more, and "
    "expandable segments save more",
)

# %% [markdown]
# Fourth rule: many small allocations cause fragmentation; memory pools and larger batches reduce
# it. Compare Dora's run with half the batch, with one length, with expandable segments, and with
# memory pools.

# %%
small = [segment for segment in segments if segment.pool == "small"]
in_small = sum(block.bytes for s in small for block in s.blocks if block.state == "free")
verdict(
    "7c",
    in_small / sum(free) > 0.5,
    f"{format_bytes(sum(free))} are free before the last large segment, "
    f"only {format_bytes(in_small)} in segments of small allocations (up to 1 MiB)",
    otherwise="large allocations of many sizes cause it; small ones have their own segments",
)

# %%
half, one_length = (simulate(run) for run in (whole_run(dora, 12, batch=512, seed=0), same_length))
grows = simulate(doras_run, expandable_segments=True)
LONG_LIVED = ("parameters", "gradients", "optimizer_state", "inputs")
long_lived_pool = simulate(doras_run, pool_of=lambda event: int(event.category in LONG_LIVED))
forward_pool = simulate(  # use_mem_pool around forward; backward runs in another thread
    doras_run, pool_of=lambda e: int(e.phase == "forward" and e.category not in LONG_LIVED)
)
compared = half, on_large_gpu, one_length, grows, long_lived_pool, forward_pool
shares = [ran.fragmentation for ran in compared]
wasted = [ran.reserved_bytes - ran.allocated_bytes for ran in (half, on_large_gpu)]

# %%
measured = (
    f"free share of Dora's reserved memory: batch 512 {shares[0]:.0%}; batch 1,024 {shares[1]:.0%} "
    f"({wasted[1] / wasted[0]:.1f}× the bytes); one length {shares[2]:.0%}; expandable segments "
    f"{shares[3]:.0%}; a memory pool for long-lived tensors {shares[4]:.0%}; a memory pool around "
    f"the forward pass {shares[5]:.0%}"
)
verdict(
    "7d",
    min(shares[1], shares[4]) < shares[0] - 0.05,
    measured,
    otherwise="a larger batch wastes the same share of more memory, and free memory in a memory "
    "pool serves no other tensors; expandable segments and sequences of one length help",
)

# %% [markdown]
# Fifth rule: how to fix a leak. One guide says: delete the tensor and empty the cache. Ada does so,
# but her list still refers to the loss. Another guide says: use half the batch, twice as often.


# %%
def ada_cleans_up(model, optimizer, data):
    losses = []
    while True:
        for _ in range(2):
            train_on(model, optimizer, *next(data))
        tokens, targets = next(data)
        loss = F.cross_entropy(model(tokens).mT, targets)
        losses.append(loss)
        del loss
        torch.cuda.empty_cache()
        gc.collect()
        yield


# %%
cleaned = epochs_of(ada_cleans_up, 2)
growth_cleaned = cleaned[-1].live_bytes - cleaned[-2].live_bytes
measured = (
    f"Ada's memory grows by {format_bytes(growth)} per epoch; with del, empty_cache() and "
    f"gc.collect() it grows by {format_bytes(growth_cleaned)}; the memory of exercise 2.5's loop, "
    f"without these calls, grows by {format_bytes(alive[-1] - alive[-2])}"
)
verdict(
    "8a",
    growth_cleaned == 0,
    measured,
    otherwise="del removes a name, but a tensor stays alive as long as a reference exists; without "
    "references it is freed without empty_cache(), which only releases free segments",
)

# %%
halved = epochs_of(ada, 2, batch=32, times=2)
growth_halved = halved[-1].live_bytes - halved[-2].live_bytes
fit_halved = len(halved) + (adas_gpu - halved[-1].peak_bytes) // growth_halved
measured = (
    f"Ada's memory grows by {format_bytes(growth)} per epoch, and {fit} epochs fit; with half the "
    f"batch, twice as often, it grows by {format_bytes(growth_halved)}, and {fit_halved} fit; "
    f"Dora, without a leak, reserves {on_large_gpu.reserved_bytes / GIB:.2f} GiB, with half the "
    f"batch {half.reserved_bytes / GIB:.2f} GiB"
)
verdict(
    "8b",
    fit_halved >= 2 * fit,
    measured,
    otherwise="if memory_allocated grows from epoch to epoch, it is a leak, and smaller batches "
    "leak as much per epoch; if it stays flat (fragmentation, a longer text), half the batch helps",
)

# %% [markdown]
# ## What you can do now
#
# | you see | cause | remedy |
# | --- | --- | --- |
# | allocated grows from epoch to epoch | a leak | `leaks`, then find what keeps the tensors alive |
# | allocated grows, then stays flat | a cache fills, Adam's state | none needed |
# | allocated flat, reserved grows | fragmentation | `expandable_segments:True`, fewer lengths |
# | both flat, `nvidia-smi` higher | contexts, other processes | find the other processes |
# | only the peak jumps | a longer sequence | Day 3 |
#
# You can also estimate reserved memory before a run, and when a leaking run will fail.

# %% [markdown]
# | when | tool |
# | --- | --- |
# | before the run | `memlab.predict`, `memlab.allocator.simulate` |
# | while it trains | `with memlab.monitor():` |
# | when memory grows | six epochs of `memlab.measure(one_epoch, lines=True)`, then `leaks` |
# | after a failed run | the message; next time the snapshot, the viewer, `memlab explain` |

# %% [markdown]
# ## The running bill
#
# Reading the meter saves no memory, so today's line equals yesterday's. The bill counts allocated
# memory. A GPU also needs memory for the context and for reserved memory without tensors.

# %%
running_bill(2)

# %% [markdown]
# ## Sources
#
# - PyTorch: [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html)
# - PyTorch: [Understanding CUDA Memory
#   Usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html)
# - PyTorch: [torch.mps](https://docs.pytorch.org/docs/stable/mps.html)
# - PyTorch: [torch.xpu](https://docs.pytorch.org/docs/stable/xpu.html)
#
# The rules on trial are from:
#
# - maxvdboom: [DreaMS Memory Optimization
#   Strategies](https://github.com/maxvdboom/DreaMS/blob/757a414db1b8430e3ebed6665aa1f9d1b19eb376/MEMORY_OPTIMIZATION_GUIDE.md)
# - thINKblots: [Multi-Platform Memory
#   Optimization](https://github.com/thINKblots/gearhead/blob/d9730c481ff0cc18e9e2b2e6981495e233b9f7b1/MEMORY_OPTIMIZATIONS.md)
# - gHashTag, VIBEE: [Memory Optimization
#   Guide](https://github.com/gHashTag/vibee-lang/blob/203f37f8ed256b5a984355cbb3ee82194a8affd7/docs/guides/MEMORY_OPTIMIZATION_GUIDE.md)
