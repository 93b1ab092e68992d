"""A training on the disk loses nothing when it is killed: not at any of twenty random points, and
not from outside. In killed_training.py is the training, and who kills it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from killed_training import STEPS

KILLS, SEED = 20, 0
SIGKILL = 9


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of a process of its own, which forks before torch has threads."""
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed_training.py")
    arguments = [sys.executable, str(script), str(folder), str(SEED), str(KILLS)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_undisturbed_the_training_is_the_one_without_offloading(found):
    assert (found["whole"]["began"], found["whole"]["right"]) == (0, True)


def test_killed_at_twenty_random_points_it_goes_on_from_the_last_completed_step_to_the_bit(found):
    assert len(found["killed"]) == KILLS
    for row in found["killed"]:
        assert row["status"] == SIGKILL
        # Killed after the rename and before the call returned, a step is complete all the same.
        assert row["completed"] <= row["began"] <= row["completed"] + 1, row
        assert row["right"], row
    assert {row["began"] for row in found["killed"]} >= set(range(STEPS))


def test_killed_from_outside_it_goes_on_too(found):
    for row in found["outside"]:
        assert row["status"] == SIGKILL
        assert row["began"] >= 1
        assert row["right"], row


def test_what_a_killed_process_left_is_removed_and_nothing_else(found):
    assert found["left"] == [".store", "lock", "manifest.json", *found["files"]]


def test_the_disk_never_holds_more_than_two_generations(found):
    assert found["state_bytes"] < found["whole"]["most_bytes"] <= 2 * found["state_bytes"]


def test_every_step_is_forced_to_the_disk_before_it_is_named_and_named_before_the_last_is_removed(
    found,
):
    """By the log of what was asked of the disk. The process and its thread write to one log."""
    log = [tuple(row) for row in found["whole"]["log"]]
    renames = [at for at, (what, _) in enumerate(log) if what == "replace"]
    assert len(renames) == STEPS
    for at in renames:
        _, manifest = log[at]
        written = [name for what, name in log[:at] if what == "write" and name.startswith("state")]
        forced = [name for what, name in log[:at] if what == "fsync"]
        assert set(written) <= set(forced)
        assert log[at - 1] == ("fsync", manifest)
        assert log[at - 2] == ("fsync", "whole")
        after = log[at + 1 : at + 3]
        assert ("fsync", "whole") in after
        assert not any(what == "unlink" and name.startswith("state") for what, name in after)
