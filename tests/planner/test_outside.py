"""Techniques around somebody else's training: what is learned, and what it takes."""

from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from torch import nn

import memlab
from memlab.optim import Adam8bit, AdamW
from memlab.planner.outside import (
    CLIMB,
    Places,
    checkpointed,
    find,
    kept_on_disk,
    ladder,
    path_of_layers,
    stepped_by,
)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build(lr: float = 0.01):
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(256, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


def trained(change=lambda *parts: parts, steps: int = 3) -> list[torch.Tensor]:
    step, model, _ = change(*build())
    for _ in range(steps):
        step()
    return list(model.parameters())


def trace_of(change=lambda *parts: parts):
    with memlab.dry_run():
        step, model, optimizer = change(*build())
        step()
        return memlab.measure(step, model=model, optimizer=optimizer)


@pytest.mark.parametrize("change", [checkpointed, kept_on_disk])
def test_where_activations_are_changes_no_weight(change):
    for ours, theirs in zip(trained(change), trained(), strict=True):
        assert torch.equal(ours, theirs)


def test_another_optimizer_takes_the_steps_at_the_same_rate():
    for ours, theirs in zip(
        trained(stepped_by(partial(AdamW, weight_decay=0.01))), trained(), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_step_in_backward_learns_what_the_step_after_it_does():
    after, inside = (trained(stepped_by(Adam8bit, in_backward=each)) for each in (False, True))
    for one, other in zip(after, inside, strict=True):
        assert torch.equal(one, other)


def test_another_rate_is_a_share_of_the_optimizers_own():
    _, model, optimizer = stepped_by(AdamW, rate=1 / 5)(*build(lr=0.05))
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 * (1 / 5)]
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


@pytest.mark.slow
def test_each_rung_saves():
    _, model, optimizer = build()
    plain = trace_of()
    peaks = {}
    for rung in ladder(find(model, optimizer)):
        trace = peaks[rung.name] = trace_of(rung.applied)
        if "checkpointing" in rung.name:
            assert trace.at_peak.get("activations", 0) < plain.at_peak["activations"]
        if "step in backward" in rung.name:
            assert trace.at_end.get("gradients", 0) == 0
        if "adam8bit" in rung.name:
            N = sum(p.numel() for p in model.parameters())
            counters = 4 * len(list(model.parameters()))
            assert plain.at_end["optimizer_state"] == 8 * N + counters
            assert trace.at_end["optimizer_state"] < 3 * N + 2**18  # and the table of codes
    assert len(peaks) == len(CLIMB)
    assert all(trace.peak_bytes < plain.peak_bytes for trace in peaks.values())


# ------------------------------------------------------------------ where layers are


def mlp(*widths: int) -> nn.Sequential:
    parts = ((nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths))
    return nn.Sequential(*chain.from_iterable(parts))


class Holding(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (Deep(), "layers"),
        (mlp(4, 4, 4, 4), ""),  # the model is the list
        (nn.Linear(2, 2), None),
        (mlp(4, 4), None),  # one layer with weights
        (Holding(few=nn.ModuleList([nn.Linear(2, 2)] * 2), many=mlp(2, 2, 2, 2, 2)), "few"),
        (Holding(few=mlp(2, 2, 2), many=mlp(2, 2, 2, 2, 2)), "many"),
        # The list of blocks, not what is inside of one of them.
        (Holding(inner=Holding(blocks=nn.Sequential(mlp(2, 2, 2), mlp(2, 2, 2)))), "inner.blocks"),
    ],
)
def test_the_list_of_layers_is_found(model, path):
    assert path_of_layers(model) == path
    assert find(model, None) == Places(path, None)


def test_where_there_is_no_list_no_rung_has_a_checkpoint_and_a_sentence_says_so():
    names = [rung.name for rung in ladder(Places(layers=None))]
    assert names == [
        "adam8bit",
        "lion8bit, step in backward",
        "lion8bit, step in backward, offloaded-activations",
    ]
    with pytest.raises(ValueError, match=r"got a Linear; checkpointing cannot be put around"):
        checkpointed(print, nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="got nothing; checkpointing cannot be put around"):
        checkpointed(print, None, None)


@pytest.mark.parametrize(
    ("groups", "rate"),
    [
        ([{"lr": 0.1}], 0.1),
        ([{"lr": 0.1}, {"lr": 0.1}], 0.1),
        ([{"lr": 0.1}, {"lr": 0.2}], None),
        ([{"lr": torch.tensor(0.1)}], None),
    ],
)
def test_a_rate_is_that_of_all_groups(groups, rate):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], **group} for group in groups])
    assert find(None, optimizer).rate == rate


# ------------------------------------------------------------------ the lines to add


def with_the_lines(rung, change_groups=lambda optimizer: None):
    """The model of a training into which somebody pasted a rung's lines, after three steps."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(256, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    change_groups(optimizer)
    names = {"model": model, "optimizer": optimizer, "x": x}
    *lines, last = rung.lines
    around = last.startswith("with")
    exec("\n".join(lines if around else [*lines, last]), names)
    forward = "loss = model(x).square().mean()"
    for _ in range(3):
        names["optimizer"].zero_grad()
        exec(last.replace("loss = ...", forward) if around else forward, names)
        names["loss"].backward()
        names["optimizer"].step()
    return list(model.parameters())


@pytest.mark.parametrize("number", range(len(CLIMB)))
def test_the_lines_of_a_rung_do_what_the_rung_does(number):
    _, model, optimizer = build()
    rung = ladder(find(model, optimizer))[number]
    for ours, theirs in zip(with_the_lines(rung), trained(rung.applied), strict=True):
        assert torch.equal(ours, theirs)
    plain = trained()
    assert any("8bit" in each.name for each in rung.techniques) != all(
        torch.equal(ours, theirs) for ours, theirs in zip(with_the_lines(rung), plain, strict=True)
    )


def test_groups_keep_their_rates_in_the_lines():
    def halved(optimizer: torch.optim.Optimizer) -> None:
        first, *others = optimizer.param_groups[0].pop("params")
        optimizer.param_groups[0]["params"] = [first]
        optimizer.add_param_group({"params": others, "lr": 0.005})

    def build_with_groups():
        step, model, optimizer = build()
        halved(optimizer)
        return step, model, optimizer

    _, model, optimizer = build_with_groups()
    rung = next(r for r in ladder(find(model, optimizer)) if r.name == "adam8bit")
    step, other, _ = rung.applied(*build_with_groups())
    for _ in range(3):
        step()
    for ours, theirs in zip(with_the_lines(rung, halved), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_no_optimizer_cannot_be_replaced():
    step, model, _ = build()
    with pytest.raises(ValueError, match=r"build\(\) returned nothing as optimizer"):
        stepped_by(Adam8bit)(step, model, None)
