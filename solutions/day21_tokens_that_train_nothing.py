# %% [markdown]
# # Day 21: Tokens that train nothing
#
# **Half of my batch is padding, evaluation runs out of memory where training does not, and
# preference training needs twice the memory of fine-tuning. What uses the memory?**
#
# After today you have built sequence packing, attention that stays within a document, and
# log-probabilities without full logits. You can also compute the size of a KV cache, and say what
# uses the memory of DPO and GRPO.
#
# About 90 minutes, 60 of them for five exercises. You need a laptop; a GPU is optional. Nothing is
# downloaded.

# %% [markdown]
# As before, you **guess**, **measure**, and **build** what explains the gap. In an exercise,
# replace `raise NotImplementedError` with your own lines. The cell below it checks them. If you are
# stuck, type `memlab hint 21.1` in a terminal. You can skip an exercise and go on.

# %% [markdown]
# ## The question
#
# So far every token of a step was trained on. In practice many are not:
#
# - **padding** makes the sequences of a batch equally long
# - **generated tokens** keep their keys and values in memory, the KV cache
# - the **reference model** of preference training reads tokens only for their log-probabilities
#
# These tokens train nothing, but they need activations, caches and logits.

# %%
import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.checkpointing import checkpoint as checkpointed
from memlab.configs.nccl import all_to_all_bytes, connection_bytes, ring_bytes
from memlab.course import exercise, guess, reveal, running_bill, stored_on_a_gpu
from memlab.course.optional import imported
from memlab.data import source_bytes
from memlab.lora import LoRALinear, add_lora
from memlab.losses import token_log_probs
from memlab.model import GPT, PRESETS, rotate
from memlab.planner.repetition import extrapolate
from memlab.units import format_bytes

# %% [markdown]
# ## Guess
#
# 1. Pad 24 documents of different lengths to the longest. What percentage of the tokens is
#    padding?
# 2. Llama 2 7B in bfloat16 generates 8 sequences of 4,096 tokens. How many GiB is its KV cache?
#    (The weights are 12.6 GiB.)
# 3. Train Llama 3 8B (15 GiB of weights) with DPO, which learns from pairs of a preferred and a
#    rejected answer. Use LoRA and checkpointing. A batch has 4 pairs of 2,048-token sequences. A
#    second, frozen model is the reference. How many GiB does a step need?

# %%
### BEGIN SOLUTION
guess("21.1", padding_percent=25, cache_gib=4, step_gib=24)
### END SOLUTION
### BEGIN STUB
# guess("21.1", padding_percent=..., cache_gib=..., step_gib=...)
### END STUB

# %% [markdown]
# ## Measure: a padded batch
#
# The lengths of real documents span an order of magnitude, with a few long ones. Draw 24 lengths
# from a log-normal distribution.

# %%
CONFIG = replace(PRESETS["tiny"], hidden_size=64, heads=4, kv_heads=2, seq_len=256)
rng = random.Random(21)
LENGTHS = [min(256, max(8, round(rng.lognormvariate(4, 0.7)))) for _ in range(24)]
TEXT = source_bytes("64 KiB").long()
DOCUMENTS = [TEXT[128 * n :][:length] for n, length in enumerate(LENGTHS)]

longest, useful = max(LENGTHS), sum(LENGTHS)
padding = 1 - useful / (len(LENGTHS) * longest)
print(f"{len(LENGTHS)} documents of {min(LENGTHS)} to {longest} tokens, {useful:,} in total")
print(f"padded to {len(LENGTHS)} × {longest} = {len(LENGTHS) * longest:,}: {padding:.0%} padding")


# %%
def padded(documents):
    """Return tokens and targets of shape (documents, longest). A target of −100 has no loss."""
    tokens = torch.zeros(len(documents), longest, dtype=torch.long)
    targets = torch.full_like(tokens, -100)
    for row, document in enumerate(documents):
        tokens[row, : len(document)] = document
        targets[row, : len(document) - 1] = document[1:]
    return tokens, targets


def activations_of(model, *batch):
    """Return the activation bytes at the peak of forward and backward."""
    model.zero_grad()
    return memlab.measure(lambda: model(*batch).backward(), model=model).at_peak["activations"]


torch.manual_seed(0)
model = GPT(CONFIG)
padded_bytes = activations_of(model, *padded(DOCUMENTS))
print(f"{format_bytes(padded_bytes)} of activations", end=": ")
print(f"{padded_bytes / useful:,.0f} bytes per useful token")

# %% [markdown]
# Each padding token costs as much as a real token. Sorting documents by length reduces padding, but
# then each batch has only documents of similar length. **Packing** puts several documents into one
# row instead. Which documents go into which row?

