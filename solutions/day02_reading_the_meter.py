# %% [markdown]
# # Day 2: Reading the meter
#
# **`nvidia-smi` says 11 GB, PyTorch says 7. Who is right? And what dies at epoch 60?**
#
# After today you can tell apart the three numbers that people call "memory", say why one of them
# is higher, and find the line that makes a run die after hours.
#
# About 90 minutes, 60 of them for five exercises. You need a laptop; a GPU is welcome and not
# needed. Nothing is downloaded.

# %% [markdown]
# As yesterday: you **guess**, **measure**, and **build** what explains the gap. In an exercise, put
# your own lines in place of `raise NotImplementedError`; the cell below it checks them. If you are
# stuck, type `memlab hint 2.1` in a terminal. An exercise left open blocks nothing.

# %% [markdown]
# ## The question
#
# Three numbers are called "memory". They are all right, and they count different things.
#
# | number | who says it | what it counts |
# | --- | --- | --- |
# | **allocated** | `torch.cuda.memory_allocated()` | what tensors hold, rounded up |
# | **reserved** | `torch.cuda.memory_reserved()` | what torch got from the driver, used or not |
# | **in use** | `nvidia-smi`, `torch.cuda.mem_get_info()` | reserved + *context*, all processes |
#
# The context is CUDA's own code and tables: some hundred MiB for each process, more or less by card
# and driver. (The title's 11 and 7 GB are what somebody read; the run below has numbers of its
# own.)

# %%
import random
from bisect import bisect_left
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from textwrap import fill

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import plot
from memlab.allocator import Settings, simulate
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu, verdict
from memlab.course.ledger import activation_bytes
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.trace import Event, Trace
from memlab.units import format_bytes

MIB, GIB = 2**20, 2**30

# %% [markdown]
# Here is a training run as many are: the batches have different lengths. Four steps of yesterday's
# model with 124M weights, 8 sequences each, in float32. It is written for `"cuda"`.

# %%
text = source_bytes("64 KiB")
lengths = (448, 512, 640, 576)


def build():
    with torch.device("cuda"):
        model = GPT(PRESETS["124m"])
    optimizer = torch.optim.AdamW(model.parameters())

    def four_steps():
        for seq_len in lengths:
            tokens, targets = next(batches(text, 8, seq_len, seed=0))
            optimizer.zero_grad()
            model(tokens.to("cuda"), targets.to("cuda")).backward()
            optimizer.step()

    return four_steps, model, optimizer


# %% [markdown]
# ## Guess
#
# `memlab.predict` takes the steps on fake tensors (they have sizes and no memory) with the kernels
# that CUDA would take. At their peak the tensors hold 7.6 GiB. How much will torch have
# **reserved** from the driver by then? Write a number in place of the dots.

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
# Torch does not ask the driver for each tensor: that is slow. A *caching allocator* stands in
# between. It asks for large *segments*, cuts *blocks* off them, and keeps what is freed.
# `simulate` runs a trace through its rules, which are simple enough for you to build them today.
#
# (Yesterday's step took 7.94 GiB: a CPU's. CUDA's kernel for norms keeps one tensor less for each
# norm.)

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
# "Measured" says too much here: no GPU ran. The tensors are *predicted*, and torch's allocator is
# *simulated*. The gap in your guess is made of free blocks: memory that a tensor gave back stays
# with torch. Here they are, when torch asks for its last large segment.

# %%
growth = [after - before for before, after in pairwise((0, *blocks.reserved))]
asked_at = max(position for position, size in enumerate(growth) if size > 100 * MIB)
just_before, asked = blocks.segments(asked_at), trace.events[asked_at]
free = [p.bytes for s in just_before for p in s.pieces if p.state == "free"]
print(f"{format_bytes(sum(free))} are free, in {len(free)} pieces: the largest has ", end="")
print(format_bytes(max(free)))
print(f"asked for, by {asked.operator} in {asked.phase}: {format_bytes(asked.bytes)}")
for note in trace.notes:
    print(fill(f"note: {note}", 96))

# %% [markdown]
# So 2.6 GiB were free, and no piece of it was large enough: that is **fragmentation**. The notes
# are the prediction's own: what it assumed, what no GPU has confirmed
# yet, and how far the predictions of measured steps were off.

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
# About 8 minutes. Nothing is free; what does the driver get asked for?


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
# One quantity, three numbers: what was asked for, your formula, and torch's rules as simulated. The
# smallest tensor is rounded most. And the logits' block gets its whole segment: rule 2 says why.

