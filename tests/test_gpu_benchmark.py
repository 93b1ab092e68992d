"""Tests of benchmarks/gpu.py without a GPU: recorded steps, timings, saved files and processes."""

import gzip
import importlib.machinery
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_scripts import script
from quick import quick

from memlab.allocator import Allocator, Settings, recording, replay
from memlab.attention.package_interface import flash_attn_func
from memlab.course.elsewhere import stored_on_a_gpu, time_on_a_gpu
from memlab.prediction.cuda import EVERYTHING_NOTE

ROOT = Path(__file__).parents[1]
MIB, GIB = 2**20, 2**30
CIRCUMSTANCES = ("device", "torch", "python", "memlab", "date")

gpu = script("gpu")
own, measurements, predictions = (
    script(f"evidence_steps.{name}") for name in ("own", "measurements", "predictions")
)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    """Keep the repository's results out of reach."""
    for folder in ("RESULTS", "EVIDENCE", "RECORDINGS"):
        monkeypatch.setattr(gpu, folder, tmp_path / folder)


@pytest.fixture
def only(monkeypatch):
    """Return a function that leaves some jobs of one section."""

    def leave(section, *jobs, **changes):
        kept = replace(gpu.SECTIONS[section], jobs=jobs, **changes)
        monkeypatch.setattr(gpu, "SECTIONS", {section: kept})

    return leave


def run(*words) -> int:
    return gpu.main([str(word) for word in words])


def saved(folder: Path) -> dict:
    return json.loads((folder / "rehearsal.json").read_text(encoding="utf-8"))["gpu"]


# ------------------------------------------------------------------ steps


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(list(own.STEPS)[::16], own.STEPS))
def test_a_step_is_predicted_and_creates_everything_on_the_gpu(name):
    trace = own.predicted(name, own.SMALL, "cuda:hopper")
    assert EVERYTHING_NOTE not in trace.notes
    assert trace.at_peak["parameters"] > 0
    assert trace.peak_phase != "before"


def test_every_recorded_step_can_be_built_again():
    recorded = [m.facts[1]["configuration"] for m in measurements.own_steps()]
    assert len(recorded) > 90
    assert set(recorded) <= own.STEPS.keys()


def test_rows_are_what_the_evidence_reads(tmp_path, monkeypatch):
    for section, job in (("steps-perceptron", "AdamW, fused"), ("steps-transformers", "no_grad")):
        with monkeypatch.context() as context:
            context.setattr(gpu, "SECTIONS", {section: replace(gpu.SECTIONS[section], jobs=(job,))})
            assert run("--out", tmp_path) == 0
    monkeypatch.setattr(measurements, "EVIDENCE", tmp_path)
    fused, no_grad = measurements.own_steps()
    assert (fused.name, no_grad.name) == ("AdamW, fused, rehearsal", "no_grad, rehearsal")
    assert (fused.kind, no_grad.kind) == ("own perceptron", "own transformers")
    for measured in (fused, no_grad):
        row = predictions.predicted(measured)
        assert row.reserved_bytes == measured.reserved_bytes > 0
        assert row.allocated_bytes == measured.allocated_bytes > 0


@pytest.mark.parametrize(("torch_version", "left"), [("2.13", ["a", "b"]), ("2.14", ["b"])])
def test_steps_of_an_earlier_run_stay_if_the_versions_agree(tmp_path, capsys, torch_version, left):
    source = {"gpu": "X", "target": "cuda", "small": False, "torch": "2.13"}
    rows = [{"configuration": n, "allocated_bytes": 5, "reserved_bytes": 7} for n in ("a", "b")]
    measurements.put_own_steps(tmp_path, "x", source, rows[:1])
    path = measurements.put_own_steps(tmp_path, "x", {**source, "torch": torch_version}, rows[1:])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [run["configuration"] for run in found["runs"]] == left
    assert found["source"]["torch"] == torch_version
    assert ("own-x.json is written anew" in capsys.readouterr().err) == (left == ["b"])


# ------------------------------------------------------------------ recording


