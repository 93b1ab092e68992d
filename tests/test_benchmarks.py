"""Tests of benchmarks/meter.py: wrong meters, wrong dry runs and slow ones show up."""

import io
import json
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from benchmark_scripts import script
from quick import quick
from rich.progress import Progress
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memlab.dry_runs import fake_tensors
from memlab.metering import folding, storages
from memlab.metering.storages import StorageMeter

ROOT = Path(__file__).parents[1]


common, meter = script("common"), script("meter")
plans, observers, tallies, exactness, dry_runs, costs = (
    script(f"meter_sections.{name}")
    for name in ("plans", "observers", "tallies", "exactness", "dry_runs", "costs")
)
KINDS = common.kinds_of_steps().KINDS


# ------------------------------------------------------------------ exactness


def two_tensors() -> tuple:
    """Build a step with 400 B of weights and 80 B of input that allocates 800 B, then 200 B."""
    model, x = nn.Linear(10, 10, bias=False), torch.zeros(20)

    def step() -> None:
        first = torch.zeros(200)
        second = x[:1] + torch.zeros(50)
        del first, second

    return step, model, None


def test_the_reference_counts_every_live_byte():
    zeros_operand = 200
    assert observers.reference_of(two_tensors).peak_bytes == 400 + 80 + 800 + 200 + zeros_operand


@pytest.mark.slow
def test_only_memlab_is_exact_if_a_dispatch_mode_changes_the_peak():
    row = exactness.exactness_of("fan_out", KINDS["fan_out"])
    assert row.right == "memlab"
    assert row.mem_tracker == row.watched > 0


def test_a_meter_without_the_correction_is_reported_as_inexact(monkeypatch):
    monkeypatch.setattr(folding, "is_in_place_without_mode", lambda *arguments: False)
    row = exactness.exactness_of("fan_out", KINDS["fan_out"])
    assert row.memlab == row.watched
    assert row.missing > 0
    assert "memlab's peak is exact to the byte in 0 (worst +4.008 %)" in (
        exactness.exactness_sentence([row])
    )


def test_a_meter_that_misses_an_allocation_is_reported_as_inexact(monkeypatch):
    see_all = storages.StorageMeter._record_birth

    def see_all_but_one(self, *arguments):
        monkeypatch.setattr(storages.StorageMeter, "_record_birth", see_all)
        storage = see_all(self, *arguments)
        self._stream._counted.discard(storage.number)
        return storage

    monkeypatch.setattr(storages.StorageMeter, "_record_birth", see_all_but_one)
    assert exactness.exactness_of("two tensors", two_tensors).unseen == 1


@pytest.mark.slow
def test_mem_tracker_runs_again_with_resets_if_it_refuses_a_second_call():
    answer = observers.tracked(KINDS["lbfgs"], observers.reference_of(KINDS["lbfgs"]).peak_bytes)
    assert answer == observers.MemTrackerAnswer(0, needs_resets=True)


def test_a_refusal_is_explained_and_is_no_answer():
    answer = observers.tracked(KINDS["recommender_sparse_gradients"], reference_bytes=1)
    assert answer.figure == "sparse tensors"
    assert tallies.tally([(answer.figure, 1)]).answers == 0


def test_an_unknown_error_is_explained_by_its_first_line():
    assert observers.explanation_of(OSError("no room\nat all")) == "OSError: no room"


def test_scratch_at_the_peak_has_its_operator():
    names = exactness.scratch_at_peak(observers.reference_of(KINDS["linear_algebra"]).recording)
    assert next(iter(names)) == "aten::_trilinear"


def test_a_tally_counts_exact_close_and_worst():
    figures = [(0, 1000), (-1, 10_000), (30, 1000), (-50, 1000), ("refuses", 1000)]
    assert tallies.tally(figures) == tallies.Tally(answers=4, exact=1, close=2, worst=-0.05)


def test_kinds_with_the_same_reason_are_grouped():
    lines = tallies.grouped("memlab", {"a": "why", "b": "else", "c": "why"})
    assert lines == ["memlab on a, c: why", "memlab on b: else"]


