"""Spellings of GPUs, and suggestions for misspelled ones."""

import random

import pytest

from memlab.configs.gpu_names import find_gpu, gpus_called, nearest_gpus, typos
from memlab.configs.gpus import GPUS


def test_a_gpu_is_found_by_its_own_name_in_any_case_and_with_any_separator():
    for name in GPUS:
        for spelling in (name, name.upper(), name.replace("-", " "), name.replace("-", "_")):
            assert find_gpu(spelling) is GPUS[name]


def test_a_gpu_is_found_by_its_full_name_and_size():
    for gpu in GPUS.values():
        if gpu.name == "gtx1650-laptop":  # prints the desktop card's name
            assert find_gpu(gpu.full_name) is GPUS["gtx1650"]
            continue
        with_size = find_gpu(f"{gpu.full_name} {gpu.advertised_gb}GB")
        same_name = [other for other in GPUS.values() if other.full_name == gpu.full_name]
        assert with_size in (gpu, None)
        assert with_size is gpu or gpu in gpus_called(gpu.full_name)
        if len(same_name) > 1:
            assert gpus_called(gpu.full_name) != (gpu,) or gpu.name == gpu.family


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4070", "rtx4070"),
        ("4070 Ti Super", "rtx4070tisuper"),
        ("RTX 4060 Ti 16GB", "rtx4060ti-16"),
        ("4060ti-8", "rtx4060ti-8"),
        ("rtx 3080 12 GB", "rtx3080-12"),
        ("NVIDIA GeForce RTX 3080", "rtx3080"),
        ("rtx4090 laptop", "rtx4090-laptop"),
        ("4090 mobile", "rtx4090-laptop"),
        ("RTX A6000", "a6000"),
        ("RTX 6000 Ada", "rtx6000ada"),
        ("Quadro RTX 6000", "rtx6000"),
        ("RTX PRO 6000 Blackwell", "rtxpro6000"),
        ("A100 PCIe 80GB", "a100-pcie-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("H100 SXM", "h100"),
        ("GH200", "gh200"),
        ("Radeon RX 7900 XTX", "rx7900xtx"),
        ("7900 xtx", "rx7900xtx"),
        ("W7900", "w7900"),
        ("Arc B580", "b580"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "b60"),
        ("Apple M3 Max 64GB", "m3-max-64"),
        ("m3max64", "m3-max-64"),
        ("M1 16 GB", "m1-16"),
    ],
)
def test_people_spell_a_gpu_in_many_ways(text, name):
    assert find_gpu(text) is GPUS[name]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a100", "a100-80 a100-40"),
        ("RTX 4060 Ti", "rtx4060ti-8 rtx4060ti-16"),
        ("5060ti", "rtx5060ti-8 rtx5060ti-16"),
        ("rtx3050", "rtx3050-6 rtx3050-8"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "rtx3080-laptop-8 rtx3080-laptop-16"),
        ("Apple M4", "m4-16 m4-24 m4-32"),
        ("m3-max", "m3-max-36 m3-max-96 m3-max-48 m3-max-64 m3-max-128"),
    ],
)
def test_a_name_without_its_size_means_several_gpus(text, names):
    assert [gpu.name for gpu in gpus_called(text)] == names.split()
    assert find_gpu(text) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("rtx4091", "rtx4090"),
        ("rtx3061", "rtx3060"),
        ("rtx409", "rtx4090"),
        ("rtx4900", "rtx4000"),  # two swapped digits of a 4090, or one wrong one: 8 GB, not 24
        ("a100-60", "a100-40"),
        ("rtx3070-6", "rtx3050-6"),  # not the rtx3070, which has 8 GB
        ("rtx5060ti-12", "rtx5060ti-8"),
        ("mi301x", "mi300x"),
        ("m3-mx-64", "m3-max-64"),
        ("4091", "rtx4090"),
        ("titan", "titanrtx"),
        ("rtxpro6", "rtxpro6000 rtxpro6000-maxq rtxpro6000-server"),
        ("xyzzy", ""),
        ("", ""),
        ("NVIDIA", ""),
        ("24", ""),
        (".5GB", ""),
        ("lots", ""),
    ],
)
def test_an_unknown_name_gets_the_nearest_gpu_with_no_more_memory(text, names):
    assert sorted(nearest_gpus(text)) == sorted(names.split())


def misspellings(name: str, rng: random.Random) -> list[str]:
    """Some names with one typo: a character left out, doubled, wrong, or swapped with the next."""
    found = []
    for at, char in enumerate(name):
        wrong = rng.choice("0123456789" if char.isdigit() else "abcdefghijklmnopqrstuvwxyz-")
        found += [name[:at] + name[at + 1 :], name[:at] + 2 * char + name[at + 1 :]]
        found += [name[:at] + wrong + name[at + 1 :]]
        found += [name[:at] + name[at + 1 : at + 2] + char + name[at + 2 :]]
    return rng.sample(found, min(len(found), 16))


@pytest.mark.few(1)
@pytest.mark.parametrize("vendor", ["NVIDIA", "AMD", "Intel", "Apple"])
def test_a_suggestion_never_has_more_memory_than_the_gpu_that_was_misspelled(vendor):
    rng, tried, answered = random.Random(0), 0, 0
    for gpu in GPUS.values():
        for text in misspellings(gpu.name, rng) if gpu.vendor == vendor else ():
            if gpus_called(text):  # another GPU's name, or a family's
                continue
            suggested = [GPUS[name] for name in nearest_gpus(text)]
            assert all(near.total_bytes <= gpu.total_bytes for near in suggested), text
            tried, answered = tried + 1, answered + bool(suggested)
    assert tried > 100
    assert answered > 0.8 * tried


@pytest.mark.parametrize(
    ("typed", "meant", "count"),
    [
        ("rtx4090", "rtx4090", 0),
        ("rtx409", "rtx4090", 1),
        ("rtx40900", "rtx4090", 1),
        ("rtx4080", "rtx4090", 1),
        ("rxt4090", "rtx4090", 1),
        ("4090", "rtx4090", 3),
        ("", "t4", 2),
    ],
)
def test_typos_are_counted(typed, meant, count):
    assert typos(typed, meant) == typos(meant, typed) == count