class FakeCuda:
    """Stands in for torch.cuda, with the simulated allocator."""

    def __init__(self) -> None:
        self.allocator = Allocator(Settings(), keeps_history=True)
        self.memory = self
        self.calls: list[str] = []

    def is_available(self) -> bool:
        return True

    def init(self) -> None:
        self.calls.append("init")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def _record_memory_history(self, enabled, context="all") -> None:
        self.calls.append(f"record {enabled} {context}")

    def _snapshot(self) -> dict:
        found = recording(self.allocator)
        entries = [{**e, "frames": [], "time_us": 0} for e in found["events"]]
        entries.insert(1, {"action": "snapshot", "size": 0, "stream": 0})
        segments = [{**s, "device": 0, "frames": []} for s in found["segments_at_end"]]
        segments.append({**segments[0], "device": 1, "address": 2**40})  # on another GPU
        return {"device_traces": [entries], "segments": segments}

    def reset_peak_memory_stats(self) -> None:
        self.allocator.allocated_peak_bytes = self.allocator.allocated_bytes

    def max_memory_reserved(self) -> int:
        return self.allocator.reserved_peak_bytes

    def memory_stats(self) -> dict:
        return {
            "allocated_bytes.all.peak": self.allocator.allocated_peak_bytes,
            "reserved_bytes.all.peak": self.allocator.reserved_bytes,
        }

    def build(self, size):
        """Allocate 3 MiB of weights; the first step takes 30 MiB for a while, the second 4 MiB."""
        sizes = iter((30 * MIB, 4 * MIB))
        self.allocator.malloc(3 * MIB)

        def step() -> None:
            self.allocator.free(self.allocator.malloc(next(sizes)))
            self.allocator.empty_cache()

        return step, None, None


@pytest.fixture
def recorded(monkeypatch):
    """Return the facts of a recorded step, and the fake GPU."""
    card = FakeCuda()
    monkeypatch.setattr(gpu.torch, "cuda", card)
    monkeypatch.setitem(gpu.STEPS, "a step", card.build)
    return gpu.record("a step", small=True), card


def test_the_figures_are_of_the_second_step_and_the_reserved_memory_of_both(recorded):
    found, card = recorded
    assert card.calls[:3] == ["init", "synchronize", "record all None"]  # without stacks
    assert card.calls[-1] == "record None all"
    assert found["allocated_bytes"] == 7 * MIB
    assert found["reserved_bytes"] == 50 * MIB


def test_a_saved_history_is_replayed_from_an_empty_gpu(recorded, tmp_path):
    history = recorded[0]["history"]
    measured = gpu.Device({"device": "GPU X", "total_bytes": GIB}, True, tmp_path, keeps=True)
    for name in ("first", "second"):
        measured.save_history({**history, "name": name})
    first, second = stored_histories(tmp_path / "gpu-x.jsonl.gz").values()
    assert set(first["events"][0]) == {"action", "addr", "size", "stream"}
    assert len(first["segments_at_end"]) == 1  # without the other GPU's
    of_step = second["events"][second["step_at"] :]
    assert [(e["action"], e["size"]) for e in of_step if e["action"] == "alloc"] == [
        ("alloc", 4 * MIB)
    ]
    assert replayed(second).exact