# %% [markdown]
# ### Exercise 21.1: first-fit decreasing
#
# About 10 minutes. Place the documents from longest to shortest (equally long ones in the given
# order). Put each into the *first* row that has room for it. If no row has room, open a new row.
#
# Return the rows, in the order you opened them. Each row is a list of document indices, in the
# order you placed them. No document is longer than `capacity`.


# %%
def pack(lengths, capacity):
    ### BEGIN SOLUTION memlab.reference.packing.pack
    rows: list[list[int]] = []
    free: list[int] = []  # tokens left in each row
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fitting = [row for row, left in enumerate(free) if left >= lengths[number]]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            free.append(capacity)
        rows[fitting[0]].append(number)
        free[fitting[0]] -= lengths[number]
    return rows
    ### END SOLUTION


# %%
pack = exercise("21.1", pack)

# %%
rows = pack(LENGTHS, 256)
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
alone = [[n] for n in range(len(LENGTHS))]
for place, (packing, length) in enumerate(((alone, longest), (rows, 256))):
    for row, numbers in enumerate(packing):
        ends = [0, *torch.tensor([LENGTHS[n] for n in numbers]).cumsum(0).tolist()]
        for color, (start, end) in enumerate(pairwise(ends)):
            axes[place].barh(row, end - start, left=start, color=f"C{color}", edgecolor="white")
    filled = useful / (len(packing) * length)
    title = f"{len(packing)} rows of {length} tokens: {filled:.0%} useful"
    axes[place].set(xlim=(0, 256), xlabel="tokens", ylim=(24, -1), title=title)
axes[0].set_ylabel("row")
print(f"{len(rows)} rows; {useful:,} tokens need at least {-(-useful // 256)}")

# %% [markdown]
# First-fit decreasing needs at most 11/9 of the fewest possible rows, plus one.

# %% [markdown]
# ## Documents in a row
#
# A row is one long sequence. If you trained it as one document, two things would go wrong:
#
# - The last token of a document would predict the first token of the next.
# - Attention would read earlier documents.
#
# Variable-length (*varlen*) kernels take the **boundaries** of documents, the cumulative lengths 0,
# n₁, n₁ + n₂, … (int32, `cu_seqlens` in FlashAttention).

# %% [markdown]
# ### Exercise 21.2: join documents
#
# About 10 minutes. `documents` is a list of 1-D int64 tensors of tokens; don't change them. Return
# `(tokens, targets, positions, boundaries)`:
#
# - `targets`: the next token of the same document, or −100 if there is none
# - `positions`: start at 0 in each document
# - `boundaries`: int32, one element more than there are documents
#
# `tokens`, `targets` and `positions` have one element per token, in int64.


# %%
def join(documents):
    ### BEGIN SOLUTION memlab.reference.packing.join
    tokens = torch.cat(list(documents))
    lengths = torch.tensor([len(document) for document in documents], dtype=torch.int64)
    boundaries = F.pad(lengths.cumsum(0), (1, 0))
    targets = tokens.roll(-1)
    targets[boundaries[1:] - 1] = IGNORED  # the next token is another document's
    starts = boundaries[:-1].repeat_interleave(lengths)
    return tokens, targets, torch.arange(len(tokens), dtype=torch.int64) - starts, boundaries.int()
    ### END SOLUTION


# %%
IGNORED = -100
join = exercise("21.2", join)

# %% [markdown]
# ### Exercise 21.3: attention within documents
#
# About 15 minutes. `q`, `k` and `v` are (1, heads, T, head dimension), with rotary positions
# applied; T is the number of tokens in the row. Return causal attention, in the same shape, but a
# token attends only to itself and to earlier tokens of its own document. Use
# `F.scaled_dot_product_attention`, and allocate nothing with T² elements, such as a T × T mask.
# `boundaries` is as in exercise 21.2.


# %%
def attend_within(q, k, v, boundaries):
    ### BEGIN SOLUTION memlab.reference.packing.attend_within
    outputs = []
    for start, end in pairwise(boundaries.tolist()):
        of_document = (x[:, :, start:end] for x in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(*of_document, is_causal=True))
    return torch.cat(outputs, dim=2)
    ### END SOLUTION


# %%
attend_within = exercise("21.3", attend_within)

# %% [markdown]
# Is a packed row's gradient the sum of its documents' gradients? The model takes attention as a
# function (Day 10). Rotary positions need no reset, because q·k depends only on the distance of two
# tokens. With *learned* positions, the model needs `positions`.


# %%
def packed_model(boundaries, config=CONFIG):
    """Return the same model with attention within documents."""

    def attend(q, k, v, *, causal):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return attend_within(q, k, v, boundaries)

    torch.manual_seed(0)
    return GPT(config, attention=attend)


# %%
def gradient(model, batches):
    """Return the gradient of the loss summed over all tokens, as one vector."""
    model.zero_grad()
    for tokens, targets in batches:
        (model(tokens[None], targets[None]) * (targets != -100).sum()).backward()
    return torch.cat([w.grad.flatten() for w in model.parameters()])


