"""`memlab explain`: the summary, the report, and bad input."""

import io
import json
import pickle
import re
import sys
from html.parser import HTMLParser

import pytest

from memlab import Event, Trace
from memlab.allocator import history
from memlab.cli.explain import Progress

MIB = 2**20
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of "
    "which 1.20 GiB is free. Process 1234 has 10.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 12.40 GiB memory in use. Of the allocated memory 11.00 GiB is "
    "allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


def trace() -> Trace:
    kinds = [("parameters", "before"), *[("activations", "forward")] * 9]
    return Trace(
        tuple(
            Event(8 * MIB, n, kind, "aten.mm", f"blocks.{n}", phase, "float32", (2**21,))
            for n, (kind, phase) in enumerate(kinds)
        )
    )


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace().to_dict()), encoding="utf-8")
    return path


def test_a_trace_is_summarized_and_the_report_is_written(memlab_command, tmp_path, trace_file):
    outcome = memlab_command("explain", trace_file, "--all")
    assert outcome.status == 0
    assert (
        "memlab trace: no memory problem (no request was refused); the peak is 80.00 MiB"
        in outcome.out
    )
    assert re.search(r"activations +72\.00 MiB +90\.0%", outcome.out)
    assert "written: work/explain.json, work/explain.html" in outcome.out
    assert max(map(len, outcome.out.split("\n"))) <= 80
    assert (tmp_path / "work" / "explain.html").exists()


def test_a_message_from_standard_input_is_explained(memlab_command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(MESSAGE))
    outcome = memlab_command("explain", "-", "--all")
    assert outcome.status == 0
    assert "cause: another process on the card" in outcome.out
    assert "process 1234" in outcome.out
    assert "_record_memory_history" in outcome.out


def test_the_answer_fits_the_screen_and_names_one_remedy_with_its_code(memlab_command, tmp_path):
    (tmp_path / "oom.txt").write_text(MESSAGE, encoding="utf-8")
    rows = memlab_command("explain", "oom.txt").out.splitlines()
    assert rows.index("everything else: --all, and the report") <= 12
    assert [row for row in rows if row.startswith("  → ")] == [
        "  → Run nvidia-smi and end the other process, or choose another card with"
    ]
    assert "      $ CUDA_VISIBLE_DEVICES=1 python train.py" in rows


def test_all_says_what_a_confidence_rests_on_and_the_screen_does_not(
    memlab_command, tmp_path, trace_file
):
    (tmp_path / "oom.txt").write_text(MESSAGE, encoding="utf-8")
    assert "reports" not in memlab_command("explain", "oom.txt").out
    every = memlab_command("explain", "oom.txt", "--all").out
    assert re.search(r"confidence: \d+ of the \d+ public reports that look like this had", every)
    of_a_trace = memlab_command("explain", trace_file, "--all").out
    assert "confidence, an estimate)" in of_a_trace
    assert "confidence: estimated from shares and sizes, not counted" in of_a_trace


class Bytes(io.StringIO):
    """Standard input with bytes beneath."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.buffer = io.BytesIO(content)


def test_a_snapshot_from_standard_input_is_explained(memlab_command, monkeypatch):
    content = pickle.dumps({"segments": [], "device_traces": [trace_entries()]})
    monkeypatch.setattr(sys, "stdin", Bytes(content))
    outcome = memlab_command("explain", "-")
    assert outcome.status == 0
    assert "memory snapshot: no memory problem (no request was refused)" in outcome.out


def test_a_long_replay_names_its_remedies_on_standard_error(capsys):
    times = iter((0.0, 1.0, 3.0))
    progress = Progress(lambda: next(times))
    progress("first")
    progress("second")
    assert capsys.readouterr() == ("", "replaying: second\n")


def trace_entries() -> list[dict]:
    return history(trace())["events"]


def test_options_that_a_log_ignores_are_named(memlab_command, tmp_path):
    (tmp_path / "oom.txt").write_text(MESSAGE, encoding="utf-8")
    outcome = memlab_command("explain", "oom.txt", "--device", "0", "--memory", "24GB")
    assert outcome.status == 0
    assert "ignored --device and --memory" in outcome.out
    assert "ignored" not in memlab_command("explain", "oom.txt").out


def test_a_recording_on_another_device_than_cuda_is_not_advised(memlab_command, tmp_path):
    (tmp_path / "oom.txt").write_text(MESSAGE.replace("CUDA", "XPU"), encoding="utf-8")
    assert "torch.cuda" not in memlab_command("explain", "oom.txt").out


def test_a_snapshot_that_states_blocks_alone_shows_no_reserved_memory(memlab_command, tmp_path):
    """memlab's own exporter writes no segments that were reserved at a time."""
    trace().to_snapshot(tmp_path / "snapshot.pickle")
    memlab_command("explain", "snapshot.pickle")
    page = (tmp_path / "work" / "explain.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert data["history"]["has_segments"] is False
    assert 'h.has_segments ? ", " + bytes(h.reserved[n]) + " reserved"' in page


def test_the_report_loads_nothing_and_contains_its_data(memlab_command, tmp_path, trace_file):
    memlab_command("explain", trace_file)
    page = (tmp_path / "work" / "explain.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    data = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    shown = json.loads(data)
    assert shown["history"]["categories"] == ["parameters", "activations"]
    assert max(shown["history"]["totals"]) == 80 * MIB
    assert shown["table"][1][:2] == ["activations", "72.00 MiB"]


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[object] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))

    def handle_endtag(self, tag):
        self.found.append(tag)


