"""The table of cards against advertised memory, and parsing of memory sizes."""

import pytest
from quick import together

from memlab.configs.evidence import margin_share
from memlab.configs.gpus import CONTEXT_BYTES, GIB, GPUS, MIB, PCIE_3, PCIE_4, PCIE_5
from memlab.configs.targets import TARGETS
from memlab.planner.cards import (
    CARDS,
    Memory,
    budget_bytes,
    card_named,
    margin_bytes,
    margin_named,
    memory_named,
    with_margin,
)

LIST_HINT = "`memlab plan --gpu list` prints all GPUs"

SOLD_WITH_GIB = {
    **{"rtx3060": 12, "rtx3080": 10, "rtx3090": 24},
    **{"rtx4060": 8, "rtx4080": 16, "rtx4090": 24, "rtx5090": 32},
    **{"t4": 16, "v100-16": 16, "v100-32": 32, "a10g": 24, "l4": 24, "a6000": 48, "l40s": 48},
    **{"a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192},
}


def message_of(call, *given):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (each caller checks the whole message)
        call(*given)
    message = str(caught.value)
    assert "\n" not in message
    assert not message.endswith(".")
    return message


# The table


@together("name", SOLD_WITH_GIB)
def test_a_card_has_a_little_less_than_its_advertised_memory(name):
    share = CARDS[name].total_bytes / (SOLD_WITH_GIB[name] * GIB)
    assert 0.9 < share < 1


def test_the_cards_of_plans_are_the_gpus_of_predictions():
    assert CARDS is GPUS


@together("name", SOLD_WITH_GIB)
def test_speeds_have_a_plausible_order(name):
    card = CARDS[name]
    assert card.flops > 10e12  # tensor cores
    assert card.memory_bandwidth > card.link_bandwidth >= card.host_bandwidth
    assert card.host_bandwidth in (PCIE_3, PCIE_4, PCIE_5)


@together("card", CARDS.values())
def test_a_card_is_its_own_prediction_target(card):
    assert TARGETS[card.target].gpu is GPUS[card.name]
    assert memory_named(card.name).target == card.target


def test_a_number_of_bytes_is_predicted_for_most_cards():
    assert memory_named("80GiB").target == memory_named("16GB").target == "cuda"


def test_pcie_speeds_follow_from_16_lanes_and_their_encoding():
    for pcie, gigatransfers in ((PCIE_3, 8e9), (PCIE_4, 16e9), (PCIE_5, 32e9)):
        assert pcie == pytest.approx(16 * gigatransfers / 8 * 128 / 130, rel=0.001)


# Names


@together(
    ("text", "name"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("A100 80 GB", "a100-80"),
        ("a100_40gb", "a100-40"),
        ("a10040", "a100-40"),
        # as torch.cuda.get_device_name() returns it
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_card_is_found_by_any_spelling(text, name):
    assert card_named(text) is CARDS[name]


@together("name", CARDS)
def test_a_card_is_found_by_its_own_name(name):
    assert card_named(name) is CARDS[name]


@pytest.mark.parametrize(("text", "nearest"), [("rtx4091", "rtx4090"), ("rtx3061", "rtx3060")])
def test_an_unknown_card_gets_the_nearest(text, nearest):
    said = f"got unknown GPU {text!r}; did you mean {nearest}? {LIST_HINT}"
    assert message_of(card_named, text) == message_of(memory_named, text) == said


@pytest.mark.parametrize(
    ("text", "sizes", "names"),
    [
        ("rtx4060ti", "8 or 16", "rtx4060ti-8 or rtx4060ti-16"),
        ("NVIDIA GeForce RTX 4060 Ti", "8 or 16", "rtx4060ti-8 or rtx4060ti-16"),
        ("a100", "40 or 80", "a100-40 or a100-80"),
        ("v100", "16 or 32", "v100-16 or v100-32"),
        ("M4", "16, 24 or 32", "m4-16, m4-24 or m4-32"),
    ],
)
def test_a_card_of_several_sizes_has_to_be_named_with_one(text, sizes, names):
    said = f"got {text!r}, which has {sizes} GB; give one of {names}"
    assert message_of(card_named, text) == message_of(memory_named, text) == said


@pytest.mark.parametrize("text", ["xyzzy", "", "gpu", "NVIDIA"])
def test_a_name_unlike_any_card_gets_the_list(text):
    assert message_of(card_named, text) == (
        f"got unknown GPU {text!r}; give its memory, such as 24GiB; {LIST_HINT}"
    )


# Memory


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("1.5TB", 1_500 * 10**9),
        ("25769803776", 24 * 2**30),
        ("25_769_803_776", 24 * 2**30),
    ],
)
def test_a_number_with_a_unit_is_a_number_of_bytes(text, total):
    assert memory_named(text) == Memory(text, total)


def test_a_cards_name_gives_its_memory():
    card = CARDS["rtx4090"]
    assert memory_named(" GeForce RTX 4090") == Memory("rtx4090", card.total_bytes, card)


def test_4090_is_a_card_and_not_4090_bytes():
    assert memory_named("4090").card is CARDS["rtx4090"]


@pytest.mark.parametrize("text", ["24GB", "rtx4090", "h200"])
def test_the_budget_excludes_the_cuda_context(text):
    memory = memory_named(text)
    assert memory.total_bytes - memory.budget_bytes == 616 * MIB == max(CONTEXT_BYTES)


@pytest.mark.parametrize("text", ["lots", "twenty-four GB", "", "GB", "GiB 24"])
def test_words_are_not_a_memory(text):
    assert message_of(memory_named, text) == (
        f"got {text!r} as a memory, which is neither a number with a unit, such as 24GB or 24GiB, "
        f"nor a known GPU; {LIST_HINT}"
    )


@pytest.mark.parametrize(
    "text", ["-24GB", "-1", "+24GB", "24 gigabytes", "1.5", "24GB free", ".5GB"]
)
def test_an_invalid_quantity_is_quoted(text):
    message = message_of(memory_named, text)
    assert message.startswith(f"got {text!r} as a number of bytes; give a number and a unit")


@pytest.mark.parametrize(
    ("text", "size"), [("24", "24 B"), ("0", "0 B"), ("0GB", "0 B"), ("616MiB", "616.00 MiB")]
)
def test_memory_that_only_fits_the_cuda_context_is_refused(text, size):
    assert message_of(memory_named, text) == (
        f"got {text!r} as a memory, which is {size}, and the CUDA context needs up to 616.00 MiB; "
        f"give more, with a unit, such as 24GB or 24GiB"
    )


def test_a_small_number_that_is_nearly_a_card_gets_both_remedies():
    assert message_of(memory_named, "4091") == (
        "got '4091' as a memory, which is 4.00 KiB, and the CUDA context needs up to 616.00 MiB; "
        "give more, with a unit, such as 24GB or 24GiB, or a GPU: did you mean rtx4090?"
    )


def test_without_a_gpu_all_memory_is_available_from_1_mib():
    assert memory_named("1MiB", "cpu").total_bytes == MIB
    assert message_of(memory_named, "24", "cpu") == (
        "got '24' as a memory, which is 24 B, and no training fits; give more, with a unit, such "
        "as 24GB or 24GiB"
    )


def test_one_byte_more_than_the_cuda_context_is_accepted():
    assert memory_named(str(616 * MIB + 1)).budget_bytes == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100"),
        ("24GiB", "rtx3090"),
        ("24GB", "a10g"),  # 22.35 GiB
        ("1GB", "rtx4060"),
        ("80GiB", "a100-80"),
        ("31.74GiB", "v100-32"),
        ("9999GiB", "mi300x"),
    ],
)
def test_a_number_of_bytes_uses_the_speeds_of_the_nearest_card(text, name):
    assert memory_named(text).card_for_costs is CARDS[name]


