"""Techniques applied to a user's training: equal results and fewer bytes."""

from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn.utils import spectral_norm

import memlab
from memlab.optim import Adam8bit, AdamW
from memlab.planner.outside import (
    AS_IT_IS,
    LION,
    ORDER,
    Places,
    adams_groups,
    attempts,
    checkpointed,
    find,
    kept_on_disk,
    paths_of_layers,
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


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(256, 32)


def build(lr: float = 0.01):
    torch.manual_seed(0)
    model, x = Deep(), inputs()
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
def test_moving_activations_changes_no_weight(change):
    for ours, theirs in zip(trained(change), trained(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_replaced_optimizer_uses_the_same_learning_rate():
    assert_close(trained(stepped_by(AdamW, adams_groups)), trained(), terms=8)


def test_a_step_in_backward_equals_a_step_after_it():
    after, inside = (
        trained(stepped_by(Adam8bit, adams_groups, in_backward=each)) for each in (False, True)
    )
    for one, other in zip(after, inside, strict=True):
        assert torch.equal(one, other)


def in_groups(*, lr: float = 0.01, **settings):
    """Build a training with two parameter groups."""
    step, model, optimizer = build(lr)
    first, *others = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [first]
    optimizer.add_param_group({"params": others, "lr": lr / 2, **settings})
    return step, model, optimizer


def test_a_replaced_optimizer_keeps_the_groups_settings():
    _, model, optimizer = stepped_by(Adam8bit, adams_groups)(
        *in_groups(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    )
    first, second = optimizer.param_groups
    assert (first["lr"], first["betas"], first["weight_decay"]) == (0.01, (0.9, 0.999), 0.01)
    assert (second["lr"], second["betas"], second["eps"]) == (0.005, (0.8, 0.95), 1e-6)
    assert second["weight_decay"] == 0.3
    assert [*first["params"], *second["params"]] == list(model.parameters())


def test_lions_rate_is_a_fifth_and_its_weight_decay_five_times_adams():
    _, _, optimizer = LION.change(*in_groups(weight_decay=0.3))
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.01 / 5, 0.01 * 5),
        (0.005 / 5, 0.3 * 5),
    ]


@pytest.mark.slow
def test_each_attempt_saves_memory():
    _, model, optimizer = build()
    plain = trace_of()
    peaks = {}
    for attempt in attempts(find(model, optimizer)):
        trace = peaks[attempt.name] = trace_of(attempt.applied)
        if "checkpointing" in attempt.name:
            assert trace.at_peak.get("activations", 0) < plain.at_peak["activations"]
        if "step-in-backward" in attempt.name:
            assert trace.at_end.get("gradients", 0) == 0
        if "adam8bit" in attempt.name:
            N = sum(p.numel() for p in model.parameters())
            counters = 4 * len(list(model.parameters()))
            assert plain.at_end["optimizer_state"] == 8 * N + counters
            assert trace.at_end["optimizer_state"] < 3 * N + 2**18  # and the codebook
    assert len(peaks) == len(ORDER)
    assert all(trace.peak_bytes < plain.peak_bytes for trace in peaks.values())


# ------------------------------------------------------------------ finding layers


def mlp(*widths: int) -> nn.Sequential:
    parts = ((nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths))
    return nn.Sequential(*chain.from_iterable(parts))


def Conv() -> nn.Module:  # noqa: N802 - as the layer it makes
    return nn.Conv2d(4, 4, 3)


class Holding(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (Deep(), ["layers"]),
        (mlp(4, 4, 4, 4), [""]),  # the model is the list
        (nn.Linear(2, 2), []),
        (mlp(4, 4), []),  # one layer with weights
        (Holding(few=nn.ModuleList([nn.Linear(2, 2)] * 2), many=mlp(2, 2, 2)), ["few", "many"]),
        # The list of blocks, not a list inside a block.
        (
            Holding(inner=Holding(blocks=nn.Sequential(mlp(2, 2, 2), mlp(2, 2, 2)))),
            ["inner.blocks"],
        ),
        # An embedding, a deep encoder and a head: the encoder's layers, not the whole encoder.
        (nn.Sequential(nn.Embedding(9, 4), Deep(), nn.Linear(4, 9)), ["1.layers"]),
        # Layers that overwrite the checkpoint's input, or whose weights change before recomputing.
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True)), []),
        (nn.Sequential(*(spectral_norm(nn.Linear(4, 4)) for _ in range(3))), []),
        (Holding(norms=nn.ModuleList([nn.LayerNorm(4), None, nn.LayerNorm(4)])), []),
        (Holding(bad=nn.Sequential(Conv(), nn.ReLU(True), Conv()), good=mlp(4, 4, 4)), ["good"]),
    ],
)
def test_lists_of_layers_are_found(model, paths):
    assert paths_of_layers(model) == tuple(paths)
    assert find(model, None) == Places(tuple(paths), False)


