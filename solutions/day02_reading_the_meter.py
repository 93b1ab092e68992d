# %% [markdown]
# # Day 2: Reading the meter
#
# **`nvidia-smi` says 11 GB, PyTorch says 7. Who is right? And what dies at epoch 60?**
#
# After today you can tell apart the three numbers that people call "memory", read an out-of-memory
# message, and find the line that makes a run die after hours.
#
# About 100 minutes, 68 of them for six exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As yesterday, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines; the cell below checks them. If you are
# stuck, type `memlab hint 2.1` in a terminal. You can skip an exercise and go on.

# %% [markdown]
# ## The question
#
# Three numbers are called "memory". All three are right, because they count different things.
#
# | number | who reports it | what it counts |
# | --- | --- | --- |
# | **allocated** | `torch.cuda.memory_allocated()` | tensors, each rounded up |
# | **reserved** | `torch.cuda.memory_reserved()` | memory that torch got from the driver |
# | **in use** | `nvidia-smi`, `torch.cuda.mem_get_info()` | reserved + *context*, all processes |
#
# The CUDA context holds the driver's own code and tables: several hundred MiB for each process,
# depending on card and driver. The section *On your GPU* has the names for AMD, Apple and Intel.

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
# Many training runs look like this one: the batches have different lengths. It takes four steps of
# yesterday's 124M model, with 8 sequences each, in float32. The code is written for `"cuda"`.

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
# that CUDA would use. At the peak, the tensors hold 7.6 GiB. How much will torch have **reserved**
# from the driver? Replace the dots with a number.

# %%
### BEGIN SOLUTION
guess("2.1", reserved_gib=8)  # what tensors hold, and a little more
### END SOLUTION
### BEGIN STUB
# guess("2.1", reserved_gib=...)
### END STUB

# %% [markdown]
# ## Measure
#
# Asking the driver for every tensor would be slow, so torch has a *caching allocator*. It requests
# large *segments* from the driver, cuts *blocks* off them for tensors, and keeps freed blocks for
# later tensors. `simulate` runs a trace through its rules. Today you build these rules yourself.
#
# (Yesterday's step peaked at 7.94 GiB, on a CPU. CUDA's RMSNorm kernel saves one tensor fewer for
# each norm.)

# %%
trace = memlab.predict(build, steps=1)
blocks = simulate(trace)
requested = trace.peak_bytes - trace.at_peak["rounding"]
context = GIB // 2  # assumed: a card and its driver decide

reveal("2.1", reserved_gib=blocks.reserved_bytes)
print(f"requested by tensors  {format_bytes(requested)}")
print(f"allocated             {format_bytes(blocks.allocated_bytes)}   what PyTorch says")
print(f"reserved              {format_bytes(blocks.reserved_bytes)}")
print(
    f"and 0.5 GiB context   {format_bytes(blocks.reserved_bytes + context)}  what nvidia-smi says"
)

# %% [markdown]
# No GPU ran: the tensors are *predicted*, and the allocator is *simulated*. The gap between your
# guess and the reserved memory is made of free blocks, because torch keeps the memory of freed
# tensors. The next cell lists the free blocks at the moment when torch requests its last large
# segment.

# %%
growth = [after - before for before, after in pairwise((0, *blocks.reserved))]
asked_at = max(position for position, size in enumerate(growth) if size > 100 * MIB)
just_before, asked = blocks.segments(asked_at), trace.events[asked_at]
free = [p.bytes for s in just_before for p in s.pieces if p.state == "free"]
print(f"free: {format_bytes(sum(free))} in {len(free)} pieces, the largest ", end="")
print(format_bytes(max(free)))
print(f"requested by {asked.operator} in {asked.phase}: {format_bytes(asked.bytes)}")
for note in trace.notes:
    print(fill(f"note: {note}", 96))

# %% [markdown]
# 2.6 GiB were free, but no single piece was large enough for the request. This is
# **fragmentation**. The notes belong to the prediction: its assumptions, the kernels that no GPU
# has confirmed yet, and its error for steps that were measured on GPUs.

# %% [markdown]
# ## Build, rule 1: two sizes
#
# | step | rule |
# | --- | --- |
# | request → *block* | rounded up to a multiple of 512 bytes |
# | block → *segment*, if nothing free fits | up to 1 MiB: 2 MiB |
# | | above, and below 10 MiB: 20 MiB |
# | | from 10 MiB: the block itself, rounded up to a multiple of 2 MiB |
#
# ### Exercise 2.1: from a request to a block and a segment
#
# About 8 minutes. Nothing is free. Return the size of the block and of the segment that torch
# requests from the driver.


