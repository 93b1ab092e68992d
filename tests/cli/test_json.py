"""`--json`: one document on standard output, which memlab/cli/schema.json describes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memlab import Event, Trace
from memlab.cli import documents
from memlab.cli.rows import Row
from memlab.configs.gpus import CONTEXT_BYTES
from memlab.train import TECHNIQUES
from tests.transformers_models.configs import TINY

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch

def build(batch=64):
    print("printed by the script")
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(batch, 512)).square().mean().backward()
        optimizer.step()

    return step, model, optimizer
"""


@pytest.fixture
def document(memlab_command, tmp_path, schema):
    """Run a command with --json; return its status and its document, once it is valid."""

    def run(*arguments: object) -> tuple[int, dict]:
        outcome = memlab_command(*arguments, "--json")
        found = json.loads(outcome.out)
        schema.validate(found)
        assert "written: work/" in outcome.err
        written = json.loads((tmp_path / f"work/{arguments[0]}.json").read_text(encoding="utf-8"))
        assert written == found
        drawn = (tmp_path / f"work/{arguments[0]}.png").exists()
        assert drawn == any(each.get("at_peak") for each in found.get("options", found.get("rows")))
        return outcome.status, found

    return run


# ------------------------------------------------------------------ the schema


def test_the_schema_is_a_schema_and_refuses_what_is_not_in_it(schema):
    schema.check_schema(schema.schema)
    valid = documents.measure_document("", [Row("plain", failure="why")], [])
    schema.validate(valid)
    for wrong in (
        {"schema": 2},
        {"verdict": "fits"},
        {"rows": []},
        {"more": 1},
        {"rows": [{**valid["rows"][0], "failure": None}]},  # neither bytes nor a failure
    ):
        assert not schema.is_valid({**valid, **wrong})


def test_every_field_of_the_schema_is_explained_or_obvious(schema):
    obvious = {"schema", "command", "machine", "torch", "python", "parameters", "fits", "device"}
    obvious |= {"gpus", "memory", "total_bytes", "at_peak", "seconds", "time_ratios", "failure"}
    obvious |= {"estimated_time_ratio", "largest_gradient", "what", "date", "notes", "peak_in"}
    for name, part in schema.schema["$defs"].items():
        for field, meaning in part.get("properties", {}).items():
            assert "description" in meaning or field in obvious, (name, field)


