"""The optimizer benchmark's results are right: drift, long steps and bytes."""

import json

import pytest
import torch
from benchmark_scripts import script
from quick import slow

from memlab.optim import AdamW

benchmark = script("optim")

PLAN = benchmark.OptimizerSizes(
    timed=2**13,
    followed=2**13,
    steps=3,
    spreads=(1.0,),
    idle_steps=5,
    rounds=1,
    threads=(1,),
    width=32,
    rank=4,
)
TORCHS = benchmark.CONTENDERS[benchmark.LOOP]


def bytes_of(contender):
    return benchmark.bytes_of(contender.build, benchmark.timed_weight(PLAN))


class Wild(AdamW):
    """Moves one weight ten times too far in every step, even without a gradient."""

    def update_(self, weight, gradient, *moments, step, group):
        super().update_(weight, gradient, *moments, step=step, group=group)
        weight[0] += 10 * group["lr"]


WILD = benchmark.of_ours(Wild)


def test_torchs_adamw_does_not_drift_from_itself():
    assert benchmark.drift(TORCHS, PLAN) == 0
    assert benchmark.idle_movement(TORCHS, PLAN) == 0


def test_a_wrong_weight_shows_up_in_each_column():
    """30 · lr after three steps, relative to a distance of about √8192 · 3 · lr / 2."""
    assert 0.1 < benchmark.drift(WILD, PLAN) < 0.3
    assert 9 < benchmark.longest_steps(WILD, PLAN)[1.0] < 11.1
    assert benchmark.idle_movement(WILD, PLAN) == pytest.approx(50, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        (benchmark.LOOP, 8 + 4 / 2**13),
        ("memlab AdamW", 8),
        ("memlab Adam8bit", 2 + 8 / 256 + 2048 / 2**13),
        slow(("memlab Lion8bit", 1 + 4 / 256 + 1024 / 2**13)),
        slow(("memlab AdamMini", 4 + 4 / 1024)),
    ],
)
def test_state_is_in_bytes_per_weight(name, state):
    assert bytes_of(benchmark.CONTENDERS[name])["state"] == state


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("Muon", 32 * 32),
        ("GaLore", 4 * (32 + 2 * 32)),
        slow(("GaLore, with SVD", 4 * (32 + 2 * 32))),
        ("APOLLO", 2 * 4 * 32 + 1),
        ("Shampoo", 2 * 32 * 32),
        ("SOAP", 6 * 32 * 32),
        slow(("SOAP, with QR", 6 * 32 * 32)),
    ],
)
def test_the_state_of_a_matrix_has_the_elements_that_day_20_counts(name, elements):
    """Float32 elements of a square matrix of 32, with rank 4."""
    build, weight = benchmark.of_a_matrix(PLAN)[name], benchmark.with_gradient(32, 32)
    assert benchmark.bytes_of(build, weight)["state"] * weight.numel() == 4 * elements


@pytest.mark.parametrize(("name", "calls"), [("GaLore", "svd"), ("SOAP", "qr")])
def test_only_a_row_that_says_so_decomposes_after_the_first_step(name, calls, monkeypatch):
    counted = []
    decompose = getattr(torch.linalg, calls)

    def counting(*arguments, **settings):
        counted.append(calls)
        return decompose(*arguments, **settings)

    monkeypatch.setattr(torch.linalg, calls, counting)
    builds, found = benchmark.of_a_matrix(PLAN), {}
    for row in (name, f"{name}, with {calls.upper()}"):
        optimizer = benchmark.ready(builds[row], benchmark.with_gradient(32, 32))
        counted.clear()
        optimizer.step()
        found[row] = len(counted)
    assert found[name] == 0
    assert found[f"{name}, with {calls.upper()}"] > 0


def test_temporaries_are_adamws_square_root():
    """Python scalars briefly become tensors too."""
    root = 4 * PLAN.timed
    found = bytes_of(benchmark.CONTENDERS["memlab AdamW"])["on the way"]
    assert root <= found < root + 64


def test_a_tensor_subclass_counts_its_inner_tensors():
    contender = benchmark.CONTENDERS["torchao AdamW8bit"]
    if not contender.is_installed:
        pytest.skip("torchao is not installed")
    with torch.compiler.set_stance("force_eager"):
        found = bytes_of(contender)["state"]
    assert found == 2 + 8 / 256 + (2048 + 4) / 2**13


def test_numbers_are_short_and_zero_is_exact():
    numbers = (0.0, 0.02195, 1.234567, 99.9999, 123456.7, float("nan"))
    words = ["0", "0.022", "1.23", "100", "1.2e+05", "nan"]
    assert [benchmark.short(number) for number in numbers] == words


def test_absent_packages_are_named(monkeypatch):
    absent = benchmark.TestedOptimizer(TORCHS.build, package="no_such_package")
    monkeypatch.setattr(benchmark, "CONTENDERS", {**benchmark.CONTENDERS, "another": absent})
    (sentence,) = (
        s for s in benchmark.sentences({}) if s.startswith("Not installed, and left out")
    )
    assert "no_such_package" in sentence


@pytest.mark.slow
def test_it_prints_and_writes_a_line_for_each(tmp_path, monkeypatch, capsys):
    ours = {
        name: each
        for name, each in benchmark.CONTENDERS.items()
        if each.package in ("torch", "bitsandbytes") or name == "torchao AdamW8bit"
    }
    without_torchao = benchmark.TestedOptimizer(TORCHS.build, package="no_such_package")
    monkeypatch.setattr(benchmark, "CONTENDERS", {**ours, "torchao AdamW8bit": without_torchao})
    assert benchmark.main(["--results", str(tmp_path)], PLAN) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Optimizers: CPU")
    assert f"\n| {benchmark.LOOP} | 8.000 | 0 |" in printed
    assert "| 1.00 (1.00–1.00) |" in printed
    assert "Not installed, and left out: no_such_package." in printed
    [results] = tmp_path.glob("*.json")
    sections = json.loads(results.read_text(encoding="utf-8"))["optim"]
    for name, builds in (("optimizers", ours), ("matrices", benchmark.of_a_matrix(PLAN))):
        found = sections[name]
        assert found["rows"].keys() == found["times"]["1"].keys()
        assert found["rows"].keys() == set(builds) - {"torchao AdamW8bit"}
        assert found["times"]["1"][benchmark.LOOP] == 1.0
    for name in benchmark.of_a_matrix(PLAN):
        assert f"\n| {name} | {sections['matrices']['rows'][name]['state']:.3f} |" in printed
