"""The allocator benchmark prints the results of replays and simulations."""

import gzip
import json

import pytest
from benchmark_scripts import script

from memlab.allocator import history, simulate
from memlab.trace import Event

MIB = 2**20

benchmark = script("allocator")


def two_events() -> list[Event]:
    event = Event(5 * MIB, 1, "activations", "", "", "forward", "uint8", ())
    return [event, event._replace(bytes=-5 * MIB)]


@pytest.fixture
def recorded(tmp_path):
    """Write a recording of two events that does not state its settings."""
    path = tmp_path / "a_step.0.json.gz"
    recording = history(two_events())
    del recording["allocator_settings"]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(recording, file)
    return path


def test_it_prints_the_scores_of_each_recording_and_the_speed(recorded, tmp_path, capsys):
    words = [str(recorded), "--events", "300", "--results", str(tmp_path)]
    assert benchmark.main(words) == 0
    printed = capsys.readouterr().out
    assert (
        "| a_step.0 | 1 of 1 (100.00%) | 1 of 1 (100.00%) | 1 of 1 (100.00%) | 0 of 0 (100.00%) "
        "| 1 of 1 (100.00%) | 20.00 MiB (20,971,520 B) | 20.00 MiB (20,971,520 B) |"
    ) in printed
    for name in benchmark.SETTINGS:
        assert f"| {name} |" in printed
    [results] = tmp_path.glob("*-cores.json")
    saved = json.loads(results.read_text(encoding="utf-8"))["allocator"]["speed"]
    assert saved["events"] == 300
    assert saved["settings"].keys() == benchmark.SETTINGS.keys()


def test_it_prints_the_differences(recorded, tmp_path, capsys):
    words = [str(recorded), "--conf", "large_segment_size_mb:12", "--events", "300"]
    assert benchmark.main([*words, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| 0 of 1 (0.00%) |" in printed
    assert (
        "- a_step.0: event 1, 5.00 MiB on stream 0: new memory of 20.00 MiB in the rec" in printed
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere.json"], "nowhere.json"),
        (["--conf", "max_split_size_mb:1"], "max_split_size_bytes is 1.00 MiB"),
    ],
)
def test_unreadable_input_is_one_line(words, complaint, capsys):
    assert benchmark.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert complaint in printed.err


def test_the_generated_trace_is_valid_and_within_its_bounds():
    trace = benchmark.generated(2_000, alive=50)
    assert trace == benchmark.generated(2_000, alive=50)
    assert len(trace) == 2_000
    alive = 0
    for event in trace:
        alive += 1 if event.bytes > 0 else -1
        assert 0 <= alive <= 50
        assert 64 <= abs(event.bytes) <= 64 * MIB
    assert simulate(trace).fits
