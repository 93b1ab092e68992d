"""The options --lora-rank, --lora-targets and --qlora."""

import pytest

from memlab.cli.adapter_options import choose_adapters, list_adapters
from memlab.cli.choices import choose_techniques
from memlab.cli.errors import UsageError
from memlab.cli.plan_options import choose_kinds
from memlab.cli.requests import PlanRequest, Request
from memlab.lora import LoRALinear
from memlab.qlora import NF4Linear
from memlab.train import Adapters, Setting, build

TINY = Setting("tiny", batch=2, seq_len=16)


@pytest.mark.parametrize("technique", ["lora", "qlora"])
@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("all", {"query", "key", "value", "output", "gate", "up", "down"}),
        ("attention", {"query", "key", "value", "output"}),
        ("mlp", {"gate", "up", "down"}),
        ("query,value", {"query", "value"}),
    ],
)
def test_the_options_choose_rank_and_layers(technique, targets, layers):
    request = Request(techniques=(technique,), lora_rank=3, lora_targets=targets)
    model = build(TINY, choose_techniques(request)[technique]).model
    found = {n.rpartition(".")[2]: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}
    assert found.keys() == layers
    assert all(layer.down.shape[0] == 3 for layer in found.values())
    in_4_bits = sum(isinstance(m, NF4Linear) for m in model.modules())
    assert in_4_bits == (7 * TINY.config.layers if technique == "qlora" else 0)


def test_the_output_says_which_adapters_are_trained():
    adapters = Adapters(3, "query,value")
    line = list_adapters(["plain", "qlora+autocast"], adapters)
    assert line == "qlora: adapters of rank 3 on query, value"
    assert list_adapters(["plain"], adapters) == ""


@pytest.mark.parametrize("technique", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_train_and_measure_show_them(memlab_command, technique, tmp_path):
    small = ("--model", "tiny", "--batch", "2", "--seq", "16", "--technique", technique)
    adapters = ("--lora-rank", "2", "--lora-targets", "mlp")
    outcome = memlab_command("train", *small, "--steps", "1", *adapters)
    assert f"{technique}: adapters of rank 2 on gate, up, down" in outcome.out
    outcome = memlab_command("measure", *small, "--dry-run", *adapters, "--out", str(tmp_path))
    assert f"{technique}: adapters of rank 2 on gate, up, down" in outcome.out


def test_options_that_do_nothing_or_are_unknown_are_refused():
    with pytest.raises(UsageError, match=r"got --lora-rank without adapters; add --technique lora"):
        choose_adapters(4, None, ["checkpointing"])
    assert choose_adapters(None, None, ["checkpointing"]) == Adapters()
    with pytest.raises(UsageError, match="got 'quary' as a layer with adapters; give all, attent"):
        choose_adapters(None, "quary")


@pytest.mark.parametrize("group", ["full fine-tuning", "LoRA", "QLoRA"])
def test_a_group_selects_its_kinds(group):
    kinds = choose_kinds(PlanRequest(lora_rank=4), group)
    assert {kind.group for kind in kinds} == {group}
    assert all(
        kind.adapters == (Adapters(4) if kind.has_adapters else Adapters()) for kind in kinds
    )
    [kind] = choose_kinds(PlanRequest(precision="autocast", optimizer="lion"), group)
    assert (kind.group, kind.precision, kind.optimizer) == (group, "autocast", "lion")


def test_two_groups_at_once_are_refused(memlab_command):
    outcome = memlab_command("plan", "--model", "tiny", "--memory", "1GB", "--qlora", "--lora")
    assert outcome.status == 2
    assert "got --qlora together with --lora or --full" in outcome.err
