"""Expert parallelism by formula: against transformers' Mixtral, real experts and dry runs."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from memlab.dry_runs.routing import balanced
from memlab.planner.experts import Mixture
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks

MIXTURE = Mixture(64, 96, 8, 2)
EXCHANGE = """
import torch, torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

dist.init_process_group("gloo")
gate = torch.nn.Parameter(torch.ones(64))
optimizer = torch.optim.SGD([gate])
parts = [2 * 48 // 4] * 4
for _ in range(2):
    copies = (torch.ones(48, 64) * gate).repeat_interleave(2, 0)
    arrived = exchange(copies, parts, parts, dist.group.WORLD)
    back = exchange(arrived * 2, parts, parts, dist.group.WORLD)
    back.sum().backward()
    optimizer.step()
"""


def test_a_ranks_weights_are_those_of_mixtral():
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=32,
    )
    with torch.device("meta"):
        layer = MixtralForCausalLM(config).model.layers[0]
    counts = {
        name: weight.numel()
        for name, weight in layer.named_parameters()
        if "attn" not in name and "norm" not in name
    }
    router = sum(count for name, count in counts.items() if "gate.weight" in name)
    experts = sum(counts.values()) - router
    assert router == 64 * 8
    for ranks in (1, 2, 4, 8):
        assert MIXTURE.weights(ranks) == experts // ranks + router


@pytest.mark.filterwarnings("ignore")
def test_sent_elements_are_those_of_real_all_to_alls(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(EXCHANGE)
    outcome = run_ranks(launch_of([str(script)]).with_ranks(4), (0,), device="cpu")[0]
    sent = [each.bytes for each in outcome.transfers if each.kind == "all-to-all"]
    assert len(sent) == 4
    assert sum(sent) == 4 * MIXTURE.sent_elements(48, 4)


@pytest.mark.filterwarnings("ignore")
def test_the_busiest_rank_sends_back_what_it_got(tmp_path):
    """Of its 96 rows rank 0 keeps 36. It gets 36 from each rank, and sends 108 back."""
    sent_rows, got_rows = [36, 20, 20, 20], [36] * 4
    uneven = EXCHANGE.replace("(copies, parts, parts", f"(copies, {got_rows}, {sent_rows}")
    uneven = uneven.replace("arrived * 2, parts, parts", f"arrived * 2, {sent_rows}, {got_rows}")
    script = tmp_path / "train.py"
    script.write_text(uneven)
    outcome = run_ranks(launch_of([str(script)]).with_ranks(4), (0,), device="cpu")[0]
    sent = [each.bytes // (4 * 64) for each in outcome.transfers if each.kind == "all-to-all"]
    assert sent == [60, 108, 60, 108]
    mixture = Mixture(64, 96, 4, 2)
    assert mixture.busiest_rank_tokens(4 * 48, 4, 1.5) == sum(got_rows)
    assert mixture.sent_elements(48, 4, 1.5) == 64 * sum(sent)
    assert mixture.sent_elements(48, 4, 1.5, recomputed=True) == 64 * (sum(sent) + 60 + 108)


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 3.0, 100.0])
@pytest.mark.parametrize("mixture", [MIXTURE, Mixture(4, 4, 6, 3), Mixture(4, 4, 4, 4)])
def test_tokens_of_experts_are_those_that_a_dry_run_assumes(mixture, imbalance):
    chosen = balanced(torch.Size((50, mixture.chosen)), mixture.experts, imbalance)
    counts = torch.bincount(chosen.flatten(), minlength=mixture.experts).tolist()
    assert mixture.tokens_of_experts(50, imbalance) == counts


def test_the_busiest_rank_has_the_busiest_expert_and_its_share_of_the_others():
    assert MIXTURE.tokens_of_experts(80, 2.0) == [40, 18, 17, 17, 17, 17, 17, 17]
    assert MIXTURE.busiest_rank_tokens(80, 4, 2.0) == 58
    assert MIXTURE.busiest_rank_tokens(80, 4) == 40  # the average
    assert MIXTURE.busiest_rank_tokens(80, 1, 2.0) == 160


def test_saved_bytes_are_what_autograd_saves_of_the_experts():
    """The weights that autograd saves too are left out."""
    saved: dict[int, int] = {}
    experts = [[torch.rand(64, 96), torch.rand(64, 96), torch.rand(96, 64)] for _ in range(2)]
    weights = {w.requires_grad_().untyped_storage().data_ptr() for e in experts for w in e}

    def note(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            saved[place] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = [torch.rand(count, 64, requires_grad=True) for count in (40, 18)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [
            (F.silu(x @ gate) * (x @ up)) @ down
            for x, (gate, up, down) in zip(inputs, experts, strict=True)
        ]
    assert len(outputs) == 2
    assert sum(saved.values()) == MIXTURE.saved_bytes(80, 4, 2.0, element_bytes=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Mixture(4, 4, 2, 3), "got 3 chosen of 2 experts"),
        (lambda: Mixture(4, 0, 2, 1), "got intermediate_size=0"),
        (lambda: MIXTURE.weights(3), "got 8 experts for 3 ranks"),
        (lambda: MIXTURE.tokens_of_experts(8, 0.5), "got an imbalance of 0.5"),
        (lambda: MIXTURE.tokens_of_experts(8, math.nan), "got an imbalance of nan"),
    ],
)
def test_wrong_sizes_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
