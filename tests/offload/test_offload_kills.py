"""A training on disk loses nothing when it is killed, at random points or from outside.

killed_training.py contains the training and the kills.
"""

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
    """Run the script in its own process, which forks before torch starts threads."""
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed_training.py")
    arguments = [sys.executable, str(script), str(folder), str(SEED), str(KILLS)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.slow
def test_without_kills_the_training_equals_the_one_without_offloading(found):
    assert (found["whole"]["began"], found["whole"]["right"]) == (0, True)


def test_a_training_killed_at_random_points_resumes_bit_for_bit_from_the_last_step(found):
    assert len(found["killed"]) == KILLS
    for row in found["killed"]:
        assert row["status"] == SIGKILL
        # A step is complete after its rename, even if the process is killed before step() returns.
        assert row["completed"] <= row["began"] <= row["completed"] + 1, row
        assert row["right"], row
    assert {row["began"] for row in found["killed"]} >= set(range(STEPS))


def test_a_training_killed_from_outside_resumes(found):
    for row in found["outside"]:
        assert row["status"] == SIGKILL
        assert row["began"] >= 1
        assert row["right"], row


def test_only_the_leftovers_of_a_killed_process_are_removed(found):
    assert found["left"] == [".store", "lock", "manifest.json", *found["files"]]


def test_the_disk_never_holds_more_than_two_generations(found):
    assert found["state_bytes"] < found["whole"]["most_bytes"] <= 2 * found["state_bytes"]


def test_files_are_synced_before_the_manifest_names_them_and_removed_after(found):
    """Check the log of disk operations, which the process and its thread share."""
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
