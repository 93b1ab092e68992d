"""The GPUs of predictions: names, and the kernels and workspaces of each architecture."""

import pytest
from quick import together

from memlab.configs.gpus import CONTEXT_BYTES, GIB, GPUS, MIB, NVLINK_C2C, PCIE_3, PCIE_4, PCIE_5
from memlab.configs.targets import TARGETS, Target, find_target, target_named, target_of

# Multiprocessors and compute capability, by NVIDIA's and AMD's specifications and
# get_device_properties (a pair of compute units on Radeon).
SPECIFICATIONS = {
    **{"t4": (40, (7, 5)), "v100-16": (80, (7, 0)), "v100-32": (80, (7, 0))},
    **{"rtx3060": (28, (8, 6)), "rtx3080": (68, (8, 6)), "rtx3090": (82, (8, 6))},
    **{"a10g": (80, (8, 6)), "a6000": (84, (8, 6)), "l4": (58, (8, 9)), "l40s": (142, (8, 9))},
    **{"rtx4060": (24, (8, 9)), "rtx4080": (76, (8, 9)), "rtx4090": (128, (8, 9))},
    **{"a100-40": (108, (8, 0)), "a100-80": (108, (8, 0))},
    **{"h100": (132, (9, 0)), "h200": (132, (9, 0)), "b200": (148, (10, 0))},
    **{"rtx5090": (170, (12, 0)), "mi300x": (304, (9, 4))},
    **{"p100-16": (56, (6, 0)), "p40": (30, (6, 1)), "gtx1660ti": (24, (7, 5))},
    **{"rtx2060": (30, (7, 5)), "rtx2060-12": (34, (7, 5)), "rtx2080ti": (68, (7, 5))},
    **{"rtx3050-6": (18, (8, 6)), "rtx3050-8": (20, (8, 6)), "rtx3090ti": (84, (8, 6))},
    **{"orin-64": (16, (8, 7)), "rtx4070": (46, (8, 9)), "rtx4070tisuper": (66, (8, 9))},
    **{"rtx4090-laptop": (76, (8, 9)), "rtx6000ada": (142, (8, 9)), "a30": (56, (8, 0))},
    **{"h100-pcie": (114, (9, 0)), "h20": (78, (9, 0)), "b300": (148, (10, 3))},
    **{"rtx5070ti": (70, (12, 0)), "rtxpro6000": (188, (12, 0))},
    **{"mi100": (120, (9, 0)), "mi250x": (110, (9, 0)), "mi355x": (256, (9, 5))},
    **{"rx6800xt": (36, (10, 3)), "rx7900xtx": (48, (11, 0)), "rx9070xt": (32, (12, 0))},
}

