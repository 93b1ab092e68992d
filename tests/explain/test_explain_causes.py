"""Each cause is found in the snapshot of a script that has it, and not in a near miss."""

import linecache
import pickle
import re
from functools import cache

import failing_scripts
import pytest
import torch
import torch.nn.functional as F
from confidence import corpus
from cuda_recorder import Recorder, peak_bytes, record
from quick import quick

import memlab
from memlab.explain import explain, explain_source, of_text, summary
from memlab.explain.findings import CAUSES
from memlab.explain.reading import of_data
from memlab.units import format_bytes

# script: (its cause, the share of its peak that the card has)
SCRIPTS = {
    "large_batch": ("batch", 0.8),
    "large_batch_gpt": ("batch", 0.8),
    "long_sequence": ("sequence", 0.8),
    "deep_without_checkpointing": ("no-checkpointing", 0.8),
    "large_vocabulary": ("logits", 0.8),
    "optimizer_state": ("optimizer-state", 0.7),
    "validation_with_gradients": ("no-grad", 0.85),
    "losses_kept": ("kept-graphs", 0.65),
    "accumulated_loss": ("kept-graphs", 0.65),
    "generation": ("kv-cache", 0.9),
    "fragmentation": ("fragmentation", 0.9),
    "loading": ("weights", 0.8),
}
# script: (the cause that it nearly has, the share of its peak that the card has)
NEAR_MISSES = {
    "checkpointed": ("no-checkpointing", 0.8),
    "validation_without_gradients": ("no-grad", 0.8),
    "losses_detached": ("kept-graphs", 0.7),
    "fused_attention": ("sequence", 0.8),
    "small_vocabulary": ("logits", 0.8),
    "later_optimizer_step": ("optimizer-state", 0.8),
    "fixed_cache": ("kv-cache", 0.8),
}


@cache
def recorded(name: str, share: float, stacks: str = "python") -> tuple[dict, str]:
    script = getattr(failing_scripts, name)
    return record(script, int(peak_bytes(script) * share), stacks=stacks)


@pytest.mark.few(1)
@pytest.mark.parametrize("stacks", ["python", "all"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_cause_of_a_snapshot_is_found(name, stacks):
    cause, share = SCRIPTS[name]
    snapshot, log = recorded(name, share, stacks)
    assert log, "the script did not run out of memory"
    found = explain_source(of_data(snapshot))
    assert found.cause == cause
    assert found.findings[0].evidence


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(list(NEAR_MISSES)[1:6], NEAR_MISSES))
def test_a_near_miss_has_another_cause(name):
    cause, share = NEAR_MISSES[name]
    snapshot, log = recorded(name, share)
    assert log, "the script did not run out of memory"
    assert explain_source(of_data(snapshot)).cause not in (cause, None)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(["large_batch", "generation"], SCRIPTS))
def test_a_replay_with_the_recorded_settings_fails_at_the_same_request(name):
    snapshot, _ = recorded(name, SCRIPTS[name][1])
    found = explain_source(of_data(snapshot))
    assert found.replays.reproduces
    assert found.replays.base.failed_at == found.situation.moment


def test_the_remedy_of_a_leak_is_replayed_and_fits():
    found = explain_source(of_data(recorded("losses_kept", 0.65)[0]))
    [outcome] = [o for o in found.replays.remedies if o.cause == "kept-graphs"]
    assert outcome.fits


def test_expandable_segments_help_against_fragmentation_and_not_against_a_leak():
    for name, helps in (("fragmentation", True), ("losses_kept", False)):
        found = explain_source(of_data(recorded(name, SCRIPTS[name][1])[0]))
        by_name = {outcome.name: outcome for outcome in found.replays.remedies}
        assert by_name["expandable_segments:True"].fits == helps


def test_the_line_that_leaks_is_named():
    found = explain_source(of_data(recorded("losses_kept", 0.65)[0]))
    frame = found.situation.leaks[0].frame
    assert "extra = loss_of(model" in linecache.getline(frame.filename, frame.line)


