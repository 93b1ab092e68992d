"""Day 21: what its checks tell a learner, and what the lesson claims."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from lesson_parts import lesson_part

import memlab
from memlab.course.checks.day21 import cache_bytes
from memlab.course.solutions import given
from memlab.lora import add_lora
from memlab.losses import token_log_probs
from memlab.model import GPT, PRESETS
from memlab.planner.repetition import extrapolate

Setup, dpo_step, dpo_loss, by_logsumexp, without_adapters, KVCache, generate = given(
    21, "Setup", "dpo_step", "dpo_loss", "by_logsumexp", "without_adapters", "KVCache", "generate"
)
EIGHT = PRESETS["llama-3-8b"]
SHAPE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


class Predicted(NamedTuple):
    """As in the lesson."""

    allocated: int
    reserved: int


# ------------------------------------------------------------------ answers


def layer_by_layer(windows, kv_heads, head_dim, tokens, batch, element_bytes):
    total = 0
    for window in windows:
        kept = tokens if not window or window > tokens else window - 1
        total += batch * kv_heads * kept * (head_dim + head_dim) * element_bytes
    return total


def test_a_window_as_long_as_the_text_keeps_one_token_less():
    assert layer_by_layer([4], 1, 1, 4, 1, 1) == cache_bytes([4], 1, 1, 4, 1, 1) == 2 * 3


# ------------------------------------------------------------------ figures of the lesson


STEPS = lesson_part(
    21,
    "STEPS",
    **{"Setup": Setup, "Predicted": Predicted, "replace": replace, "LORA": Setup(lora=True)},
    **{"by_logsumexp": by_logsumexp, "token_log_probs": token_log_probs},
)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_lessons_table_is_predicted(name):
    setup, stated = STEPS[name]
    fewer, more = (
        memlab.predict(partial(dpo_step, replace(EIGHT, layers=n), setup, 4, 2048)) for n in (4, 5)
    )
    trace = extrapolate(fewer, more, 5, EIGHT.layers)
    assert (trace.allocated_bytes, trace.reserved_bytes) == stated


def test_the_table_says_what_the_text_says():
    allocated = {name: step.allocated for name, (_, step) in STEPS.items()}
    weights = 2 * EIGHT.parameters
    two_models = allocated["LoRA, two models"]
    assert 0.45 < (two_models - 2 * weights) / two_models < 0.5
    assert f"{(two_models - allocated['+ in chunks']) / 2**30:.0f}" == "20"
    assert allocated["+ no log-softmax"] > two_models
    assert abs(allocated["+ in chunks"] - allocated["+ adapters off"] - weights) < 2**22
    assert f"{allocated['+ adapters off'] / allocated['all weights, two models']:.2f}" == "0.26"
    saved = allocated["all weights, in chunks"] - allocated["+ stored reference"]
    assert abs(saved - weights) < 2**22


def test_every_setup_has_the_same_gradients():
    """On a CPU, with one seed: a second model, adapters off, and stored log-probabilities."""
    config = replace(PRESETS["tiny"], layers=1)
    tokens = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))

    def policy(log_probs):
        torch.manual_seed(0)
        model = GPT(config, loss=log_probs)
        before = GPT(config, loss=log_probs)
        before.load_state_dict(model.state_dict())
        add_lora(model, 2)
        for name, weight in model.named_parameters():
            if name.endswith("up"):
                torch.nn.init.normal_(weight, std=0.1)
        return model, before

    found = []
    for log_probs in (Setup().log_probs, by_logsumexp, token_log_probs):
        model, before = policy(log_probs)
        with torch.no_grad():
            references = before(tokens, tokens).sum(1), without_adapters(model, tokens).sum(1)
        assert_close(*references)
        assert model(tokens, tokens).sum(1).sub(references[0]).abs().min() > 1e-3
        dpo_loss(model(tokens, tokens).sum(1), references[1]).backward()
        found.append([w.grad for w in model.parameters() if w.requires_grad])
    for other in found[1:]:
        assert_close(other, found[0])


def test_dpos_loss_is_the_papers():
    policy, reference = (
        torch.tensor([-3.0, -5.0, -4.0, -4.5]),
        torch.tensor([-3.5, -5.0, -4.0, -4.0]),
    )
    margins = torch.tensor([(0.5) - (0.0), (0.0) - (-0.5)])
    assert_close(dpo_loss(policy, reference), -F.logsigmoid(0.1 * margins).mean())


@pytest.mark.parametrize("fraction", ["cache", "no cache"])
def test_the_lessons_cache_has_the_bytes_of_the_formula(fraction):
    config = replace(PRESETS["tiny"], heads=4, kv_heads=2)
    torch.manual_seed(0)
    model, tokens = GPT(config), torch.arange(24).view(2, 12)
    cache = KVCache(model) if fraction == "cache" else None
    written = generate(model, tokens, 20, cache)
    assert_close(written, generate(model, tokens, 20))
    if cache:
        wanted = cache_bytes([None] * config.layers, 2, config.head_dim, 31, 2, 4)
        assert cache.bytes == wanted


def left_after(trace):
    return sum(event.bytes for event in trace.events if event.phase != "before")


def prompt_and(model, tokens, more):
    """The bytes that a cache leaves after a prompt and `more` tokens."""
    kept = []

    def run():
        with torch.no_grad():
            out = model(tokens)
            for _ in range(more):
                out = model(tokens[:, :1], past_key_values=out.past_key_values)
        kept.append(out.past_key_values)

    return left_after(memlab.measure(run, model=model)), kept[0]


def test_transformers_caches_have_the_bytes_of_the_formula():
    transformers = pytest.importorskip("transformers")
    tokens = torch.zeros(3, 40, dtype=torch.long)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    _, cache = prompt_and(llama, tokens, 2)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == cache_bytes([None] * 2, 2, 16, 42, 3, 4)
    config = transformers.MistralConfig(**SHAPE, sliding_window=16)
    mistral = transformers.MistralForCausalLM(config).eval()
    _, cache = prompt_and(mistral, tokens, 2)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == cache_bytes([16] * 2, 2, 16, 42, 3, 4)


def test_after_a_prompt_a_window_keeps_all_of_it_alive():
    """The kept keys are a slice; so are those after the next token, of a tensor of 16."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(**SHAPE, sliding_window=16)
    mistral = transformers.MistralForCausalLM(config).eval()
    tokens = torch.zeros(3, 40, dtype=torch.long)
    counters = 1024  # of the cache: its lengths
    for more, kept in ((0, 40), (1, 16)):
        left, _ = prompt_and(mistral, tokens, more)
        whole = cache_bytes([None] * 2, 2, 16, kept, 3, 4)
        assert whole <= left <= whole + counters


def test_evaluation_with_a_cache_peaks_higher_by_the_cache():
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    tokens = torch.zeros(3, 40, dtype=torch.long)
    found = {}
    for use_cache in (True, False):

        def evaluate(use_cache=use_cache):
            with torch.no_grad():
                llama(tokens, labels=tokens, use_cache=use_cache)

        found[use_cache] = memlab.measure(evaluate, model=llama).peak_bytes
    assert found[True] - found[False] == cache_bytes([None] * 2, 2, 16, 40, 3, 4)