# %%
for what, requested in (("the loss", 4), ("a bias of 768", 3072), ("logits", 8 * 640 * 50257 * 4)):
    block, segment = sizes(requested)
    one = Event(requested, 1, "activations", "", "", "forward", "float32", ())
    by_rules = simulate([one])
    print(f"{what:14}{requested:>13,} B asked, block {block:>13,}, segment {segment:>13,}")
    print(f"{'simulated':>35}, block {by_rules.allocated_bytes:>13,}, ", end="")
    print(f"segment {by_rules.reserved_bytes:>13,}")

# %% [markdown]
# ## Rule 2: which piece
#
# A segment is cut into pieces. Small blocks (up to and with 1 MiB) and large ones never share a
# segment: each kind has a *pool*, a list of pieces in the order of their addresses.


# %%
@dataclass
class Piece:
    segment: int  # the number of the segment that it is a part of
    address: int  # where it begins
    bytes: int
    free: bool


# %% [markdown]
# - **Best fit**: the smallest free piece that is large enough. Among equals, the lowest address.
# - **Split**: the request gets the lower part, and the rest becomes a free piece of its own,
#   behind it in the list. In the small pool a rest becomes a piece from 512 bytes; in the large
#   pool only above 1 MiB, and less goes with the request and is wasted.
#
# ### Exercise 2.2: take a piece
#
# About 15 minutes. `size` is a block's and says which pool this is. Give the address; where nothing
# fits, change nothing and give None.


# %%
def take(pieces: list[Piece], size: int) -> int | None:
    """Mark `size` bytes as taken, and say where they begin."""
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
# Cut only, and all memory would soon be crumbs. So a piece that is freed **merges** with free
# neighbours. Neighbours are those of the same segment: the driver gave each segment in one piece
# and takes it back in one piece.
#
# ### Exercise 2.3: give a piece back
#
# About 10 minutes. Nothing is returned; the list itself is changed.


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
# That was all. Around your three functions goes a class that holds the two pools and asks the
# driver where nothing fits.


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
# The four steps of the question, allocation by allocation, through your three functions (or the
# reference, for one that isn't right yet).

# %%
cache = Cache()
for event in trace.events:
    if event.category == "rounding":
        continue  # the allocator does its own
    if event.bytes > 0:
        cache.malloc(event.storage, event.bytes)
    else:
        cache.free(event.storage)
print(f"this one: {cache.segments} segments, {format_bytes(cache.reserved)} reserved")
print(f"memlab's: {blocks.segment_allocations} segments, ", end="")
print(f"{format_bytes(blocks.reserved_bytes)} reserved")
print(f"the same to the byte: {cache.reserved == blocks.reserved_bytes}")

# %% [markdown]
# ## Fragment it
#
# Four tensors of 5 MiB share a segment of 20 MiB. The first and the third are freed: 10 MiB are
# free. Then 6 MiB are asked for: first on a card with room, then on one that has 24 MiB in all.

# %%
changes = (1, 5), (2, 5), (3, 5), (4, 5), (1, -5), (3, -5), (5, 6)  # storage, MiB
events = [
    Event(mib * MIB, storage, "activations", "aten.empty", "", "forward", "uint8", ())
    for storage, mib in changes
]
roomy = simulate(events)
print(f"with room: {format_bytes(roomy.reserved_bytes)} reserved for 16 MiB of tensors")
plot.blocks(
    simulate(events, capacity_bytes=24 * MIB),
    title="10 MiB are free, and a request of 6 MiB finds no room",
)

# %% [markdown]
# Nobody can push the two tensors together: a tensor's address stays as long as it lives. Now the
# same picture of the four steps. What tensors hold goes up and down in each step; what is reserved
# only rises. Hatched is reserved and free.

# %%
plot.blocks(blocks, title="Four steps of 124m, when most is reserved")

# %% [markdown]
# ## Who needs what
#
# The reserved bytes are not the *need*. Where the driver has no more, torch gives whole free
# segments back and asks again (a *retry*), before it gives up. So the same run may fit a smaller
# card. How much must a card have left beside the context, at least? Halving finds it, in steps of
# 32 MiB.


