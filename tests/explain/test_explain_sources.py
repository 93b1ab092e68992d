"""The user's source files decide whether gradients were disabled, if they are the ones that ran."""

import os
import warnings

import pytest

from memlab.explain import explain_text
from memlab.explain.source_files import WIDEST_SOURCE

TORCH = "/env/lib/python3.12/site-packages/torch"
LOSS = (f"{TORCH}/nn/functional.py", 3458, "cross_entropy", "return torch._C._nn.cross_entropy(")
MOVING = (f"{TORCH}/nn/modules/module.py", 1340, "to", "return self._apply(convert)")
READ = "no torch.no_grad() around these lines in train.py"
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total "
    "capacity of 14.56 GiB of which 1.18 GiB is free. Including non-PyTorch memory, this process "
    "has 13.38 GiB memory in use. Of the allocated memory 12.87 GiB is allocated by PyTorch, and "
    "253.11 MiB is reserved by PyTorch but unallocated."
)
SCRIPT = """\
import torch

ctx = nullcontext() if device == "cpu" else torch.autocast("cuda")
grads_off = torch.no_grad()

@DECORATOR
def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)  # logits

def evaluate(model, x, y):
    model.eval()
    with AROUND:
        loss = loss_of(model, x, y)
    return loss

def sample(model, x):
    with torch.no_grad():
        return model(x)

def main():
    for x, y in data:
        loss_of(model, x, y).backward()
    evaluate(model, x, y)

main()
"""
FRAMES = (
    ("<module>", "main()"),
    ("main", "evaluate(model, x, y)"),
    ("evaluate", "loss = loss_of(model, x, y)"),
    ("loss_of", "return F.cross_entropy(model(x), y)  # logits"),
)


def script(around="torch.autocast('cuda')", decorator="torch.compile") -> str:
    text = SCRIPT if "grads_off" in around else SCRIPT.replace("grads_off = torch.no_grad()\n", "")
    return text.replace("AROUND", around).replace("DECORATOR", decorator)


def log(file, text: str, frames=FRAMES, inner=LOSS) -> str:
    """Return the log of a script in a file: its traceback has the lines that hold each source."""
    rows = [row.strip() for row in text.split("\n")]
    lines = [(file, rows.index(source) + 1, name, source) for name, source in frames]
    body = [
        f'  File "{path}", line {line}, in {name}\n    {source}'
        for path, line, name, source in (*lines, inner)
    ]
    return "\n".join(["Traceback (most recent call last):", *body, MESSAGE])


@pytest.fixture
def explained(tmp_path):
    """Write a script, and explain the log of its failure."""

    def explain(text: str, frames=FRAMES, *, in_file: str | None = None, inner=LOSS):
        file = tmp_path / "train.py"
        file.write_text(text if in_file is None else in_file)
        return {
            each.cause.name: each for each in explain_text(log(file, text, frames, inner)).findings
        }

    return explain


@pytest.mark.parametrize(
    "around",
    ["torch.autocast('cuda')", "ctx", "torch.inference_mode(False)", "torch.enable_grad()"],
)
def test_an_evaluation_whose_file_disables_nothing_is_the_first_cause(explained, around):
    found = explained(script(around))
    assert list(found)[:2] == ["no-grad", "logits"]
    assert READ in found["no-grad"].evidence


@pytest.mark.parametrize(
    ("around", "decorator"),
    [
        ("torch.no_grad()", "torch.compile"),
        ("torch.set_grad_enabled(mode=False), torch.autocast('cuda')", "torch.compile"),
        ("torch.autocast('cuda')", "torch.no_grad()"),
        ("torch.autocast('cuda')", "torch.inference_mode"),
        ("grads_off", "torch.compile"),
    ],
)
def test_a_block_or_a_decorator_in_the_file_disables_gradients(explained, around, decorator):
    assert "no-grad" not in explained(script(around, decorator))


@pytest.mark.parametrize(
    "around",
    [
        "eval_mode(model)",
        "torch.set_grad_enabled(training)",
        "torch.no_grad() if fast else nullcontext()",
    ],
)
def test_a_context_manager_that_is_not_known_leaves_it_open(explained, around):
    found = explained(script(around))
    assert next(iter(found)) == "logits"
    assert "a with statement would not show" in found["no-grad"].evidence[-1]


def test_a_call_that_disables_gradients_elsewhere_leaves_it_open(explained):
    found = explained(f"{script()}\ntorch.set_grad_enabled(False)\n")
    assert READ not in found["no-grad"].evidence


def test_an_inner_block_that_enables_gradients_counts(explained):
    text = script("torch.no_grad(), torch.enable_grad()")
    assert "no-grad" in explained(text)


@pytest.mark.parametrize("around", ["torch.no_grad()", "torch.autocast('cuda')"])
def test_a_file_that_changed_since_is_not_believed(explained, around):
    """One line of the traceback has another text in the file, so its blocks say nothing."""
    text = script(around)
    found = explained(text, in_file=text.replace("evaluate(model, x, y)\n\nmain", "pass\n\nmain"))
    assert READ not in found["no-grad"].evidence
    assert found["no-grad"].evidence[-1].endswith("and train.py differs from the traceback)")


def test_a_line_in_a_function_of_another_name_is_of_another_file(explained):
    text = script("torch.no_grad()")
    assert "no-grad" in explained(text, in_file=text.replace("def evaluate", "def measure"))


def test_every_file_of_the_traceback_must_be_here(tmp_path):
    text, file = script(), tmp_path / "train.py"
    file.write_text(text)
    absent = log(file, text).replace(f'{file}", line 1', '/home/me/main.py", line 1')
    assert "/home/me/main.py" in absent
    [found] = [each for each in explain_text(absent).findings if each.cause.name == "no-grad"]
    assert READ not in found.evidence


def test_a_traceback_that_begins_in_a_function_hides_its_callers(explained):
    """A program that catches the error and prints it shows no frame above."""
    assert READ not in explained(script(), FRAMES[1:])["no-grad"].evidence


def test_an_evaluation_that_calls_backward_needs_its_gradients(explained):
    text = script().replace("    return loss\n", "    loss.backward()\n    return loss\n")
    found = explained(text)
    assert "no-grad" not in found


def test_an_evaluation_that_loads_a_model_keeps_no_activations_yet(explained):
    text = script()
    text = text.replace("return F.cross_entropy(model(x), y)  # logits", "model.to(device)")
    found = explained(text, (*FRAMES[:3], ("loss_of", "model.to(device)")), inner=MOVING)
    assert next(iter(found)) == "weights"


def test_a_long_line_is_compared_as_far_as_the_traceback_is_read(explained):
    long = f"loss = loss_of(model, x, y)  # {'x' * WIDEST_SOURCE}"
    text = script("torch.no_grad()").replace("loss = loss_of(model, x, y)", long)
    frames = tuple((name, long if name == "evaluate" else source) for name, source in FRAMES)
    assert "no-grad" not in explained(text, frames)


def test_warnings_about_a_script_are_not_shown(explained):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "no-grad" not in explained(f'{script("torch.no_grad()")}\nTEXT = "\\d"\n')


def test_a_path_that_is_no_file_is_not_read():
    text = log(os.devnull, script())
    assert explain_text(text).cause == "logits"