def test_the_line_that_leaks_is_named_in_memlabs_own_snapshot(tmp_path):
    """Its stacks have one line of the user: a helper's lines repeat within every step."""

    def train(model, optimizer):
        optimizer.zero_grad()
        model(torch.zeros(64, 256)).square().mean().backward()
        optimizer.step()

    losses = []
    with memlab.dry_run():
        model = torch.nn.Linear(256, 1024)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        with memlab.meter(model, optimizer, lines=True) as running:
            for _ in range(6):
                train(model, optimizer)
                train(model, optimizer)
                losses.append(model(torch.zeros(1024, 256)).square().mean())
    running.trace.to_snapshot(tmp_path / "kept.pickle")
    found = explain(tmp_path / "kept.pickle")
    assert found.cause == "kept-graphs"
    frame = found.situation.leaks[0].frame
    assert "losses.append" in linecache.getline(__file__, frame.line)


def test_a_record_that_begins_late_has_the_same_cause():
    script = failing_scripts.losses_kept
    recorder = Recorder(int(peak_bytes(script) * 0.65))
    with pytest.raises(Exception, match="out of memory"), recorder:
        script()
    found = explain_source(of_data(recorder.snapshot(max_entries=5000)))
    assert found.cause == "kept-graphs"


def test_memory_that_another_process_takes_is_noticed():
    """The process had more reserved before than is now reserved or free."""
    snapshot, _ = recorded("large_batch", 0.8)
    entries = [
        {"action": "segment_alloc", "addr": 2**40, "size": 2**30, "stream": 0, "frames": []},
        {"action": "segment_free", "addr": 2**40, "size": 2**30, "stream": 0, "frames": []},
    ]
    changed = snapshot | {"device_traces": [entries + snapshot["device_traces"][0]]}
    assert explain_source(of_data(changed)).cause == "other-process"
    assert explain_source(of_data(snapshot)).cause == "batch"


def test_the_size_of_the_card_shows_another_process():
    snapshot, _ = recorded("large_batch", 0.8)
    found = explain_source(of_data(snapshot), total_bytes=24 * 2**30)
    assert found.cause == "other-process"


def test_a_request_larger_than_all_memory_is_the_cause():
    snapshot, _ = recorded("large_batch", 0.8)
    entries = snapshot["device_traces"][0]
    larger = [e | {"size": 2**40} if e["action"] == "oom" else e for e in entries]
    found = explain_source(of_data(snapshot | {"device_traces": [larger]}))
    assert found.cause == "request"
    assert "request" not in {f.cause.name for f in explain_source(of_data(snapshot)).findings}


def test_every_cause_has_a_script_or_a_test_of_its_own():
    tested = {cause for cause, _ in SCRIPTS.values()} | {case["cause"] for case in corpus()}
    assert tested == CAUSES.keys()


@pytest.mark.slow
def test_temporaries_of_a_later_optimizer_step_are_no_new_state():
    """A leak fills the memory, and the optimizer's step is where it ends."""
    snapshot, _ = recorded("leak_that_fails_in_the_optimizer", 0.9)
    found = explain_source(of_data(snapshot))
    assert found.situation.phase == "optimizer"
    assert found.cause == "kept-graphs"
    weights = found.situation.by_category["parameters"]
    assert found.situation.by_category["optimizer_state"] == pytest.approx(2 * weights, rel=0.01)


def frames(*names: str, line: int) -> list[dict]:
    """Return the stack of a training step that calls functions, innermost first."""
    inner = [{"filename": "model.py", "line": 9, "name": name} for name in reversed(names)]
    outer = [("train.py", line, "train_step"), ("train.py", 90, "<module>")]
    keys = ("filename", "line", "name")
    return inner + [dict(zip(keys, frame, strict=True)) for frame in outer]


class Entries:
    """The entries of a device's trace, and its segments at the end."""

    def __init__(self) -> None:
        self.entries, self.alive = [], {}

    def add(self, size: int, stack: list[dict]) -> int:
        address = (len(self.entries) + 1) * 2**32
        self._write("segment_alloc", address, size, stack)
        self._write("alloc", address, size, stack)
        self.alive[address] = (size, stack)
        return address

    def free(self, address: int) -> None:
        size, _ = self.alive.pop(address)
        for action in ("free_requested", "free_completed", "segment_free"):
            self._write(action, address, size, [])

    def refuse(self, size: int, stack: list[dict]) -> None:
        self._write("oom", 0, size, stack)
        self.entries[-1]["device_free"] = 0

    def _write(self, action: str, address: int, size: int, stack: list[dict]) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": 0}
        self.entries.append({**entry, "frames": stack})

    def snapshot(self) -> dict:
        segments = []
        for address, (size, stack) in self.alive.items():
            state = {"state": "active_allocated", "requested_size": size, "frames": stack}
            block = {"address": address, "size": size, **state}
            segment = {"address": address, "total_size": size, "blocks": [block]}
            segments.append({"device": 0, "stream": 0, **segment})
        return {"segments": segments, "device_traces": [self.entries]}


