"""Day 3's checks accept other right answers, and its formula matches the meter."""

from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from edited import each, verdict_on
from torch import nn

import memlab
from memlab.accumulation import accumulate, windows
from memlab.course import days
from memlab.course.checks.day03 import MASKED, trained_bytes
from memlab.course.exercises import OK, WRONG, judge
from memlab.lora import LoRALinear
from memlab.model import PRESETS
from memlab.train import Plugs, Setting, dry_trace

TRAIN_EPOCH, TRAINED_BYTES, LORA, VALIDATE = days.day(3).exercises


def sum_of_losses(logits, targets):
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED, reduction="none"
    )
    return losses.sum(), int((targets != MASKED).sum())


# ------------------------------------------------------------------ other right answers


def by_the_library(model, optimizer, micro_batches, size, max_norm):
    losses = []
    for window in windows(micro_batches, size):
        optimizer.zero_grad()
        loss, _ = accumulate(
            window, lambda part: sum_of_losses(model(part[0]), part[1]), model.parameters()
        )
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def counted_first(model, optimizer, micro_batches, size, max_norm):
    """Counts the tokens before the first backward, and clips by hand."""
    remaining, losses = iter(micro_batches), []
    while window := list(islice(remaining, size)):
        tokens = sum(int((targets != MASKED).sum()) for _, targets in window)
        total = 0.0
        optimizer.zero_grad()
        for x, targets in window:
            loss = sum_of_losses(model(x), targets)[0] / max(tokens, 1)
            loss.backward()
            total += loss.item()
        gradients = [w.grad for w in model.parameters() if w.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        optimizer.step()
        losses.append(total)
    return losses


class Library(LoRALinear):
    """The library's own layer: it freezes nothing, and its merge has another name."""

    def __init__(self, frozen, rank, alpha):
        super().__init__(frozen.requires_grad_(False), rank, alpha)

    def merge(self):
        return self.merged()


class FromTheOtherSide(nn.Module):
    """Scales x, and merges into a new layer."""

    def __init__(self, frozen, rank, alpha):
        super().__init__()
        self.base = frozen
        for weight in frozen.parameters():
            weight.requires_grad = False
        self.by = alpha / rank
        self.down = nn.Parameter(torch.rand(rank, frozen.in_features, dtype=frozen.weight.dtype))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank, dtype=frozen.weight.dtype))

    def forward(self, x):
        return F.linear(F.linear(self.by * x, self.down), self.up) + self.base(x)

    def merge(self):
        weight, bias = self.base.weight, self.base.bias
        merged = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        merged.weight = nn.Parameter((weight + self.by * self.up @ self.down).detach())
        merged.bias = bias
        return merged


@torch.inference_mode()
def inferred(model, held_out):
    modes, total, count = {part: part.training for part in model.modules()}, 0.0, 0
    for tokens, targets in held_out:
        model.eval()
        logits = model(tokens)
        loss, tokens_here = sum_of_losses(logits, targets)
        total, count = total + loss, count + tokens_here
    for part, mode in modes.items():
        part.training = mode
    return float(total / max(count, 1))