# float32 operations per clock of a multiprocessor: two for each lane.
OPERATIONS_PER_CLOCK = {
    **dict.fromkeys(("sm_60", "sm_70", "sm_75", "sm_80"), 128),
    **dict.fromkeys(("sm_61", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103"), 256),
    **{"sm_120": 256, "gfx908": 128, "gfx90a": 128, "gfx942": 256, "gfx950": 256},
    **dict.fromkeys(("gfx1030", "gfx1031"), 256),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"), 512),
    **{"dg2": 256, "bmg": 256, "pvc": 256},
    **dict.fromkeys(("apple7", "apple8", "apple9", "apple10"), 256),
}


def target(name: str) -> Target:
    return TARGETS[f"cuda:{name}"]


# ------------------------------------------------------------------ the table


def test_a_gpu_has_its_multiprocessors_and_capability():
    for name in SPECIFICATIONS:
        assert (GPUS[name].multiprocessors, GPUS[name].capability) == SPECIFICATIONS[name]


def test_each_name_is_there_once_and_says_its_size_if_it_has_one():
    assert len(GPUS) == len({gpu.name for gpu in GPUS.values()}) > 200
    for gpu in GPUS.values():
        assert GPUS[gpu.name] is gpu
        assert gpu.name == gpu.name.lower()
        if gpu.vendor == "Apple":
            assert gpu.name == f"{gpu.family}-{gpu.advertised_gb}"


def test_one_driver_name_means_one_gpu_of_a_size():
    named = [(gpu.full_name, gpu.advertised_gb) for gpu in GPUS.values()]
    twice = {name for name in named if named.count(name) > 1}
    assert twice == {("NVIDIA GeForce GTX 1650", 4)}  # the laptop's prints the same


def test_the_float32_peak_is_multiprocessors_times_lanes_at_a_plausible_clock():
    for gpu in GPUS.values():
        lanes = OPERATIONS_PER_CLOCK[gpu.arch]
        assert 0.9e9 < gpu.float32_flops / (gpu.multiprocessors * lanes) < 3.2e9


@pytest.mark.parametrize(
    ("ratio", "names"),
    [
        (1, "p40 m1-8 m3-max-64"),
        (2, "p100-16 gtx1650 rtx3090 rtx4090 rtx5090 rx6800xt rx7900xtx"),
        (4, "rtx2080ti a6000 a40 l4 rtx6000ada rtxpro6000 rx9070xt mi100"),
        (8, "v100-32 titanrtx rtx8000 t4 mi210 mi300x"),
        (16, "a100-80 a30 mi355x"),
    ],
)
def test_the_half_precision_peak_is_the_architectures_multiple_of_float32(ratio, names):
    for name in names.split():
        assert GPUS[name].flops / GPUS[name].float32_flops == pytest.approx(ratio, rel=0.03)


def test_bandwidths_are_bytes_per_second():
    for gpu in GPUS.values():
        assert 60e9 < gpu.memory_bandwidth <= 8000e9
        assert gpu.host_bandwidth <= gpu.link_bandwidth <= gpu.memory_bandwidth
        hosts = (PCIE_3, PCIE_3 / 2, PCIE_4, PCIE_5, NVLINK_C2C, gpu.memory_bandwidth)
        assert gpu.host_bandwidth in hosts
        assert (gpu.host_bandwidth == gpu.memory_bandwidth) == (
            gpu.vendor == "Apple" or gpu.arch == "sm_87"
        )


def test_vendors():
    first = {name: GPUS[name].vendor for name in ("orin-64", "t4", "titanrtx", "w7900", "a580")}
    assert list(first.values()) == ["NVIDIA", "NVIDIA", "NVIDIA", "AMD", "Intel"]
    assert {gpu.vendor for gpu in GPUS.values()} == {"NVIDIA", "AMD", "Intel", "Apple"}


# ------------------------------------------------------------------ memory


def test_a_gpu_reports_a_little_less_than_its_advertised_memory():
    for gpu in GPUS.values():
        lowest = 0.66 if gpu.vendor == "Apple" else 0.88
        assert lowest < gpu.total_bytes / (gpu.advertised_gb * GIB) < 1


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("rtx3060", 11_931),
        ("rtx2060", 5_926),
        ("rtx5060ti-16", 15_816),
        ("mi300x", 196_592),
        ("b60", 24_480),
    ],
)
def test_a_measured_memory_is_as_printed(name, mib):
    assert GPUS[name].is_measured
    assert GPUS[name].total_bytes == mib * MIB


@pytest.mark.parametrize(
    ("name", "like", "lost_mib"),
    [
        ("rtx5060ti-8", "rtx5060ti-16", 16 * 1024 - 15_816),  # smaller: the same bytes
        ("rtx5070", "rtx5060ti-16", 16 * 1024 - 15_816),
        ("rx7900gre", "rx7900xtx", 24 * 1024 - 24_560),
        ("a40", "a10g", 2 * (24 * 1024 - 22_587)),  # larger: the same share
        ("a2", "a10g", 16 / 24 * (24 * 1024 - 22_587)),  # error correction: the same share
        ("mi325x", "mi300x", 256 / 192 * (192 * 1024 - 196_592)),
        ("p100-16", "v100-16", 0.22 * 1024),  # another architecture of the same vendor and kind
    ],
)
def test_a_memory_by_rule_loses_what_the_most_similar_measured_gpu_loses(name, like, lost_mib):
    assert GPUS[like].is_measured
    assert not GPUS[name].is_measured
    lost = GPUS[name].advertised_gb * 1024 - GPUS[name].total_bytes / MIB
    assert 0 <= lost - lost_mib < 2


def test_of_two_equally_similar_gpus_the_one_that_loses_more_counts():
    lost = {name: GPUS[name].advertised_gb * GIB - GPUS[name].total_bytes for name in GPUS}
    larger, smaller = lost["rtx5090"], 24 / 16 * lost["rtx5060ti-16"]
    assert smaller > larger
    assert lost["rtx5090-laptop"] == pytest.approx(smaller, abs=2 * MIB)