# ------------------------------------------------------------------ dry runs


@pytest.mark.slow
def test_an_equal_dry_run_is_reported_as_equal():
    row = dry_runs.dry_run_of("unet", KINDS["unet"])
    assert (row.memlab, row.equal_events, row.unlike) == (0, True, [])


def test_a_dry_run_with_a_smaller_storage_is_reported_with_its_operator(monkeypatch):
    monkeypatch.setattr(fake_tensors, "enlarge", lambda *arguments: None)
    row = dry_runs.dry_run_of("autoencoder", KINDS["autoencoder"])
    assert row.memlab == row.mem_tracker < 0
    assert not row.equal_events
    assert row.unlike == ["aten.mse_loss.default"]


# ------------------------------------------------------------------ cost


def costs_of(**seconds: list[float]) -> object:
    names = {
        "bare": "bare fake tensors",
        "dry": "dry run, measured",
        "lines": "measured, with lines",
    }
    names["tracker"] = "MemTracker, fake tensors"
    names["two_steps"], names["predicted"] = costs.WHOLE
    named = {names.get(name, name): values for name, values in seconds.items()}
    once = dict.fromkeys(named, 6.0)
    return costs.RunCosts(named, construction_seconds=once, peak_bytes=dict.fromkeys(named, 2**30))


def test_goals_are_compared_with_the_median_ratio():
    lines = costs.cost_lines(
        real=costs_of(plain=[1.0, 2.0, 4.0], measured=[1.1, 2.2, 8.0], lines=[2.0, 4.0, 8.0]),
        dry=costs_of(bare=[1.0, 1.0, 1.0], dry=[1.2, 1.4, 1.5]),
        theirs=costs_of(bare=[1.0], tracker=[12.0]),
        whole=costs_of(two_steps=[1.0, 1.0, 2.0], predicted=[1.2, 1.3, 4.0]),
        torch_bytes=2**30 - 2**28,
    )
    verdicts = {name: line.cells()[-1] for name, line in lines.items()}
    assert {name for name in verdicts if verdicts[name] == "met"} == {
        "measured",  # 1.1 of 1.15
        "dry_seconds",
        "memory",  # 0.25 GiB of 0.5
        "predicted",  # 1.3 of 1.3
    }
    assert {name for name in verdicts if verdicts[name] == "missed"} == {"dry", "construction"}


OBSERVERS = {  # the innermost mode while a step is timed
    "plain": None,
    "measured": StorageMeter,
    "measured, with lines": StorageMeter,
    "bare fake tensors": FakeTensorMode,
    "dry run, measured": StorageMeter,
    "MemTracker, fake tensors": MemTracker,
}


@pytest.mark.parametrize("name", quick(list(costs.RUNS)[:1], costs.RUNS))
def test_a_served_run_warms_up_plainly_and_steps_once_per_line(name, monkeypatch, capsys):
    observers = []

    def model(size: object) -> tuple:
        return (lambda: observers.append(_get_current_dispatch_mode())), nn.Linear(1, 1), None

    monkeypatch.setattr(costs, "language_model", model)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    costs.serve(name, plans.QUICK.dry)
    first, *timed = observers
    assert not isinstance(first, (StorageMeter, MemTracker))
    assert [mode and type(mode) for mode in timed] == [OBSERVERS[name]] * 2
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.parametrize("name", costs.WHOLE)
def test_a_whole_run_builds_and_takes_two_steps(name, monkeypatch, capsys):
    done = []

    def model(size: object) -> tuple:
        done.append("built")
        return (lambda: done.append("step")), None, None

    monkeypatch.setattr(costs, "language_model", model)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    costs.serve(name, plans.QUICK.dry)
    assert done == ["built", "step", "step"] * 2
    assert len(capsys.readouterr().out.split()) == 2


