"""Packing: rows by brute force and by the reference, values against separate documents, bytes."""

from functools import partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from hypothesis import given
from hypothesis import strategies as st

import memlab
from memlab.model import GPT, PRESETS, scaled_dot_product_attention
from memlab.packing import DocumentAttention, join, pack
from memlab.reference import packing as reference_packing

CONFIG = PRESETS["tiny"]
LENGTHS = [7, 20, 1, 12]


def documents(lengths=LENGTHS):
    random = torch.Generator().manual_seed(0)
    return [torch.randint(CONFIG.vocab_size, (n,), generator=random) for n in lengths]


def model_for(attention=scaled_dot_product_attention, **options):
    torch.manual_seed(0)
    return GPT(CONFIG, attention=attention, **options)


def summed_loss(hidden, weight, targets):
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum")


def loss_and_gradients(model, batches):
    """The sum over rows of (tokens, targets)."""
    total = sum(model(*batch) for batch in batches)
    total.backward()
    return [total.detach(), *(w.grad for w in model.parameters())]


def apart():
    """Loss and gradients of each document on its own."""
    alone = [(join([d]).tokens, join([d]).targets) for d in documents()]
    return loss_and_gradients(model_for(loss=summed_loss), alone)


# ------------------------------------------------------------------ rows


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(12, 30))
def test_rows_are_those_of_the_reference(lengths, capacity):
    assert pack(lengths, capacity) == reference_packing.pack(lengths, capacity)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(12, 30))
def test_every_document_is_in_one_row_with_room_for_it(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in row) <= capacity for row in rows)
    # A row is opened only for a document that fits into none before.
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert all(one + other > capacity for one, other in combinations(filled, 2))


def test_a_gap_is_filled_by_the_longest_document_that_fits():
    assert pack([3, 9, 5, 4, 1], 10) == [[1, 4], [2, 3], [0]]


def test_no_documents_need_no_row():
    assert pack([], 8) == reference_packing.pack([], 8) == []


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4, 9], "document 1 has 9 tokens, and a row has room for 8; cut the document"),
        ([0], "document 0 has no tokens; leave it out"),
    ],
)
def test_a_document_that_fits_nowhere_is_an_error(lengths, message):
    with pytest.raises(ValueError, match=message):
        pack(lengths, 8)


# ------------------------------------------------------------------ joined documents


def test_the_last_token_of_a_document_has_no_target():
    row = join([torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 4])])
    assert row.tokens.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert row.targets.tolist() == [[6, 7, -100, -100, 4, -100]]
    assert row.positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert row.boundaries.tolist() == [0, 3, 4, 6]
    assert row.boundaries.dtype == torch.int32


def test_joined_documents_are_those_of_the_reference():
    row = join(documents())
    mine = (row.tokens[0], row.targets[0], row.positions[0], row.boundaries)
    theirs = reference_packing.join(documents())
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ([], "got no documents"),
        ([torch.zeros(2, 3, dtype=torch.long)], r"got document 0 of shape \(2, 3\)"),
        ([torch.zeros(0, dtype=torch.long)], r"got document 0 of shape \(0,\)"),
        ([torch.zeros(3)], "and torch.float32; give a 1-D tensor of tokens"),
        ([torch.zeros(3, dtype=torch.uint8)], "−100 has to fit"),
    ],
)
def test_other_tensors_are_an_error(given_, message):
    with pytest.raises(ValueError, match=message):
        join(given_)


# ------------------------------------------------------------------ attention


def test_a_row_has_the_loss_and_the_gradients_of_its_documents_apart():
    attention, row = DocumentAttention(), join(documents())
    attention.boundaries = row.boundaries
    together = loss_and_gradients(
        model_for(attention, loss=summed_loss), [(row.tokens, row.targets)]
    )
    assert_close(together, apart())