# %%
def step_starts(trace: Trace) -> list[int]:
    """The places of the events with which each forward pass but the first begins."""
    phases = [event.phase for event in trace.events]
    return [i for i, pair in enumerate(pairwise(phases), 1) if pair == ("optimizer", "forward")]


def smallest_card(words: str = "", **how) -> int:
    cards = range(7 * 1024, 12 * 1024, 32)  # MiB

    def fits(mib: int) -> bool:
        return simulate(trace, Settings.parse(words, capacity_bytes=mib * MIB), **how).fits

    return cards[bisect_left(cards, True, key=fits)] * MIB


need = smallest_card()
print(f"tensors need {format_bytes(blocks.allocated_bytes)}, ", end="")
print(f"torch takes {format_bytes(blocks.reserved_bytes)} if it can, ", end="")
print(f"and {format_bytes(need)} will do, left beside the context")

# %% [markdown]
# **So who is right?** PyTorch's number is what tensors hold, and with no more than that the run
# fails. `nvidia-smi`'s is what torch has taken, and with less the run still fits. The need lies
# between.
#
# ## What the settings change
#
# They are words in an environment variable (in older torch `PYTORCH_CUDA_ALLOC_CONF`):
#
# ```
# PYTORCH_ALLOC_CONF=expandable_segments:True python train.py
# ```
#
# A function of torch, `empty_cache()`, gives all whole free segments back at once; here it is
# called before every step.

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
# In GiB: both peaks, and the least that a card must have left beside the context (*smallest*).
# *Calls* are those of `cudaMalloc` and `cudaFree`; with expandable segments, the times that pages
# are mapped and unmapped. No setting changes what tensors need: `allocated` moves by rounding
# alone.
#
# | setting | what it does | here |
# | --- | --- | --- |
# | `max_split_size_mb` | keeps large blocks whole | takes 17 GiB if it can, and fits 8.4 |
# | `roundup_power2_divisions` | rounds more, so that more requests are alike | worse |
# | `garbage_collection_threshold` | gives free segments back early | helps on a card nearly full |
# | `per_process_memory_fraction` | a limit | saves nothing |
# | `expandable_segments` | one segment that grows by pages | hardly a hole: try it first |

# %% [markdown]
# ## What dies at epoch 60?
#
# Four people train a small model on torch's own source. Each added a few innocent lines:
#
# - **Ada** notes the loss on a batch that is *held out*: only looked at, not learnt.
# - **Ben** watches how large the activations get, with a hook.
# - **Cleo** keeps the soft targets of a batch, so as to make them only once.
# - **Dora** has texts of several lengths, and keeps a table of positions for each length.
#
# An epoch here is two batches for training. What they share, and Ada:


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
    """The right byte gets 0.9; a tenth is spread over all 256."""
    return 0.9 * F.one_hot(targets, 256) + 0.1 / 256


# %%
def ada(model, optimizer, data, times=1):
    """Notes the loss on text that is held out."""
    losses = []
    while True:
        for _ in range(2 * times):
            train_on(model, optimizer, *next(data))
        for _ in range(times):
            tokens, targets = next(data)
            losses.append(F.cross_entropy(model(tokens).mT, targets))
        yield  # an epoch is over


# %% [markdown]
# Ada keeps *one number* a held-out batch. How many MiB more are alive after each epoch than after
# the one before? A batch is 64 sequences of 512 bytes.

# %%
### BEGIN SOLUTION
guess("2.2", growth_mib=0)  # a loss is one number of four bytes
### END SOLUTION
### BEGIN STUB
# guess("2.2", growth_mib=...)
### END STUB

# %% [markdown]
# The other three. `model[2]` is the GELU, and its hook runs in every forward pass.


# %%
def ben(model, optimizer, data):
    """Notes the mean size of the GELU's outputs."""
    outputs, scales = [], []
    model[2].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    while True:
        for _ in range(2):
            train_on(model, optimizer, *next(data))
        scales.append(sum(output.abs().mean().item() for output in outputs[-2:]) / 2)
        yield


# %%
def cleo(model, optimizer, data):
    """Makes the soft targets of a batch only once."""
    soft = {}
    while True:
        for _ in range(2):
            tokens, targets = next(data)
            if targets not in soft:
                soft[targets] = soften(targets)
            train_on(model, optimizer, tokens, soft[targets].mT)
        yield