@pytest.mark.parametrize(
    ("name", "gib"),
    [("m1-8", 16 / 3), ("m2-max-32", 64 / 3), ("m3-pro-36", 27), ("m2-ultra-192", 144)],
)
def test_a_mac_uses_two_thirds_of_up_to_32_gb_and_three_quarters_of_more(name, gib):
    assert GPUS[name].total_bytes / GIB == pytest.approx(gib)
    assert not GPUS[name].is_measured


def test_the_two_classes_are_an_a100_and_an_h100():
    assert TARGETS["cuda"].gpu is GPUS["a100-80"]
    assert TARGETS["cuda:hopper"].gpu is GPUS["h100"]


ARCHITECTURES = sorted({gpu.arch for gpu in GPUS.values() if gpu.runs_cuda})


def test_the_architectures_since_pascal_are_known():
    known = (60, 61, 70, 75, 80, 86, 87, 89, 90, 100, 103, 120)
    found = {arch for arch in ARCHITECTURES if arch.startswith("sm")}
    assert found == {f"sm_{number}" for number in known}


@together("arch", ARCHITECTURES)
def test_an_architecture_is_its_gpu_with_the_most_multiprocessors(arch):
    gpus = [gpu for gpu in GPUS.values() if gpu.arch == arch]
    assert target(arch).multiprocessors == max(gpu.multiprocessors for gpu in gpus)
    assert target(arch).gpu in gpus


def test_only_a_measured_context_replaces_the_range():
    assert GPUS["t4"].context_bytes == (140.875 * MIB, 140.875 * MIB)
    others = {gpu.context_bytes for gpu in GPUS.values() if gpu.name != "t4"}
    assert others == {CONTEXT_BYTES}


# ------------------------------------------------------------------ names


@together(
    ("name", "device"),
    [
        *((device, device) for device in TARGETS),
        ("cuda:RTX 3060", "cuda:rtx3060"),
        ("cuda:3060", "cuda:rtx3060"),
        ("cuda:NVIDIA GeForce RTX 4090", "cuda:rtx4090"),
        ("cuda:Tesla T4", "cuda:t4"),
        ("cuda:a100", "cuda:a100-80"),
        ("cuda:V100", "cuda:v100-32"),
        ("cuda:sm86", "cuda:sm_86"),
        ("cuda:8.6", "cuda:sm_86"),
        ("cuda:sm_90a", "cuda:sm_90"),
        ("cuda:10.3", "cuda:sm_103"),
        ("cuda:gfx1100", "cuda:gfx1100"),
        ("cuda:rtx4060ti", "cuda:rtx4060ti-16"),
        ("cuda:M3 Max 64 GB", "cuda:m3-max-64"),
        ("cuda:sm_120", "cuda:sm_120"),
        ("cuda:12.0", "cuda:sm_120"),
    ],
)
def test_a_target_is_found_by_any_spelling(name, device):
    assert target_named(name) is TARGETS[device]
    assert target_named(name).device == device


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("cuda:rtx3061", "did you mean cuda:rtx3060? Use "),
        ("t4", "did you mean cuda:t4? Use "),
        ("hopper", "did you mean cuda:hopper? Use "),
        ("cuda:turing", "use "),
        ("cuda:sm_88", "use "),
        ("cuda:9.4", "did you mean cuda? Use "),
        ("cuda:a100-60", "did you mean cuda:a100-40? Use "),
        ("mps", "use "),
        ("", "use "),
    ],
)
def test_an_unknown_device_gets_the_nearest_and_the_accepted_forms(name, question):
    assert find_target(name) is None
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole message is checked)
        target_named(name)
    assert str(caught.value) == (
        f"got device {name!r}; {question}cuda, cuda:hopper, cuda:GPU such as cuda:rtx4090 "
        f"(`memlab plan --gpu list` prints all GPUs) or cuda:ARCHITECTURE such as cuda:sm_86"
    )


def test_a_real_gpu_is_itself_or_its_architecture():
    assert target_of("NVIDIA H200", "sm_90") is target("h200")
    assert target_of("NVIDIA GeForce RTX 4060 Ti", "sm_89") is target("rtx4060ti-16")
    assert target_of("NVIDIA RTX 4000 Embedded", "sm_89") is target("sm_89")
    assert target_of("NVIDIA Thor", "sm_110") is None


def test_every_gpu_has_a_target_with_defined_rules():
    for gpu in GPUS.values():
        found = TARGETS[gpu.target]
        assert found.gpu is gpu
        assert found.total_bytes == gpu.total_bytes
        assert found.workspace_bytes in (8_519_680, 32 * MIB, 128 * MIB)
        assert set(found.attention_order) <= {"flash", "efficient", "cudnn"}
        assert found.chip.runs_cuda
        assert len(found.capability) == 2