tokens, targets, _, boundaries = join([DOCUMENTS[n] for n in rows[1]])
one_by_one = gradient(model, [join([DOCUMENTS[n]])[:2] for n in rows[1]])
print(f"{len(rows[1])} documents in a row: relative error of the row's gradient")
for name, other in (("within documents", packed_model(boundaries)), ("plain causal", model)):
    error = (gradient(other, [(tokens, targets)]) - one_by_one).norm() / one_by_one.norm()
    print(f"  {name:17}{'below 1e-5' if error < 1e-5 else 'above 5 %' if error > 0.05 else '?'}")

# %% [markdown]
# How much memory does packing save? Join all documents into one row. (Frameworks call this
# *padding-free*.)

# %%
tokens, targets, _, boundaries = join(DOCUMENTS)
long_row = packed_model(boundaries, replace(CONFIG, seq_len=useful))
packed_bytes = activations_of(long_row, tokens[None], targets[None])
for name, count in (("padded", padded_bytes), ("packed", packed_bytes)):
    print(f"{name}: {format_bytes(count):>10}, {count / useful:,.0f} bytes per useful token")
print(f"packed / padded: {packed_bytes / padded_bytes:.2f} × the activations", end=", ")
print(f"{1 - padding:.2f} × the tokens")

# %% [markdown]
# The ratio of activations is a little larger than the ratio of tokens, because the packed model
# concatenates outputs, and repeats k and v: it has two query heads per key/value head. A varlen
# kernel does neither (`torch.nn.attention.varlen.varlen_attn`, flash-attn's
# `flash_attn_varlen_func`).

# %% [markdown]
# ### Why not a mask?
#
# A mask gives the same values. But on CUDA, torch then uses another kernel, which needs the mask in
# q's dtype. Predict the memory per block of the 124M model, for a row of 4,096 tokens in bfloat16:


# %%
def row_on_cuda(kind, layers, length=4096):
    """Return a step with a row of eight documents."""
    boundaries = torch.arange(0, length + 1, length // 8)
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda")

    def attend(q, k, v, *, causal):
        if kind == "within documents":
            return attend_within(q, k, v, boundaries)
        chosen = {"attn_mask": mask} if kind == "a mask" else {"is_causal": True}
        return F.scaled_dot_product_attention(q, k, v, **chosen)

    config = replace(PRESETS["124m"], layers=layers, seq_len=length)
    gpt = GPT(config, attention=attend, dtype=torch.bfloat16).to("cuda")
    tokens = torch.zeros(1, length, dtype=torch.long, device="cuda")
    return lambda: gpt(tokens, tokens).backward(), gpt, None


per_block = {}
for kind in ("plain causal", "a mask", "within documents"):
    one, two = (memlab.predict(partial(row_on_cuda, kind, layers), steps=1) for layers in (1, 2))
    per_block[kind] = two.allocated_bytes - one.allocated_bytes
    print(f"{kind:17} {format_bytes(per_block[kind])} per block")
print(f"two bytes per pair of tokens: {format_bytes(2 * 4096**2)}")

# %% [markdown]
# *Every* block saves the converted mask for backward: 2 · T² bytes, 2 GiB at 32,768 tokens.
# Compared with plain causal attention, the mask adds 32 MiB per block. Attention within documents
# adds 6 MiB, because `torch.cat` copies the outputs of all documents.

# %% [markdown]
# ## The KV cache
#
# A model generates one token at a time. The new token attends to all earlier tokens, so each layer
# keeps their keys and values. Our model takes attention as a function, so you can add the cache
# from outside:


# %%
class KVCache:
    """An attention function that keeps the keys and values of earlier tokens."""

    def __init__(self, model):
        self.layers, self.rotary = [None] * model.config.layers, model.rotary
        self.layer = -1

    def __call__(self, q, k, v, *, causal):
        self.layer = (self.layer + 1) % len(self.layers)
        if (kept := self.layers[self.layer]) is not None:
            # The model applied rotary positions from 0 on; rotate further by the cache's length.
            cos, sin = (t[kept[0].shape[2]].squeeze(0) for t in (self.rotary.cos, self.rotary.sin))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k, v = (torch.cat(pair, dim=2) for pair in zip(kept, (k, v), strict=True))
        self.layers[self.layer] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

    @property
    def bytes(self):
        return sum(x.untyped_storage().nbytes() for pair in self.layers for x in pair)


# %%
@torch.no_grad()
def generate(model, tokens, count, cache=None):
    """Append the most likely token, `count` times."""
    for block in model.blocks:
        block.attention.attend = cache or memlab.model.scaled_dot_product_attention
    new = tokens
    for _ in range(count):
        next_token = model(new)[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, next_token], dim=1)
        new = next_token if cache else tokens
    return tokens


