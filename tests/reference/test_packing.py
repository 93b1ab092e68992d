"""Packing: rows by brute force, and values against separate documents."""

from itertools import combinations

import torch
import torch.nn.functional as F
from close import assert_close, is_close
from hypothesis import given
from hypothesis import strategies as st

from memlab.model import GPT, PRESETS, scaled_dot_product_attention
from memlab.reference.packing import attend_within, join, pack

CONFIG = PRESETS["tiny"]
LENGTHS = [7, 20, 1, 12]


def documents():
    random = torch.Generator().manual_seed(0)
    return [torch.randint(CONFIG.vocab_size, (n,), generator=random) for n in LENGTHS]


def within(boundaries):
    """Attention for a model, which repeats keys and values of grouped queries itself."""

    def attend(q, k, v, *, causal):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return attend_within(q, k, v, boundaries)

    return attend


def loss_and_gradients(attention, rows):
    """The sum over rows of (tokens, targets)."""
    torch.manual_seed(0)
    model = GPT(CONFIG, attention=attention, loss=_summed_loss)
    total = sum(model(tokens[None], targets[None]) for tokens, targets in rows)
    total.backward()
    return [total.detach(), *(w.grad for w in model.parameters())]


def _summed_loss(hidden, weight, targets):
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(12, 30))
def test_every_document_is_in_one_row_with_room_for_it(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in row) <= capacity for row in rows)
    # A row is opened only for a document that fits into none before.
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert all(one + other > capacity for one, other in combinations(filled, 2))


def test_a_gap_is_filled_by_the_longest_document_that_fits():
    assert pack([5, 7, 3, 2], capacity=10) == [[1, 2], [0, 3]]


def test_the_last_token_of_a_document_has_no_target():
    row = join([torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 4])])
    tokens, targets, positions, boundaries = row
    assert tokens.tolist() == [5, 6, 7, 8, 9, 4]
    assert targets.tolist() == [6, 7, -100, -100, 4, -100]
    assert positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert boundaries.tolist() == [0, 3, 4, 6]


def test_a_row_has_the_loss_and_the_gradients_of_its_documents_apart():
    tokens, targets, _, boundaries = join(documents())
    together = loss_and_gradients(within(boundaries), [(tokens, targets)])
    each = [join([document])[:2] for document in documents()]
    apart = loss_and_gradients(scaled_dot_product_attention, each)
    assert_close(together, apart)
    mixed = loss_and_gradients(scaled_dot_product_attention, [(tokens, targets)])
    assert not is_close(mixed[0], apart[0])