def log_with(name: str) -> bytes:
    return f'  File "{name}.py", line 1, in {name}\n    x = "{name}"\n{MESSAGE}'.encode()


def snapshot_with(name: str) -> bytes:
    frames = [{"filename": f"/{name}.py", "line": 3, "name": name}]
    entries = [{**entry, "frames": frames} for entry in trace_entries()]
    return pickle.dumps({"segments": [], "device_traces": [entries]})


@pytest.mark.parametrize("content", [log_with, snapshot_with])
@pytest.mark.parametrize(
    "name",
    [
        "</script><b>",
        "<!--<script>",
        "</title><img/src=x/onerror=alert(1)>",
        "&lt;b&gt;",
        "`${x}`",
    ],
)
def test_text_of_a_file_adds_nothing_to_the_reports_page(memlab_command, tmp_path, content, name):
    def page_of(name: str) -> str:
        (tmp_path / "file").write_bytes(content(name))
        assert memlab_command("explain", "file").status == 0
        return (tmp_path / "work" / "explain.html").read_text(encoding="utf-8")

    page = page_of(name)
    assert Tags(page).found == Tags(page_of("f")).found
    assert "innerHTML" not in page
    assert name in json.dumps(
        json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1]), ensure_ascii=False
    )


class Malicious:
    def __reduce__(self):
        return print, ("ran",)


def test_a_malicious_snapshot_is_refused_in_one_line(memlab_command, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [Malicious()]}))
    outcome = memlab_command("explain", path)
    assert (outcome.status, outcome.out) == (2, "")
    assert "not plain data" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.pickle"], "cannot be read (No such file or directory)"),
        (["."], "cannot be read (Is a directory)"),
        ([], "got no FILE"),
        (["trace.json", "--device", "3"], "no device 3"),
        (["trace.json", "--memory", "many"], "--memory"),
        (["trace.json", "--out", ""], "--out"),
    ],
)
def test_bad_input_is_one_line(memlab_command, trace_file, arguments, words):
    outcome = memlab_command("explain", *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert words in outcome.err
    assert outcome.err.count("\n") == 1


def test_the_help_has_two_examples_and_the_lines_that_record(memlab_command):
    out = memlab_command("explain", "--help").out
    assert "memlab explain snapshot.pickle" in out
    assert "| memlab explain -" in out
    assert "_dump_snapshot" in out


def test_a_recording_without_stacks_says_that_its_categories_are_ambiguous(
    memlab_command, tmp_path
):
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(history(trace())), encoding="utf-8")
    assert "ambiguous" in memlab_command("explain", path, "--all").out


def test_code_stands_below_the_remedy_that_it_belongs_to(memlab_command, tmp_path):
    message = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; "
    message += "21.10 GiB already allocated; 1.20 GiB free; 21.30 GiB reserved in total by PyTorch)"
    (tmp_path / "oom.txt").write_text(message, encoding="utf-8")
    rows = memlab_command("explain", tmp_path / "oom.txt", "--all").out.splitlines()
    place = rows.index("      (loss / 2).backward()")
    assert rows[place - 1] == "  → Halve the batch, and accumulate gradients over two batches."
