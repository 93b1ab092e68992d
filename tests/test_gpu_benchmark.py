"""Tests of benchmarks/gpu.py without a GPU: predictions, comparisons, scores, files, processes."""

import importlib.machinery
import json
import os
import re
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from benchmark_scripts import script as part
from close import assert_close
from quick import quick

import memlab
from memlab.allocator import Allocator, Settings, history, recording
from memlab.attention.package_interface import flash_attn_func
from memlab.course.elsewhere import stored_on_a_gpu
from memlab.model import PRESETS
from memlab.prediction.cuda import EVERYTHING_NOTE
from memlab.trace import Event, Trace
from memlab.train import combined, predicted_trace
from memlab.units import format_bytes

ROOT = Path(__file__).parents[1]
KIB, MIB, GIB = 2**10, 2**20, 2**30


gpu, common = part("gpu"), part("common")
archive, bench, configurations, day_jobs, jobs, predictions, recorder, streams = (
    part(f"gpu_sections.{name}")
    for name in (
        *("archive", "bench", "configurations", "day_jobs", "jobs", "predictions"),
        *("recorder", "streams"),
    )
)
allocator_section, predict_section = (
    part(f"gpu_sections.{name}_section") for name in ("allocator", "predict")
)
optim_jobs, fused_jobs, ema_jobs = (
    part(f"gpu_sections.{name}_jobs") for name in ("optim", "fused", "ema")
)
CONFIGURATIONS, SMALL = configurations.CONFIGURATIONS, configurations.SMALL
FEW = ("AdamW, fused", "no_grad")


@pytest.fixture
def few(monkeypatch):
    """Use only a few configurations."""
    chosen = {name: CONFIGURATIONS[name] for name in FEW}
    monkeypatch.setattr(predict_section, "CONFIGURATIONS", chosen)
    monkeypatch.setattr(predict_section, "NEAR_GPU", "no_grad")


@pytest.fixture
def rehearsal(tmp_path):
    """Return a Bench that rehearses and writes to a temporary folder."""
    facts = jobs.answer(jobs.Job("facts", rehearsal=True))
    return bench.Bench(facts, jobs.Here(), True, True, tmp_path, section="predict")


def event(count: int, number: int, operator: str = "aten.op") -> Event:
    return Event(count, number, "activations", operator, "", "forward", "uint8", (count,))


def done(result: dict) -> "Future[dict]":
    future: Future[dict] = Future()
    future.set_result(result)
    return future


# ------------------------------------------------------------------ configurations


@pytest.mark.parametrize("name", quick(list(CONFIGURATIONS)[::16], CONFIGURATIONS))
def test_a_configuration_is_predicted_and_creates_everything_on_the_gpu(name):
    if CONFIGURATIONS[name].missing:
        pytest.skip(f"{CONFIGURATIONS[name].missing} is not installed")
    trace = predictions.step_predicted(CONFIGURATIONS[name], SMALL, "cuda:hopper")
    assert EVERYTHING_NOTE not in trace.notes
    assert trace.at_peak["parameters"] > 0
    assert trace.peak_phase != "before"


def test_there_are_enough_distinct_configurations():
    assert len(CONFIGURATIONS) >= 60
    assert len({id(c.build) for c in CONFIGURATIONS.values()}) == len(CONFIGURATIONS)


def test_a_configuration_of_a_missing_package_is_skipped_with_a_message(
    rehearsal, monkeypatch, capsys
):
    missing = configurations.Configuration(CONFIGURATIONS["no_grad"].build, "no_such_package")
    chosen = {"another": missing, "no_grad": CONFIGURATIONS["no_grad"]}
    monkeypatch.setattr(predict_section, "CONFIGURATIONS", chosen)
    monkeypatch.setattr(predict_section, "NEAR_GPU", "no_grad")
    report = predict_section.run(rehearsal)
    assert "another: skipped, no_such_package is not installed" in capsys.readouterr().err
    assert [row["configuration"] for row in report.plain["rows"]] == ["no_grad"]


# ------------------------------------------------------------------ predictions


def linear_training(size, device):
    """Build a step with 128 B of weights whose gradient lives until the next step."""
    weight = torch.nn.Parameter(torch.zeros(32, device=device))

    def step() -> None:
        weight.grad = None
        (weight * 2).sum().backward()

    return step, torch.nn.ParameterList([weight]), None


def test_the_whole_process_is_building_a_first_and_a_second_step():
    configuration = configurations.Configuration(linear_training)
    prediction = predictions.predicted(configuration, SMALL, "cuda")
    of_step = [
        e.bytes for e in prediction.trace.events if e.phase != "before" and e.category != "rounding"
    ]
    assert [e.bytes for e in prediction.step] == of_step
    assert of_step[0] == -128  # the first step's gradient
    first = [e.bytes for e in prediction.whole[: prediction.step_at] if e.bytes > 0]
    assert first == [128, *(count for count in of_step if count > 0)]  # the weight, and a step


def alternating(*sizes: int) -> predictions.Prediction:
    """Predict a process that allocates and frees one block after another."""
    events = [event(sign * size, n) for n, size in enumerate(sizes) for sign in (1, -1)]
    return predictions.Prediction(Trace(tuple(events)), tuple(events), 0)