def dora(model, optimizer, data, lengths=range(192, 513, 64), seed=7):
    """Adds positions to the text, from a table for each length."""
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
# Eight epochs of each, dry: with fake tensors, a card may be larger than the laptop.
# `lines=True` notes the line that made each tensor.


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
runs = {person.__name__: epochs_of(person, 8) for person in people}
growth = runs["ada"][-1].live_bytes - runs["ada"][-2].live_bytes
reveal("2.2", growth_mib=growth)

# %% [markdown]
# A loss remembers how it came about: its *graph*, with every activation that backward would need.
# In training `backward()` frees them. On held-out text nobody calls it, so the gap is made of what
# the forward pass kept for a backward pass that never comes.

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, epochs in runs.items():
    alive = [epoch.live_bytes / MIB for epoch in epochs]
    axes.plot(range(1, 9), alive, marker="o", markersize=3, label=name.title())
axes.set(xlabel="epoch", ylabel="MiB alive after it", ylim=(0, None))
axes.set_title("What is still alive when an epoch is over")
axes.legend(frameon=False)
print("dora, MiB:", *(f"{epoch.live_bytes / MIB:.2f}" for epoch in runs["dora"]))

# %% [markdown]
# Three of them grow for ever. Dora's line lies at the bottom: it grew at first (a table for each of
# six lengths) and then no more. What gets full is no leak.
#
# ### Exercise 2.4: find the leak, and its line
#
# About 12 minutes. Of each epoch you have a Trace. `epoch.alive()` gives what is alive at its end,
# an event for each tensor, with its `bytes` and its `line`. Compare the epoch in the middle,
# `epochs[len(epochs) // 2]`, with the last, for the first ones fill what is then full.


# %%
def leaks(epochs: list[Trace]) -> dict[str, int]:
    """For each line that made more and more that stays: by how many bytes an epoch."""
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
# The line is where a tensor was *born* (the text itself, in memlab's `data.py`). Who keeps it is
# another question: Ben's are born in `train_on`, as all activations are. `diff` tells more of them:
# which module made them, how large, how many.

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
# A leak is a straight line. Ada has a card with 11.2 GiB of room. You know the peak of epoch 8 and
# what an epoch adds: that gives the epoch in which her run dies. Then the whole run, through the
# allocator of such a card.


# %%
def whole_run(person, epochs, batch=64, **how) -> Trace:
    """All epochs as one trace."""
    with memlab.dry_run():
        model, optimizer = new_model()
        run = person(model, optimizer, batches(text, batch, 512, seed=0), **how)
        with memlab.meter(model, optimizer) as running:
            for _ in range(epochs):
                next(run)
    return running.trace


room = int(11.2 * GIB)
fit = 8 + (room - runs["ada"][-1].peak_bytes) // growth
print(f"by the line, the last epoch that fits: {fit}")

whole = whole_run(ada, 62)
died = simulate(whole, capacity_bytes=room).out_of_memory
print(f"by the allocator, it dies in epoch {1 + 62 * died.position // len(whole.events)}: ", end="")
print(f"of {format_bytes(died.reserved_bytes)} reserved, ", end="")
print(f"{format_bytes(died.allocated_bytes)} are allocated")

# %% [markdown]
# Nearly all of what is reserved is in use: that is a leak. Now Dora, who leaks nothing. She has a
# large batch (1,024 sequences) on a card with 4.3 GiB of room, and her tensors need 4 GiB at most.

# %%
many = whole_run(dora, 12, batch=1024, seed=0)  # the lengths in another order
print(f"the peak of what is allocated: {format_bytes(simulate(many).allocated_bytes)}")

card = int(4.3 * GIB)
with_pages = simulate(many, expandable_segments=True, capacity_bytes=card)
print(f"with expandable segments all 12 epochs fit: {with_pages.fits}")

died = simulate(many, capacity_bytes=card).out_of_memory
pieces, left = died.free_piece_bytes, card - died.reserved_bytes
print(f"with nothing set it dies in epoch {1 + 12 * died.position // len(many.events)}; ", end="")
print(f"{format_bytes(died.allocated_bytes)} are allocated")
print(f"  asked for                {format_bytes(died.requested_bytes):>12}")
print(f"  free in what is reserved {format_bytes(sum(pieces)):>12}", end=", ")
print(f"the largest piece {format_bytes(pieces[0])}")
print(f"  left with the driver     {format_bytes(left):>12}")