def stored_histories(path: Path) -> dict[str, dict]:
    """Return the recordings of an archive by name; the later of two with one name counts."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {found["name"]: found for found in map(json.loads, lines)}


def replayed(found: dict):
    """Replay a recording with its own settings and limit."""
    total, cap = found["facts"]["total_bytes"], found["cap_bytes"]
    if cap is None:
        return replay(found, Settings.parse(found["conf"]))
    settings = Settings.parse(found["conf"], capacity_bytes=total)
    return replay(found, replace(settings, memory_fraction=math.nextafter(cap / total, 1.0)))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "recordings").glob("*.jsonl.gz")), ids=lambda path: path.name
)
def test_recorded_histories_are_replayed_exactly(path):
    found = stored_histories(path)
    assert len(found) > 100
    for name, kept in found.items():
        result = replayed(kept)
        assert result.exact, (name, result.misses[:3])
        assert result.reserved_bytes == kept["reserved_peak_bytes"], name


# ------------------------------------------------------------------ timings


def test_a_ratio_is_the_median_of_the_rounds_after_three_warm_ups(monkeypatch):
    calls = []
    rounds = [(3.0, 2.0), (9.0, 1.0), (1.0, 2.0)]
    monkeypatch.setattr(gpu, "time_in_turn", lambda ours, theirs: rounds)
    assert gpu.ratio(lambda: calls.append("a"), lambda: calls.append("b")) == 1.5
    assert calls == ["a"] * 3 + ["b"] * 3


def test_lessons_show_the_times_and_the_averages(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ratio", lambda ours, theirs: (ours(), theirs()) and 1.25)
    for section in ("time", "ema"):
        with monkeypatch.context() as context:
            context.setattr(gpu, "SECTIONS", {section: gpu.SECTIONS[section]})
            assert run("--out", tmp_path) == 0
    for technique in ("bfloat16", "adam8bit", "empty_cache"):
        assert time_on_a_gpu(technique, tmp_path) == "measured: 1.25 × on rehearsal"
    shown = stored_on_a_gpu("ema", tmp_path)
    assert "  on the GPU, averages: 450.25 KiB\n" in shown
    assert "  on the disk, time of step and update / step: 1.25" in shown


def test_tf32_is_on_only_inside_its_step():
    seen = []
    gpu.in_tf32(lambda: seen.append(torch.get_float32_matmul_precision()))
    assert seen == ["high"]
    with pytest.raises(ZeroDivisionError):
        gpu.in_tf32(lambda: 1 / 0)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_cache_is_cleared_after_the_step():
    calls = []
    gpu.then(lambda: calls.append("clear"), lambda: calls.append("step"))
    assert calls == ["step", "clear"]


@pytest.mark.parametrize("name", ["AdamW, foreach", "AdamW, fused"])
def test_adam8bit_has_a_byte_for_each_moment_and_a_scale_for_each_block(name):
    found = gpu.time_of_optimizer(name, small=True)
    assert found[f"{name}, state_bytes"] == 8 * 2**14
    assert 2 * 2**14 < found["Adam8bit, state_bytes"] < 2.2 * 2**14


@pytest.mark.parametrize("name", gpu.ATTENTION)
def test_the_flash_attn_package_is_called_with_memlabs_arguments(name, monkeypatch):
    assert gpu.time_of_attention(name, small=True)["flash-attn"] == "not installed"
    package = ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    found = gpu.time_of_attention(name, small=True)
    assert found[f"{name}, flash-attn, error"] == found[f"{name}, memlab, error"] < 2**-7
    assert found[f"{name}, time / flash-attn"] > 0


def test_a_wrong_attention_has_a_large_error(monkeypatch):
    monkeypatch.setattr(gpu, "flash_attn_func", lambda q, k, v, **options: v + 0 * (q + k))
    assert gpu.time_of_attention("causal", small=True)["causal, memlab, error"] > 0.1


def test_each_fp8_job_calls_fp8_and_bfloat16(monkeypatch):
    calls = []
    monkeypatch.setattr(gpu, "ratio", lambda *both: calls.append(both) or 2.0)
    for name in gpu.SECTIONS["fp8"].jobs:
        assert gpu.time_of_fp8(name, small=True)[f"{name}, time / bf16"] == 2.0
    (ours, theirs), *of_layers = calls
    exact = theirs().float()
    assert 0 < (ours().float() - exact).norm() / exact.norm() < 0.06  # of E4M3's rounding
    for ours, theirs in of_layers:
        ours(), theirs()
        fp8, bf16 = (call.args[0][0] for call in (ours, theirs))
        assert 0 < (fp8.weight.grad - bf16.weight.grad).norm() / bf16.weight.grad.norm() < 0.2


# ------------------------------------------------------------------ sections


def test_other_jobs_run_after_one_fails(only, tmp_path, capsys):
    def measure(name, small):
        return {"what": "it", name: {"a": 1.0}.get(name) or 1 / 0}

    only("time", "broken", "a", measure=measure)
    assert run("--out", tmp_path) == 0  # a rehearsal
    assert saved(tmp_path)["time"].keys() == {*CIRCUMSTANCES, "what", "a"}
    printed = capsys.readouterr()
    assert "| broken | failure | ZeroDivisionError: division by zero |" in printed.out
    assert "time 1/2, 0 s: broken: ZeroDivisionError: division by zero" in printed.err


def test_a_failed_job_on_a_gpu_fails_the_run(only, monkeypatch):
    only("time", "a")
    monkeypatch.setattr(gpu, "device_facts", lambda: {"device": "GPU X", "total_bytes": GIB})
    monkeypatch.setattr(gpu, "device", lambda: "cuda")
    monkeypatch.setattr(gpu, "in_a_process", lambda section, name, small: {"a": 1.0})
    assert run("--quick") == 0
    monkeypatch.setattr(gpu, "in_a_process", lambda section, name, small: {"failure": "no"})
    assert run("--quick") == 1


def test_an_interrupted_run_keeps_its_results(only, tmp_path, capsys):
    def measure(name, small):
        if name == "b":
            raise KeyboardInterrupt
        return {name: 1.0}

    only("time", "a", "b", measure=measure)
    assert run("--out", tmp_path) == 130
    assert saved(tmp_path)["time"]["a"] == 1.0
    assert saved(tmp_path)["time"]["complete"] is False
    assert capsys.readouterr().err.endswith("stopped; finished jobs are saved\n")


def test_without_a_gpu_nothing_is_written_unless_asked(only, tmp_path):
    only("steps-perceptron", "AdamW, fused")
    assert run("--only", "steps") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_plan_lists_the_jobs_of_the_chosen_sections(capsys):
    assert run("--plan", "--only", "fp8", "--only", "em") == 0
    assert capsys.readouterr().out == (
        "ema: two averages during training\n  on the GPU\n  on the host\n  on the disk\n"
        "fp8: FP8, relative to bfloat16\n  matmul\n  tensor\n  delayed\n  block\n"
    )


def test_an_unknown_section_is_one_line(capsys):
    assert run("--only", "nosuch") == 2
    assert capsys.readouterr().err.startswith("error: no section begins with 'nosuch'; choose from")


# ------------------------------------------------------------------ processes


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that replaces the script in subprocesses."""

    def make(text: str) -> None:
        path = tmp_path / "script.py"
        path.write_text(f"import json, os, sys, time\n{text}\n", encoding="utf-8")
        monkeypatch.setattr(gpu, "__file__", str(path))

    return make