torch.manual_seed(0)
writer = GPT(CONFIG)
prompt = torch.stack([TEXT[start : start + 64] for start in (0, 1000, 2000, 3000)])
cache = KVCache(writer)
same = torch.equal(generate(writer, prompt, 32, cache), generate(writer, prompt, 32))
print(f"same tokens with and without the cache: {same}")
print(f"cache of 4 sequences, 64 + 31 tokens (not the last new one): {cache.bytes:,} bytes")

# %% [markdown]
# ### Exercise 21.4: the bytes of a KV cache
#
# About 10 minutes. `windows` has an entry per layer: None if a token attends to all earlier tokens,
# or the size of its sliding window, the token itself included. A layer with a window keeps at most
# `window - 1` tokens, because the next token brings its own key and value. Return the cache's bytes
# after `tokens` tokens in each of `batch` sequences.


# %%
def cache_bytes(windows, kv_heads, head_dim, tokens, batch, element_bytes):
    ### BEGIN SOLUTION
    kept = sum(tokens if window is None else min(tokens, window - 1) for window in windows)
    return 2 * kept * kv_heads * head_dim * batch * element_bytes
    ### END SOLUTION


# %%
cache_bytes = exercise("21.4", cache_bytes)


# %%
def cache_of(config, tokens, batch, element_bytes=2, windows=None):
    windows = windows or [None] * config.layers
    return cache_bytes(windows, config.kv_heads, config.head_dim, tokens, batch, element_bytes)


print(f"your formula {cache_of(CONFIG, 95, 4, 4):,} bytes, the cache above {cache.bytes:,} bytes\n")
seven, eight = PRESETS["llama-2-7b"], PRESETS["llama-3-8b"]
sliding = [4096 if layer % 6 < 5 else None for layer in range(eight.layers)]  # 5 of 6, as Gemma 3
print("bfloat16 cache: per token, and for 8 sequences of 4,096 and of 32,768 tokens")
for name, config, windows in (
    ("7B: 32 key/value heads", seven, None),
    ("8B: 8 key/value heads", eight, None),
    ("8B, window 4,096 in 5 of 6 layers", eight, sliding),
):
    each = cache_of(config, 1, 1, windows=windows)
    sizes = (format_bytes(cache_of(config, n, 8, windows=windows)) for n in (4096, 32_768))
    print(f"  {name:34}{format_bytes(each):>12}{''.join(f'{size:>12}' for size in sizes)}")
cache_gib = cache_of(seven, 4096, 8)

# %% [markdown]
# With 4,096 tokens, 7B's cache for 8 sequences is larger than its weights. Grouped-query attention
# (GQA) divides the cache by the number of query heads per key/value head. A sliding window bounds
# the cache of its layer. Quantization (Days 7 and 17) also reduces the cache.

# %% [markdown]
# ### The cache in evaluation
#
# In Hugging Face's `transformers`, a forward pass **fills a cache by default**, even in evaluation,
# which generates nothing. How much memory does this need? Use a small Llama, 8 × 128 tokens, under
# `no_grad`:

# %%
llama_code = imported("transformers.models.llama.modeling_llama")
mistral_code = imported("transformers.models.mistral.modeling_mistral")
SHAPE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def left_after(trace):
    """Return the bytes still alive that the step allocated."""
    return sum(event.bytes for event in trace.events if event.phase != "before")


# %% tags=["nbval-ignore-output"] reason="the package is optional"
if llama_code:
    llama = llama_code.LlamaForCausalLM(llama_code.LlamaConfig(**SHAPE)).eval()
    ids = torch.zeros(8, 128, dtype=torch.long)

    def evaluate(kept, keep, use_cache):
        with torch.no_grad():
            kept.append(keep(llama(ids, labels=ids, use_cache=use_cache)))

    for name, keep, use_cache in (
        ("the loss, default", lambda out: out.loss, True),
        ("the whole output, default", lambda out: out, True),
        ("the loss, use_cache=False", lambda out: out.loss, False),
    ):
        kept = []
        trace = memlab.measure(partial(evaluate, kept, keep, use_cache), model=llama)
        print(f"keep {name:26} peak {trace.peak_bytes:9,} bytes, {left_after(trace):9,} at the end")
    print(f"cache by formula {cache_bytes([None] * 8, 2, 16, 128, 8, 4):,}, "
          f"logits {4 * 8 * 128 * 256:,} bytes")  # fmt: skip
else:
    print("transformers is not installed")

# %% [markdown]
# `use_cache=False` reduces the peak by exactly the cache. If a list keeps an output, it keeps the
# cache of its batch *and* its logits. Keep `out.loss.item()` instead.
#
# ### A sliding window that keeps the prompt
#
# For Mistral, the cache of `transformers` keeps the last `window − 1` tokens as a slice. A slice
# keeps its whole tensor alive (Day 17):