# %% [markdown]
# Enough is there, and it lies in two places, of which neither has enough. Tensors of earlier,
# shorter batches were cut to other sizes, and what was left between them stayed.

# %%
plenty = simulate(many)
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
# Where there is room, her reserved memory rises in jumps, in epochs 1, 3 and 11, to more than twice
# what she needs. `nvidia-smi` sees only that, and it looks like a leak. The test is the other
# number, `memory_allocated()` at the end of each epoch: if that stays flat, nothing leaks.

# %% [markdown]
# ## Mend it
#
# All three leaks in one loop, and for real this time: no dry run. The loop is there; ask of each
# line what it keeps. Every epoch gets batches of its own, and `notes` stays for the whole run.
# `model[2]` is the GELU; `.mT` puts the classes second, where `cross_entropy` wants them.

# %% [markdown]
# ### Exercise 2.5: mend it
#
# About 15 minutes. After each epoch the same bytes are alive. Within an epoch nothing may pile up
# either, except one number for each batch. `register_forward_hook` returns a handle, and
# `handle.remove()` takes that hook off again. And nothing else changes: what is learnt;
# `notes["losses"]`, a Python float for each held-out batch; `notes["scales"]`, a Python float for
# each epoch, of training alone; the model's mode and the hooks of others.


# %%
def train_epoch(model, optimizer, training, held_out, notes):
    """Train on each batch, then note the losses on held-out text."""
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
# Twelve epochs of it, on real text and for real: what is alive after each, and what is learnt.

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
# A tensor dies with the last reference to it, at once; nothing has to be collected. One case is
# left: objects that refer to each other in a circle. Python's collector finds those, now and then.


# %%
import gc


class Logger:
    def __init__(self):
        self.last = torch.zeros(2**18)  # 1 MiB
        self.callback = self.log  # a method refers to its object: a circle

    def log(self): ...


# %%
def alive_bytes(make, then=lambda: None) -> int:
    """What stays of `make()` once it is dropped, and `then` was called."""
    gc.disable()
    with memlab.meter() as running:
        make()
        then()
    gc.enable()
    return running.trace.live_bytes


print(f"a tensor, dropped:  {format_bytes(alive_bytes(lambda: torch.zeros(2**18)))}")
print(f"a circle, dropped:  {format_bytes(alive_bytes(Logger))}")
print(f"after gc.collect(): {format_bytes(alive_bytes(Logger, gc.collect))}")
kept = []
still = alive_bytes(lambda: kept.append(torch.zeros(2**18)), gc.collect)
print(f"kept in a list, after gc.collect(): {format_bytes(still)}")

# %% [markdown]
# ## A snapshot
#
# Torch's own picture of memory is a web page,
# [pytorch.org/memory_viz](https://pytorch.org/memory_viz). Every Trace can be written for it: here
# Ada's second epoch. Drop the file onto the page (it stays in your browser) and look at *Active
# Memory Timeline*: a band that runs to the right edge is still alive, and a click on it shows the
# line that made it.

# %%
import pickle
import tempfile
from pathlib import Path

from torch.cuda import _memory_viz

yours = Path("progress.json").exists()  # a folder that `memlab start` made
path = Path("." if yours else tempfile.mkdtemp(), "ada.pickle")
runs["ada"][1].to_snapshot(path)
print(f"{path.name} is {'beside this notebook' if yours else 'where `path` says'}")

# %% [markdown]
# The code that ships in torch reads it, too. Each tensor stands as a segment, each letter for 20
# MiB of it.

# %%
snapshot = pickle.loads(path.read_bytes())
print(_memory_viz.segsum(snapshot).partition("Legend")[0].strip())
print(f"by the meter: {format_bytes(runs['ada'][1].live_bytes)} alive")

# %% [markdown]
# ## At scale
#
# One batch of held-out text, kept with its graph, is what a forward pass keeps. For that there is
# yesterday's formula, in float32.

# %%
for name, batch, seq_len in (("124m", 8, 640), ("1b", 1, 8192), ("llama-2-7b", 1, 4096)):
    kept_bytes = activation_bytes(PRESETS[name], batch, seq_len)
    print(f"{name:12}{batch} × {seq_len} tokens: {format_bytes(kept_bytes):>10} for each loss kept")

