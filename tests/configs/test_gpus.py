"""The GPUs of predictions: names, and the kernels and workspaces of each architecture."""

import pytest

from memlab.configs.gpus import CONTEXT_BYTES, GPUS, MIB
from memlab.configs.targets import TARGETS, Target, find_target, target_named, target_of

# Multiprocessors and compute capability, by NVIDIA's and AMD's specifications.
SPECIFICATIONS = {
    **{"t4": (40, (7, 5)), "v100-16": (80, (7, 0)), "v100-32": (80, (7, 0))},
    **{"rtx3060": (28, (8, 6)), "rtx3080": (68, (8, 6)), "rtx3090": (82, (8, 6))},
    **{"a10g": (80, (8, 6)), "a6000": (84, (8, 6)), "l4": (58, (8, 9)), "l40s": (142, (8, 9))},
    **{"rtx4060": (24, (8, 9)), "rtx4080": (76, (8, 9)), "rtx4090": (128, (8, 9))},
    **{"a100-40": (108, (8, 0)), "a100-80": (108, (8, 0))},
    **{"h100": (132, (9, 0)), "h200": (132, (9, 0)), "b200": (148, (10, 0))},
    **{"rtx5090": (170, (12, 0)), "mi300x": (304, (9, 4))},
}


def target(name: str) -> Target:
    return TARGETS[f"cuda:{name}"]


# ------------------------------------------------------------------ the table


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_its_multiprocessors_and_capability(name):
    assert (target(name).multiprocessors, target(name).capability) == SPECIFICATIONS[name]


def test_the_two_classes_are_an_a100_and_an_h100():
    assert TARGETS["cuda"].gpu is GPUS["a100-80"]
    assert TARGETS["cuda:hopper"].gpu is GPUS["h100"]


@pytest.mark.parametrize("arch", {gpu.arch for gpu in GPUS.values()})
def test_an_architecture_is_its_gpu_with_the_most_multiprocessors(arch):
    gpus = [gpu for gpu in GPUS.values() if gpu.arch == arch]
    assert target(arch).multiprocessors == max(gpu.multiprocessors for gpu in gpus)
    assert target(arch).gpu in gpus


def test_only_a_measured_context_replaces_the_range():
    assert GPUS["t4"].context_bytes == (140.875 * MIB, 140.875 * MIB)
    others = {gpu.context_bytes for gpu in GPUS.values() if gpu.name != "t4"}
    assert others == {CONTEXT_BYTES}


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
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
        ("cuda:sm_87", "use "),
        ("cuda:9.4", "did you mean cuda? Use "),
        ("cuda:a100-", "did you mean cuda:a100-40 or cuda:a100-80? Use "),
        ("mps", "use "),
        ("", "use "),
    ],
)
def test_an_unknown_device_gets_the_nearest_and_the_accepted_forms(name, question):
    assert find_target(name) is None
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole message is checked)
        target_named(name)
    assert str(caught.value) == (
        f"got device {name!r}; {question}cuda, cuda:hopper, cuda:GPU (where GPU is "
        f"{', '.join(GPUS)}) or cuda:ARCHITECTURE (sm_70, sm_75, sm_80, sm_86, sm_89, sm_90, "
        f"sm_100, sm_120, gfx942)"
    )


def test_a_real_gpu_is_itself_or_its_architecture():
    assert target_of("NVIDIA H200", "sm_90") is target("h200")
    assert target_of("NVIDIA GeForce RTX 4070", "sm_89") is target("sm_89")
    assert target_of("NVIDIA GeForce GTX 1080", "sm_61") is None


# ------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("names", "workspace_mib"),
    [
        (("t4", "v100-16", "a100-80", "rtx3060", "rtx4090", "l4"), 8.125),
        (("h100", "h200", "b200", "rtx5090"), 32),
        (("mi300x",), 128),
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
        (("t4", "v100-16"), ("efficient",)),
        (("a100-80", "rtx3060", "rtx4090", "rtx5090"), ("flash", "efficient", "cudnn")),
        (("h100", "h200", "b200"), ("cudnn", "flash", "efficient")),
        (("mi300x",), ("flash", "efficient")),
    ],
)
def test_the_attention_kernels_follow_the_architecture(names, order):
    assert {target(name).attention_order for name in names} == {order}


def test_bfloat16_and_tf32_begin_with_ampere():
    without = {name for name in GPUS if not target(name).has_bfloat16}
    assert without == {"t4", "v100-16", "v100-32"}


@pytest.mark.parametrize("name", ["rtx3060", "l4", "rtx4090", "rtx5090"])
def test_flash_cannot_train_some_large_heads_on_small_chips(name):
    assert target(name).flash_can_train(192, 0.1)
    assert not target(name).flash_can_train(200, 0.0)
    assert not target(name).flash_can_train(224, 0.0)
    assert target(name).flash_can_train(256, 0.0)
    assert not target(name).flash_can_train(256, 0.1)


@pytest.mark.parametrize("name", ["a100-80", "h100", "b200", "mi300x"])
def test_flash_trains_every_head_on_large_chips(name):
    assert target(name).flash_can_train(224, 0.1)


def test_the_alignment_is_16_bytes_where_tensor_cores_have_the_dtype():
    assert target("t4").efficient_alignment(2) == target("rtx3060").efficient_alignment(2) == 8
    assert target("rtx3060").efficient_alignment(4) == 4
    assert target("t4").efficient_alignment(4) == 1