def test_plain_causal_attention_looks_into_other_documents():
    row = join(documents())
    together = loss_and_gradients(model_for(loss=summed_loss), [(row.tokens, row.targets)])
    assert abs(together[0] - apart()[0]) > 1e-3


def test_a_mask_of_documents_gives_the_same():
    row = join(documents())
    number = torch.repeat_interleave(torch.arange(4), row.boundaries.diff())
    mask = (number[:, None] == number).tril()
    random = torch.Generator().manual_seed(1)
    q = torch.randn(1, 4, 40, 8, generator=random)
    k, v = (torch.randn(1, 2, 40, 8, generator=random) for _ in range(2))
    attention = DocumentAttention()
    attention.boundaries = row.boundaries
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert_close(attention(q, k, v, causal=True), masked)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    mine = reference_packing.attend_within(q, k, v, row.boundaries)
    assert_close(mine, masked)


@pytest.mark.parametrize("boundaries", [None, [0, 3], [1, 40], [0, 41]])
def test_boundaries_of_another_row_are_an_error(boundaries):
    attention = DocumentAttention()
    attention.boundaries = None if boundaries is None else torch.tensor(boundaries)
    q = torch.zeros(1, 2, 40, 8)
    with pytest.raises(ValueError, match="boundaries"):
        attention(q, q, q, causal=True)
    with pytest.raises(ValueError, match=r"give one row|set them"):
        attention(q.expand(2, -1, -1, -1), q, q, causal=True)


# ------------------------------------------------------------------ bytes


def activations(attention, tokens, targets):
    model = model_for(attention)
    trace = memlab.measure(lambda: model(tokens, targets).backward(), model=model)
    return trace.at_peak["activations"]


def test_a_row_without_padding_keeps_the_activations_of_its_own_tokens_alone():
    """Padded to its longest document, the batch has 4 · 20 tokens; the row has 40."""
    padded = torch.zeros(4, 20, dtype=torch.long)
    attention, row = DocumentAttention(), join(documents())
    attention.boundaries = row.boundaries
    full = torch.zeros(1, 40, dtype=torch.long)
    of_padded = activations(scaled_dot_product_attention, padded, padded)
    of_row = activations(attention, row.tokens, row.targets)
    of_one_document = activations(scaled_dot_product_attention, full, full)
    assert of_row < 0.55 * of_padded
    # Beside the activations of 40 tokens: each block's outputs, joined.
    assert of_row - of_one_document <= CONFIG.layers * 40 * 4 * CONFIG.hidden_size


def step_on_cuda(kind, layers, length=1024, document=256):
    """bfloat16, one head: a row of documents that attend within themselves by `kind`."""
    config = memlab.model.GPTConfig(256, 64, layers, 1, 1, 64, seq_len=length)
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda")
    boundaries = torch.arange(0, length + 1, document)
    by_document = DocumentAttention()
    by_document.boundaries = boundaries

    def masked(q, k, v, *, causal):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    attend = {"mask": masked, "documents": by_document, "one": scaled_dot_product_attention}[kind]
    model = GPT(config, attention=attend, dtype=torch.bfloat16).to("cuda")
    tokens = torch.zeros(1, length, dtype=torch.long, device="cuda")
    return lambda: model(tokens, tokens).backward(), model, None


def of_a_layer(kind):
    two, three = (memlab.predict(partial(step_on_cuda, kind, layers)) for layers in (2, 3))
    return three.allocated_bytes - two.allocated_bytes


RANDOM_STATE = 2 * 512  # seed and offset of dropout, kept by each call of flash attention


def test_on_cuda_a_mask_costs_two_bytes_for_each_pair_of_tokens_in_each_layer():
    one = of_a_layer("one")
    assert of_a_layer("mask") - one == 2 * 1024**2 - RANDOM_STATE
    joined = 2 * 1024 * 64  # the outputs of four calls
    assert of_a_layer("documents") - one == joined + 3 * RANDOM_STATE