# %% tags=["nbval-ignore-output"] reason="the package is optional"
if mistral_code:
    config = mistral_code.MistralConfig(**SHAPE, sliding_window=16)
    mistral = mistral_code.MistralForCausalLM(config).eval()
    for count in (1, 2):
        kept = []

        def prefill_and_generate(kept=kept, count=count):
            with torch.no_grad():
                out = mistral(ids[:, :64])
                for _ in range(count - 1):
                    out = mistral(ids[:, :1], past_key_values=out.past_key_values)
            kept.append(out.past_key_values)

        left = left_after(memlab.measure(prefill_and_generate, model=mistral))
        print(f"after {'the prompt' if count == 1 else 'a new token'}: {left:,} bytes; ", end="")
        print(f"formula {cache_bytes([16] * 8, 2, 16, 64, 8, 4):,}, ", end="")
        print(f"whole prompt {cache_bytes([None] * 8, 2, 16, 64, 8, 4):,}")

# %% [markdown]
# After a long prompt, the full cache stays in memory, even with a window, until the next token
# replaces it. (The new cache is a slice too: it keeps 16 tokens alive, not 15. The remaining 64
# bytes are an int64 per layer.) So even with a sliding window, generation peaks at the prompt's
# cache.

# %% [markdown]
# ## Preference training
#
# **DPO** (Rafailov et al. 2023) trains on pairs of answers to a prompt, one chosen and one
# rejected. log p is the sum of the log-probabilities of an answer's tokens under the trained model,
# the *policy*. log p_ref is the same under the *reference*, the model before training. With the
# sigmoid σ and a constant β, the loss is
#
# $$
# -\log \sigma\big(\beta\,[(\log p - \log p_\text{ref})_\text{chosen}
# - (\log p - \log p_\text{ref})_\text{rejected}]\big)
# $$
#
# So each step needs two sequences per pair, and the log-probabilities of their tokens under policy
# and reference. (Here the sequences have no prompt.)

# %% [markdown]
# ## DPO's memory
#
# log p_ref can come from
#
# - a second model
# - log-probabilities stored before training, since the reference never changes
# - with LoRA, the same model with its adapters turned off


# %%
def by_log_softmax(hidden, weight, targets):
    """Log-probabilities with the log-softmax of all logits."""
    x = F.linear(hidden, weight).float().log_softmax(-1)
    return x.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def by_logsumexp(hidden, weight, targets):
    """Log-probabilities without the log-softmax: x[y] − log Σ exp x."""
    x = F.linear(hidden, weight).float()
    return x.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - x.logsumexp(-1)


# %%
@dataclass(frozen=True)
class Setup:
    log_probs: object = by_log_softmax
    reference: str = "a model"  # or "stored", or "adapters off"
    lora: bool = False


# %%
def without_adapters(policy, tokens):
    """Run the model as before training: multiply LoRA's update by 0."""
    layers = [module for module in policy.modules() if isinstance(module, LoRALinear)]
    scales = [layer.scale for layer in layers]
    for layer in layers:
        layer.scale = 0
    out = policy(tokens, tokens)
    for layer, scale in zip(layers, scales, strict=True):
        layer.scale = scale
    return out


def dpo_loss(policy, reference, beta=0.1):
    """Return the loss. Both inputs have the pairs' chosen answers first, then the rejected ones."""
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


# %%
def dpo_step(config, setup, pairs, length, device="cuda"):
    """Return a step, its model and its optimizer."""
    make = partial(GPT, config, dtype=torch.bfloat16, loss=setup.log_probs)
    policy = make()
    if setup.lora:
        add_lora(policy, 16, where=lambda name: name.startswith("blocks."))
    policy.to(device)
    frozen = make().to(device) if setup.reference == "a model" else None
    for block in policy.blocks:
        block.forward = partial(checkpointed, block.forward)
    weights = [w for w in policy.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, fused=True)
    tokens = torch.zeros(2 * pairs, length, dtype=torch.long, device=device)

    def step():
        optimizer.zero_grad()
        reference = torch.zeros(2 * pairs, device=device)
        if setup.reference != "stored":
            with torch.no_grad():
                scored = frozen(tokens, tokens) if frozen else without_adapters(policy, tokens)
            reference = scored.sum(1)
        dpo_loss(policy(tokens, tokens).sum(1), reference).backward()
        optimizer.step()

    return step, policy, optimizer


# %% [markdown]
# Start with a second model and `by_log_softmax`. Predict the step for CUDA with four and with five
# blocks, and extrapolate to 32: each further block adds the same allocations (Day 16).


# %%
def predicted(setup, config=eight, pairs=4, length=2048):
    """Return the trace of a step with all blocks."""
    fewer, more = (
        memlab.predict(partial(dpo_step, replace(config, layers=n), setup, pairs, length))
        for n in (4, 5)
    )
    return extrapolate(fewer, more, 5, config.layers)


