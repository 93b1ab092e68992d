"""The ledger's formulas equal the meter to the byte, also for unusual shapes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick
from torch import nn

import memlab
from memlab.course import ledger
from memlab.model import GPT, PRESETS, GPTConfig
from memlab.trace import Trace
from memlab.train import Setting, combined, dry_trace

TINY = PRESETS["tiny"]


@st.composite
def configs(draw) -> GPTConfig:
    """Draw small, odd shapes of every family and of none."""
    kv_heads, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * queries
    own = draw(st.sampled_from([None, 2, 6]))
    return GPTConfig(
        vocab_size=draw(st.integers(3, 70)),
        hidden_size=draw(st.integers(1, 30)) if own else heads * 2 * draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=draw(st.integers(1, 50)),
        seq_len=draw(st.integers(12, 20)),
        tied=draw(st.booleans()),
        custom_head_dim=own,
        attention_biases=tuple(draw(st.sets(st.sampled_from(["query", "key", "value", "output"])))),
        head_norms=draw(st.booleans()),
        post_norms=draw(st.booleans()),
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        scaled_embeddings=draw(st.booleans()),
    )


def second_step(config: GPTConfig, batch: int, seq_len: int) -> Trace:
    """Run steps on fake tensors. Other tests show that their bytes equal the real ones."""
    with memlab.dry_run():
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(2, batch, seq_len, dtype=torch.long)
        tokens, targets = tokens[0].clone(), tokens[1].clone()

        def step() -> None:
            optimizer.zero_grad()
            model(tokens, targets).backward()
            optimizer.step()

        step()
        return memlab.measure(step, model=model, optimizer=optimizer)


def when_backward_begins(trace: Trace) -> dict[str, int]:
    """Return the live bytes when the logits' gradient exists."""
    made = (i for i, e in enumerate(trace.events, 1) if "_log_softmax_backward" in e.operator)
    position = next(made)
    return Trace(trace.events[:position]).at_end


@pytest.mark.slow
@settings(max_examples=8)
@given(configs(), st.integers(1, 3), st.integers(1, 12))
def test_the_ledger_equals_the_meter_at_the_start_of_backward(config, batch, seq_len):
    measured = when_backward_begins(second_step(config, batch, seq_len))
    assert ledger.start_of_backward_terms(config, batch, seq_len) == measured


@pytest.mark.few(1)
@pytest.mark.parametrize(("batch", "seq_len"), [(1, 64), (4, 64), (8, 33)])
def test_with_many_tokens_the_peak_is_at_the_start_of_backward(batch, seq_len):
    trace = second_step(TINY, batch, seq_len)
    assert ledger.start_of_backward_bytes(TINY, batch, seq_len) == trace.peak_bytes
    assert trace.at_peak.get("gradients", 0) == 0


@pytest.mark.parametrize(
    ("model", "batch", "seq_len"),
    quick([("25m", 4, 256)], [("25m", 4, 256), ("124m", 8, 640), ("llama-2-7b", 1, 4096)]),
)
def test_the_lessons_peaks_equal_the_meter(model, batch, seq_len):
    peak = dry_trace(Setting(model, batch, seq_len), combined("plain")).peak_bytes
    assert ledger.start_of_backward_bytes(PRESETS[model], batch, seq_len) == peak


def test_with_few_tokens_the_peak_is_later():
    trace = second_step(TINY, 1, 4)
    assert ledger.start_of_backward_bytes(TINY, 1, 4) < trace.peak_bytes


@given(st.integers(0, 2000), st.integers(1, 50), st.integers(0, 300))
def test_the_largest_batch_equals_a_linear_search(fixed, slope, budget):
    def bytes_at(batch: int) -> int:
        return max(100, fixed + slope * batch)  # flat at first, as the peak of few tokens

    counted = next(batch for batch in range(302) if bytes_at(batch + 1) > budget)
    assert ledger.largest_batch(bytes_at, budget) == counted


def test_the_largest_batch_needs_few_measurements():
    asked = []
    found = ledger.largest_batch(lambda batch: asked.append(batch) or batch, 1_000_000)
    assert found == 1_000_000
    assert len(asked) <= 2 * 20 + 1  # 20 bits


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()


def test_before_the_first_step_only_weights_exist():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    wanted = {"parameters": 36, "gradients": 0, "optimizer_state": 0}
    assert ledger.state_bytes(model, optimizer) == wanted


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (torch.optim.AdamW, 2 * 36 + 2 * 4),  # a step counter for each of two tensors
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 36),
        (torch.optim.LBFGS, None),  # nested state: compared with the meter
    ],
)
def test_the_state_after_a_step_equals_the_meter(make, state):
    model = nn.Linear(2, 3)
    optimizer = make(model.parameters())
    if state is None:
        x = torch.randn(8, 2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    else:
        trained(model, optimizer)
    found = ledger.state_bytes(model, optimizer)
    metered = memlab.measure(lambda: torch.ones(1), model=model, optimizer=optimizer).at_end
    assert found == {name: metered.get(name, 0) for name in found}
    assert state in (None, found["optimizer_state"])


def test_a_tied_weight_is_counted_once():
    model = GPT(replace(TINY, tied=True))
    assert ledger.state_bytes(model)["parameters"] == 4 * TINY.parameters


def test_bfloat16_weights_count_two_bytes():
    model = nn.Linear(2, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    trained(model, optimizer)
    wanted = {"parameters": 18, "gradients": 18, "optimizer_state": 36 + 8}
    assert ledger.state_bytes(model, optimizer) == wanted