# %%
def sizes(requested_bytes: int) -> tuple[int, int]:
    """Bytes of the block, and of the segment that it would be cut from."""
    ### BEGIN SOLUTION memlab.reference.caching_allocator.sizes
    block = -(-requested_bytes // 512) * 512
    if block <= MIB:
        return block, 2 * MIB
    if block < 10 * MIB:
        return block, 20 * MIB
    return block, -(-block // (2 * MIB)) * 2 * MIB
    ### END SOLUTION


# %%
sizes = exercise("2.1", sizes)

# %% [markdown]
# Compare the request, your formula, and the simulated allocator. Rounding matters most for the
# smallest tensor. The simulated block of the logits is a little larger than yours: it gets the
# whole segment, for a reason that rule 2 explains.

# %%
for what, requested in (("the loss", 4), ("a bias of 768", 3072), ("logits", 8 * 640 * 50257 * 4)):
    block, segment = sizes(requested)
    one = Event(requested, 1, "activations", "", "", "forward", "float32", ())
    by_rules = simulate([one])
    print(f"{what:14}{requested:>13,} B wanted, block {block:>13,}, segment {segment:>13,}")
    print(f"{'simulated':>36}, block {by_rules.allocated_bytes:>13,}, ", end="")
    print(f"segment {by_rules.reserved_bytes:>13,}")

# %% [markdown]
# ## Rule 2: which piece
#
# A segment is cut into pieces. Small blocks (at most 1 MiB) and large blocks never share a segment.
# Each kind has its own *pool*: a list of pieces, sorted by address.


# %%
@dataclass
class Piece:
    segment: int  # the number of the segment that it is a part of
    address: int  # where it begins
    bytes: int
    free: bool


# %% [markdown]
# - **Best fit**: take the smallest free piece that is large enough. Of equal pieces, take the one
#   with the lowest address.
# - **Split**: the request gets the lower part. A rest of at least 512 bytes (small pool) or more
#   than 1 MiB (large pool) becomes a free piece, right behind it in the list. A smaller rest stays
#   with the request and is wasted.
#
# ### Exercise 2.2: take a piece
#
# About 15 minutes. `size` is a block's size, which also tells you the pool. Return the piece's
# address, or None if nothing fits.


# %%
def take(pieces: list[Piece], size: int) -> int | None:
    """Mark `size` bytes as taken, and return their address."""
    ### BEGIN SOLUTION memlab.reference.caching_allocator.take
    fitting = [piece for piece in pieces if piece.free and piece.bytes >= size]
    if not fitting:
        return None
    best = min(fitting, key=lambda piece: (piece.bytes, piece.address))
    rest = best.bytes - size
    if rest >= 512 if size <= MIB else rest > MIB:
        above = Piece(best.segment, best.address + size, rest, free=True)
        pieces.insert(pieces.index(best) + 1, above)
        best.bytes = size
    best.free = False
    return best.address
    ### END SOLUTION


# %%
take = exercise("2.2", take)

# %% [markdown]
# ## Rule 3: give it back
#
# With splits alone, pieces would only get smaller. So a freed piece **merges** with its free
# neighbours in the same segment. Pieces of two segments never merge, because the driver can only
# take back a segment as a whole.
#
# ### Exercise 2.3: give a piece back
#
# About 10 minutes. Change the list itself, and return nothing.


# %%
def give_back(pieces: list[Piece], address: int) -> None:
    """Free the piece at `address`, and merge it with its free neighbours."""
    ### BEGIN SOLUTION memlab.reference.caching_allocator.give_back
    place = next(i for i, piece in enumerate(pieces) if piece.address == address)
    pieces[place].free = True
    for i in (place, place - 1):  # with the piece above, then with the one below
        if i >= 0 and i + 1 < len(pieces):
            one, other = pieces[i], pieces[i + 1]
            if one.free and other.free and one.segment == other.segment:
                one.bytes += other.bytes
                del pieces[i + 1]
    ### END SOLUTION


# %%
give_back = exercise("2.3", give_back)

# %% [markdown]
# These are all the rules. This class has the two pools, calls your three functions, and requests a
# segment if nothing fits.


# %%
class Cache:
    def __init__(self):
        self.pools = {"small": [], "large": []}
        self.reserved = self.segments = 0
        self.held = {}  # by storage: its pool and its address

    def malloc(self, storage: int, requested: int) -> None:
        block, segment = sizes(requested)
        pool = self.pools["small" if block <= MIB else "large"]
        address = take(pool, block)
        if address is None:
            pool.append(Piece(self.segments, self.reserved, segment, free=True))
            self.segments += 1
            self.reserved += segment
            address = take(pool, block)
        self.held[storage] = pool, address

    def free(self, storage: int) -> None:
        give_back(*self.held.pop(storage))


# %% [markdown]
# Run the four steps through your three functions, allocation by allocation. For an open exercise,
# the reference runs instead.

# %%
cache = Cache()
for event in trace.events:
    if event.category == "rounding":
        continue  # the allocator does its own
    if event.bytes > 0:
        cache.malloc(event.storage, event.bytes)
    else:
        cache.free(event.storage)
print(f"your allocator:   {cache.segments} segments, {format_bytes(cache.reserved)} reserved")
print(f"memlab.allocator: {blocks.segment_allocations} segments, ", end="")
print(f"{format_bytes(blocks.reserved_bytes)} reserved")
print(f"the same to the byte: {cache.reserved == blocks.reserved_bytes}")

# %% [markdown]
# ## Fragment it
#
# Four tensors of 5 MiB share a segment of 20 MiB. Free the first and the third: 10 MiB are free.
# Then request 6 MiB, on a large card and on a card with 24 MiB.

# %%
changes = (1, 5), (2, 5), (3, 5), (4, 5), (1, -5), (3, -5), (5, 6)  # storage, MiB
events = [
    Event(mib * MIB, storage, "activations", "aten.empty", "", "forward", "uint8", ())
    for storage, mib in changes
]
roomy = simulate(events)
print(f"on a large card: {format_bytes(roomy.reserved_bytes)} reserved for 16 MiB of tensors")
plot.blocks(
    simulate(events, capacity_bytes=24 * MIB),
    title="10 MiB are free, and a request of 6 MiB finds no room",
)

# %% [markdown]
# Hatched memory is reserved but free. Torch cannot move the two tensors together, because the
# address of a tensor is fixed.

# %% [markdown]
# ## How much does the run need?
#
# A run needs less than it reserves. If the driver refuses a segment, torch releases all segments
# that are entirely free and asks again (a *retry*). So the same run may fit a smaller card. A
# binary search, in steps of 32 MiB, finds the smallest room beside the context in which it fits.


# %%
def step_starts(trace: Trace) -> list[int]:
    """Positions of the events that begin a forward pass, without the first pass."""
    phases = [event.phase for event in trace.events]
    return [i for i, pair in enumerate(pairwise(phases), 1) if pair == ("optimizer", "forward")]


def smallest_card(words: str = "", **how) -> int:
    cards = range(7 * 1024, 10 * 1024, 32)  # MiB

    def fits(mib: int) -> bool:
        return simulate(trace, Settings.parse(words, capacity_bytes=mib * MIB), **how).fits

    return cards[bisect_left(cards, True, key=fits)] * MIB


need = smallest_card()
print(f"allocated {format_bytes(blocks.allocated_bytes)} at the peak")
print(f"reserved  {format_bytes(blocks.reserved_bytes)} on a large card")
print(f"needed    {format_bytes(need)} beside the context")

# %% [markdown]
# **So who is right?** With only the allocated bytes (PyTorch's number) the run fails. With fewer
# than the reserved bytes (most of `nvidia-smi`'s number) it can still fit. The need lies between.
#
# ## What the settings change
#
# Set them in an environment variable (`PYTORCH_CUDA_ALLOC_CONF` in older torch):
#
# ```
# PYTORCH_ALLOC_CONF=expandable_segments:True python train.py
# ```
#
# `torch.cuda.empty_cache()` releases all entirely free segments at once. The second row calls it
# before every step.

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
Tried = namedtuple("Tried", "blocks calls smallest")
table = {}
print(f"{'on a card with 24 GiB':34}{'allocated':>10}{'reserved':>10}{'calls':>7}{'smallest':>10}")
for name, trial in trials.items():
    words, how = trial or (name, {})
    ran = simulate(trace, Settings.parse(words, capacity_bytes=24 * GIB), **how)
    calls = ran.segment_allocations + ran.segment_frees
    tried = table[name] = Tried(ran, calls, smallest_card(words, **how))
    peaks = f"{ran.allocated_bytes / GIB:>10.2f}{ran.reserved_bytes / GIB:>10.2f}"
    print(f"{name:34}{peaks}{calls:>7}{tried.smallest / GIB:>10.2f}")

# %% [markdown]
# The sizes are in GiB. *Smallest* is the room that the run needs beside the context. *Calls* counts
# `cudaMalloc` and `cudaFree`, or the mappings of pages for expandable segments. No setting changes
# what tensors need: `allocated` differs by rounding only.
#
# | setting | what it does | here |
# | --- | --- | --- |
# | `max_split_size_mb` | keeps large blocks whole | reserves 17 GiB, needs 8.4 |
# | `roundup_power2_divisions` | rounds more, so that sizes repeat | worse |
# | `garbage_collection_threshold` | releases free segments early | helps on a nearly full card |
# | `per_process_memory_fraction` | limits the process | saves nothing |
# | `expandable_segments` | one segment that grows by pages | almost no waste: try it first |

# %% [markdown]
# ## What dies at epoch 60?
#
# Four people train a small model on torch's own source code. Each added a few innocent lines:
#
# - **Ada** records the loss on a *held-out* batch, which she does not train on.
# - **Ben** watches the size of the activations with a hook.
# - **Cleo** caches the soft targets of a batch, to compute them only once.
# - **Dora** has texts of several lengths, and caches a table of positions for each length.
#
# An epoch here is two training batches. The next cells hold what they share, and Ada's loop.


# %%
def new_model():
    layers = nn.Embedding(256, 256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=True)


def train_on(model, optimizer, tokens, targets, positions=None):
    optimizer.zero_grad()
    inside = model[0](tokens)  # (B, T, 256)
    if positions is not None:
        inside = inside + positions
    # .mT: (B, 256, T), for cross_entropy wants the classes second
    F.cross_entropy(model[1:](inside).mT, targets).backward()
    optimizer.step()


def soften(targets):
    """Give the right byte 0.9, and spread a tenth over all 256."""
    return 0.9 * F.one_hot(targets, 256) + 0.1 / 256


# %%
def ada(model, optimizer, data, times=1):
    """Records the loss on held-out text."""
    losses = []
    while True:
        for _ in range(2 * times):
            train_on(model, optimizer, *next(data))
        for _ in range(times):
            tokens, targets = next(data)
            losses.append(F.cross_entropy(model(tokens).mT, targets))
        yield  # an epoch is over


# %% [markdown]
# Ada keeps *one number* for each held-out batch. By how many MiB does the memory that is alive
# after an epoch grow, from epoch to epoch? A batch is 64 sequences of 512 bytes.

# %%
### BEGIN SOLUTION
guess("2.2", growth_mib=0)  # a loss is one number of four bytes
### END SOLUTION
### BEGIN STUB
# guess("2.2", growth_mib=...)
### END STUB

# %% [markdown]
# Here are the other three loops. `model[2]` is the GELU; its hook runs in every forward pass.


# %%
def ben(model, optimizer, data):
    """Records the mean size of the GELU's outputs."""
    outputs, scales = [], []
    model[2].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    while True:
        for _ in range(2):
            train_on(model, optimizer, *next(data))
        scales.append(sum(output.abs().mean().item() for output in outputs[-2:]) / 2)
        yield


# %%
def cleo(model, optimizer, data):
    """Computes the soft targets of a batch only once."""
    soft = {}
    while True:
        for _ in range(2):
            tokens, targets = next(data)
            if targets not in soft:
                soft[targets] = soften(targets)
            train_on(model, optimizer, tokens, soft[targets].mT)
        yield


def dora(model, optimizer, data, lengths=range(192, 513, 64), seed=7):
    """Adds positions to the text, from one table for each length."""
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
# Run six epochs of each loop on fake tensors, so that the card may be larger than your laptop.
# `lines=True` records the line that allocates each tensor.


# %%
def epochs_of(person, epochs, batch=64, **how) -> list[Trace]:
    with memlab.dry_run():
        model, optimizer = new_model()
        run = person(model, optimizer, batches(text, batch, 512, seed=0), **how)
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
# A loss keeps its *graph* alive, with every saved tensor that backward would need. In training,
# `backward()` frees the saved tensors. Ada never calls it on held-out text. So the gap is made of
# the tensors that each forward pass saved for a backward pass that never comes.

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, epochs in runs.items():
    alive = [epoch.live_bytes / MIB for epoch in epochs]
    axes.plot(range(1, 7), alive, marker="o", markersize=3, label=name.title())
axes.set(xlabel="epoch", ylabel="MiB alive after it", ylim=(0, None))
axes.set_title("What is still alive when an epoch is over")
axes.legend(frameon=False)
print("dora, MiB:", *(f"{epoch.live_bytes / MIB:.2f}" for epoch in runs["dora"]))

# %% [markdown]
# Three of the lines keep growing. Dora's line, at the bottom, stops growing once she has a table
# for each of her six lengths. A cache that fills up is not a leak.
#
# ### Exercise 2.4: find the leak, and its line
#
# About 12 minutes. You get one Trace per epoch. `epoch.alive()` returns an event for each tensor
# that is alive at the end of the epoch, with its `bytes` and its `line`. Compare the middle epoch,
# `epochs[len(epochs) // 2]`, with the last one: the first epochs fill optimizer state and caches.


# %%
def leaks(epochs: list[Trace]) -> dict[str, int]:
    """Return the lines whose tensors pile up, and by how many bytes per epoch."""
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
        file, _, place = line.partition(":")
        number, function = place.split()
        where = file if file == "data.py" else f"line {number} of its cell"
        print(f"  {format_bytes(size)} an epoch, from {where}, in {function}")

# %% [markdown]
# The line is where a tensor was *allocated*. (The text comes from memlab's `data.py`.) Another line
# may keep it alive: Ben's tensors are allocated in `train_on`, as all activations are. `diff` shows
# more: the module that made them, their shape and their count.

# %%
for name in ("ada", "ben"):
    difference = runs[name][-2].diff(runs[name][-1])
    print(f"{name}: {format_bytes(difference.bytes)} more than an epoch ago")
    for kind, count in difference.rows[:4]:
        shape = "×".join(map(str, kind.shape))
        print(f"  {count} × {shape:12} {kind.operator:28} of module {kind.module or 'none'}")

# %% [markdown]
# ## When will it die?
#
# A leak grows along a straight line. Ada's card has 11.2 GiB of room. From the peak of epoch 6 and
# the growth per epoch you can compute the epoch in which her run dies. Then run all epochs through
# the simulated allocator of that card.


# %%
def whole_run(person, epochs, batch=64, lines=False, **how) -> Trace:
    """Return all epochs as one trace."""
    with memlab.dry_run():
        model, optimizer = new_model()
        run = person(model, optimizer, batches(text, batch, 512, seed=0), **how)
        with memlab.meter(model, optimizer, lines=lines) as running:
            for _ in range(epochs):
                next(run)
    return running.trace


room = int(11.2 * GIB)
fit = len(runs["ada"]) + (room - runs["ada"][-1].peak_bytes) // growth
print(f"by the straight line, the last epoch that fits: {fit}")

whole = whole_run(ada, 62)
ada_died = simulate(whole, capacity_bytes=room).out_of_memory
epoch = 1 + 62 * ada_died.position // len(whole.events)
print(f"in the simulated allocator, the epoch that dies: {epoch}")
print(f"reserved  {format_bytes(ada_died.reserved_bytes)}")
print(f"allocated {format_bytes(ada_died.allocated_bytes)}")

# %% [markdown]
# Almost all reserved memory is allocated: this is what a leak looks like. Dora has no leak. She
# trains with 1,024 sequences in a batch, on a card with 4.3 GiB of room, and her tensors need less.

# %%
many = whole_run(dora, 12, batch=1024, seed=0)  # the lengths in another order
plenty = simulate(many)
print(f"allocated at the peak: {format_bytes(plenty.allocated_bytes)}")

card = int(4.3 * GIB)
with_pages = simulate(many, expandable_segments=True, capacity_bytes=card)
print(f"with expandable segments all 12 epochs fit: {with_pages.fits}")

dora_died = simulate(many, capacity_bytes=card).out_of_memory
pieces = dora_died.free_piece_bytes
epoch = 1 + 12 * dora_died.position // len(many.events)
print(f"without them, epoch {epoch} dies:")
print(f"  requested                {format_bytes(dora_died.requested_bytes):>12}")
print(f"  free in reserved memory  {format_bytes(sum(pieces)):>12}", end=", ")
print(f"the largest piece {format_bytes(pieces[0])}")
print(f"  left with the driver     {format_bytes(card - dora_died.reserved_bytes):>12}")

# %% [markdown]
# The free memory is larger than the request, but it lies in two places, and neither has enough.
# Tensors of shorter batches were cut to other sizes, and the gaps between them remain.

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
places = [1 + 12 * i / len(many.events) for i in range(len(many.events))]
allocated = [b / GIB for b in plenty.allocated]
axes.fill_between(places, allocated, color="#8c9bb3", linewidth=0, label="allocated")
axes.plot(places, [b / GIB for b in plenty.reserved], color="#1c1c1c", label="reserved")
axes.axhline(4.3, color="0.4", linestyle="--", linewidth=1, label="her card of 4.3 GiB")
axes.set(xlabel="epoch", ylabel="GiB", ylim=(0, None), xticks=range(1, 13))
axes.set_title("Dora, on a card with room for all")
_ = axes.legend(frameon=False)

# %% [markdown]
# On a large card, her reserved memory jumps in epochs 1, 3 and 11, to more than twice what she
# needs. `nvidia-smi` shows only this number, and it looks like a leak. To tell the two apart, print
# `memory_allocated()` at the end of each epoch: if it stays flat, nothing leaks.

# %% [markdown]
# ## Mend it
#
# This loop has all three leaks, and it runs for real, without a dry run. Ask what each line keeps.
# Every epoch gets new batches, and `notes` lives for the whole run. `.mT` puts the classes second,
# as `cross_entropy` wants them.
#
# ### Exercise 2.5: mend it
#
# About 15 minutes. After each epoch, the same number of bytes must be alive. Within an epoch,
# nothing may pile up except one number per batch. Remove a hook with `handle.remove()`, where
# `handle` is what `register_forward_hook` returns.

# %% [markdown]
# Keep everything else as it is:
#
# - the trained weights, the modules' modes, and hooks of others
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
# Train for twelve epochs on real text. Plot the memory that is alive after each, and the loss.

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
print(f"different numbers of bytes alive after an epoch: {len(set(alive))}")
print(f"the loss went down: {notes['losses'][-1] < notes['losses'][0]}")

# %% [markdown]
# ## What `gc.collect()` does
#
# Python frees a tensor as soon as the last reference to it is gone. The exception is a *reference
# cycle*: objects that refer to each other stay until the garbage collector runs.


# %%
class Logger:
    def __init__(self):
        self.last = torch.zeros(2**18)  # 1 MiB
        self.callback = self.log  # a method refers to its object: a cycle

    def log(self): ...


# %%
def alive_bytes(make, then=lambda: None) -> int:
    """Return what stays alive after `make()`, whose result is dropped, and `then()`."""
    gc.disable()
    with memlab.meter() as running:
        make()
        then()
    gc.enable()
    return running.trace.live_bytes


print(f"a tensor, dropped: {format_bytes(alive_bytes(lambda: torch.zeros(2**18)))}")
print(f"a cycle, dropped: {format_bytes(alive_bytes(Logger))}")
print(f"a cycle, after gc.collect(): {format_bytes(alive_bytes(Logger, gc.collect))}")

# %% [markdown]
# ## Read an out-of-memory message
#
# On a GPU, Dora's run ends with this message of torch. The next cells fill it with the numbers of
# her simulated run.


# %%
class Oom(NamedTuple):
    requested: int
    total: int  # of the card
    free: int  # on the card
    process: int  # in use by this process, with its context
    allocated: int
    unallocated: int  # but reserved


MESSAGE = """CUDA out of memory. Tried to allocate {requested}.
GPU 0 has a total capacity of {total} of which {free} is free.
Including non-PyTorch memory, this process has {process} memory in use.
Of the allocated memory {allocated} is allocated by PyTorch,
and {unallocated} is reserved by PyTorch but unallocated.
If reserved but unallocated memory is large try setting
PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."""


# %%
def numbers_of(died, room: int, others: int = 0) -> Oom:
    """Return the message's numbers on a card with `room` beside the context and other processes."""
    return Oom(
        requested=died.requested_bytes,
        total=room + context + others,
        free=room - died.reserved_bytes,
        process=died.reserved_bytes + context,
        allocated=died.allocated_bytes,
        unallocated=died.reserved_bytes - died.allocated_bytes,
    )


doras = numbers_of(dora_died, card)
print(MESSAGE.format(**{name: format_bytes(size) for name, size in doras._asdict().items()}))

# %% [markdown]
# The message contains all three numbers:
#
# | in the message | it is |
# | --- | --- |
# | allocated by PyTorch | **allocated** |
# | allocated + reserved but unallocated | **reserved** |
# | this process has … in use | reserved + context |
# | total capacity − free | **in use**, as in `nvidia-smi` |
#
# Torch gives up only after it has released all entirely free segments. So the "reserved but
# unallocated" bytes lie in pieces, between tensors.

# %% [markdown]
# ### Exercise 2.6: diagnose the message
#
# About 8 minutes. Compute what this process *needs*: its context, its tensors and the request, as
# if no memory were wasted. Rounding always wastes a little, so count on 98 % of the memory only.
# Return the first answer that is true:
#
# - `"too much"`: the need exceeds 98 % of the card.
# - `"another process"`: the need exceeds 98 % of what other processes leave of the card.
# - `"fragmentation"`: neither, so the memory is there, but in pieces.


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
# process holds 1 GiB of her card.

# %%
crowded = simulate(many, expandable_segments=True, capacity_bytes=card - GIB).out_of_memory
failures = {
    "Dora": doras,
    "Ada in epoch 60": numbers_of(ada_died, room),
    "Dora and another": numbers_of(crowded, card - GIB, others=GIB),
}
print(f"{'':18}{'requested':>10}{'free':>12}{'unallocated':>13}")
for name, oom in failures.items():
    sizes_of = map(format_bytes, (oom.requested, oom.free, oom.unallocated))
    print(f"{name:18}{{:>10}}{{:>12}}{{:>13}}  {diagnose(oom)}".format(*sizes_of))

# %% [markdown]
# | diagnosis | do |
# | --- | --- |
# | too much | if `allocated` grows from epoch to epoch, find the leak; otherwise Day 3 |
# | another process | find it with `nvidia-smi`; end it, or choose another GPU |
# | fragmentation | set `expandable_segments:True`, use few lengths |

# %% [markdown]
# ## Record every allocation
#
# A message has six numbers. A *snapshot* has every allocation and its stack. On CUDA, ROCm or XPU
# (`torch.xpu.memory`), add three statements to your own script:
#
# ```python
# torch.cuda.memory._record_memory_history(max_entries=200_000)  # the newest entries stay
# try:
#     train()
# finally:  # also after an out-of-memory error
#     torch.cuda.memory._dump_snapshot("snapshot.pickle")
# ```
#
# Without a GPU, a Trace can write the same kind of file: here Ada's first six epochs.

# %%
yours = Path("progress.json").exists()  # a folder that `memlab start` made
path = Path("." if yours else tempfile.mkdtemp(), "ada.pickle")
whole_run(ada, 6, lines=True).to_snapshot(path)
print(f"{path.name} is {'beside this notebook' if yours else 'where `path` says'}")

# %% [markdown]
# `device_traces` holds the history of each device. `segments` holds what is reserved at the end,
# block by block. Torch's own reader sums it up.

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
# To look at it, drop the file onto [pytorch.org/memory_viz](https://pytorch.org/memory_viz), where
# it stays in your browser. Or write the page yourself with
# `python -m torch.cuda._memory_viz trace_plot ada.pickle -o ada.html`.
#
# | view | how to read it |
# | --- | --- |
# | *Active Memory Timeline* | a band is a tensor; click it for its stack |
# | *Allocator State History* | segments after each event, with the gaps of fragmentation |
#
# In the timeline, Ada's leak is a staircase: each epoch adds bands that reach the right edge, so
# these tensors are still alive.

# %% [markdown]
# ## Let `memlab explain` read it
#
# `memlab explain ada.pickle` in a terminal prints what memory held, the likely cause and the
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
# It names the line that exercise 2.4 found, and the remedy of exercise 2.5. To predict what a
# remedy saves, it replays the history through the simulated allocator. Record several epochs: in
# Ada's first three alone, `explain` finds no leak.

# %% [markdown]
# ## Watch the loop
#
# A snapshot explains a run that has failed. A monitor warns while the run trains: wrap your loop in
# `with memlab.monitor():`. It reads the counters after each `optimizer.step()`, and warns once of a
# leak, of fragmentation, or of full memory. Here it watches Ben's loop, for real on the CPU.

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
# Without `every`, the monitor prints nothing while all is well. On a GPU it reads torch's own
# counters. On the CPU it reads the memory of the process, which also holds freed memory that the C
# library keeps. So a warning on the CPU may come late or never, and its MiB per step are rough.

# %% [markdown]
# `log_to` sends the bytes to TensorBoard (a `SummaryWriter`), a W&B run, or a function. The
# Trainers of transformers and Lightning get the same names from `MemoryCallback()`, which is in
# `memlab.monitoring.transformers` and `memlab.monitoring.lightning`.

# %%
logged = []
log = memlab.monitor().log_to(lambda name, value, step: logged.append((step, name)), every=2)
with warnings.catch_warnings(), log:
    warnings.simplefilter("ignore")  # Ben's leak, again
    for _ in range(2):  # two steps each
        next(run)
for step, name in logged:
    print(f"step {step}: {name}")
print(f"8 × 1024**3 bytes are 8 GiB, and {8 * 1024**3 / 1e9:.2f} GB")

# %% [markdown]
# On a GPU, `memory/reserved` is there too. One guide's `log_memory_usage()` prints
# `memory_allocated() / 1024**3` as "GB". The number is right in GiB; in GB it is 7 % larger. It
# also shows the moment of the call alone. The monitor shows each step's peak.

# %% [markdown]
# ## At scale
#
# A loss that is kept with its graph keeps all saved tensors of its forward pass. Yesterday's
# formula gives their bytes for larger models, in float32.

# %%
for name, batch, seq_len in (("124m", 8, 640), ("1b", 1, 8192), ("llama-2-7b", 1, 4096)):
    kept_bytes = activation_bytes(PRESETS[name], batch, seq_len)
    print(f"{name:12}{batch} × {seq_len} tokens: {format_bytes(kept_bytes):>10} per kept loss")

# %% [markdown]
# A 7B run with such a leak does not reach epoch 60. In float32 with AdamW, 100 GiB hold weights,
# gradients and optimizer state, so on a card with 180 GiB the second kept loss finds no room. Small
# models leak slowly, so their leaks are found late.
#
# ## On your GPU
#
# | platform | in use, all processes | torch's counters |
# | --- | --- | --- |
# | NVIDIA | `nvidia-smi` | `torch.cuda.memory_allocated()`, `memory_reserved()` |
# | AMD | `rocm-smi --showmeminfo vram`, `amd-smi` | the same `torch.cuda` functions |
# | Intel | `xpu-smi` | `torch.xpu.memory_allocated()`, `memory_reserved()` |
# | Apple | `vm_stat` | `torch.mps.current_allocated_memory()`, `driver_allocated_memory()` |
#
# On Apple, `driver_allocated_memory()` is the reserved number, and `recommended_max_memory()` the
# most that Metal recommends. `vm_stat` counts pages, whose size is in its first line. Activity
# Monitor shows the same in a window.

# %% [markdown]
# Apple's GPU has *unified memory*: model, system and other programs share the same RAM. So other
# programs take memory from your training, and offloading tensors to the CPU saves nothing.
#
# With a GPU, the next cell takes the four steps under the monitor, which reads the counters of your
# platform. They reserve about 10 GiB on CUDA.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
gpu = torch.accelerator.current_accelerator(check_available=True)
if gpu is None:
    print(stored_on_a_gpu("day 2"))
else:
    four_steps, *_ = build(gpu.type)
    with memlab.monitor() as watching:
        four_steps()
    print(watching)
    print(f"predicted for CUDA: peak {format_bytes(blocks.allocated_bytes)}, ", end="")
    print(f"{format_bytes(blocks.reserved_bytes)} reserved")
    if gpu.type == "mps":
        print(f"Metal recommends at most {format_bytes(torch.mps.recommended_max_memory())}")
    else:
        left, total = torch.accelerator.get_memory_info()
        print(f"in use, by all processes: {format_bytes(total - left)}")

# %% [markdown]
# ## Rules on trial
#
# Five guides that people read today state rules for saving memory; RULES.md has the verdict on each
# rule. Today's trials use predictions and the simulated allocator, not a GPU.
#
# First: clear the cache in every batch, and collect garbage every few steps. The guides don't say
# which "memory" they mean, so try all three numbers, with varying lengths and with one length.


# %%
same_length = whole_run(dora, 6, batch=1024, lengths=[512])

same = [
    simulate(same_length, empty_cache_before=places).reserved_bytes
    for places in ((), step_starts(same_length))
]
plain, emptied = table["nothing set"], table["empty_cache() before each step"]
saved = 1 - emptied.smallest / plain.smallest
verdict(
    "6a",
    0.1 <= saved <= 0.2,
    f"with four lengths, clearing before each step reserves "
    f"{1 - emptied.blocks.reserved_bytes / plain.blocks.reserved_bytes:.0%} less, and the run "
    f"needs {saved:.0%} less on the card; with one length it reserves "
    f"{1 - same[1] / same[0]:.0%} less; the driver is called {emptied.calls} times with clearing, "
    f"{plain.calls} without",
    condition="for reserved memory, if lengths vary, through empty_cache alone (gc.collect frees "
    "only reference cycles); tensors need as much as before, and expandable segments save more "
    "without the calls",
)

# %% [markdown]
# Second: watch memory with `nvidia-smi`. Compare what it shows with what the run needs.

# %%
split = table["max_split_size_mb:128"]
shown = [tried.blocks.reserved_bytes / tried.smallest for tried in (plain, split)]
verdict(
    "6b",
    all(abs(ratio - 1) < 0.1 for ratio in shown),
    f"beside the context it shows {plain.blocks.reserved_bytes / GIB:.2f} GiB for a run that needs "
    f"{plain.smallest / GIB:.2f}; with max_split_size_mb:128 it shows "
    f"{split.blocks.reserved_bytes / GIB:.2f} for a run that needs {split.smallest / GIB:.2f}",
    otherwise="it shows what all processes hold, not what the run needs; the need lies between "
    "max_memory_allocated and max_memory_reserved, and a leak shows in memory_allocated after each "
    "epoch",
)

# %% [markdown]
# Third: a limit of 95 %, and "smaller chunks", which most likely means `max_split_size_mb`.

# %%
fraction = table["per_process_memory_fraction:0.95"]
verdict(
    "7a",
    fraction.smallest < plain.smallest,
    f"on a card with 24 GiB the run reserves {fraction.blocks.reserved_bytes / GIB:.2f} GiB with "
    f"the limit and {plain.blocks.reserved_bytes / GIB:.2f} without; it needs a card with "
    f"{fraction.smallest / GIB:.2f} GiB with the limit and {plain.smallest / GIB:.2f} without",
    otherwise="it saves nothing, and the run fails earlier; it leaves room for other processes",
)

# %%
expandable = table["expandable_segments:True"]
verdict(
    "7b",
    split.smallest < plain.smallest,
    f"with nothing set the run needs {plain.smallest / GIB:.2f} GiB on a card, with "
    f"max_split_size_mb:128 {split.smallest / GIB:.2f}, with expandable segments "
    f"{expandable.smallest / GIB:.2f}; on a large card, max_split_size_mb:128 reserves "
    f"{split.blocks.reserved_bytes / GIB:.2f}",
    condition="if the card is full, where lengths vary, by a little; nvidia-smi shows more, and "
    "expandable segments save more",
)

# %% [markdown]
# Fourth: what fragments, and what helps? Compare Dora's run with half the batch, with one length,
# and with expandable segments.

# %%
small = [segment for segment in just_before if segment.pool == "small"]
in_small = sum(p.bytes for segment in small for p in segment.pieces if p.state == "free")
verdict(
    "7c",
    in_small / sum(free) > 0.5,
    f"of {format_bytes(sum(free))} that are free before the last large segment, "
    f"{format_bytes(in_small)} are in the segments of small allocations (of up to 1 MiB)",
    otherwise="large allocations of many sizes fragment; small ones have segments of their own",
)

# %%
half, one_length = (simulate(run) for run in (whole_run(dora, 12, batch=512, seed=0), same_length))
grows = simulate(many, expandable_segments=True)
LONG_LIVED = ("parameters", "gradients", "optimizer_state", "inputs")
apart = simulate(many, pool_of=lambda event: int(event.category in LONG_LIVED))
by_thread = simulate(  # use_mem_pool around forward; backward runs in another thread
    many, pool_of=lambda e: int(e.phase == "forward" and e.category not in LONG_LIVED)
)
compared = half, plenty, one_length, grows, apart, by_thread
shares = [ran.fragmentation for ran in compared]
wasted = [ran.reserved_bytes - ran.allocated_bytes for ran in (half, plenty)]
verdict(
    "7d",
    min(shares[1], shares[4]) < shares[0] - 0.05,
    f"of Dora's reserved memory, {shares[0]:.0%} are free with 512 sequences in a batch, and "
    f"{shares[1]:.0%} with 1,024, which are {wasted[1] / wasted[0]:.1f} times the bytes; with "
    f"1,024 of one length {shares[2]:.0%}, with expandable segments {shares[3]:.0%}, with a "
    f"memory pool for long-lived tensors {shares[4]:.0%}, around the forward pass {shares[5]:.0%}",
    otherwise="a larger batch wastes the same share of more memory, and a memory pool keeps its "
    "free memory from all others; expandable segments help, and so do sequences of one length",
)

# %% [markdown]
# Fifth: the leak. Ada deletes her loss and empties the cache, as the guide says, but the list still
# refers to the loss. Then she takes half the batch, twice as often.


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


cleaned = epochs_of(ada_cleans_up, 2)
after_it = cleaned[-1].live_bytes - cleaned[-2].live_bytes
verdict(
    "8a",
    after_it == 0,
    f"Ada's epoch leaves {format_bytes(growth)} more; with del, empty_cache() and gc.collect() it "
    f"leaves {format_bytes(after_it)} more; the mended loop of exercise 2.5, which calls none of "
    f"these, {format_bytes(alive[-1] - alive[-2])}",
    otherwise="del removes one name, and a tensor lives as long as anything refers to it; without "
    "references it is freed even without empty_cache(), which only releases free segments",
)

# %%
halved = epochs_of(ada, 2, batch=32, times=2)
growth_halved = halved[-1].live_bytes - halved[-2].live_bytes
fit_halved = len(halved) + (room - halved[-1].peak_bytes) // growth_halved
verdict(
    "8b",
    fit_halved >= 2 * fit,
    f"Ada's epochs leave {format_bytes(growth)} more each, and {fit} fit; with half the batch, "
    f"twice as often, {format_bytes(growth_halved)}, and {fit_halved} fit; Dora, who has no leak, "
    f"reserves {plenty.reserved_bytes / GIB:.2f} GiB, with half the batch "
    f"{half.reserved_bytes / GIB:.2f}",
    otherwise="if memory_allocated grows from epoch to epoch it is a leak, and an epoch leaks as "
    "much in smaller batches; if it stays flat (fragmentation, a longer text), half the batch does "
    "help",
)

# %% [markdown]
# ## What you can do now
#
# | you see | it is | do |
# | --- | --- | --- |
# | allocated after each epoch grows | a leak | `leaks`, then look for what keeps the tensors |
# | it grows, then stops | a cache that fills, Adam's state | nothing |
# | it is flat, reserved grows | fragmentation | `expandable_segments:True`, few lengths |
# | both flat, `nvidia-smi` higher | contexts, other processes | find the other process |
# | only the peak jumps | a longer text | Day 3 |
#
# You can also estimate reserved memory before a run, and the epoch in which a leak ends it.

# %% [markdown]
# | when | tool |
# | --- | --- |
# | before the run | `memlab.predict`, `memlab.allocator.simulate` |
# | while it trains | `with memlab.monitor():` |
# | it grows on your laptop | six epochs of `memlab.measure(one_epoch, lines=True)`, then `leaks` |
# | it ran out of memory | the message; next time the snapshot, the viewer, `memlab explain` |

# %% [markdown]
# ## The running bill
#
# Reading the meter saves nothing, so today's line equals yesterday's. It counts allocated memory. A
# card also needs room for the reserved rest and for the context.

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