two_models = predicted(Setup(lora=True))
for name, count in two_models.at_peak.items():
    if count > 2**28:
        print(f"{name:21}{format_bytes(count):>12}  {count / two_models.allocated_bytes:4.0%}")

# %%
step_gib = two_models.allocated_bytes
reveal("21.1", padding_percent=100 * padding, cache_gib=cache_gib, step_gib=step_gib)

# %% [markdown]
# The peak has the weights of two models, and several tensors of 4 · 2 · 2,048 tokens × 128,256
# vocabulary entries. Adapters and their optimizer state are negligible. But the loss needs only one
# log-probability per token, not all logits.

# %% [markdown]
# ### Exercise 21.5: one log-probability per token
#
# About 15 minutes. log p(y) = x[y] − log Σ exp x, with x the logits. `hidden` is (N, C), with a row
# per token, `weight` (V, C), `targets` (N,). Return float32 log-probabilities (N,), computed
# `chunk` rows at a time. Only one chunk's logits may be alive at once, in forward and backward.
# `of_rows` computes one chunk, and `recompute` is torch's checkpointing. N need not be a multiple
# of `chunk`.


# %%
def recompute(function, *inputs):
    """Save only the inputs for backward, which calls the function again (Day 5)."""
    return checkpoint(function, *inputs, use_reentrant=False)


def of_rows(hidden, weight, targets):
    """Return log p(target) of each row, from all logits."""
    x = (hidden @ weight.mT).float()  # (N, V)
    return x.gather(1, targets.unsqueeze(1)).squeeze(1) - x.logsumexp(1)


def log_probs(hidden, weight, targets, chunk):
    ### BEGIN SOLUTION memlab.reference.log_probs.log_probs
    parts = []
    for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        parts.append(recompute(of_rows, rows, weight, wanted))
    return torch.cat(parts)
    ### END SOLUTION


# %%
log_probs = exercise("21.5", log_probs)


# %%
def in_chunks(hidden, weight, targets):
    """Call your function with chunks of 64 rows."""
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    return log_probs(rows, weight, wanted, 64).view(targets.shape)


hidden = torch.randn(4, 256, 16, requires_grad=True)
weight, targets = torch.randn(4096, 16), torch.zeros(4, 256, dtype=torch.long)
size = 4 * targets.numel() * len(weight)  # of all logits, in float32
for compute in (by_log_softmax, by_logsumexp, in_chunks, token_log_probs):
    peaks = []
    for train in (False, True):

        def step(compute=compute, train=train):
            with torch.set_grad_enabled(train):
                out = compute(hidden, weight, targets).sum()
            return out.backward() if train else out

        trace = memlab.measure(step)
        peaks.append((trace.peak_bytes - weight.nbytes - hidden.nbytes - targets.nbytes) / size)
    print(f"{compute.__name__:16} without gradients {peaks[0]:5.2f}, with {peaks[1]:5.2f} × logits")

# %% [markdown]
# `by_logsumexp` lowers the peak only *without* gradients. In backward, x[y] and log Σ
# exp x each allocate a gradient as large as the logits, and autograd allocates their sum. Chunks
# reduce both peaks. The rest of today uses memlab's `token_log_probs` (Day 11's loss, per token).

# %% [markdown]
# ### At scale: what each change saves
#
# The next cells compare seven setups. “LoRA, two models” is your prediction from above.
# `tests/course/test_day21.py` computes the other predictions.


# %%
@dataclass(frozen=True)
class Predicted:
    allocated: int
    reserved: int


LORA = replace(Setup(), lora=True)
STEPS = {
    "all weights, two models": (Setup(), Predicted(94_043_294_720, 105_960_701_952)),
    "LoRA, two models": (LORA, Predicted(62_039_770_624, 72_993_472_512)),
    "+ no log-softmax": (
        replace(LORA, log_probs=by_logsumexp), Predicted(70_445_287_424, 81_398_857_728)
    ),
    "+ in chunks": (
        replace(LORA, log_probs=token_log_probs), Predicted(40_519_911_936, 42_383_441_920)
    ),
    "+ adapters off": (
        Setup(token_log_probs, "adapters off", True), Predicted(24_457_292_288, 25_583_157_248)
    ),
    "all weights, in chunks": (Setup(token_log_probs), Predicted(82_782_171_136, 84_278_247_424)),
    "+ stored reference": (
        Setup(token_log_probs, "stored"), Predicted(66_719_485_952, 68_123_885_568)
    ),
}  # fmt: skip

# %%
print("DPO, Llama 3 8B, 8 × 2,048 tokens          allocated    reserved")
for name, (_, step) in STEPS.items():
    print(f"{name:40}{format_bytes(step.allocated):>12}{format_bytes(step.reserved):>12}")