def test_the_limit_is_below_reserved_memory_because_cached_segments_are_freed():
    prediction = alternating(30 * MIB, 40 * MIB, 50 * MIB)
    assert prediction.blocks.reserved_bytes == 120 * MIB
    limit = prediction.least_cap_bytes(80 * GIB)
    assert 50 * MIB <= limit <= 51 * MIB
    assert prediction.fits(Settings(), 50 * MIB, 80 * GIB)
    assert not prediction.fits(Settings(), 50 * MIB - 1, 80 * GIB)


def test_the_memory_fraction_reproduces_the_limit():
    for total in (80 * GIB, 150_754_820_096, 25_438_126_080):
        for cap in (50 * MIB, total // 3, 16_456_330_819, 1_873_450_069):  # the last two round down
            fraction = predictions.fraction_of(cap, total)
            assert cap <= int(fraction * total) <= cap + 1
    assert predictions.fraction_of(90 * GIB, 80 * GIB) == 1.0


def test_the_allocated_peak_is_of_the_second_step():
    events = (event(9 * MIB, 0), event(-9 * MIB, 0), event(3 * MIB, 1))
    prediction = predictions.Prediction(Trace(()), events, step_at=2)
    assert prediction.allocated_peak_bytes(prediction.blocks) == 3 * MIB


# ------------------------------------------------------------------ streams


def recorded(events: list[Event], step_at: int = 0) -> dict:
    """Return CUDA's recording of events; the measured step begins at event `step_at`."""
    before = len(history(events[:step_at])["events"])
    return {**history(events), "step_at": before}


def difference_of(
    ours: list[Event], theirs: list[Event], start: int = 0
) -> streams.StreamDifference:
    stream = streams.recorded_stream(recorded(theirs, start))
    return streams.compare(ours, start, *stream)


A_STEP = [event(5000, 1), event(700, 2), event(-5000, 1), event(300, 3), event(-700, 2)]


def test_equal_streams_have_no_differences():
    assert difference_of(A_STEP, A_STEP) == streams.StreamDifference(6144, 6144, (), (), 0)


def test_a_block_only_on_the_gpu_is_listed_at_and_around_the_peak():
    theirs = [A_STEP[0], event(4096, 9, "scratch"), *A_STEP[1:], event(-4096, 9)]
    found = difference_of(A_STEP, theirs)
    assert found.bytes == -4096
    assert found.at_peak == ("only recorded: 1 × 4,096 of these: 1 × 4,096",)
    assert found.around_peak == (
        "allocation 1 (the peak is at 2), after 5,000 aten.op forward activations: "
        "predicted nothing; recorded 4,096",
    )
    assert found.unlike == 1


def test_a_block_of_a_different_size_is_listed_for_both_streams():
    theirs = [e._replace(bytes=e.bytes * 2) if e.storage == 2 else e for e in A_STEP]
    found = difference_of(A_STEP, theirs)
    assert found.bytes == 1024 - 1536
    assert found.at_peak == (
        "only recorded: 1 × 1,400 of these: 1 × 1,400",
        "only predicted: 1 × 700 of these: 1 × 700 aten.op forward activations",
    )
    assert found.around_peak[0].endswith(
        "predicted 700 aten.op forward activations; recorded 1,400"
    )


def test_only_the_measured_step_and_blocks_alive_before_it_count():
    before = [event(9000, 8), event(-9000, 8), event(2048, 9)]
    assert difference_of([*before, *A_STEP], [*before, *A_STEP], start=3).recorded_bytes == 8192
    other = [event(7000, 8), *before[:2], event(-7000, 8), before[2]]
    stream = streams.recorded_stream(recorded([*other, *A_STEP], 5))
    found = streams.compare([*before, *A_STEP], 3, *stream)
    assert (found.bytes, found.unlike) == (0, 0)


def test_differences_nearest_to_the_peak_are_shown():
    ours = [event(512 * n, n) for n in range(1, 60)]
    theirs = [e._replace(bytes=e.bytes + 1) if e.storage % 2 else e for e in ours]
    found = difference_of(ours, theirs)
    assert len(found.around_peak) == streams.SHOWN
    assert "allocation 58 (the peak is at 59)" in found.around_peak[-1]
    assert found.unlike == 30


def test_operators_are_used_only_if_the_profiled_step_matches():
    three = {**recorded(A_STEP), "operators": ["a", "b", "c"]}
    events, _ = streams.recorded_stream(three)
    assert [e.operator for e in events if e.bytes > 0] == ["a", "b", "c"]
    events, _ = streams.recorded_stream({**three, "operators": ["a", "b"]})
    assert {e.operator for e in events} == {""}


def test_frees_of_blocks_from_before_the_history_are_ignored():
    later = recorded(A_STEP)
    later["events"] = later["events"][2:]  # without the first segment and block
    events, _ = streams.recorded_stream(later)
    assert [e.bytes for e in events] == [700, 300, -700]


# ------------------------------------------------------------------ scores


def test_a_recording_equal_to_the_prediction_is_exact_in_every_figure():
    prediction = predictions.predicted(CONFIGURATIONS["no_grad"], SMALL, "cuda")
    row = predict_section.scored(prediction, recorder.rehearsed(prediction, Settings()))
    assert [row[f"{name.replace(' ', '_')}_off"] for name in predict_section.FIGURES] == [0] * 4
    assert row["unlike"] == 0
    assert not predict_section.is_off(row)


def test_each_figure_is_predicted_minus_recorded():
    prediction = alternating(30 * MIB, 40 * MIB)
    recording = recorder.rehearsed(alternating(30 * MIB, 40 * MIB, 41 * MIB + 1), Settings())
    row = predict_section.scored(prediction, recording)
    assert row["allocated_off"] == 40 * MIB - (42 * MIB)  # the rest of 1 MiB - 1 B is not split off
    assert row["blocks_off"] == 40 * MIB - (41 * MIB + 512)
    assert row["with_waste_off"] == 40 * MIB - 42 * MIB
    assert row["reserved_off"] == 70 * MIB - 112 * MIB
    assert predict_section.off(row, "allocated") == "-2,097,152 B (-4.762%)"


def test_a_spread_uses_absolute_errors():
    shares = [0.0] * 10 + [0.01] * 9 + [-0.5]
    wanted = {"median": 0.005, "95th percentile": 0.01, "worst": 0.5}
    assert predict_section.spread(shares) == wanted
    assert predict_section.spread([]) == dict.fromkeys(wanted, 0.0)


class Scripted:
    """A server with fixed answers."""

    def __init__(self, **answers) -> None:
        self.answers = answers

    def submit(self, job):
        found = self.answers[job.task]
        return done(found(job) if callable(found) else found)


def test_a_wrong_prediction_lists_blocks_and_other_kernels(rehearsal, few, capsys):
    def slower(job):
        """Record AdamW's loop although the fused kernel was predicted."""
        rehearsed = jobs.answer(job)
        if job.task == "record" and job.configuration == "AdamW, fused":
            other = jobs.Job("record", "AdamW, loop", small=True, rehearsal=True)
            return {**rehearsed, **{k: v for k, v in jobs.record(other).items() if k != "name"}}
        return rehearsed

    rehearsal.server = Scripted(record=slower, predict=jobs.answer)
    report = predict_section.run(rehearsal)
    fused, no_grad = report.plain["rows"]
    assert (fused["blocks_off"] < 0, no_grad["blocks_off"]) == (True, 0)
    assert report.plain["exact"] == 1
    assert "**AdamW, fused**" in report.markdown
    assert "**no_grad**" not in report.markdown
    assert "- only recorded: " in report.markdown
    assert "optimizer." in str(fused["around_peak"]) or "aten." in str(fused["around_peak"])
    assert "AdamW, fused: " in capsys.readouterr().err


@pytest.mark.slow
def test_alternatives_list_kernels_that_change_the_peak(rehearsal):
    name = "AdamW, default"
    prediction = predictions.predicted(CONFIGURATIONS[name], SMALL, rehearsal.target)
    row = {"configuration": name, "predicted_bytes": prediction.trace.peak_bytes}
    row["recorded_blocks_bytes"] = prediction.trace.peak_bytes + 100
    others = dict(predict_section.alternatives(rehearsal, row))
    assert others["target cuda"] == -100 - 2 * (32 * MIB - 8_519_680)
    assert others["optimizer fused"] < others["optimizer loop"] < 0
    assert "optimizer foreach" not in others  # the predicted one


def test_failures_on_the_gpu_and_of_predictions_have_their_own_rows(rehearsal, monkeypatch):
    def breaks(size, device):
        raise RuntimeError("no such kernel\nin this build")

    broken = configurations.Configuration(breaks)
    monkeypatch.setattr(predict_section, "CONFIGURATIONS", {"broken": broken})
    there = predict_section.row(rehearsal, "broken", {"failure": "status 1: Segmentation fault"})
    assert there["failure"] == "on the GPU: status 1: Segmentation fault"
    recording = {**recorded(A_STEP), "name": "predict: broken", "ran_out": "", "kernels": {}}
    here = predict_section.row(rehearsal, "broken", recording)
    assert here["failure"] == "predicting: RuntimeError: no such kernel"
    report = predict_section.report([there, here], "")
    assert report.sentence.startswith("0 of 2 configurations have the predicted peak")
    assert "- on the GPU: status 1: Segmentation fault" in report.markdown


def test_a_prediction_that_a_gpu_changes_is_reported(rehearsal):
    job = jobs.Job("predict", predict_section.NEAR_GPU, small=True)
    same = jobs.answer(job)
    assert "is the same, and does not use the GPU" in predict_section.near_gpu(rehearsal, same)
    other = {"sizes": same["sizes"][1:], "touched": True}
    assert "is DIFFERENT, and USES the GPU" in predict_section.near_gpu(rehearsal, other)


# ------------------------------------------------------------------ allocator settings


def test_every_setting_is_valid_and_distinct():
    for setting in allocator_section.SETTINGS:
        Settings.parse(setting.conf)
    assert len({str(setting) for setting in allocator_section.SETTINGS}) == len(
        allocator_section.SETTINGS
    )


def test_a_limit_lies_between_the_smallest_and_the_need():
    prediction = alternating(30 * MIB, 40 * MIB, 50 * MIB)  # reserves 120 MiB, 50 MiB at once
    caps = [
        allocator_section.PredictedRun("", room).cap_bytes(prediction, 80 * GIB)
        for room in (None, 0.0, 0.5, 1.0)
    ]
    assert caps[0] is None
    assert 1.02 * 50 * MIB <= caps[1] < 53 * MIB
    assert 84 * MIB < caps[2] < 86 * MIB
    assert caps[3] == 120 * MIB


def test_a_recording_is_replayed_with_its_own_settings(rehearsal):
    conf, cap = "garbage_collection_threshold:0.6", 150 * MIB
    settings = predictions.settings_of(conf, cap, rehearsal.total_bytes)
    prediction = alternating(30 * MIB, 40 * MIB, 50 * MIB, 60 * MIB)
    recording = {
        **recorder.rehearsed(prediction, settings),
        **{"name": "a", "conf": conf, "cap_bytes": cap},
    }
    assert any(entry["action"] == "segment_free" for entry in recording["events"])
    setting = allocator_section.PredictedRun(conf, 1.0)
    assert allocator_section.row(rehearsal, setting, recording)["exact"]
    wrong = {**recording, "conf": "garbage_collection_threshold:0.9"}
    row = allocator_section.row(rehearsal, setting, wrong)
    assert not row["exact"]
    assert row["misses"]
    assert row["misses"][0] in allocator_section.report([row]).markdown


# ------------------------------------------------------------------ the archive


def a_recording(name: str = "predict: a step", **about) -> dict:
    """Return a synthetic recording in the archive's format."""
    sizes = (3 * MIB, 700, 30 * MIB, 5 * MIB, 11 * MIB)
    prediction = alternating(*sizes, *reversed(sizes))
    known = {"name": name, "configuration": "a step", "conf": "", "cap_bytes": None}
    recording = {**known, **recorder.rehearsed(prediction, Settings()), **about}
    return {**recording, "facts": {"total_bytes": 80 * GIB}}


def test_the_later_of_two_recordings_with_one_name_counts(tmp_path):
    path = tmp_path / "recordings" / "a-card.jsonl.gz"
    for number, name in enumerate(("b", "a", "b")):
        archive.add(path, a_recording(name, retries=number))
    assert {name: found["retries"] for name, found in archive.read(path).items()} == {
        "b": 2,
        "a": 1,
    }
    archive.tidy(path)
    assert list(archive.read(path)) == ["a", "b"]
    tidied = path.read_bytes()
    archive.tidy(path)
    assert path.read_bytes() == tidied


def test_an_incomplete_recording_leaves_the_earlier_ones_readable(tmp_path):
    path = tmp_path / "a-card.jsonl.gz"
    archive.add(path, a_recording("a"))
    whole = path.stat().st_size
    archive.add(path, a_recording("b"))
    for cut in (1, 30, whole // 2):
        (tmp_path / "cut.jsonl.gz").write_bytes(path.read_bytes()[: whole + cut])
        assert list(archive.read(tmp_path / "cut.jsonl.gz")) == ["a"]


def misses(path: Path) -> list[str]:
    """Return the inexact replays of an archive."""
    found = []
    for name, kept in archive.read(path).items():
        result = allocator_section.replayed(kept, kept["facts"]["total_bytes"])
        if not result.exact or result.reserved_bytes != kept["reserved_peak_bytes"]:
            found += [f"{name}: {miss}" for miss in result.misses or ("different reserved peak",)]
    return found


ARCHIVES = sorted((ROOT / "tests" / "recordings").glob(f"*{archive.SUFFIX}"))


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name)
def test_gpu_recordings_are_replayed_exactly(path):
    assert misses(path) == []


def test_misses_finds_wrong_histories(tmp_path):
    path = tmp_path / "a-card.jsonl.gz"
    archive.add(path, a_recording())
    assert misses(path) == []
    archive.add(path, a_recording(reserved_peak_bytes=1))
    assert misses(path) == ["predict: a step: different reserved peak"]
    moved = a_recording()
    position = max(n for n, e in enumerate(moved["events"]) if e["action"] == "alloc")
    for entry in moved["events"][position:]:
        entry["addr"] += 512
    archive.add(path, moved)
    assert len(misses(path)) >= 1


def test_predictions_are_compared_with_an_archive_without_a_gpu(rehearsal, few, tmp_path, capsys):
    predict_section.run(rehearsal)
    path = rehearsal.archive_path
    assert sorted(archive.read(path)) == sorted(f"predict: {name}" for name in FEW)
    assert gpu.main(["--from", str(path), "--section", "predict"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 configurations have the predicted peak of blocks to the byte" in printed
    assert gpu.main(["--from", str(path), "--section", "allocator"]) == 0
    assert "not in the archive" in capsys.readouterr().out


def test_a_run_continues_after_a_killed_one(rehearsal, few):
    archive.add(rehearsal.archive_path, a_recording("a"))
    with rehearsal.archive_path.open("ab") as file:
        file.write(archive._line(a_recording("b"))[:50])
    gpu.run(rehearsal, ["predict"])
    kept = sorted(["a", *(f"predict: {name}" for name in FEW)])
    assert sorted(archive.read(rehearsal.archive_path)) == kept


@pytest.mark.parametrize("content", [None, b"", b"no archive at all"])
def test_an_invalid_archive_is_reported_in_one_line(tmp_path, content, capsys):
    path = tmp_path / "a.jsonl.gz"
    if content is not None:
        path.write_bytes(content)
    assert gpu.main(["--from", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {path} holds no recordings; give one of tests/recordings\n"


# ------------------------------------------------------------------ recorder


class FakeCuda:
    """Stands in for torch.cuda, with the simulated allocator."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        settings = Settings(capacity_bytes=limit_bytes)
        self.allocator = Allocator(settings, keeps_history=True)
        self.memory = self
        self.calls: list[str] = []
        self.peak = 0

    def init(self) -> None:
        self.calls.append("init")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def mem_get_info(self) -> tuple[int, int]:
        return 70 * GIB, 80 * GIB

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.calls.append(f"cap {int(fraction * 80 * GIB)}")

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
            "requested_bytes.all.peak": 17,
            "reserved_bytes.all.peak": self.allocator.reserved_bytes,
            "num_alloc_retries": self.allocator.retries,
        }

    OutOfMemoryError = MemoryError

    def build(self, size, device):
        """Allocate 3 MiB of weights; the first step allocates 5 MiB, the second 4 MiB."""
        assert device == "cuda"
        sizes = iter((5 * MIB, 4 * MIB))
        self.allocator.malloc(3 * MIB)

        def step() -> None:
            block = self.allocator.malloc(next(sizes))
            if block is None:
                raise MemoryError("CUDA out of memory. Tried to allocate\nmore")
            self.allocator.free(block)

        return step, None, None


def record_on(card: FakeCuda, monkeypatch, cap_bytes: int | None = None) -> dict:
    monkeypatch.setattr(recorder.torch, "cuda", card)
    return recorder.record(configurations.Configuration(card.build), SMALL, cap_bytes)


def test_a_recording_has_the_whole_history_and_statistics_of_the_second_step(
    monkeypatch,
):
    card = FakeCuda()
    found = record_on(card, monkeypatch)
    assert card.calls[:3] == ["init", "synchronize", "record all None"]  # without stacks
    assert card.calls[-1] == "record None all"
    assert found["allocated_peak_bytes"] == 7 * MIB
    assert found["reserved_peak_bytes"] == 20 * MIB
    events, step_at = streams.recorded_stream(found)
    assert [e.bytes for e in events[step_at:]] == [4 * MIB, -4 * MIB]
    assert set(found["events"][0]) == {"action", "addr", "size", "stream"}
    assert set(found["segments_at_end"][0]) == {
        *("address", "total_size", "segment_type", "stream", "blocks"),
    }
    json.dumps(found)
    assert memlab.allocator.replay(found).exact


def test_the_limit_is_set_before_recording(monkeypatch):
    card = FakeCuda()
    record_on(card, monkeypatch, cap_bytes=50 * MIB)
    assert card.calls.index(f"cap {50 * MIB}") < card.calls.index("record all None")


def test_out_of_memory_keeps_the_history_up_to_the_error(monkeypatch):
    card = FakeCuda(limit_bytes=22 * MIB)
    for taken in (6 * MIB, 7 * MIB):  # with 3 MiB of weights, 4 MiB remain
        card.allocator.malloc(taken)
    found = record_on(card, monkeypatch)
    assert found["ran_out"].startswith("CUDA out of memory.")
    assert [e["action"] for e in found["events"]].count("alloc") == 3
    assert found["operators"] == []


def node(name: str, *children, start: int = 0, block: tuple[int, str] | None = None):
    """Return an event of the profiler's tree; `block` is (bytes, device) of an allocation."""
    kind = recorder._EventType.Allocation if block else recorder._EventType.TorchOp
    details = block and SimpleNamespace(alloc_size=block[0], device=SimpleNamespace(type=block[1]))
    return SimpleNamespace(name=name, children=children, start_time_ns=start, typed=(kind, details))


def test_allocations_have_their_operators_in_order_of_time():
    roots = [
        node("aten::mm", node("[memory]", start=5, block=(512, "cuda"))),
        node(
            "autograd::engine::evaluate_function: X",
            node("aten::sum", node("cuBLAS", node("[memory]", start=2, block=(1024, "cuda")))),
            node("[memory]", start=3, block=(-512, "cuda")),
            node("aten::empty", node("[memory]", start=4, block=(512, "cpu"))),
        ),
        node("[memory]", start=9, block=(512, "cuda")),
    ]
    assert sorted(recorder._allocations(roots)) == [(2, "aten::sum"), (5, "aten::mm"), (9, "")]


def test_kernels_that_affect_memory_are_listed():
    inner = node("aten::_scaled_dot_product_flash_attention")
    roots = [node("aten::scaled_dot_product_attention", inner), node("aten::mm")]
    assert list(recorder._memory_kernels(roots)) == ["_scaled_dot_product_flash_attention"]


def test_a_failing_profiler_leaves_the_operators_empty(monkeypatch):
    def fails(step):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(recorder, "_profiled", fails)
    found = recorder._profiled_operators((None, None, None))
    assert found["operators"] == []
    assert "no profiler here" in str(found["kernels"])


# ------------------------------------------------------------------ processes


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that replaces the benchmark script in subprocesses."""

    def make(program: str) -> None:
        path = tmp_path / "script.py"
        path.write_text(f"import json, os, sys, time\n*_, job, answer = sys.argv\n{program}\n")
        monkeypatch.setattr(jobs, "SCRIPT", path)

    return make


ANSWERS = "open(answer, 'w').write(json.dumps({'job': json.loads(job), 'env': dict(os.environ)}))"


def test_a_job_runs_in_a_process_with_its_allocator_settings(script):
    script(ANSWERS)
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:native", "HERE": "yes"}
    with jobs.Processes(environment) as processes:
        default = processes.submit(jobs.Job("record", "a", small=True)).result()
        set_ = processes.submit(jobs.Job("record", conf="max_split_size_mb:20")).result()
    assert jobs.Job(**default["job"]) == jobs.Job("record", "a", small=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in default["env"]
    assert "PYTORCH_ALLOC_CONF" not in default["env"]
    assert default["env"]["HERE"] == "yes"
    assert set_["env"]["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:20"


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("sys.exit('Segmentation fault')", "its process ended with status 1: Segmentation fault"),
        ("os.abort()", "its process ended with status -6: "),
        (
            "open(answer, 'w').write('{\"half\":'); print('a'); sys.exit('b')",
            "its process ended with status 1: b",
        ),
    ],
)
def test_a_crashed_process_is_a_failure_with_a_message(script, program, failure):
    script(program)
    with jobs.Processes(os.environ) as processes:
        assert processes.submit(jobs.Job("facts")).result() == {"failure": failure}


def test_an_answer_written_before_a_crash_counts(script):
    script(f"{ANSWERS}; os.abort()")
    with jobs.Processes(os.environ) as processes:
        assert "job" in processes.submit(jobs.Job("facts")).result()


def test_a_hanging_process_is_killed(script, monkeypatch):
    script("time.sleep(600)")
    monkeypatch.setattr(jobs, "SECONDS", 0.2)
    with jobs.Processes(os.environ) as processes:
        found = processes.submit(jobs.Job("facts")).result()
    assert found == {"failure": "its process ended with no answer in 0.2 s: "}


def test_leaving_kills_running_processes_and_starts_no_more(script, tmp_path):
    script(f"open({str(tmp_path / 'started')!r}, 'a').write('x'); time.sleep(600)")
    with jobs.Processes(os.environ) as processes:
        futures = [processes.submit(jobs.Job("facts")) for _ in range(3)]
        while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
            pass
    assert "failure" in futures[0].result()  # without waiting ten minutes
    assert futures[2].cancelled()
    assert (tmp_path / "started").read_text() == "x"


def test_no_process_starts_after_leaving(script):
    script(ANSWERS)
    with jobs.Processes(os.environ) as processes:
        pass
    answer = processes._run(jobs.Job("facts"))  # as a late thread would
    assert answer == {"failure": "its process ended with nothing, because the run was stopped: "}


@pytest.mark.slow
def test_a_subprocess_answers_like_this_process():
    job = jobs.Job("record", "AdamW, fused", name="a", small=True, rehearsal=True)
    with jobs.Processes(os.environ) as processes:
        there = processes.submit(job).result()
    assert there == json.loads(json.dumps(jobs.answer(job)))
    assert len(there["events"]) > 100


def test_an_exception_is_a_failure_in_one_line():
    assert jobs.answer(jobs.Job("record", "no such configuration")) == {
        "failure": "KeyError: 'no such configuration'"
    }


def test_small_gpus_get_one_job_at_a_time(monkeypatch):
    monkeypatch.setattr(jobs, "cores", lambda: 64)
    assert [jobs.at_once(size * GIB) for size in (8, 24, 80, 141)] == [1, 1, 5, 8]
    monkeypatch.setattr(jobs, "cores", lambda: 2)
    assert jobs.at_once(141 * GIB) == 1


def test_the_gpu_is_hidden_here_and_not_from_subprocesses(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with jobs.hidden_gpu() as environment:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with jobs.hidden_gpu():
        pass
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


# ------------------------------------------------------------------ sections and results


def test_the_lesson_shows_the_first_days_results(rehearsal):
    rehearsal.section = "day 1"
    rehearsal.facts = {**rehearsal.facts, "device": "NVIDIA H200"}
    assert gpu.run(rehearsal, ["day 1"])
    shown = stored_on_a_gpu("day 1", rehearsal.out)
    assert shown.startswith("Not your machine: measured on NVIDIA H200, torch ")
    assert "  what: tiny, 2 × 32 tokens, float32, cuda" in shown
    assert "  parameters: 225.12 KiB" in shown
    assert (rehearsal.out / "nvidia-h200.json").exists()


def test_the_lesson_shows_the_second_days_results(rehearsal):
    rehearsal.section = "day 2"
    assert gpu.run(rehearsal, ["day 2"])
    shown = stored_on_a_gpu("day 2", rehearsal.out)
    assert "  what: tiny, 2 × 8, 64 tokens, float32" in shown
    assert re.search(r"  allocated: 1\d\.\d\d MiB\n  reserved: 2\d\.\d\d MiB", shown)


def test_day_2_and_the_benchmark_use_the_same_lengths():
    lesson = (Path(__file__).parents[1] / "solutions/day02_reading_the_meter.py").read_text()
    assert f"lengths = {day_jobs.FOUR_LENGTHS}" in lesson
    assert 'GPT(PRESETS["124m"])' in lesson


@pytest.mark.slow
@pytest.mark.parametrize("day", day_jobs.SIDE_BY_SIDE)
def test_a_days_techniques_are_compared(rehearsal, day):
    assert gpu.run(rehearsal, [day])
    shown = stored_on_a_gpu(day, rehearsal.out)
    setting = replace(day_jobs.SMALL_BILL, device="cuda")
    assert f"  what: {setting}" in shown
    for words, technique in day_jobs.SIDE_BY_SIDE[day].items():
        trace = predicted_trace(setting, combined(technique))
        assert f"  {words}, peak: {format_bytes(trace.peak_bytes)}" in shown
        assert f"  {words}, reserved: {format_bytes(trace.reserved_bytes)}" in shown


def test_times_are_ratios_to_the_plain_step(rehearsal, monkeypatch, capsys):
    monkeypatch.setattr(day_jobs, "TIMED", ("checkpointing", "autocast"))
    monkeypatch.setattr(day_jobs, "time_in_turn", lambda ours, plain: [(3.0, 2.0), (5.0, 2.0)])
    assert gpu.run(rehearsal, ["time"])
    assert "| checkpointing | 2.00 × |" in capsys.readouterr().out
    assert "  autocast: 2.00" in stored_on_a_gpu("time", rehearsal.out)
    assert "  empty cache: 2.00" in stored_on_a_gpu("time", rehearsal.out)


def test_clearing_is_timed_after_the_plain_step(monkeypatch):
    called = []
    monkeypatch.setattr(day_jobs, "TIMED", ())
    monkeypatch.setattr(day_jobs, "CLEARING", {"clear": lambda: called.append("clear")})
    monkeypatch.setattr(day_jobs, "_warm", lambda *_: lambda: called.append("step"))

    def in_turn(ours, plain):
        ours()
        plain()
        return [(3.0, 2.0)]

    monkeypatch.setattr(day_jobs, "time_in_turn", in_turn)
    assert day_jobs.times("", True, True)["clear"] == 1.5
    assert called == ["step", "clear", "step"]


@pytest.mark.slow
def test_8_bit_optimizers_are_compared_with_bitsandbytes(rehearsal, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(optim_jobs, "time_in_turn", lambda ours, theirs: [(3.0, 2.0), (5.0, 2.0)])
    assert gpu.run(rehearsal, ["optim"])
    printed = capsys.readouterr().out
    assert "step / bitsandbytes: Adam8bit 2.00 ×, Lion8bit 2.00 ×." in printed
    _, timed = optim_jobs.SIZES[True]
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines()]
    lines = {row[1]: row[2:4] for row in rows if len(row) > 3}
    for who in ("memlab", "bitsandbytes"):
        codes_and_scales = timed + 4 * timed // 256 + 1024
        wanted = [format_bytes(count * codes_and_scales) for count in (2, 1)]
        assert lines[f"{who}, state_bytes"] == wanted
    assert float(lines["exp_avg_codes that differ after 1 step"][0]) < 0.01
    assert float(lines["memlab, longest step / lr, σ = 3"][0]) < 3.5


def test_a_missing_bitsandbytes_is_reported(rehearsal, monkeypatch, capsys):
    monkeypatch.setattr(optim_jobs.importlib.util, "find_spec", lambda name: None)
    assert not gpu.run(rehearsal, ["optim"])
    assert "Adam8bit: bitsandbytes is not installed: pip install" in capsys.readouterr().err


def test_attention_and_loss_are_compared_with_torch_and_unfused_versions(
    rehearsal, monkeypatch, capsys
):
    monkeypatch.setattr(fused_jobs, "time_in_turn", lambda ours, theirs: [(3.0, 2.0), (5.0, 2.0)])
    assert gpu.run(rehearsal, ["fused"])
    printed = capsys.readouterr().out
    problems = ", ".join(f"{name} 2.00 ×" for name in fused_jobs.PROBLEMS)
    assert f"Time of memlab / torch: {problems}." in printed
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines()]
    (errors,) = (row[2:5] for row in rows if row[1:2] == ["memlab, error / unfused"])
    assert all(0 < float(error) <= 2 for error in errors)


def test_a_wrong_implementation_has_a_large_error(monkeypatch):
    problem = fused_jobs.PROBLEMS["causal attention"]
    wrong = {**problem.ways(), fused_jobs.MEMLAB: fused_jobs.attention_ways(False)["memlab"]}
    monkeypatch.setitem(
        fused_jobs.PROBLEMS, "causal attention", replace(problem, ways=lambda: wrong)
    )
    monkeypatch.setattr(fused_jobs, "time_in_turn", lambda ours, theirs: [(1.0, 1.0)])
    found = fused_jobs.compare("causal attention", small=True, rehearsal=True)
    assert found["memlab, error / unfused"] > 10


def test_the_flash_attn_package_is_called_in_its_own_layout_where_it_is(monkeypatch):
    """memlab's function of the package's interface stands in for the package."""
    package = ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert fused_jobs.PACKAGE not in fused_jobs.attention_ways(True)  # without a GPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    ways = fused_jobs.attention_ways(True)
    qkv = [torch.randn(1, 2, 33, 8, dtype=torch.float64) for _ in range(3)]
    theirs = ways[fused_jobs.TORCH](*qkv)
    assert_close(ways[fused_jobs.PACKAGE](*qkv), theirs)


def test_averages_are_measured_in_each_place(rehearsal, capsys):
    assert gpu.run(rehearsal, ["ema"])
    printed = capsys.readouterr().out
    assert "GPU memory of two averages, and time with updates: on the GPU " in printed
    shown = stored_on_a_gpu("ema", rehearsal.out)
    assert f"  what: {replace(day_jobs.SMALL_BILL, device='cpu')}" in shown
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines()]
    lines = {row[1]: row[2:-1] for row in rows if row[1:2] and row[1] in ema_jobs.PLACES}
    averages = format_bytes(8 * PRESETS["tiny"].parameters)
    largest = 4 * PRESETS["tiny"].hidden_size * PRESETS["tiny"].vocab_size
    assert lines[ema_jobs.ON_THE_GPU][:3] == [averages, averages, "0 B"]
    assert lines[ema_jobs.ON_THE_HOST][:3] == [
        averages,
        averages,
        "0 B",
    ]  # the same memory without a GPU
    # The averages are updated one after another, with two tensors each.
    assert lines[ema_jobs.ON_THE_DISK][:2] == [averages, "0 B"]
    assert lines[ema_jobs.ON_THE_DISK][2] == format_bytes(largest + 4 * 32)
    assert all(float(line[4]) <= 2**-11 for line in lines.values())  # float16 rounding


def test_a_missing_synthesis_has_a_large_error(monkeypatch):
    monkeypatch.setattr(ema_jobs, "synthesize", lambda *given, **settings: None)
    found = ema_jobs.measure_averages(ema_jobs.ON_THE_GPU, small=True, rehearsal=True)
    assert found["synthesis error"] > 2**-8


def test_a_failed_day_writes_no_results(rehearsal):
    rehearsal.server = Scripted(**{"day 1": {"failure": "status 1"}})
    assert not gpu.run(rehearsal, ["day 1"])
    assert not rehearsal.results_path.exists()


def test_an_interrupted_section_keeps_its_rows(rehearsal, few):
    def stop(job):
        if job.configuration == "no_grad":
            raise KeyboardInterrupt
        return jobs.answer(job)

    class Later:
        """A server that runs a job when its result is requested."""

        def submit(self, job):
            return SimpleNamespace(result=lambda: stop(job))

    rehearsal.server = Later()
    with pytest.raises(KeyboardInterrupt):
        gpu.run(rehearsal, ["predict"])
    kept = json.loads(rehearsal.results_path.read_text(encoding="utf-8"))["gpu"]["predict"]
    assert kept["complete"] is False
    assert [row["configuration"] for row in kept["rows"]] == ["AdamW, fused"]
    assert list(archive.read(rehearsal.archive_path)) == ["predict: AdamW, fused"]


def test_other_sections_run_after_one_fails(rehearsal, monkeypatch, capsys):
    def breaks(run):
        raise RuntimeError("no room")

    report = common.SectionReport("All is well.", "a table", {"of": 1, "rows": []})
    sections = {
        "first": gpu.GpuSection("", lambda run: report),
        "broken": gpu.GpuSection("", breaks),
        "last": gpu.GpuSection("", lambda run: report),
    }
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    assert not gpu.run(rehearsal, list(sections))
    kept = json.loads(rehearsal.results_path.read_text(encoding="utf-8"))["gpu"]
    assert list(kept) == ["first", "last"]
    assert kept["last"]["summary"] == "All is well."
    printed = capsys.readouterr()
    assert "\n## last\n\nAll is well.\n\na table\n" in printed.out
    assert "broken: failed: RuntimeError: no room" in printed.err


def test_running_a_section_again_replaces_only_that_section(rehearsal):
    for section, number in (("a", 1), ("b", 2), ("a", 3)):
        rehearsal.section = section
        rehearsal.keep({"number": number})
    kept = json.loads(rehearsal.results_path.read_text(encoding="utf-8"))["gpu"]
    assert {name: entry["number"] for name, entry in kept.items()} == {"a": 3, "b": 2}
    assert kept["a"].keys() >= {"device", "torch", "python", "memlab", "date"}


# ------------------------------------------------------------------ the command


@pytest.fixture
def no_gpu(monkeypatch):
    """Hide any GPU, without a subprocess to check for one."""
    monkeypatch.setattr(gpu, "Processes", lambda *_: jobs.Here())
    monkeypatch.setattr(jobs.torch.cuda, "is_available", lambda: False)


def test_an_unknown_section_is_reported_in_one_line(capsys):
    assert gpu.main(["--section", "day 1", "--section", "nosuch"]) == 2
    known = ", ".join(map(repr, gpu.SECTIONS))
    assert capsys.readouterr() == (
        "",
        f"error: there is no section 'nosuch'; choose from {known}\n",
    )


def test_the_sections_are_listed(capsys):
    assert gpu.main(["--list"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == list(
        gpu.SECTIONS
    )


def test_without_a_gpu_it_rehearses_and_writes_nothing(no_gpu, few, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "RECORDINGS", tmp_path / "recordings")
    assert gpu.main(["--quick", "--section", "predict", "--section", "day 1"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("torch finds no GPU, so this is a rehearsal: the")
    assert printed.out.startswith("# On a GPU: rehearsal, torch ")
    assert "\n| AdamW, fused |" in printed.out
    assert "\n## day 1\n" in printed.out
    assert list(tmp_path.iterdir()) == []


def test_the_allocator_can_be_rehearsed(no_gpu, monkeypatch, tmp_path, capsys):
    settings = [
        s for s in allocator_section.SETTINGS if s.configuration == allocator_section.SIDE_STREAM
    ]
    monkeypatch.setattr(allocator_section, "SETTINGS", settings)
    monkeypatch.setattr(allocator_section, "LENGTHS", "AdamW, loop")
    assert gpu.main(["--quick", "--out", str(tmp_path), "--section", "allocator"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 allocator histories are replayed exactly" in printed
    assert misses(tmp_path / "rehearsal.jsonl.gz") == []
    assert set(json.loads((tmp_path / "rehearsal.json").read_text(encoding="utf-8"))["gpu"]) == {
        "allocator"
    }


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def stop(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "measure", stop)
    assert gpu.main([]) == 130
    assert capsys.readouterr() == ("", "stopped; finished measurements are written\n")