# %% [markdown]
# At seven billion weights such a run does not die at epoch 60. In float32, with AdamW, 100 GiB are
# weights, gradients and state; on a card with 180 GiB the second held-out batch finds no room.
# Small models leak slowly, and that is why their leaks are found late.
#
# ## On your GPU
#
# Where there is a GPU, this takes the four steps on it, and shows all three numbers beside the
# prediction.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if torch.cuda.is_available():
    four_steps, *_ = build()
    four_steps()
    torch.cuda.synchronize()
    left, total = torch.cuda.mem_get_info()
    for what, measured, predicted in (
        ("allocated", torch.cuda.max_memory_allocated(), blocks.allocated_bytes),
        ("reserved", torch.cuda.max_memory_reserved(), blocks.reserved_bytes),
    ):
        print(f"{what}: {format_bytes(measured)}, predicted {format_bytes(predicted)}")
    print(f"in use on the card, as in nvidia-smi: {format_bytes(total - left)}")
else:
    print(stored_on_a_gpu("day 2"))

# %% [markdown]
# ## Rules on trial
#
# The guides are five that people read today on saving memory; RULES.md has the verdict on each rule
# of theirs. Today's trials are of predictions and of the simulated allocator, not of a GPU.
#
# The first: clear the cache in every batch, and collect garbage every few steps. The guides'
# "memory" may be any of the three numbers, so all are tried: with lengths that vary, and with one
# length.


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
    f"{1 - emptied.blocks.reserved_bytes / plain.blocks.reserved_bytes:.0%} less, and the run fits "
    f"where {saved:.0%} less is left on the card; with one length it reserves "
    f"{1 - same[1] / same[0]:.0%} less; the driver is called {emptied.calls} times with clearing, "
    f"{plain.calls} without",
    condition="for what is reserved, if lengths vary, by empty_cache alone (gc.collect frees only "
    "circles); what tensors need it never lowers, and expandable segments save more without the "
    "calls",
)

# %% [markdown]
# The monitor. What it shows, against what the same run could do with.

# %%
split = table["max_split_size_mb:128"]
shown = [tried.blocks.reserved_bytes / tried.smallest for tried in (plain, split)]
verdict(
    "6b",
    all(abs(ratio - 1) < 0.1 for ratio in shown),
    f"beside the context it shows {plain.blocks.reserved_bytes / GIB:.2f} GiB where "
    f"{plain.smallest / GIB:.2f} GiB would do; with max_split_size_mb:128 it shows "
    f"{split.blocks.reserved_bytes / GIB:.2f} where {split.smallest / GIB:.2f} would do",
    otherwise="it shows what is held, by everybody on the card, not what is needed; the need lies "
    "between max_memory_allocated and max_memory_reserved, and a leak shows in memory_allocated "
    "after each epoch",
)

# %% [markdown]
# A limit of 95 %, and "smaller chunks", by which `max_split_size_mb` is most likely meant.

# %%
fraction = table["per_process_memory_fraction:0.95"]
verdict(
    "7a",
    fraction.smallest < plain.smallest,
    f"on a card with 24 GiB the run reserves {fraction.blocks.reserved_bytes / GIB:.2f} GiB with "
    f"the limit and {plain.blocks.reserved_bytes / GIB:.2f} without; the least that it needs on a "
    f"card is {fraction.smallest / GIB:.2f} with the limit and {plain.smallest / GIB:.2f} without",
    otherwise="it saves nothing: out of memory comes earlier; it is for leaving room to others",
)

# %%
expandable = table["expandable_segments:True"]
verdict(
    "7b",
    split.smallest < plain.smallest,
    f"with nothing set the run needs {plain.smallest / GIB:.2f} GiB on a card, with "
    f"max_split_size_mb:128 {split.smallest / GIB:.2f}, with expandable segments "
    f"{expandable.smallest / GIB:.2f}; where there is room, max_split_size_mb:128 reserves "
    f"{split.blocks.reserved_bytes / GIB:.2f}",
    condition="if the card is full, where lengths vary, by a little; nvidia-smi shows more, and "
    "expandable segments save more",
)

# %% [markdown]
# Fragmentation: whose fault, and what helps? Dora with half the batch, with all of it, with one
# length, and with expandable segments.