# ------------------------------------------------------------------ plan


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "memory", "status", "verdict"),
    [
        ("5m", "24GB", 0, "fits"),
        ("llama-2-7b", "24GB", 0, "fits with another recipe"),
        ("llama-3-405b", "8GiB", 1, "does not fit"),
    ],
)
def test_a_plan_of_a_model_is_a_document(by_formula, document, model, memory, status, verdict):
    got, found = document("plan", "--model", model, "--memory", memory)
    assert (got, found["verdict"]) == (status, verdict)
    assert (found["model"], found["library"], found["script"]) == (model, "memlab", None)
    chosen = found["chosen"]
    assert (chosen is None) == (status == 1)
    if chosen is not None:
        option = found["options"][chosen]
        assert option["fits"]
        assert option["predicted"]
        assert option["needed_bytes"] <= found["budget_bytes"]
        assert option["command"].startswith(f"memlab train --model {model} ")
    for option in found["options"]:
        assert option["fits"] == (option["needed_bytes"] <= found["budget_bytes"])
        assert option["missing_bytes"] == option["needed_bytes"] - found["budget_bytes"]
    assert (verdict == "fits") == (found["bytes_as_it_is"] <= found["budget_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free", "verdict"),
    [
        pytest.param(300_000_000, "fits", marks=pytest.mark.slow),
        pytest.param(200_000_000, "fits with another recipe", marks=pytest.mark.slow),
        (20_000_000, "does not fit"),
    ],
)
def test_a_plan_of_a_transformers_model_has_the_same_fields(
    free, verdict, document, tmp_path, monkeypatch
):
    monkeypatch.setattr("memlab.transformers_models.planning.MAX_WORKERS", 1)
    (tmp_path / "config.json").write_text(json.dumps({**TINY["gpt2"], "model_type": "gpt2"}))
    given = ("plan", "--model", "config.json", "--memory", free + CONTEXT_BYTES[1], "--margin", 0)
    status, found = document(*given, "--full", "--batch", 512, "--precision", "bfloat16")
    assert found["verdict"] == verdict, [o["needed_bytes"] for o in found["options"]]
    assert status == (1 if verdict == "does not fit" else 0)
    assert (found["model"], found["library"]) == ("config.json", "transformers")
    assert found["budget_bytes"] == free
    [option] = found["options"]
    assert option["settings"]["method"] == "full"
    assert option["settings"]["checkpointing"] == (verdict != "fits")
    assert found["chosen"] == (None if verdict == "does not fit" else 0)
    if status == 0:
        assert any("from_pretrained" in line for line in option["code"])
    assert found["bytes_as_it_is"] == (option["needed_bytes"] if verdict == "fits" else None)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("memory", "status", "verdict"),
    [
        ("1GiB", 0, "fits"),
        pytest.param("17500KiB", 0, "fits with another recipe", marks=pytest.mark.slow),
        ("5MiB", 1, "does not fit"),
    ],
)
def test_a_plan_of_a_script_has_the_same_fields(memory, status, verdict, document, tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    given = ("plan", "--script", "own.py:build", "--memory", memory, "--device", "cpu")
    got, found = document(*given)
    assert (got, found["verdict"]) == (status, verdict), found["options"]
    assert (found["script"], found["model"]) == ("own.py:build", None)
    assert (found["batch"], found["seq_len"]) == (64, None)
    first = found["options"][0]
    assert first["recipe"] == "as it is"
    assert found["bytes_as_it_is"] == first["needed_bytes"]
    assert first["fits"] == (verdict == "fits")
    if status == 0:
        chosen = found["options"][found["chosen"]]
        assert chosen["largest_batch"] >= 64
        assert bool(chosen["code"]) == (verdict != "fits")


def test_plans_of_all_kinds_have_the_same_fields(by_formula, document, tmp_path, monkeypatch):
    monkeypatch.setattr("memlab.transformers_models.planning.MAX_WORKERS", 1)
    (tmp_path / "own.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps({**TINY["gpt2"], "model_type": "gpt2"}))
    kinds = (
        ("--model", "tiny", "--recipes", 1),
        ("--model", "config.json", "--lora"),
        ("--script", "own.py:build"),
    )
    # First: it writes no picture.
    _, keys = document("plan", "--model", "tiny", "--deepspeed", "config.json")
    found = [document("plan", *kind, "--memory", "24GB")[1] for kind in kinds]
    assert keys["deepspeed"] is not None
    assert keys.keys() == found[0].keys()
    assert len({frozenset(each) for each in found}) == 1
    options = [each["options"][each["chosen"]] for each in found]
    assert len({frozenset(option) for option in options}) == 1
    assert [each["deepspeed"] for each in found] == [None, None, None]
    assert all(type(option["needed_bytes"]) is int for option in options)
    assert all(type(each["budget_bytes"]) is int for each in found)


# ------------------------------------------------------------------ measure


def test_a_measurement_is_a_document(document):
    given = ("--model", "tiny", "--dry-run", "--technique", "sgd")
    status, found = document("measure", *given)
    assert (status, found["verdict"]) == (0, "measured")
    plain, sgd = found["rows"]
    assert (plain["technique"], sgd["technique"]) == ("plain", "sgd")
    assert plain["allocated_bytes"] > sgd["allocated_bytes"] > 0
    assert plain["allocated_bytes"] >= sum(plain["at_peak"].values()) == plain["peak_bytes"]
    assert [row["technique"] for row in found["on_cuda"]] == ["plain", "sgd"]
    assert all(row["reserved_bytes"] >= row["allocated_bytes"] for row in found["on_cuda"])


def test_a_failed_technique_is_the_verdict(document, monkeypatch):
    def attention(*arguments, **named):
        raise NotImplementedError("no such kernel")

    fails = replace(TECHNIQUES["plain"], plugs={"attention": lambda: attention})
    monkeypatch.setitem(TECHNIQUES, "autocast", fails)
    given = ("--model", "tiny", "--dry-run", "--technique", "autocast")
    status, found = document("measure", *given)
    assert (status, found["verdict"]) == (1, "a technique failed")
    assert found["rows"][1]["failure"] == "NotImplementedError: no such kernel"
    assert "allocated_bytes" not in found["rows"][1]


def test_ranks_are_a_document(document):
    status, found = document("measure", "--model", "tiny", "--batch", 2, "--ranks", 4)
    assert (status, found["verdict"]) == (0, "measured")
    states = [row["model_states_bytes"] for row in found["rows"]]
    assert states == sorted(states, reverse=True)
    assert "root" in found["rows"][3]["gathered"]


def test_a_measured_script_is_a_document_and_its_own_output_is_elsewhere(
    document, memlab_command, tmp_path
):
    (tmp_path / "own.py").write_text(SCRIPT)
    given = ("measure", "--script", "own.py:build", "--dry-run")
    status, found = document(*given)
    assert (status, found["rows"][0]["technique"]) == (0, "own.py:build")
    assert "printed by the script" in memlab_command(*given, "--json").err


# ------------------------------------------------------------------ streams and errors


def test_a_process_prints_the_document_alone(tmp_path, schema):
    loud = SCRIPT.replace('print("printed by the script")', "import os; os.system('echo loud')")
    (tmp_path / "own.py").write_text(loud)
    given = ("measure", "--script", "own.py:build", "--dry-run", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "memlab", *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    schema.validate(json.loads(done.stdout))
    assert "loud\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--json", "--model", "tiny"), "got no --memory"),
        (("plan", "--json", "--script", "no.py:build", "--memory", "1GiB"), "there is no file"),
        (("plan", "--json", "--wide", "--model", "tiny"), "got --wide together with --json"),
        (("measure", "--json", "--wide"), "got --wide together with --json"),
        (("plan", "--gpu", "list", "--json"), "got --json together with the list of GPUs"),
        (
            ("plan", "--gpu", "list", "--model", "x", "--batch", "2"),
            "got --model, --batch together with the list of GPUs; leave --model, --batch out",
        ),
        (("measure", "--json", "--model", "tinny"), "did you mean tiny?"),
    ],
)
def test_bad_input_is_one_line_on_standard_error(arguments, words, usage_error):
    assert words in usage_error(*arguments)


