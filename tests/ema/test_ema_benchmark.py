"""The post-hoc EMA benchmark measures correctly."""

import json
import math
from dataclasses import replace

import pytest
import torch
from benchmark_scripts import script
from close import assert_close

from memlab.ema import Snapshot, find_snapshots, power_profile, profile_error
from memlab.ema.synthesis import CHUNK, ROWS

benchmark = script("ema")
QUICK = benchmark.QUICK
OURS, OUTER, THEIRS = benchmark.OURS, benchmark.OUTER, benchmark.THEIRS
FUSED = benchmark.FUSED


@pytest.fixture
def quick(monkeypatch):
    """Shrink the full plan to the quick one, so that results are written."""
    monkeypatch.setattr(benchmark, "FULL", QUICK)


def run(folder, *words):
    assert benchmark.main([*words, "--results", str(folder)]) == 0
    [results] = folder.glob("*.json")
    return json.loads(results.read_text(encoding="utf-8"))["ema"]


# ------------------------------------------------------------------ synthesis


def found_with(ours, outer, theirs, peak):
    seconds = {OURS: [ours], OUTER: [outer], THEIRS: [theirs]}
    return {benchmark.TASKS[0]: benchmark.SynthesisCosts(seconds, {OURS: peak})}


@pytest.mark.parametrize(
    ("outer", "theirs", "peak", "buffers", "missed"),
    [
        (2.0, 2.0, 2**26, 12 * 2**20, []),
        (1.9, 2.0, 2**26, 12 * 2**20, ["time of loop over snapshots"]),
        (2.0, 1.9, 2**26, 12 * 2**20, ["time of ema-pytorch"]),
        (2.0, 2.0, 2**26 + 1, 12 * 2**20, ["anonymous memory"]),
        (2.0, 2.0, 2**26, 12 * 2**20 + 1, ["buffers"]),
    ],
)
def test_the_goals_are_half_the_time_and_a_memory_limit(outer, theirs, peak, buffers, missed):
    found = found_with(1.0, outer, theirs, peak)
    goals = benchmark.goals(found, {benchmark.TASKS[0]: buffers})
    assert len(goals) == 4
    assert [what.split(": ")[1] for what, *_, verdict in goals if verdict == "missed"] == missed


def test_tasks_are_described_in_words():
    assert list(map(str, benchmark.TASKS)) == [
        "1 average into a model",
        "4 averages into models",
        "4 averages into files",
    ]


@pytest.fixture(scope="module")
def folder():
    with benchmark.snapshots_of(QUICK) as made:
        yield made


@pytest.mark.parametrize(
    ("place", "way"), [(p, w) for p in benchmark.WAYS for w in benchmark.WAYS[p]]
)
def test_every_method_gives_the_same_average(place, way, folder):
    """ema-pytorch only approximately: its β is one step late."""
    own = folder / ("theirs" if way == THEIRS else "ours")
    wanted = [benchmark.synthesize(folder / "ours", s)["0.weight"] for s in benchmark.WANTED[:2]]
    made = benchmark.WAYS[place][way](QUICK, own, 2)()
    if place == "into a file":
        name = "ours" if way == OURS else "outer"
        files = [own / f"{name}-{number}.safetensors" for number in range(2)]
        found = [benchmark.load_file(file)["0.weight"] for file in files]
    elif way == THEIRS:
        found = [average.ema_model[0].weight for average in made]
    else:
        found = [model[0].weight for model in made]
    for average, exact in zip(found, wanted, strict=True):
        if way == THEIRS:
            assert (average - exact).abs().max() < 0.03
        else:
            assert_close(average, exact)
    assert (wanted[0] - wanted[1]).abs().max() > 1e-5


@pytest.mark.parametrize("count", [1, 4])
def test_buffers_are_a_chunk_per_average_and_eight_more(count, folder):
    shares = count * 20 * 4
    largest = min(CHUNK, QUICK.width * (QUICK.width - 1))
    assert (
        benchmark.buffer_bytes(QUICK, folder / "ours", count) - shares
        == (count + ROWS) * largest * 4
    )


def test_a_wrong_loop_is_reported(folder, monkeypatch):
    assert benchmark.largest_difference(QUICK, folder / "ours") < 1e-6
    monkeypatch.setattr(benchmark, "solve_weights", lambda p, t: torch.ones(len(p)) / len(p))
    assert benchmark.largest_difference(QUICK, folder / "ours") > 1e-3


@pytest.mark.slow
def test_separate_processes_return_seconds_and_bytes(quick, tmp_path, capsys):
    section = run(tmp_path, "--section", "synthesis")["synthesis"]
    printed = capsys.readouterr().out
    assert "\n| 1 average into a model | memlab | " in printed
    assert section["1 average into a model"]["ratios"].keys() == {OUTER, FUSED, THEIRS}
    for seconds in section["4 averages into files"]["seconds"].values():
        assert len(seconds) == QUICK.rounds
        assert min(seconds) > 0


# ------------------------------------------------------------------ other sections


def test_errors_equal_profile_error_and_have_slopes(quick, tmp_path):
    section = run(tmp_path, "--section", "profiles")["profiles"]
    assert section["counts"] == [16, 64]
    row = section["(0.05, 0.1) → 0.15"]
    profiles = [power_profile(sigma, t) for t in range(1, 17) for sigma in (0.05, 0.1)]
    assert row["errors"][0] == profile_error(profiles, power_profile(0.15, 16))
    assert 3.7 < row["slope"] < 4.1