# %%
small = [segment for segment in just_before if segment.pool == "small"]
in_small = sum(p.bytes for segment in small for p in segment.pieces if p.state == "free")
verdict(
    "7c",
    in_small / sum(free) > 0.5,
    f"of {format_bytes(sum(free))} that lie free before the last large segment, "
    f"{format_bytes(in_small)} are in the segments of small allocations (of up to 1 MiB)",
    otherwise="large allocations of many sizes fragment; small ones have segments of their own",
)

# %%
half, full, one_length = (
    simulate(run) for run in (whole_run(dora, 12, batch=512, seed=0), many, same_length)
)
grows = simulate(many, expandable_segments=True)
shares = [ran.fragmentation for ran in (half, full, one_length, grows)]
wasted = [ran.reserved_bytes - ran.allocated_bytes for ran in (half, full)]
verdict(
    "7d",
    shares[1] < shares[0] - 0.05,
    f"of what Dora's run reserves, {shares[0]:.0%} lie free with 512 sequences in a batch, and "
    f"{shares[1]:.0%} with 1,024, which are {wasted[1] / wasted[0]:.1f} times the bytes; of the "
    f"latter, {shares[2]:.0%} with one length, {shares[3]:.0%} with expandable segments",
    otherwise="a larger batch wastes the same share of more; sequences of one length (padded, or "
    "cut to few lengths) and expandable segments help. Pools of one's own are not tried here",
)

# %% [markdown]
# The leak. Ada deletes her loss and empties the cache, as the guide says; the list still has it.
# Then she takes half the batch, twice as often.


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


cleaned = epochs_of(ada_cleans_up, 3)
after_it = cleaned[-1].live_bytes - cleaned[-2].live_bytes
verdict(
    "8a",
    after_it == 0,
    f"Ada's epoch leaves {format_bytes(growth)} more; with del, empty_cache() and gc.collect() it "
    f"leaves {format_bytes(after_it)} more; the mended loop of exercise 2.5, which calls none of "
    f"these, {format_bytes(alive[-1] - alive[-2])}",
    otherwise="del removes a name, and a tensor lives as long as anything refers to it; once "
    "nothing does it is freed without empty_cache(), which only gives free segments back",
)

# %%
halved = epochs_of(ada, 3, batch=32, times=2)
growth_halved = halved[-1].live_bytes - halved[-2].live_bytes
fit_halved = 3 + (room - halved[-1].peak_bytes) // growth_halved
verdict(
    "8b",
    fit_halved >= 2 * fit,
    f"Ada's epochs leave {format_bytes(growth)} more each, and {fit} fit; with half the batch, "
    f"twice as often, {format_bytes(growth_halved)}, and {fit_halved} fit; Dora leaks nothing, and "
    f"reserves {full.reserved_bytes / GIB:.2f} GiB, with half the batch "
    f"{half.reserved_bytes / GIB:.2f}",
    otherwise="if memory_allocated grows from epoch to epoch it is a leak, and an epoch leaks the "
    "same in smaller batches; if it stays flat (fragmentation, a longer text), half the batch does "
    "buy room",
)

# %% [markdown]
# ## What you can do now
#
# | you see | it is | do |
# | --- | --- | --- |
# | allocated after each epoch grows | a leak | `leaks`, then look for who keeps it |
# | it grows, then stops | a table filling, Adam's state | nothing |
# | it is flat, reserved grows | fragmentation | `expandable_segments:True`, few lengths |
# | both flat, `nvidia-smi` higher | contexts, other processes | look who else is there |
# | the peak alone jumps | a longer text | Day 3 |
#
# And before you start: reserved memory by your own rules, and the epoch in which a leak ends a run.

# %% [markdown]
# For a training of your own: put one epoch of it into a function, and measure a few.
#
# ```python
# def one_epoch(): ...  # your loop: it trains, looks at held-out data, and takes its notes
#
# watched = [
#     memlab.measure(one_epoch, model=model, optimizer=optimizer, lines=True) for _ in range(6)
# ]
# for line, size in leaks(watched).items():
#     print(f"{size:,} bytes more after each epoch, from {line}")
# print(watched[-2].diff(watched[-1]))  # what they are
# ```
#
# Measuring notes each allocation and makes a loop slower: a few batches for an epoch will do.

# %% [markdown]
# ## The running bill
#
# Reading saves nothing, so today's line is yesterday's. It counts what tensors hold; a card also
# has to have what is reserved beyond that, and the context.

# %%
running_bill(2)