@pytest.mark.parametrize(("name", "vendor"), [("m3-max-64", "an Apple"), ("a770-16", "an Intel")])
def test_a_gpu_without_cuda_is_predicted_like_most_cards_and_says_so(name, vendor):
    found, usual = target(name), TARGETS["cuda"]
    assert found.attention_order == usual.attention_order
    assert (found.capability, found.multiprocessors) == (usual.capability, usual.multiprocessors)
    assert found.workspace_bytes == usual.workspace_bytes
    assert found.lt_workspace_bytes == usual.lt_workspace_bytes
    assert found.note == (
        f"never compared with {vendor} GPU: the kernels and the allocator of an NVIDIA "
        f"A100-SXM4-80GB are assumed"
    )


def test_only_gpus_of_other_vendors_were_never_compared():
    noted = {name for name in GPUS if target(name).note}
    assert noted == {name for name, gpu in GPUS.items() if gpu.vendor != "NVIDIA"}


# ------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("names", "workspace_mib"),
    [
        (("p100-16", "p40", "t4", "v100-16", "a100-80", "rtx3060", "rtx4090", "l4"), 8.125),
        (("orin-64", "m1-8", "b580"), 8.125),
        (("h100", "h200", "b200", "b300", "rtx5090"), 32),
        (("mi210", "rx7900xtx", "rx6800xt"), 32),
        (("mi300x", "mi355x"), 128),
    ],
)
def test_the_workspace_follows_the_architecture(names, workspace_mib):
    assert {target(name).workspace_bytes / MIB for name in names} == {workspace_mib}


def test_the_workspace_of_hipblaslt_is_larger():
    assert target("mi300x").lt_workspace_bytes == 76 * MIB
    assert {t.lt_workspace_bytes for t in TARGETS.values() if not t.gpu.is_amd} == {MIB}


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("p100-16", "p40", "t4", "v100-16", "gtx1660ti"), ("efficient",)),
        (("a100-80", "rtx3060", "rtx4090", "rtx5090", "orin-64"), ("flash", "efficient", "cudnn")),
        (("h100", "h200", "b200", "b300"), ("cudnn", "flash", "efficient")),
        (("mi300x", "mi210", "mi355x", "rx7900xtx", "rx9070xt"), ("flash", "efficient")),
        (("mi100", "rx6800xt", "rx7600", "rx9060xt-8"), ()),
    ],
)
def test_the_attention_kernels_follow_the_architecture(names, order):
    assert {target(name).attention_order for name in names} == {order}


def test_bfloat16_and_tf32_begin_with_ampere():
    without = {GPUS[name].arch for name in GPUS if not target(name).has_bfloat16}
    assert without == {"sm_60", "sm_61", "sm_70", "sm_75"}


@pytest.mark.parametrize("name", ["rtx3060", "orin-64", "l4", "rtx4090", "rtx5090"])
def test_flash_cannot_train_some_large_heads_on_small_chips(name):
    assert target(name).flash_can_train(192, 0.1)
    assert not target(name).flash_can_train(200, 0.0)
    assert not target(name).flash_can_train(224, 0.0)
    assert target(name).flash_can_train(256, 0.0)
    assert not target(name).flash_can_train(256, 0.1)


@pytest.mark.parametrize("name", ["a100-80", "h100", "b200", "b300", "mi300x"])
def test_flash_trains_every_head_on_large_chips(name):
    assert target(name).flash_can_train(224, 0.1)


def test_the_alignment_is_16_bytes_where_tensor_cores_have_the_dtype():
    assert target("t4").efficient_alignment(2) == target("rtx3060").efficient_alignment(2) == 8
    assert target("rtx3060").efficient_alignment(4) == 4
    assert target("t4").efficient_alignment(4) == 1
    assert target("p100-16").efficient_alignment(2) == target("p40").efficient_alignment(2) == 1


def test_the_widest_head_of_flash_attention():
    widths = {name: target(name).max_flash_head_dim for name in ("a100-80", "rx7900xtx", "mi300x")}
    assert widths == {"a100-80": 256, "rx7900xtx": 256, "mi300x": 512}
    assert target("mi300x").max_efficient_head_dim == 256 < target("t4").max_efficient_head_dim