def test_a_slope_is_a_falling_exponent_from_16_on():
    assert benchmark.slope([2, 16, 64], [7, 1, 1 / 256]) == pytest.approx(4)


def test_pruning_names_each_choice(quick, tmp_path, capsys):
    section = run(tmp_path, "--section", "pruning")["pruning"]
    assert section["errors"].keys() == benchmark.CHOICES.keys()
    assert "\n| every 5th, and the last | " in capsys.readouterr().out
    worst = {name: max(errors.values()) for name, errors in section["errors"].items()}
    assert min(worst, key=worst.get) == "all 100"


def test_files_have_the_bytes_of_their_encodings(quick, tmp_path):
    section = run(tmp_path, "--section", "files")["files"]
    assert section["tracked_bytes"] == 2 * 4 * QUICK.weights
    sizes = section["file_bytes"]
    header = sizes["float32"] - 4 * QUICK.weights
    assert 0 < header < 1024
    assert abs(sizes["float16"] - 2 * QUICK.weights - header) <= 64
    assert section["errors"]["float32"] == 0 < section["errors"]["float16"] < 5e-4


def test_decoding_compares_times_with_float32_and_bytes(monkeypatch, quick, tmp_path):
    """Tensors of 10,000 elements, so that int8 files have codes."""
    monkeypatch.setattr(benchmark, "FULL", replace(QUICK, width=100))
    read = []
    proper = benchmark.reads
    monkeypatch.setattr(benchmark, "reads", lambda folder: read.append(folder) or proper(folder))
    section = run(tmp_path, "--section", "decoding")["decoding"]
    assert [folder.name for folder in read] == list(benchmark.ENCODINGS)
    assert section["float32"]["reading"]["median"] == section["float32"]["synthesis"]["median"] == 1
    assert section["int8"]["file_bytes"] < section["float16"]["file_bytes"]
    assert all(row["reading"]["low"] > 0 for row in section.values() if "reading" in row)


def test_reading_decodes_every_element(monkeypatch, tmp_path):
    track = replace(QUICK, width=100)
    benchmark.track(track, tmp_path, snapshot_dtype="int8")
    chunks = []
    proper = Snapshot.reader

    def counted(self, name):
        read = proper(self, name)
        return lambda start, stop: chunks.append(stop - start) or read(start, stop)

    monkeypatch.setattr(Snapshot, "reader", counted)
    last = benchmark.reads(tmp_path)()
    every = sum(math.prod(s) for s in find_snapshots(tmp_path)[0].shapes.values())
    assert sum(chunks) == 2 * track.steps * every
    snapshot = find_snapshots(tmp_path)[-1]
    name, shape = list(snapshot.shapes.items())[-1]
    assert torch.equal(last[: math.prod(shape)], snapshot.read(name, 0, math.prod(shape)))


def test_float16_sums_lose_more_than_float16_files(quick, tmp_path):
    errors = run(tmp_path, "--section", "float16")["float16"]["errors"]
    for of_each in errors.values():
        assert of_each["float32 files, float32 sums"] < 1e-6
        files, sums = (
            of_each["float16 files, float32 sums"],
            of_each["float32 files, float16 sums"],
        )
        assert 1e-5 < files < sums < 1e-2


@pytest.mark.parametrize(
    ("files", "sums", "wanted"),
    [
        (torch.float32, torch.float32, 0),
        (torch.float16, torch.float32, 2**-12 / (1 + 2**-12)),  # 1 + 2⁻¹² becomes 1
        (torch.float32, torch.float16, 2**-12 / (1 + 2**-12)),
    ],
)
def test_a_sum_is_rounded_in_the_files_or_in_the_sums(files, sums, wanted):
    numbers = [torch.full((8,), 1 + 2**-12)]
    assert benchmark.sum_error(numbers, [1.0], files, sums) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", list(benchmark.UPDATES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_update_gives_the_same_averages(name, dtype):
    torch.manual_seed(0)
    weights = {str(n): torch.randn(50, 40, dtype=dtype) for n in range(3)}
    averages = [{n: torch.randn(50, 40) for n in weights} for _ in range(2)]
    wanted = [{n: a + 0.3 * (weights[n].float() - a) for n, a in one.items()} for one in averages]
    benchmark.UPDATES[name](averages, weights, 0.3)
    rounded = dtype if name == "mul_ and add_" else torch.float32
    for one, exact in zip(averages, wanted, strict=True):
        assert_close(list(one.values()), list(exact.values()), terms=4, dtype=rounded)


def test_updates_are_compared_with_memlabs(quick, tmp_path):
    section = run(tmp_path, "--section", "update")["update"]
    large = section["large tensors, bfloat16"]
    assert large["ratios"].keys() == benchmark.UPDATES.keys() - {OURS}
    assert large["weight_bytes"] == 2 * QUICK.layers * QUICK.width**2


def test_a_relative_error_covers_all_tensors():
    wanted = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    found = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([4.4])}
    assert benchmark.relative_error(found, wanted) == pytest.approx(0.1)


def test_a_quick_run_writes_nothing(tmp_path, capsys):
    words = ["--quick", "--section", "profiles", "--section", "pruning", "--section", "files"]
    assert benchmark.main([*words, "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("# Post-hoc EMA: CPU")
    assert list(tmp_path.iterdir()) == []
