"""The trace from shallow models equals the trace of the whole model."""

from dataclasses import replace
from functools import partial

import pytest

from memlab.checkpointing import ATTENTION, selective
from memlab.course import deep_models
from memlab.course.deep_models import dry_trace_of_blocks
from memlab.lora import add_lora
from memlab.model import PRESETS
from memlab.train import Plugs, Setting, combined, dry_trace

TINY = replace(PRESETS["tiny"], layers=8)
DEEP = Setting(TINY, batch=2, seq_len=16)


def with_lora(model):
    add_lora(model, rank=2, where=lambda name: name.endswith(("query", "value")))


def with_selective_blocks(model):
    for block in model.blocks:
        block.forward = partial(selective(ATTENTION), block.forward)


def frozen_but_the_third_block(model):
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)


FUSED = combined("fused-adamw")
HOW = {
    "fused AdamW": FUSED,
    "accumulation": combined("accumulation+checkpointing"),
    "LoRA": replace(FUSED, change_model=with_lora),
    "selective checkpointing": Plugs(change_model=with_selective_blocks),
}


@pytest.fixture
def layers(monkeypatch):
    """Record the depth of each model that runs."""
    found = []

    def recorded(setting, technique):
        found.append(setting.config.layers)
        return dry_trace(setting, technique)

    monkeypatch.setattr(deep_models, "dry_trace", recorded)
    return found


def bytes_of(trace):
    """What a trace says about bytes, in order: sizes, categories, modules, phases."""
    return [(e.bytes, e.category, e.operator, e.module, e.phase) for e in trace.events]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_three_and_four_blocks_give_the_trace_of_eight(how, layers):
    made, whole = dry_trace_of_blocks(DEEP, how), dry_trace(DEEP, how)
    assert layers == [3, 4]
    assert bytes_of(made) == bytes_of(whole)
    assert (made.at_peak, made.at_end) == (whole.at_peak, whole.at_end)


def test_blocks_that_differ_all_run(layers):
    how = Plugs(change_model=frozen_but_the_third_block)
    made, whole = dry_trace_of_blocks(DEEP, how), dry_trace(DEEP, how)
    assert layers == [3, 4, 8]
    assert (made.at_peak, made.at_end) == (whole.at_peak, whole.at_end)


def test_a_shallow_model_runs_as_it_is(layers):
    dry_trace_of_blocks(replace(DEEP, model=replace(TINY, layers=4)), FUSED)
    assert layers == [4]