agree = two_models.allocated_bytes == STEPS["LoRA, two models"][1].allocated
print(f"“LoRA, two models” equals your prediction: {agree}")

# %%
fig, axes = plt.subplots(figsize=(9, 3), layout="constrained")
weights_of_one = 2 * eight.parameters / 2**30
for row, (setup, step) in enumerate(STEPS.values()):
    moments = 0 if setup.lora else 2 * weights_of_one
    parts = {"policy": weights_of_one, "AdamW's moments": moments,
             "reference model": weights_of_one * (setup.reference == "a model")}  # fmt: skip
    parts["logits, activations, gradients"] = step.allocated / 2**30 - sum(parts.values())
    left = 0
    for (part, size), color in zip(parts.items(), ("#4477aa", "#ddaa33", "#cc6677", "0.75"),
                                   strict=True):  # fmt: skip
        axes.barh(row, size, left=left, color=color, label=None if row else part)
        left += size
axes.set_yticks(range(len(STEPS)), list(STEPS))
axes.set(xlabel="GiB allocated at the peak", ylim=(6.6, -0.6))
axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.2))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The table shows four things:
#
# 1. Nearly half of the second row is **logits**, their gradients and activations. Chunks save
#    20 GiB.
# 2. Leaving out the log-softmax needs *more* memory, as you measured.
# 3. **Turning adapters off** saves the second model. The step then needs about a quarter of the
#    first row's memory.
# 4. If all weights are trained, gradients and AdamW's moments need 45 GiB. A stored reference saves
#    the second model there.

# %% [markdown]
# ### GRPO: three phases
#
# **GRPO** (Shao et al. 2024) samples a group of answers per prompt and compares their rewards. A
# step has three phases on the same GPU:
#
# 1. *Roll out*: generate the answers, with weights and a KV cache.
# 2. *Score*: compute log p_ref without gradients.
# 3. *Train*: forward and backward on the answers.
#
# By formula, for 8 prompts of 512 tokens with 8 answers of 1,024 tokens each:

# %%
ANSWERS, PROMPT, ANSWER = 8 * 8, 512, 1024
print("64 answers                        7B (32 kv heads)   8B (8 kv heads)")
for name, count in {
    "weights, bfloat16": lambda c: 2 * c.parameters,
    "roll out: KV cache": lambda c: cache_of(c, PROMPT + ANSWER, ANSWERS),
    "  8 answers at a time": lambda c: cache_of(c, PROMPT + ANSWER, 8),
    "score: all logits, float32": lambda c: 4 * ANSWERS * (PROMPT + ANSWER) * c.vocab_size,
    "  only of the answers": lambda c: 4 * ANSWERS * ANSWER * c.vocab_size,
    "  log-probabilities": lambda c: 4 * ANSWERS * ANSWER,
}.items():
    print(f"{name:30}{format_bytes(count(seven)):>18}{format_bytes(count(eight)):>18}")

# %% [markdown]
# The phases run one after the other. If each frees its tensors, the peak is the largest phase, not
# their sum. You can roll out and score a few answers at a time, because you keep only their tokens
# and one log-probability per token. If the loss has no KL penalty against the reference, GRPO needs
# no reference model.

# %% [markdown]
# A separate inference engine (vLLM) *reserves* its cache at start-up, as a share of the GPU's
# memory. It keeps this memory while you train, unless you use its sleep mode.

# %% [markdown]
# ## What `nvidia-smi` also shows
#
# Day 2 compared `nvidia-smi` with torch's *allocated* memory. `nvidia-smi` also counts two kinds of
# memory that *allocated* leaves out, for CUDA graphs and for NCCL.
#
# A captured **CUDA graph** contains the addresses of its tensors, so torch's allocator gives it a
# *private pool*. Other tensors never use the pool until the graph is deleted. The pool counts as
# reserved; the temporaries of a finished capture don't count as allocated. Graphs can share a pool
# (`pool=`) if they run in the order of their capture.

# %% [markdown]
# **NCCL** splits each collective over several *channels*. For each GPU it receives from,
# a channel has three buffers outside torch's allocator: 4 MiB (set by `NCCL_BUFFSIZE`), 4.7 MiB
# and 0.5 MiB. NCCL rounds their sum up to a multiple of 2 MiB (here 10 MiB). For each GPU
# it sends to, a channel needs 2 MiB more. In a ring (all-reduce), a GPU receives from one neighbor
# and sends to another. In all-to-all, it does both with every other GPU.

# %%
print(f"one channel, receiving and sending: {format_bytes(connection_bytes())}")
for channels in (2, 16, 32):
    rings = f"rings {format_bytes(ring_bytes(channels)):>11}"
    pairs = f"all-to-all, 8 GPUs {format_bytes(all_to_all_bytes(channels, 8)):>11}"
    print(f"  {channels:2} channels: {rings}, {pairs}")