def test_a_job_runs_in_a_process_with_torchs_allocator_settings(program, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:20")
    program("print('noise'); print(json.dumps({'words': sys.argv[1:], 'env': dict(os.environ)}))")
    found = gpu.in_a_process("time", "a job", small=True)
    assert found["words"] == ["--job", "time", "a job", "--quick"]
    assert found["env"].keys() >= {"PATH", "OMP_NUM_THREADS"}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found["env"]
    assert "PYTORCH_CUDA_ALLOC_CONF" in os.environ


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("sys.exit('Segmentation fault')", "its process ended with status 1: Segmentation fault"),
        ("os.abort()", "its process ended with status -6: "),
        ("print('{'); sys.exit('b')", "its process ended with status 1: b"),
    ],
)
def test_a_process_that_ends_without_an_answer_is_a_failure(program, text, failure):
    program(text)
    assert gpu.in_a_process("time", "a job", small=True) == {"failure": failure}


def test_a_hanging_process_is_a_failure(program, monkeypatch):
    monkeypatch.setattr(gpu, "SECONDS", 0.2)
    program("time.sleep(600)")
    assert gpu.in_a_process("time", "a job", small=True) == {"failure": "no answer in 0.2 s"}


@pytest.mark.slow
def test_a_process_answers_as_this_one_does():
    job = ("steps-perceptron", "AdamW, fused", True)
    assert gpu.in_a_process(*job) == gpu.answer(*job)


def test_a_small_gpu_gets_one_recording_at_a_time(monkeypatch):
    monkeypatch.setattr(gpu, "cores", lambda: 64)
    assert [gpu.at_once(size * GIB) for size in (8, 24, 80, 141)] == [1, 1, 5, 8]
    monkeypatch.setattr(gpu, "cores", lambda: 2)
    assert gpu.at_once(141 * GIB) == 1