def test_an_error_of_a_script_is_one_line(usage_error, tmp_path):
    (tmp_path / "own.py").write_text("def build():\n    raise ValueError('no data')\n")
    said = usage_error("plan", "--json", "--script", "own.py:build", "--memory", "1GiB")
    assert said == "own.py:2 raised ValueError: no data"


# ------------------------------------------------------------------ explain


@pytest.mark.parametrize(
    ("file", "verdict", "kind"),
    [("oom.txt", "other-process", "log"), ("trace.json", "no-grad", "trace")],
)
def test_an_explanation_is_a_document(memlab_command, tmp_path, schema, file, verdict, kind):
    (tmp_path / "oom.txt").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 23.65 GiB of which 1.20 GiB is free. Process 1234 has 10.00 GiB memory in "
        "use. Including non-PyTorch memory, this process has 12.40 GiB memory in use."
    )
    layers = [
        Event(2**23, n, "activations", "aten.mm", f"blocks.{n}", "forward", "float32", (2**21,))
        for n in range(9)
    ]
    (tmp_path / "trace.json").write_text(json.dumps(Trace(tuple(layers)).to_dict()))
    outcome = memlab_command("explain", tmp_path / file, "--json")
    found = json.loads(outcome.out)
    schema.validate(found)
    assert json.loads((tmp_path / "work/explain.json").read_text(encoding="utf-8")) == found
    assert (found["verdict"], found["kind"]) == (found["causes"][0]["name"], kind)
    if kind == "log":
        assert found["verdict"] == "other-process"
        assert found["stated"] == {
            "requested": 2 * 2**30,
            "capacity": round(23.65 * 2**30),
            "free": round(1.2 * 2**30),
            "process": round(12.4 * 2**30),
        }
    else:
        assert (found["allocated_bytes"], found["alive"]) == (9 * 2**23, {"activations": 9 * 2**23})
