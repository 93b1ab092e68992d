"""Parsing PYTORCH_ALLOC_CONF, and its errors."""

import re
from dataclasses import replace

import pytest
import torch

import memlab
from memlab.allocator import Settings, simulate
from memlab.allocator.settings import VARIABLES, configuration
from memlab.trace import Event, Trace

MIB = 2**20


@pytest.mark.parametrize(
    ("configuration", "settings"),
    [
        ("", Settings()),
        ("max_split_size_mb:128", Settings(max_split_size_bytes=128 * MIB)),
        (" expandable_segments : True , ", Settings(expandable_segments=True)),
        (
            "max_split_size_mb:64,max_non_split_rounding_mb:32,expandable_segments:False",
            Settings(max_split_size_bytes=64 * MIB, max_non_split_rounding_bytes=32 * MIB),
        ),
        ("garbage_collection_threshold:0.8", Settings(garbage_collection_threshold=0.8)),
        ("large_segment_size_mb:12", Settings(large_segment_bytes=12 * MIB)),
        ("per_process_memory_fraction:0.5", Settings(memory_fraction=0.5)),
        ("roundup_power2_divisions:4", Settings(roundup_power2_divisions=4)),
        ("backend:native,pinned_use_background_threads:True", Settings()),
        ("expandable_segments:True,expandable_segments:False", Settings()),
    ],
)
def test_a_configuration_is_read_as_torch_reads_it(configuration, settings):
    assert Settings.parse(configuration) == settings


# torch 2.13's result for 1 MiB, 2 MiB, … 32 GiB with the same configuration.
@pytest.mark.parametrize(
    ("words", "divisions"),
    [
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", [8] * 7 + [2, 4, 2, 4] + [1] * 5),
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),
        ("[256:8]", [8] * 9 + [0] * 7),
        ("[>:8]", [0] + [8] * 15),
        ("[4:0]", [0] * 16),
        ("[262144:2]", [2] * 16),
    ],
)
def test_divisions_by_size_are_read_as_torch_reads_them(words, divisions):
    settings = Settings.parse(f"roundup_power2_divisions:{words},max_split_size_mb:20")
    assert settings.roundup_power2_divisions == tuple(divisions)
    assert settings.max_split_size_bytes == 20 * MIB


@pytest.mark.parametrize(
    ("configuration", "complaint"),
    [
        ("max_split_size_mb:19", "max_split_size_bytes is 19.00 MiB; it must be at least large_se"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "at least large_segment_bytes, 40.00 M"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_bytes is 19.00 MiB"),
        ("max_split_size_mb:many", "got max_split_size_mb:many; give an integer number of MiB"),
        ("max_split_size_mb", "options look like name:value"),
        ("max_split_size_mb:", "options look like name:value"),
        ("large_segment_size_mb:10", "it must be more than 10 MiB"),
        ("expandable_segments:true", "got expandable_segments:true; give True or False"),
        ("garbage_collection_threshold:0", "garbage_collection_threshold is 0.0; give a value in"),
        (
            "garbage_collection_threshold:1.0",
            "garbage_collection_threshold is 1.0; give a value in",
        ),
        ("per_process_memory_fraction:1.5", "memory_fraction is 1.5"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions is 3; give a power of two"),
        ("roundup_power2_divisions:0", "give a power of two"),
        ("roundup_power2_divisions:[3:8]", "give a power of two, or powers by size"),
        ("roundup_power2_divisions:[256:3]", "give a power of two, or 16 of them"),
        ("backend:cudaMallocAsync", "got backend:cudaMallocAsync, which is not simulated"),
        ("max_split_size:20", "got max_split_size:20, which is not simulated; use one of expand"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_the_remedy(configuration, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Settings.parse(configuration)


def test_other_fields_are_passed_as_arguments():
    settings = Settings.parse("garbage_collection_threshold:0.8", capacity_bytes=2**30)
    assert simulate((), settings).settings.capacity_bytes == 2**30


@pytest.mark.parametrize("share", [{"garbage_collection_threshold": 0.5}, {"memory_fraction": 0.5}])
def test_a_fraction_of_the_device_requires_a_capacity(share):
    with pytest.raises(ValueError, match="give capacity_bytes too"):
        simulate((), **share)


def test_settings_can_be_changed_for_one_run():
    settings = Settings(max_split_size_bytes=64 * MIB)
    run = simulate((), settings, expandable_segments=True)
    assert run.settings == Settings(max_split_size_bytes=64 * MIB, expandable_segments=True)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, ""),
        ({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}, None),
    ],
)
def test_the_environment_is_read_as_torch_reads_it(monkeypatch, variables, wanted):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert configuration() == (variables["PYTORCH_ALLOC_CONF"] if wanted is None else wanted)


def test_unknown_settings_of_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable:True")
    with pytest.raises(ValueError, match=r"^PYTORCH_ALLOC_CONF: got expandable:True, which is not"):
        configuration()


def test_a_trace_is_simulated_with_the_settings_of_its_prediction():
    sizes = ((12 * MIB, 1), (-12 * MIB, 1), (30 * MIB, 2))
    events = [Event(n, i, "activations", "", "", "forward", "float32", ()) for n, i in sizes]
    plain = Trace(tuple(events))
    settings = "expandable_segments:True,garbage_collection_threshold:0.5"
    trace = replace(plain, allocator=settings)
    expandable = simulate(plain, expandable_segments=True).reserved_bytes
    assert simulate(trace).reserved_bytes == expandable == 40 * MIB
    assert simulate(trace, expandable_segments=False).reserved_bytes == 42 * MIB
    assert simulate(plain).reserved_bytes == 42 * MIB
    assert simulate(trace, capacity_bytes=42 * MIB).fits
    assert Trace.from_dict(trace.to_dict()).allocator == settings


def training():
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(3072, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def test_a_prediction_has_the_settings_of_the_environment(monkeypatch):
    default = memlab.predict(training)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    expandable = memlab.predict(training)
    assert expandable.allocated_bytes == default.allocated_bytes
    by_hand = simulate(default, expandable_segments=True).reserved_bytes
    assert expandable.reserved_bytes == by_hand < default.reserved_bytes
    assert "with the allocator settings expandable_segments:True" in expandable.notes
