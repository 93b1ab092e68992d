"""A deep model's bytes from shallow runs, compared with a full run."""

from dataclasses import replace

import pytest
import torch
from quick import quick, slow

from memlab.model import PRESETS
from memlab.planner import measuring
from memlab.planner.measuring import measured, shallow_blocks, whole_trace
from memlab.train import (
    Setting,
    combined,
    dry_trace,
    predicted_rank_trace,
    predicted_trace,
    rank_step,
)

GIB = 2**30


def setting(blocks: int, device: str = "cpu", **changes: object) -> Setting:
    config = replace(PRESETS["tiny"], layers=blocks)
    return Setting(config, **{"batch": 1, "seq_len": 8, "device": device, **changes})


@pytest.fixture
def runs(monkeypatch):
    """Record the settings that run, in order."""
    found = []
    for name in ("dry_trace", "predicted_trace"):
        real = getattr(measuring.train, name)

        def noted(setting, technique, real=real):
            found.append(setting)
            return real(setting, technique)

        monkeypatch.setattr(measuring.train, name, noted)
    measuring.clear_cache()
    yield found
    measuring.clear_cache()


def test_a_deep_model_is_measured_by_runs_of_three_and_four_blocks(runs):
    found = measured(setting(9), "plain")
    assert [run.config.layers for run in runs] == [3, 4]
    assert found.extrapolated
    whole = dry_trace(setting(9), combined("plain"))
    assert found.allocated_bytes == whole.peak_bytes
    assert found.reserved_bytes is None
    assert (found.at_peak, found.peak_phase) == (whole.at_peak, whole.peak_phase)


def test_a_gpu_is_measured_with_its_reserved_bytes():
    card = setting(6, "cuda:hopper")
    found, whole = measured(card, "plain"), predicted_trace(card, combined("plain"))
    assert found.extrapolated
    assert found.reserved_bytes == whole.reserved_bytes
    assert found.allocated_bytes == whole.allocated_bytes
    assert found.at_peak == whole.at_peak
    assert found.at_peak["workspace"] > 2 * 2**23  # larger than on most cards


@pytest.mark.slow
def test_a_step_that_cannot_be_extrapolated_runs_in_full(runs):
    found = measured(setting(9), "sqrt-checkpointing")
    assert [run.config.layers for run in runs] == [3, 4, 9]
    assert not found.extrapolated
    whole = dry_trace(setting(9), combined("sqrt-checkpointing"))
    assert (found.allocated_bytes, found.at_peak) == (whole.peak_bytes, whole.at_peak)


@pytest.mark.parametrize("name", ["lion", slow("lora"), slow("sqrt-checkpointing")])
def test_the_trace_of_a_deep_model_is_the_one_of_all_blocks(name):
    technique, deep = combined(name), setting(9)
    whole, found = dry_trace(deep, technique), whole_trace(deep, name, technique)
    assert (found.at_peak, found.at_end) == (whole.at_peak, whole.at_end)
    sizes = [event[:1] + event[2:] for event in found.events]  # storages have other numbers
    assert sizes == [event[:1] + event[2:] for event in whole.events]


def test_a_shallow_model_runs_in_full(runs):
    assert not measured(setting(4), "plain").extrapolated
    assert [run.config.layers for run in runs] == [4]


def test_shallow_runs_are_reused_for_every_depth(runs):
    first, second = measured(setting(9), "plain"), measured(setting(12), "plain")
    assert [run.config.layers for run in runs] == [3, 4]
    block = (PRESETS["tiny"].parameters - replace(PRESETS["tiny"], layers=3).parameters) * 4
    assert second.allocated_bytes - first.allocated_bytes >= 3 * 4 * block  # with AdamW's state


def test_results_are_cached(runs):
    assert measured(setting(9), "plain") is measured(setting(9), "plain")


@pytest.mark.slow
def test_another_setting_is_measured_again():
    short, long = measured(setting(6), "plain"), measured(setting(6, batch=8, seq_len=64), "plain")
    assert short.allocated_bytes < long.allocated_bytes


@pytest.mark.parametrize(
    ("blocks", "unit", "wanted"),
    [(32, 1, 3), (5, 1, 3), (4, 1, None), (1, 1, None), (32, 4, 12), (33, 4, 13), (16, 4, None)],
)
def test_units_of_blocks_stay_whole(blocks, unit, wanted):
    fewest = shallow_blocks(blocks, unit)
    assert fewest == wanted
    assert wanted is None or (blocks - fewest) % unit == 0


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("lora+checkpointing", marks=pytest.mark.slow),
        pytest.param("lora+bfloat16", marks=pytest.mark.slow),
        pytest.param("lora+selective-checkpointing+bfloat16", marks=pytest.mark.slow),
    ],
)
def test_frozen_blocks_are_extrapolated_although_the_first_differs(names):
    wanted = setting(9, "cuda", dtype=torch.bfloat16)
    found, whole = measured(wanted, names), predicted_trace(wanted, combined(names))
    assert found.extrapolated
    assert found.allocated_bytes == whole.allocated_bytes
    assert found.reserved_bytes == whole.reserved_bytes
    assert found.at_peak == whole.at_peak


def test_a_unit_of_no_blocks_is_an_error():
    with pytest.raises(ValueError, match="got a unit of 0 blocks"):
        measured(setting(9), "plain", unit=0)


@pytest.mark.slow
def test_llama_2_7b_matches_a_full_run():
    names = "checkpointing+lion8bit+step-in-backward+chunked-loss"
    wanted = Setting("llama-2-7b", 1, 2048, torch.bfloat16, "cuda")
    found, whole = measured(wanted, names), predicted_trace(wanted, combined(names))
    assert found.extrapolated
    assert found.allocated_bytes == whole.allocated_bytes
    assert found.reserved_bytes == whole.reserved_bytes
    assert found.at_peak == whole.at_peak
    assert (round(found.allocated_bytes / GIB, 2), round(found.reserved_bytes / GIB, 2)) == (
        20.28,
        20.54,
    )


@pytest.mark.parametrize("stage", quick([3], [1, 3]))
def test_each_of_several_ranks_matches_a_full_run(stage):
    wanted = setting(6, "cuda", dtype=torch.bfloat16)
    found = measured(wanted, "checkpointing", ranks=4, stage=stage)
    whole = predicted_rank_trace(wanted, combined("checkpointing"), 4, stage)
    assert found.allocated_bytes == whole.allocated_bytes
    assert found.reserved_bytes == whole.reserved_bytes
    assert found.extrapolated == (stage == 3)
    alone = measured(wanted, "checkpointing")
    assert found.allocated_bytes < alone.allocated_bytes


def test_a_rank_on_the_cpu_matches_its_dry_run():
    wanted = setting(6)
    step = rank_step(wanted, combined("plain"), 4, 2)
    assert measured(wanted, "plain", ranks=4, stage=2).allocated_bytes == step.traces[0].peak_bytes