smaller = format_bytes(connection_bytes(2**20))
print(f"one channel with NCCL_BUFFSIZE of 1 MiB instead of 4 MiB: {smaller}")

# %% [markdown]
# NCCL chooses the number of channels, and each process group has its own buffers. Users report 544
# to 688 MiB for the first all-reduce of a group on A100s, and 3.05 GiB for the first all-to-all on
# 8 H100s, more than the buffers above (NVIDIA/nccl issues 964 and 1685). So with several GPUs:
#
# - leave memory free (`memlab plan --gpus` reports how much)
# - reuse process groups
# - try a lower `NCCL_MAX_NCHANNELS` (all-to-all: `NCCL_MAX_P2P_NCHANNELS`) before you reduce the
#   batch

# %% [markdown]
# ## Explain the gap
#
# - Padding: all documents are padded to the longest, which is far above the mean.
# - Cache: 2 · 32 layers · 4,096 elements · 2 bytes are half a MiB *per token*.
# - DPO step: it needs a second model, and several tensors of float32 logits for 16,384 tokens.

# %% [markdown]
# ## On your GPU
#
# If you have a GPU, this cell runs the step with chunks and adapters off, with four of the 32
# blocks and one pair of 1,024-token sequences, and compares its memory with the prediction.

# %% tags=["nbval-ignore-output"] reason="depends on the reader's GPU"
if torch.cuda.is_available():
    four, best = replace(eight, layers=4), Setup(token_log_probs, "adapters off", True)
    step, *_ = dpo_step(four, best, 1, 1024)
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    print(f"allocated {format_bytes(torch.cuda.max_memory_allocated())}; predicted ", end="")
    trace = memlab.predict(partial(dpo_step, four, best, 1, 1024))
    print(format_bytes(trace.allocated_bytes))
else:
    print(stored_on_a_gpu("day 21"))

# %% [markdown]
# ## Claims on trial
#
# The guides of the other days don't mention these topics. These claims are common:

# %%
one, two, chunked, off = (STEPS[name][1].allocated for name in (
    "LoRA, two models", "+ no log-softmax", "+ in chunks", "+ adapters off"))  # fmt: skip
CLAIMS = {
    "packing removes the memory of padding":
        f"activations are {packed_bytes / padded_bytes:.2f}× the padded batch's, which has "
        f"{1 - padding:.0%} useful tokens",
    "for packed rows, a mask is as good as attention within documents":
        f"the values are the same, but a block needs {format_bytes(per_block['a mask'])}, not "
        f"{format_bytes(per_block['within documents'])}",
    "a sliding window bounds the cache":
        f"8B with windows in 5 of 6 layers: {format_bytes(cache_of(eight, 32_768, 8))} become "
        f"{format_bytes(cache_of(eight, 32_768, 8, windows=sliding))}, but only after the prompt",
    "log-probabilities without the log-softmax save memory":
        f"only without gradients; in training the step needs {two / one:.2f}× the memory that it "
        f"needs with the log-softmax, in chunks {chunked / one:.2f}×",
    "DPO needs two models in memory":
        f"with LoRA only one, {format_bytes(chunked - off)} less; without LoRA, store log p_ref",
}  # fmt: skip
for claim, found in CLAIMS.items():
    print(f"{claim}\n    {found}")

# %% [markdown]
# ## What you can do now
#
# | item | bytes |
# | --- | --- |
# | padding | activations · (1 − useful tokens / (documents · longest)) |
# | a mask for packed rows | 2 · T² in each block, on CUDA |
# | KV cache | 2 · layers · kv heads · head dimension · tokens · batch · bytes per element |
# | reference model | 2 per weight; 0 with adapters off or stored |
# | log-probabilities | a few chunks of logits; 4 per token afterwards |
# | NCCL (default) | at least 12 MiB per channel (ring), or per channel and other GPU (all-to-all) |
#
# If such a step runs out of memory, check three things:
#
# 1. Which tokens of this step have a loss?
# 2. Which object keeps keys and values, and for how long?
# 3. Are all logits of any model in memory at once?

# %% [markdown]
# ## The running bill
#
# The bill's documents are as long as its rows. Its step has no padding, no generated tokens and no
# reference model, so the bill does not change.

# %%
running_bill(21)

# %% [markdown]
# ## Sources
#
# - Krell et al. 2021: [Efficient Sequence Packing without
#   Cross-contamination](https://arxiv.org/abs/2107.02027)
# - Rafailov et al. 2023: [Direct Preference Optimization: Your Language Model is Secretly a Reward
#   Model](https://arxiv.org/abs/2305.18290)
# - Shao et al. 2024: [DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
#   Models](https://arxiv.org/abs/2402.03300)
# - Chen et al. 2016: [Training Deep Nets with Sublinear Memory
#   Cost](https://arxiv.org/abs/1604.06174)
# - NVIDIA: [NCCL, environment
#   variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)