@pytest.mark.parametrize(
    ("exercise", "answer", "named"),
    [
        (TRAIN_EPOCH, by_the_library, "calls memlab.accumulation.accumulate"),
        (LORA, Library, "is memlab.lora.LoRALinear"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_the_librarys_version_is_refused_though_its_values_are_right(exercise, answer, named):
    exercise.check(answer)
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert f"{named}, which this exercise rebuilds" in verdict.text


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [(TRAIN_EPOCH, counted_first), (LORA, FromTheOtherSide), (VALIDATE, inferred)],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


def test_measuring_the_bytes_is_refused():
    def metered(config, batch, seq_len, trained):
        trace = memlab.measure(lambda: torch.ones(batch, seq_len))
        return dict.fromkeys(trained_bytes(config, batch, seq_len, trained), trace.peak_bytes)

    verdict = judge(TRAINED_BYTES, metered)
    assert verdict.status == WRONG
    assert "calls memlab.measure, which this exercise rebuilds" in verdict.text


# ------------------------------------------------------------------ edits of the solution

CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
BY_HAND = """grads = [w.grad for w in model.parameters() if w.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm(){}
        for g in grads:
            g.mul_(min(1.0, max_norm / norm))"""
AHEAD = """def ahead(items):
    held = list(itertools.islice(items, 1))
    while held:
        held += itertools.islice(items, 1)
        yield held.pop(0)


def train_epoch("""
SUM = ("losses.append(total / max(count, 1))", "losses.append(float(total / max(count, 1)))")
ZERO = "        optimizer.zero_grad()\n        total, count = 0.0, 0\n"
STEP = "        optimizer.step()\n"
DIVIDE = "        for weight in model"
COUNT = "int((targets != MASKED).sum())"
ONE_ROW = "len(targets) * int((targets[0] != MASKED).sum())"
FROZEN = "return self.frozen(x)"
WITHOUT_GRADIENTS = "with torch.no_grad():\n            y = self.frozen(x)\n        return y"
FREEZE = "self.frozen = frozen.requires_grad_(False)"
COPY = "import copy; self.frozen = copy.deepcopy(frozen).requires_grad_(False)"
CHANGE = "self.frozen(x) + self.scale * (x @ self.down.T @ self.up.T)"
TWO_DIMENSIONS = "torch.addmm(self.frozen(x), x @ self.down.T, self.up.T, alpha=self.scale)"
EVAL = "    model.eval()\n"
BACK = "    for module, training in modes:\n        module.training = training\n"
CHILDREN = "    for part in model.children():\n        part.training = {}\n"
DROPOUT_OFF = "    [m.eval() for m in model.modules() if isinstance(m, nn.Dropout)]\n"
WINDOW = "        for tokens, targets in window:\n"
REFUSED = [
    (
        "3.1",
        "a copy of the weights",
        (WINDOW, f"        old = [w.detach().clone() for w in model.parameters()]\n{WINDOW}"),
    ),
    (
        "3.4",
        "a copy of the model",
        ("    model.eval()\n", "    model = copy.deepcopy(model).eval()\n"),
        ("    modes", "    import copy\n    modes"),
    ),
    (
        "3.4",
        "logits stay alive",
        ("    modes =", "    kept, modes = [],"),
        (
            "            total += loss",
            "            kept.append(flat[0])\n            total += loss",
        ),
    ),
    ("3.4", "a fixed seed", ("    model.eval()\n", "    model.eval(); torch.manual_seed(0)\n")),
    ("3.1", "0 / 0 in the gradients", ("/= max(count, 1)", "/= count")),
    ("3.1", "0 / 0 in the loss", ("(total / max(count, 1))", "(total / count)")),
    (
        "3.1",
        "no step for a window without tokens",
        (DIVIDE, f"        if count == 0:\n            continue\n{DIVIDE}"),
    ),
    ("3.1", "all micro-batches in a list", ("iter(micro_batches)", "iter(list(micro_batches))")),
    ("3.1", "left in eval mode", ("remaining, losses", "model.eval()\n    remaining, losses")),
    (
        "3.1",
        "zero_grad after each step",
        (ZERO, "        total, count = 0.0, 0\n"),
        (STEP, f"{STEP}        optimizer.zero_grad()\n"),
    ),
    (
        "3.1",
        "the next window read before the step",
        ("iter(micro_batches), []", "ahead(iter(micro_batches)), []"),
        ("def train_epoch(", AHEAD),
        (DIVIDE, f"        window = tokens = targets = flat = None\n{DIVIDE}"),
    ),
    ("3.1", "tokens counted in one row", (COUNT, ONE_ROW)),
    (
        "3.1",
        "one parameter group clipped",
        (CLIP, CLIP.replace("model.parameters()", 'optimizer.param_groups[0]["params"]')),
    ),
    (
        "3.1",
        "every tensor clipped alone",
        (CLIP, f"[{CLIP.replace('model.parameters()', '[w]')} for w in model.parameters()]"),
    ),
    ("3.1", "None divided", ("            if weight.grad is not None:\n    ", "")),
    (
        "3.1",
        "a graph kept in a window of one",
        (WINDOW, f"        kept = [model(tokens) for tokens, _ in window[:1]]\n{WINDOW}"),
    ),
    ("3.3", "no graph through W", (FROZEN, WITHOUT_GRADIENTS)),
    ("3.3", "no gradient through W", (FROZEN, "return self.frozen(x.detach())")),
    ("3.3", "no gradient through B A", ("(x @ self.down.T", "(x.detach() @ self.down.T")),
    ("3.3", "two dimensions only", (CHANGE, TWO_DIMENSIONS)),
    ("3.3", "a fixed seed", (FREEZE, f"torch.manual_seed(0)\n        {FREEZE}")),
    ("3.3", "a scale on the class", ("self.scale = alpha", "type(self).scale = alpha")),
    ("3.3", "down in float32", ("(rank, -1)) / rank", "(rank, -1)).float() / rank")),
    ("3.3", "merged in float32", ("return self.frozen\n", "return self.frozen.float()\n")),
    ("3.3", "a copy", (FREEZE, COPY)),
    ("3.3", "constant down", ("torch.randn_like", "torch.ones_like")),
    ("3.4", "tokens counted in one row", (COUNT, ONE_ROW)),
    ("3.4", "grad mode turned on", (BACK, f"{BACK}    torch.set_grad_enabled(True)\n")),
    ("3.4", "all batches in a list", ("in held_out:", "in list(held_out):")),
    ("3.4", "gradients dropped", (BACK, f"{BACK}    model.zero_grad()\n")),
    ("3.4", "all weights made trainable", (BACK, f"{BACK}    model.requires_grad_(True)\n")),
    ("3.4", "one mode for all modules", (BACK, "    model.train(modes[0][1])\n")),
    ("3.4", "0 / 0", ("return total / max(count, 1)", "return total / count")),
    (
        "3.4",
        "the children's mode only",
        (EVAL, CHILDREN.format(False)),
        (BACK, CHILDREN.format(True)),
    ),
    ("3.4", "nn.Dropout alone in eval mode", (EVAL, DROPOUT_OFF)),
]
ACCEPTED = [
    (
        "3.1",
        "log-probabilities, gathered",
        (
            "            flat = model(tokens).flatten(0, 1), targets.flatten()\n",
            "            log_p, mask = model(tokens).log_softmax(-1), targets != MASKED\n"
            "            of_target = log_p.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]\n",
        ),
        (
            'F.cross_entropy(*flat, ignore_index=MASKED, reduction="sum")',
            "-(of_target * mask).sum()",
        ),
    ),
    ("3.1", "clipped by hand", (CLIP, BY_HAND.format(""))),
    ("3.1", "clipped by hand, with 1e-6", (CLIP, BY_HAND.format(" + 1e-6"))),
    (
        "3.1",
        "a sum in float32",
        ("total, count = 0.0, 0", "total, count = torch.tensor(0.0), 0"),
        SUM,
    ),
]


@each(REFUSED)
def test_a_wrong_answer_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_a_right_answer_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ messages

SAID = [
    (
        "3.1",
        "old gradients",
        (ZERO, "        total, count = 0.0, 0\n"),
        "They depend on gradients from before the epoch: clear these first.",
    ),
    (
        "3.1",
        "the length of the step",
        ("weight.grad /= max(count, 1)", "weight.grad /= max(2 * count, 1)"),
        "The update has the right direction and 0.5 times the right length.",
    ),
    (
        "3.2",
        "the loss",
        ("per_token + 1)", "per_token + batch)"),
        "That is 1 element in total too many.",
    ),
    ("3.2", "a head", ("+ config.heads +", "+ config.kv_heads +"), "6 elements per token too few."),
    ("3.3", "the scale", ("alpha / rank", "alpha * rank"), "gives W x + 4 · B A x; wanted 1 ·"),
    (
        "3.3",
        "no graph",
        ("return self.frozen(x) +", "with torch.no_grad():\n            return self.frozen(x) +"),
        "without a graph",
    ),
    (
        "3.4",
        "dropout",
        ("model.eval()", "model.training = False"),
        "A second call gives another result, so dropout is on.",
    ),
]


@pytest.mark.parametrize("row", SAID, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_message_says_how_the_answer_is_off(row, tmp_path):
    id_, _, edit, words = row
    assert words in verdict_on((id_, (edit,)), tmp_path).text


# ------------------------------------------------------------------ compared with the meter


def frozen_but(trained):
    def change(model):
        model.requires_grad_(False)
        for place in trained:
            model.blocks[place].requires_grad_(True)

    return Plugs(change_model=change)


@pytest.mark.parametrize(
    "trained", [range(1), range(2), range(1, 3), range(2, 4), range(4)], ids=str
)
def test_the_formula_of_a_partly_frozen_step_matches_the_meter(trained):
    trace = dry_trace(Setting("tiny", batch=8, seq_len=64), frozen_but(trained))
    wanted = trained_bytes(PRESETS["tiny"], 8, 64, trained)
    assert trace.peak_phase == "backward"
    assert {
        "gradients": trace.at_end["gradients"],
        "optimizer_state": trace.at_end["optimizer_state"],
        "activations": trace.at_peak["activations"],
    } == wanted
