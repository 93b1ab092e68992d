"""An evaluation is recognized where the peak is in it, and only there."""

from textwrap import dedent

import pytest

from memlab.scripts.changes import CHANGES, changes_for
from memlab.scripts.launch import launch_of
from memlab.scripts.running import run

SCRIPT = """
    import torch
    from torch import nn

    def built(trained=True):
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*layers).requires_grad_(trained)

    model, teacher = built(), built(trained=False).eval()
    optimizer = torch.optim.SGD(model.parameters())

    def train(batch):
        model(torch.randn(batch, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(batch, gradients):
        model.eval()
        with torch.set_grad_enabled(gradients):
            loss = model(torch.randn(batch, 64)).sum()
        model.train()

    for _ in range(3):
        TRAINING
    """


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Return the outcome of a dry run of the script with these steps."""
    monkeypatch.chdir(tmp_path)

    def outcome(training, change=None):
        (tmp_path / "train.py").write_text(dedent(SCRIPT.replace("TRAINING", training)))
        return run(launch_of(["train.py"]), device="cpu", change=change)

    return outcome


@pytest.mark.few(1)
@pytest.mark.parametrize("gradients", [True, False])
def test_the_peak_is_in_the_evaluation(outcome, gradients):
    found = outcome(f"train(64); evaluate(4096, {gradients})")
    evaluation = found.evaluation
    assert (evaluation.model, evaluation.gradients) == ("Sequential", gradients)
    assert evaluation.peak_bytes == found.trace.peak_bytes


def test_a_small_evaluation_has_its_own_peak(outcome):
    """At its peak it holds the weights, its input, and the output of a layer and the next."""
    found = outcome("train(4096); evaluate(64, False)")
    weights = 8 * (64 * 64 + 64) * 4
    assert found.evaluation.peak_bytes == 2 * weights + 3 * 64 * 64 * 4
    assert found.trace.peak_bytes > 8 * 4096 * 64 * 4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "training",
    [
        "model.eval(); train(4096)",  # as fine-tuning of frozen BatchNorm does
        "train(64); teacher(torch.randn(65536, 64)); model(torch.randn(64, 64))",
    ],
)
def test_this_is_not_an_evaluation(outcome, training):
    assert outcome(training).evaluation is None


def test_no_grad_from_outside_has_the_peak_of_the_scripts_own(outcome):
    plain = outcome("train(64); evaluate(4096, True)")
    change = changes_for("cpu", plain.trace, (), plain.evaluation)[-1]
    assert change.name == "no_grad in evaluation"
    changed = outcome("train(64); evaluate(4096, True)", change).trace.peak_bytes
    assert changed == outcome("train(64); evaluate(4096, False)").trace.peak_bytes
    assert changed < plain.trace.peak_bytes / 2


@pytest.mark.slow
def test_no_grad_is_not_tried_without_such_an_evaluation(outcome):
    others = ("train(64); evaluate(4096, False)", "train(64)", "train(4096); evaluate(64, True)")
    for training in others:
        plain = outcome(training)
        tried = changes_for("cpu", plain.trace, plain.models, plain.evaluation)
        assert 0 < len(tried) < len(CHANGES)
        assert "no_grad in evaluation" not in [change.name for change in tried]


def test_a_compiled_model_is_one_graph_and_its_evaluation_is_found(outcome):
    compiled = "model = model if hasattr(model, '_orig_mod') else torch.compile(model); "
    found = outcome(f"{compiled}train(64); evaluate(4096, False)")
    [note] = found.trace.notes
    assert "(3 graphs" in note  # forward, backward and the evaluation
    assert found.evaluation.peak_bytes == found.trace.peak_bytes
