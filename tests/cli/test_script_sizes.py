"""The largest batch and length of a script, against brute force and closed forms."""

from functools import partial

import pytest

from memlab.cli.errors import UsageError
from memlab.cli.script_sizes import Limits, Size, find_limits, no_sizes, sizes_of

# ------------------------------------------------------------------ parameters


def with_names(batch_size=8, *, seq=128):
    pass


def with_other_names(seq_len=256, rate=3e-4, batch=2):
    pass


def with_no_integer(batch=None, seq_len="long", **batch_size):
    pass


def positional(batch=2, /, *seq):
    pass


def without_default(batch, seq_len=8):
    pass


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (with_names, {"batch": Size("batch_size", 8), "length": Size("seq", 128)}),
        (with_other_names, {"batch": Size("batch", 2), "length": Size("seq_len", 256)}),
        (
            partial(with_names, batch_size=4),
            {"batch": Size("batch_size", 4), "length": Size("seq", 128)},
        ),
        (with_no_integer, {}),
        (positional, {}),
        (lambda: None, {}),
        (lambda batch=True: None, {}),
        (lambda batch=0: None, {}),
    ],
)
def test_a_functions_sizes_are_its_parameters_with_integer_defaults(function, sizes):
    assert sizes_of(function, "own.py:build") == sizes


def test_a_parameter_without_a_default_is_one_sentence():
    with pytest.raises(UsageError, match=r"with a parameter batch without a default"):
        sizes_of(without_default, "own.py:build")


# ------------------------------------------------------------------ the search


def limits(bytes_at, budget, batch=8, length=None):
    """Return the limits, and the arguments that were tried."""
    tried = []

    def needed(arguments):
        tried.append(arguments)
        return bytes_at(**{"batch": batch, "length": length or 1, **arguments})

    sizes = {"batch": Size("batch", batch)}
    if length is not None:
        sizes["length"] = Size("length", length)
    known = bytes_at(batch=batch, length=length or 1)
    return find_limits(needed, sizes, known, budget), tried


@pytest.mark.parametrize("budget", [1100, 1200, 1210, 2000, 54_321, 7 * 10**6])
def test_the_largest_batch_is_found_and_a_larger_one_does_not_fit(budget):
    def bytes_at(batch, length):
        return 1000 + 10 * batch

    found, tried = limits(bytes_at, budget)
    brute = max(n for n in range(8, 10**6) if bytes_at(n, 1) <= budget)
    assert found.batch == brute or bytes_at(found.batch, 1) > 0.98 * budget
    assert bytes_at(found.batch, 1) <= budget
    assert found.length is None
    assert len(tried) <= 6


def test_a_length_is_found_in_steps_of_128_where_bytes_grow_with_its_square():
    def bytes_at(batch, length):
        return 10**6 + batch * (1000 * length + 2 * length**2)

    found, _ = limits(bytes_at, 10**8, batch=2, length=100)
    brute = max(n for n in range(100, 10**5, 128) if bytes_at(2, n) <= 10**8)
    assert found.length % 128 == 100
    assert 0.95 * brute <= found.length <= brute
    assert found.remarks == ()


@pytest.mark.parametrize("most", [8, 9, 13, 100, 1000])
def test_where_the_script_fails_is_the_limit_and_is_said(most):
    def bytes_at(batch, length):
        if batch > most:
            raise UsageError(f"own.py:3 raised ValueError: {batch}")
        return 1000 + 10 * batch

    found, tried = limits(bytes_at, 10**6)
    assert found.batch == pytest.approx(most, rel=0.02)
    assert found.batch <= most
    [remark] = found.remarks
    failed = int(remark.rpartition(" ")[2])
    assert failed > most
    assert remark == (
        f"batch up to: the script fails with batch={failed}: own.py:3 raised ValueError: {failed}"
    )
    assert {"batch": failed} in tried


def test_a_failure_beyond_the_memory_is_not_said():
    def bytes_at(batch, length):
        if batch > 100:
            raise UsageError("too many")
        return 1000 + 10 * batch**2

    found, _ = limits(bytes_at, 1000 + 10 * 50**2)
    assert found == Limits(batch=found.batch)
    assert 49 <= found.batch <= 50


def test_a_parameter_without_effect_is_said():
    found, _ = limits(lambda batch, length: 1000, 10**6)
    assert found.batch is None
    assert found.remarks == (
        "batch up to: the bytes do not depend on batch; use it for the inputs",
    )


# ------------------------------------------------------------------ memlab plan --script

SCRIPT = """
import torch

def build({parameters}):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn({inputs}, 256)).square().mean().backward()
        optimizer.step()

    return step, model, optimizer
"""


@pytest.fixture
def planned(memlab_command, tmp_path):
    def run(parameters, inputs, memory="64MiB", *more):
        (tmp_path / "own.py").write_text(SCRIPT.format(parameters=parameters, inputs=inputs))
        given = ("plan", "--script", "own.py:build", "--memory", memory, "--device", "cpu", *more)
        return memlab_command(*given)

    return run


def test_a_plan_has_the_largest_batch_and_length(planned):
    """For each token, four layers keep their inputs of 1 KiB, and the loss needs more."""
    outcome = planned("batch_size=8, seq=128", "batch_size, seq", "64MiB", "--wide")
    assert (outcome.status, outcome.err) == (0, "")
    header, row = (line for line in outcome.out.splitlines() if line[:4] in ("with", "as i"))
    assert header.split()[-6:] == ["batch", "up", "to", "length", "up", "to"]
    batch, length = (int(cell.replace(",", "")) for cell in row.split()[-2:])
    assert length % 128 == 0
    assert abs(batch * 128 - 8 * length) <= 8 * 128  # tokens are tokens
    words = " ".join(outcome.out.split())
    assert "each with the other at its default (batch_size=8, seq=128)" in words
    assert "not predicted" not in words

    within = planned(f"batch={batch}, seq=128", "batch, seq")
    assert "It fits as it is" in within.out
    beyond = planned(f"batch={2 * batch}, seq=128", "batch, seq")
    assert "It fits as it is" not in beyond.out


def test_a_script_without_the_parameters_gets_one_remark(planned):
    outcome = planned("", "1024")
    assert outcome.status == 0
    assert " ".join(outcome.out.split()).count(no_sizes("own.py:build")) == 1
    assert "batch up to" not in outcome.out.split("\n\n")[1]  # the table


def test_a_script_that_does_not_fit_gets_no_limits(planned):
    outcome = planned("batch=1024", "batch", "1500KiB")
    assert outcome.status == 1
    assert "batch up to" not in outcome.out


def test_a_builder_that_fails_for_another_batch_keeps_its_plan(planned):
    outcome = planned("batch=16", "{16: 16}[batch]")
    assert (outcome.status, outcome.err) == (0, "")
    words = " ".join(outcome.out.split())
    assert "batch up to: the script fails with batch=17: own.py:10 raised KeyError: 17" in words
    assert "It fits as it is" in words


@pytest.mark.parametrize("command", ["plan", "measure"])
def test_a_missing_default_is_one_line(command, usage_error, tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT.format(parameters="batch", inputs="batch"))
    memory = ("--memory", "1GiB") if command == "plan" else ()
    said = usage_error(command, "--script", "own.py:build", *memory)
    assert said == (
        "got own.py:build with a parameter batch without a default; give it one, such as batch=8"
    )