def test_of_two_equally_near_cards_the_first_in_the_table_counts():
    less, more = CARDS["rtx4090"], CARDS["rtx3090"]
    middle = (less.total_bytes + more.total_bytes) // 2
    assert middle - less.total_bytes == more.total_bytes - middle
    assert Memory("between", middle).card_for_costs is more  # the older card comes first


# Margin


@pytest.mark.parametrize(
    ("given", "margin"),
    [
        ("2%", 20_000_000),
        ("0.5 %", 5_000_000),
        ("33.333333%", 333_333_330),
        ("0", 0),
        ("0%", 0),
        (0, 0),
        ("500MiB", 500 * MIB),
        ("1MB", 10**6),
        (12_345, 12_345),
    ],
)
def test_a_margin_is_a_percentage_or_bytes(given, margin):
    assert margin_named(given, Memory("one", 10**9)) == margin


def test_a_percentage_of_a_few_bytes_is_rounded_up():
    assert margin_named("1%", Memory("few", 101)) == 2


@pytest.mark.parametrize("given", ["2x", "%", "-1%", "-500MiB", "two", "", "1,5%", "٢%", -1, True])
def test_another_margin_is_quoted(given):
    assert message_of(margin_named, given, Memory("one", 10**9)) == (
        f"got a margin of {given!r}; give a percentage of the memory, such as 2%, or bytes with a "
        f"unit, such as 500MiB"
    )


def test_the_default_margin_is_as_much_as_measured_steps_needed_more():
    memory = Memory("one", 10 * 10**9)
    assert margin_bytes(memory, "cuda") == round(margin_share() * 10 * 10**9) > 0
    assert budget_bytes(memory, "cuda") == memory.budget_bytes - margin_bytes(memory, "cuda")
    assert margin_bytes(memory, "cpu") == 0
    assert budget_bytes(memory, "cpu") == 10 * 10**9


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_margin_replaces_the_default_and_leaves_the_rest(target):
    memory = Memory("one", 10 * 10**9)
    none = with_margin(memory, 0, target)
    assert budget_bytes(none, target) == 10 * 10**9 - (616 * MIB if target == "cuda" else 0)
    some = with_margin(memory, "500MiB", target)
    assert budget_bytes(none, target) - budget_bytes(some, target) == 500 * MIB
    assert (some.name, some.total_bytes) == (memory.name, memory.total_bytes)


@pytest.mark.parametrize(
    ("given", "target", "rest"),
    [("100%", "cuda", "408.00 MiB"), ("408MiB", "cuda", "408.00 MiB"), ("1GiB", "cpu", "1.00 GiB")],
)
def test_a_margin_has_to_leave_something(given, target, rest):
    assert message_of(with_margin, Memory("one", GIB), given, target) == (
        f"got a margin of {given!r}, which leaves nothing of the {rest} that tensors can use on "
        f"one; give less"
    )
    almost = with_margin(Memory("one", GIB), 408 * MIB - 1, target)
    assert budget_bytes(almost, target) > 0