def test_a_leak_in_training_whose_backward_allocates_nothing_is_no_evaluation():
    """Gradients stay after the first step, and later backwards only free activations."""
    found, leak = Entries(), 2**21
    for step in range(40):
        made = [found.add(2**20, frames("forward", line=41)) for _ in range(4)]
        found.add(leak, frames("forward", line=46))
        if step == 0:
            found.add(2**20, frames("_engine_run_backward", line=43))
        for address in made:
            found.free(address)
    found.refuse(leak, frames("forward", line=46))
    found = explain_source(of_data(found.snapshot()))
    assert found.cause == "kept-graphs"
    assert "no-grad" not in {each.cause.name for each in found.findings}


def trace_of_evaluation() -> memlab.Trace:
    model = failing_scripts.CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))

    def train_and_evaluate() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        total = 0
        for _ in range(5):
            total = total + F.cross_entropy(model(images), labels)

    return memlab.measure(train_and_evaluate, model=model, optimizer=optimizer)


def test_a_snapshot_without_a_history_uses_the_stacks_of_its_blocks():
    blocks = Entries()
    for size in (2**24, 2**25, 2**26):
        blocks.add(size, frames("forward", line=41))
    found = explain_source(of_data(blocks.snapshot() | {"device_traces": [[]]}))
    assert found.situation.history.has_frames
    assert summary.stack_note(found.situation) == ""
    assert found.cause == "batch"


def test_without_a_refused_request_no_finding_says_that_memory_ran_out():
    snapshot, log = record(failing_scripts.large_vocabulary)
    assert not log
    found = explain_source(of_data(snapshot))
    said = [line for each in found.findings for line in each.evidence]
    said.append(summary.replay_note(found.replays, found.situation))
    assert found.cause == "logits"
    assert not re.search("refused|ran out|this request| 0 B", " ".join(said))
    assert summary.title_of_causes(found) == "what fills the peak"


def test_a_saving_says_whether_it_is_of_allocated_or_of_reserved_memory():
    found = explain_source(of_data(record(failing_scripts.large_vocabulary)[0]))
    base = found.replays.base
    for outcome in found.replays.remedies:
        kind = "reserved" if outcome.cause == "fragmentation" else "allocated"
        words = outcome.against(base)
        assert words == "saves nothing" or words.endswith(f"of what is {kind}")
        saved = getattr(base, f"{kind}_peak_bytes") - getattr(outcome, f"{kind}_peak_bytes")
        assert format_bytes(max(0, saved)) in words or saved <= 0


def test_evaluation_passes_are_not_called_completed_steps():
    found = explain_source(of_data(recorded("validation_that_keeps_outputs", 0.8)[0]))
    assert "passes of validate_and_keep()" in summary.headline(found)


def test_passes_of_memlabs_own_trace_without_backward_are_found():
    """Without a backward, memlab calls what a forward keeps its temporaries."""
    found = explain_source(of_data(trace_of_evaluation().to_dict()))
    assert found.cause == "no-grad"


def test_a_history_without_stacks_is_explained_with_ambiguous_categories(tmp_path):
    snapshot, _ = recorded("deep_without_checkpointing", 0.8)
    entries = [{k: v for k, v in e.items() if k != "frames"} for e in snapshot["device_traces"][0]]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot | {"device_traces": [entries]}))
    situation = explain(path).situation
    assert situation.unsure["activations"] == situation.by_category["activations"]


# ------------------------------------------------------------------ the logs of the same scripts

LOGS = (  # a log without checkpointing looks like a batch that is too large
    *("long_sequence", "large_vocabulary", "optimizer_state"),
    *("validation_with_gradients", "generation", "fragmentation"),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOGS)
def test_the_cause_of_a_log_is_found(name):
    cause, share = SCRIPTS[name]
    found = explain_source(of_text(recorded(name, share)[1]))
    assert found.cause == cause