def test_a_served_run_answers_with_seconds(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    monkeypatch.setattr(costs.time, "perf_counter", count().__next__)  # one second between calls
    costs.serve("plain", plans.QUICK.real)
    assert capsys.readouterr().out.split() == ["1", "1"]


def test_runs_take_turns_in_reverse_every_other_round():
    order = []
    runs = {name: (lambda name=name: order.append(name) or 1.0) for name in "ab"}
    assert common.side_by_side(runs, range(3)) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_a_ratio_is_taken_within_each_round():
    assert common.ratios([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == (2.5, 3.0, 3.5)


def test_quartiles_of_a_single_round():
    assert common.spread([2.0]) == (2.0, 2.0, 2.0)


def test_a_runner_answers_when_ready_and_after_each_run():
    program = "for number in range(3): print(number, flush=True); input()"
    with common.Runner("-c", program) as runner:
        assert [runner.answer(), runner.run(), runner.run()] == [0, 1, 2]


def test_a_runner_that_exits_early_raises():
    with (
        common.Runner("-c", "pass") as runner,
        pytest.raises(RuntimeError, match="without an answer"),
    ):
        runner.answer()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_runners_memory_includes_its_allocations():
    program = "taken = bytearray(2**26); print(0, flush=True); input()"
    with common.Runner("-c", program) as runner:
        runner.answer()
        assert runner.bytes_now() >= 2**26
        assert runner.peak_bytes >= 2**26


# ------------------------------------------------------------------ results and the command


def test_saving_a_section_keeps_the_others(tmp_path):
    common.save(tmp_path, "meter", "cost", {"lines": 1})
    common.save(tmp_path, "savings", "techniques", {"lines": 2})
    path = common.save(tmp_path, "meter", "exactness", {"lines": 3})
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["meter"]["cost"]["lines"] == 1
    assert results["savings"]["techniques"]["lines"] == 2
    assert results["meter"]["exactness"]["lines"] == 3


def test_results_include_device_versions_and_date(tmp_path):
    path = common.save(tmp_path, "meter", "cost", {})
    section = json.loads(path.read_text(encoding="utf-8"))["meter"]["cost"]
    assert section.keys() >= {"device", "torch", "python", "memlab", "date"}


def test_results_contain_no_host_name():
    assert socket.gethostname() not in common.machine() + common.heading("")


def test_an_interrupted_write_keeps_the_old_results(tmp_path, monkeypatch):
    path = common.save(tmp_path, "meter", "cost", {"lines": 1})
    before = path.read_text(encoding="utf-8")

    def stop(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text.encode()[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        common.save(tmp_path, "meter", "cost", {"lines": 2})
    assert path.read_text(encoding="utf-8") == before
    assert [path] == list(tmp_path.iterdir())


def test_finished_sections_are_written_if_a_later_one_is_interrupted(tmp_path):
    def stop(plan: object, bar: Progress) -> None:
        raise KeyboardInterrupt

    done = common.SectionReport("a sentence", "a table", {"rows": []})
    sections = {"exactness": lambda plan, bar: done, "cost": stop}
    with pytest.raises(KeyboardInterrupt):
        dict(common.reports("meter", sections, sections, plans.QUICK, tmp_path))
    (path,) = tmp_path.iterdir()
    assert set(json.loads(path.read_text(encoding="utf-8"))["meter"]) == {"exactness"}


def test_ctrl_c_is_one_line_on_standard_error(monkeypatch, capsys):
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(meter, "reports", stop)
    monkeypatch.setattr(sys, "argv", ["meter.py"])
    assert meter.main() == 130
    assert capsys.readouterr() == ("", "stopped; finished sections are written\n")


@pytest.mark.slow
def test_the_command_prints_a_summary_and_a_table():
    command = [sys.executable, "benchmarks/meter.py", "--quick", "--section", "dry-run"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    heading, _, summary, *_ = run.stdout.splitlines()
    assert heading.startswith("# The meter: CPU")
    assert f"torch {torch.__version__}" in heading
    assert summary.startswith("A dry run has the same events as the real step")
    for kind in plans.chosen_kinds(plans.QUICK):
        assert f"\n| {kind} |" in run.stdout