def test_a_technique_without_a_place_is_not_attempted_and_raises_if_applied():
    assert [attempt.name for attempt in attempts(Places((), is_adam=True))] == [
        "adam8bit",
        "offloaded-activations",
        "adam8bit, offloaded-activations",
        "lion8bit, step-in-backward",
        "lion8bit, step-in-backward, offloaded-activations",
    ]
    assert [attempt.name for attempt in attempts(Places(("",), is_adam=False))] == [
        "checkpointing",
        "checkpointing, offloaded-activations",
        "offloaded-activations",
    ]
    with pytest.raises(ValueError, match=r"got a Linear; memlab cannot checkpoint this model"):
        checkpointed(print, nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="got nothing; memlab cannot checkpoint this model"):
        checkpointed(print, None, None)


WEIGHTS = [torch.zeros(1)]


@pytest.mark.parametrize(
    ("optimizer", "is_it"),
    [
        (torch.optim.AdamW(WEIGHTS), True),
        (torch.optim.Adam(WEIGHTS), True),
        (torch.optim.Adam(WEIGHTS, weight_decay=0.1), False),  # weight decay in the gradient
        (torch.optim.Adam(WEIGHTS, weight_decay=0.1, decoupled_weight_decay=True), True),
        (torch.optim.AdamW(WEIGHTS, amsgrad=True), False),
        (torch.optim.AdamW(WEIGHTS, maximize=True), False),
        (torch.optim.AdamW(WEIGHTS, lr=torch.tensor(0.1)), False),
        (torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9), False),
        (torch.optim.NAdam(WEIGHTS), False),
        (None, False),
    ],
)
def test_only_adam_can_be_replaced(optimizer, is_it):
    assert find(None, optimizer).is_adam == is_it


# ------------------------------------------------------------------ the code to add


def with_the_lines(attempt, made=build):
    """Paste an attempt's code into a training; return the weights after three steps."""
    _, model, optimizer = made()
    names = {"model": model, "optimizer": optimizer, "inputs": inputs(), "targets": None}
    names["loss_of"] = lambda model, inputs, targets: model(inputs).square().mean()
    exec("\n".join(attempt.lines), names)
    forward = "\n".join(attempt.lines_inside) or "loss = loss_of(model, inputs, targets)"
    for _ in range(3):
        names["optimizer"].zero_grad(set_to_none=True)
        exec(forward, names)
        names["loss"].backward()
        names["optimizer"].step()
    return list(model.parameters())


def with_the_attempt(attempt, made=build):
    """Apply the attempt; return the weights after three steps."""
    step, model, _ = attempt.applied(*made())
    for _ in range(3):
        step()
    return list(model.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("made", [build, partial(in_groups, betas=(0.8, 0.95), weight_decay=0.3)])
@pytest.mark.parametrize("number", range(len(ORDER)))
def test_an_attempts_code_equals_the_attempt(number, made):
    _, model, optimizer = made()
    attempt = attempts(find(model, optimizer))[number]
    ours, theirs = with_the_lines(attempt, made), with_the_attempt(attempt, made)
    assert all(map(torch.equal, ours, theirs))
    same_as_plain = all(map(torch.equal, theirs, with_the_attempt(AS_IT_IS, made)))
    assert same_as_plain == (not any("8bit" in each.name for each in attempt.wrappers))


def test_the_code_addresses_nested_lists():
    model = nn.Sequential(nn.Linear(4, 32), Deep(), Holding(**{"a-b": mlp(4, 4, 4)}))
    attempt = attempts(find(model, None))[0]
    exec("\n".join(attempt.lines), {"model": model})
    changed = [m for m in model.modules() if isinstance(m.forward, partial)]
    assert len(changed) == 6 + 4
    assert "model[1].layers:" in attempt.lines[-2]


def test_a_missing_optimizer_cannot_be_replaced():
    step, model, _ = build()
    with pytest.raises(ValueError, match=r"build\(\) returned nothing as optimizer"):
        stepped_by(Adam8bit, adams_groups)(step, model, None)


def test_a_scheduler_accepts_the_replaced_optimizers_step(recwarn):
    step, model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    stepped_by(Adam8bit, adams_groups)(step, model, optimizer)
    step()
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_an_8_bit_optimizer_takes_float16_weights_which_cannot_be_rounded_stochastically():
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight])
    _, _, other = stepped_by(Adam8bit, adams_groups)(lambda: None, None, optimizer)
    weight.grad = torch.ones_like(weight)
    other.step()
    assert weight.max() < 1
