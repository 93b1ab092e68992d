"""The registry of techniques: its code runs, its packages exist, its formulas match the meter."""

import importlib
import re
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab.planner.formulas import layer_shapes
from memlab.train import TECHNIQUES, Setting, combined, dry_trace
from memlab.train.registry import exclusions, why_not_together
from memlab.train.technique import Technique

CODE = {name: row.code.memlab for name, row in TECHNIQUES.items() if row.code.memlab}
IMPORT = re.compile(r"^(?:from (\S+) )?import (.*?)(?:  #.*)?$")


class Script(nn.Module):
    """The model of a user's script: a list of layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.blocks = self.layers
        self.lm_head = nn.Linear(16, 32, bias=False)

    def hidden(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens):
        return self.lm_head(self.hidden(tokens))


def names_of_a_script() -> dict[str, object]:
    """What a script has when the registry's lines are pasted into it."""
    model = Script()
    inputs, targets = torch.randint(32, (2, 4, 8))
    query, key, value = torch.randn(3, 2, 4, 8, 16)

    def loss_of(model, inputs, targets):
        return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())

    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), weight_decay=0.0),
        "inputs": inputs,
        "targets": targets,
        "hidden": model.hidden(inputs),
        "loss_of": loss_of,
        "loss_and_tokens_of": lambda part: (
            loss_of(model, *part) * part[1].numel(),
            part[1].numel(),
        ),
        **{"query": query, "key": key, "value": value},
    }


@pytest.mark.parametrize("name", CODE)
def test_the_lines_of_a_technique_train_in_a_users_script(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = names_of_a_script()
    lines = "\n".join(CODE[name]).replace('"cuda"', '"cpu"').replace("update(step)", "update(1)")
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(lines, names)
    model, optimizer = names["model"], names["optimizer"]
    if "backward()" not in lines and "accumulate(" not in lines:
        loss = names.get("loss")
        loss = names["loss_of"](model, names["inputs"], names["targets"]) if loss is None else loss
        loss.backward()
    if "scaler" not in names:
        optimizer.step()
    after = list(model.parameters())
    assert len(after) != len(before) or any(
        a.shape != b.shape or not torch.equal(a.float(), b.float())
        for a, b in zip(after, before, strict=True)
    )


@pytest.mark.parametrize("name", CODE)
def test_the_packages_that_a_technique_names_have_what_it_imports(name):
    row = TECHNIQUES[name]
    for line in (*row.code.memlab, *row.code.production):
        if not (match := IMPORT.match(line)):
            continue
        module, imported = match.groups()
        module = module or imported
        if find_spec(module.split(".")[0]) is None:
            continue  # an optional package, absent here
        found = importlib.import_module(module)
        if match[1]:
            assert all(hasattr(found, each) for each in imported.split(", ")), line


def test_every_technique_says_what_it_costs():
    assert all(row.costs for name, row in TECHNIQUES.items() if name != "plain")


# ------------------------------------------------------------------ facts against the meter

STATED = [name for name, row in TECHNIQUES.items() if row.state_bytes is not None]
SETTING = Setting("5m", batch=1, seq_len=8)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STATED)
def test_the_state_of_an_optimizer_is_what_its_row_says(name):
    """Within 2 %: small weights keep float32 state, and each weight has a step counter. Float32
    copies of bfloat16 weights count as state here, and as parameters in a trace."""
    held, elements = dry_trace(SETTING, combined(name)).at_peak, SETTING.config.parameters
    weights = elements * (2 if name in ("bfloat16", "master-weights") else 4)
    state = held.get("optimizer_state", 0) + held["parameters"] - weights
    assert state / elements == pytest.approx(stated(TECHNIQUES[name]), rel=0.02, abs=0.02)


def stated(row: Technique) -> float:
    """Bytes per weight, on average over hidden layers' matrices and all other weights."""
    if row.matrix_step is None:
        return row.state_bytes
    config = SETTING.config
    rank = row.matrix_step.rank(config.hidden_size)
    shapes = [sorted(shape) for shape in layer_shapes(config).values()] * config.layers
    in_matrices = sum(short * long for short, long in shapes)
    own = sum(row.matrix_step.state_bytes(short, long, rank) for short, long in shapes)
    others = config.parameters - in_matrices
    return (own + row.state_bytes * others) / config.parameters


def test_a_wrong_fact_would_be_noticed():
    trace = dry_trace(SETTING, combined("lion"))
    state = trace.at_end["optimizer_state"] / SETTING.config.parameters
    assert state != pytest.approx(TECHNIQUES["adam8bit"].state_bytes, rel=0.02)


# ------------------------------------------------------------------ rows that exclude each other


def test_an_exclusion_is_stated_once_and_found_in_either_order():
    assert len(exclusions()) == sum(len(row.exclusive_with) for row in TECHNIQUES.values())
    for pair, reason in exclusions().items():
        for names in (sorted(pair), sorted(pair, reverse=True)):
            assert reason in why_not_together({name: TECHNIQUES[name] for name in names})


def test_two_schedules_exclude_each_other_by_their_slot():
    chosen = {name: TECHNIQUES[name] for name in ("checkpointing", "sqrt-checkpointing")}
    assert "each bring their own recomputation schedule" in why_not_together(chosen)
