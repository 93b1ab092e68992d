"""The words of PYTORCH_ALLOC_CONF, and what a wrong one is answered with."""

import re

import pytest

from memlab.allocator import Settings, simulate

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


# What torch 2.13 answered for 1 MiB, 2 MiB, … 32 GiB when it was given the same words.
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
        ("max_split_size_mb:many", "got max_split_size_mb:many; give a whole number of MiB"),
        ("max_split_size_mb", "options look like name:value"),
        ("max_split_size_mb:", "options look like name:value"),
        ("large_segment_size_mb:10", "it must be more than 10 MiB"),
        ("expandable_segments:true", "got expandable_segments:true; give True or False"),
        ("garbage_collection_threshold:0", "garbage_collection_threshold is 0.0; give one in"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold is 1.0; give one in"),
        ("per_process_memory_fraction:1.5", "memory_fraction is 1.5"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions is 3; give a power of two"),
        ("roundup_power2_divisions:0", "give a power of two"),
        ("roundup_power2_divisions:[3:8]", "give a power of two, or powers by size"),
        ("roundup_power2_divisions:[256:3]", "give a power of two, or 16 of them"),
        ("backend:cudaMallocAsync", "got backend:cudaMallocAsync, which is not simulated"),
        ("max_split_size:20", "got max_split_size:20, which is not simulated; known are expand"),
    ],
)
def test_a_wrong_word_is_named_with_what_is_wanted(configuration, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Settings.parse(configuration)


def test_what_the_configuration_has_no_word_for_is_given_beside_it():
    settings = Settings.parse("garbage_collection_threshold:0.8", capacity_bytes=2**30)
    assert simulate((), settings).settings.capacity_bytes == 2**30


@pytest.mark.parametrize("share", [{"garbage_collection_threshold": 0.5}, {"memory_fraction": 0.5}])
def test_a_share_of_the_card_wants_the_card(share):
    with pytest.raises(ValueError, match="give capacity_bytes too"):
        simulate((), **share)


def test_settings_can_be_changed_for_one_run():
    settings = Settings(max_split_size_bytes=64 * MIB)
    run = simulate((), settings, expandable_segments=True)
    assert run.settings == Settings(max_split_size_bytes=64 * MIB, expandable_segments=True)
