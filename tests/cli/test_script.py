"""`memlab measure --script`: a user's own step, and errors in it as one sentence."""

import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

import memlab
from memlab.cli.script import is_users
from memlab.trace import Trace
from memlab.units import format_bytes

FILES = {"measure.json", "measure.png", "measure-timeline.png"}

# A working script. Tests replace lines of it.
GOOD = """
import torch

def build():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.ones(4, 8)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step, model, optimizer
"""


@pytest.fixture(autouse=True)
def modules_of_one_test():
    """Remove the modules that a test's script imported, so that the next test cannot see them."""
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest-of" in file:
            del sys.modules[name]


@pytest.fixture
def script(tmp_path):
    """Write train.py; by default the working script."""

    def write(text: str = GOOD, name: str = "train.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
        return f"{name}:build"

    return write


def bare_loop() -> Trace:
    """Return the trace of the second step of GOOD, without the command line."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.ones(4, 8)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    return memlab.measure(step, model=model, optimizer=optimizer)


# ------------------------------------------------------------------ scripts that work


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_the_trace_equals_a_bare_loops(memlab_command, script, how):
    outcome = memlab_command("measure", "--script", script(), *how)
    assert (outcome.status, outcome.err) == (0, "")
    real = str(bare_loop())
    shown = real.replace("(cpu)", "(cpu, dry run)") if how else real
    assert f"\n\n{shown}\n" in outcome.out


def test_the_second_step_is_measured(memlab_command, script):
    text = """
    import torch

    def build():
        sizes = iter((1000, 2000, 3000))
        return (lambda: torch.ones(next(sizes))), None, None
    """
    outcome = memlab_command("measure", "--script", script(text))
    assert f"\npeak {format_bytes(2000 * 4)} " in outcome.out


def test_numbers_and_pictures_are_written(memlab_command, script, tmp_path):
    memlab_command("measure", "--script", script(), "--out", "here")
    assert {path.name for path in (tmp_path / "here").iterdir()} == FILES
    [row] = json.loads((tmp_path / "here/measure.json").read_text())["rows"]
    assert row["technique"] == "train.py:build"
    assert row["peak_bytes"] == bare_loop().peak_bytes


def test_a_script_can_import_a_file_beside_it(memlab_command, script):
    script("SIZE = 8", name="folder/settings_beside.py")
    text = GOOD.replace("import torch\n", "import torch\nfrom settings_beside import SIZE\n")
    given = script(text.replace("Linear(8, 8)", "Linear(SIZE, 8)"), name="folder/train.py")
    assert memlab_command("measure", "--script", given).status == 0


def test_a_step_can_import_a_file_beside_the_script(memlab_command, script):
    script("SIZE = 8", name="folder/late_settings.py")
    text = GOOD.replace("optimizer.zero_grad()", "import late_settings")
    assert memlab_command("measure", "--script", script(text, "folder/train.py")).status == 0


def test_sys_path_is_restored(memlab_command, script):
    before = sys.path[:]
    memlab_command("measure", "--script", script())
    assert sys.path == before


def test_a_scripts_argv_holds_only_its_name(memlab_command, script):
    text = "import sys\nassert sys.argv == ['train.py'], sys.argv\n" + dedent(GOOD)
    assert memlab_command("measure", "--script", script(text)).status == 0


def test_a_dataclass_with_postponed_annotations_finds_its_module(memlab_command, script):
    """dataclasses looks the module up in sys.modules."""
    header = """
    from __future__ import annotations
    from dataclasses import dataclass
    from typing import ClassVar

    @dataclass
    class Settings:
        count: ClassVar[int] = 0
    """
    assert memlab_command("measure", "--script", script(dedent(header) + GOOD)).status == 0


def test_a_script_may_be_named_like_a_loaded_module(memlab_command, script):
    known = sys.modules["json"]
    assert memlab_command("measure", "--script", script(name="json.py")).status == 0
    assert sys.modules["json"] is known


def test_a_scripts_own_output_is_kept(memlab_command, script):
    outcome = memlab_command("measure", "--script", script(GOOD + "\nprint('hello')\n"))
    assert outcome.out.startswith("hello\n")


def test_a_model_and_an_optimizer_may_be_none(memlab_command, script):
    text = GOOD.replace("return step, model, optimizer", "return step, None, None")
    assert memlab_command("measure", "--script", script(text)).status == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "lines",
    [
        ("torch.nn.Linear(8, 8)", "torch.nn.Linear(8, 8).cuda()"),
        ("torch.nn.Linear(8, 8)", "torch.nn.Linear(8, 8).to('cuda')"),
        ("torch.nn.Linear(8, 8)", "torch.nn.Linear(8, 8, device='cuda')"),
        ("torch.ones(4, 8)", "torch.ones(4, 8, device='cuda')"),
        ("torch.ones(4, 8)", "torch.ones(4, 8).to('cuda:0', non_blocking=True)"),
    ],
    ids=lambda lines: lines[1],
)
def test_a_dry_run_needs_no_device(memlab_command, script, lines):
    outcome = memlab_command("measure", "--dry-run", "--script", script(GOOD.replace(*lines)))
    assert (outcome.status, outcome.err) == (0, "")


# ------------------------------------------------------------------ usage errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("train.py", "got --script train.py; give a file and a function in it"),
        ("train:build", "got --script train:build; give a file and a function in it"),
        ("train.py:", "got --script train.py:; give a file and a function in it"),
        ("trian.py:build", "got --script trian.py:build; there is no file trian.py: give an"),
        ("train.py:built", "train.py has no function built; did you mean build? Choose from build"),
        ("train.py:torch", "got --script train.py:torch; train.py has no function torch"),
    ],
)
def test_a_missing_script_is_named(usage_error, script, given, message):
    script()
    assert message in usage_error("measure", "--script", given)


@pytest.mark.parametrize("option", ["--model", "--batch", "--seq", "--dtype", "--technique"])
def test_a_script_excludes_the_models_options(usage_error, script, option):
    value = {"--batch": "1", "--seq": "1"}.get(option, "x")
    line = usage_error("measure", "--script", script(), option, value)
    assert line.startswith(f"got --script together with {option}; ")


@pytest.mark.parametrize(
    ("built", "got"),
    [
        ("3", "int"),
        ("None", "NoneType"),
        ("step", "function"),
        ("(step, model)", "(function, Linear)"),
        ("(model, optimizer, step)", "(Linear, Adam, function)"),
        ("(step, optimizer, model)", "(function, Adam, Linear)"),
        ("(None, model, optimizer)", "(NoneType, Linear, Adam)"),
        ("(step, model, 0.1)", "(function, Linear, float)"),
        ("(step, 'model', optimizer)", "(function, str, Adam)"),
        ("(step, model, optimizer, 0.1)", "(function, Linear, Adam, float)"),
    ],
)
def test_wrong_types_from_the_script_are_named(usage_error, script, built, got):
    text = GOOD.replace("return step, model, optimizer", f"return {built}")
    line = usage_error("measure", "--script", script(text))
    assert line.startswith(f"train.py:build returned {got}; expected (step, model, optimizer), ")


def test_a_missing_device_is_named(usage_error, script):
    line = usage_error("measure", "--script", script(), "--device", "tpu")
    assert line.startswith("got --device tpu; this machine has cpu")


def test_a_device_without_a_dry_run_is_refused(usage_error, script):
    line = usage_error("measure", "--script", script(), "--device", "mps", "--dry-run")
    assert line.startswith("got --device mps with --dry-run; use cpu, cuda, cuda:hopper, ")


def unfolded(output):
    """Join the output's lines."""
    return " ".join(output.split())


def test_a_dry_run_of_cuda_predicts_the_script(memlab_command, script):
    outcome = memlab_command("measure", "--script", script(), "--device", "cuda", "--dry-run")
    names: dict = {}
    exec(GOOD, names)
    trace = memlab.predict(names["build"])
    assert outcome.out.startswith(
        "train.py:build: its second step, predicted for CUDA (most cards)"
    )
    said, _, _ = str(trace).partition("\nnote: ")
    assert f"\n\n{said}\n" in outcome.out
    for note in trace.notes:
        assert f"note: {note}" in unfolded(outcome.out)
    assert f"\n\nallocated {format_bytes(trace.allocated_bytes)}: " in outcome.out
    assert f"\nreserved {format_bytes(trace.reserved_bytes)}: taken from" in outcome.out
    assert "\nnvidia-smi 0.27–0.62 GiB: reserved plus" in outcome.out


def test_a_prediction_draws_the_reserved_memory(memlab_command, script, tmp_path):
    memlab_command("measure", "--script", script(), "--device", "cuda", "--dry-run", "--out", "x")
    assert {path.name for path in (tmp_path / "x").iterdir()} == FILES | {"measure-blocks.png"}


def test_an_error_in_a_prediction_is_one_line_with_the_scripts_line(usage_error, script):
    text = """
    def build():
        raise KeyError("no data")
    """
    line = usage_error("measure", "--script", script(text), "--device", "cuda", "--dry-run")
    assert line == "train.py:3 raised KeyError: 'no data'"


def test_a_step_that_allocates_nothing_is_named(usage_error, script):
    text = "def build(): return (lambda: None), None, None"
    line = usage_error("measure", "--script", script(text))
    assert line == "the step of train.py:build allocated nothing on cpu; it must call the model"


# ------------------------------------------------------------------ errors in the script


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("import torch\n", "import torch\n1 / 0\n"), "train.py:3 raised ZeroDivisionError: "),
        (("import torch\n", "import torch\n1 /\n"), "train.py:3 raised SyntaxError: "),
        (("import torch\n", "import torhc\n"), "train.py:2 raised ModuleNotFoundError: "),
        (("import torch\n", "import sys; sys.exit(3)\n"), "train.py:2 raised SystemExit: 3"),
        (("x = torch", "x = touch"), "train.py:7 raised NameError: name 'touch'"),
        (("torch.ones(4, 8)", "torch.ones(4, 9)"), "train.py:11 raised RuntimeError: "),
        (("optimizer.step()", "raise KeyError"), "train.py:12 raised KeyError"),
        (("optimizer.step()", "exec('1 / 0')"), "train.py:12 raised ZeroDivisionError: "),
        (("def build():", "def build(size):"), "train.py raised TypeError: build() missing 1"),
    ],
    ids=lambda case: case if isinstance(case, str) else None,
)
@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["real", "dry"])
def test_an_error_is_one_line_with_the_scripts_line(usage_error, script, lines, message, how):
    line = usage_error("measure", "--script", script(GOOD.replace(*lines)), *how)
    assert line.startswith(message)


def test_an_error_in_a_file_beside_the_script_names_both_lines(usage_error, script):
    script("def check(): raise ValueError('too deep')", name="helper_that_raises.py")
    text = GOOD.replace("optimizer.step()", "import helper_that_raises as h; h.check()")
    line = usage_error("measure", "--script", script(text))
    assert line == ("helper_that_raises.py:1, called from train.py:12, raised ValueError: too deep")


def test_an_error_in_a_library_names_the_scripts_line(usage_error, script):
    text = GOOD.replace("optimizer.step()", "torch.zeros(2) @ torch.zeros(3)")
    line = usage_error("measure", "--script", script(text))
    assert line.startswith("train.py:12 raised RuntimeError")


def test_neither_the_library_nor_an_environment_beside_a_script_is_its_code():
    """As in a clone's root, which contains both."""
    root = Path(memlab.__file__).resolve().parents[1]
    assert is_users(root / "train.py", root)
    assert not is_users(root / "memlab/units.py", root)
    assert not is_users(root / ".venv/lib/python3.11/site-packages/timm/data.py", root)


def test_several_optimizers_are_a_list(memlab_command, script):
    text = GOOD.replace("model, optimizer", "model, [optimizer, optimizer]")
    assert memlab_command("measure", "--script", script(text)).status == 0


def test_the_innermost_of_several_script_lines_is_shown(usage_error, script):
    text = GOOD.replace("optimizer.step()", "check()") + "\ndef check():\n    raise ValueError\n"
    line = usage_error("measure", "--script", script(text))
    assert line == "train.py:17 raised ValueError"


@pytest.mark.parametrize(
    ("first", "shown"),
    [("first", "first second"), ("a long first line" * 4, "a long first line" * 4)],
)
def test_a_second_line_is_shown_after_a_short_first_one(usage_error, script, first, shown):
    text = GOOD.replace("optimizer.step()", f"raise ValueError('{first}\\n\\nsecond\\nthird')")
    line = usage_error("measure", "--script", script(text))
    assert line == f"train.py:12 raised ValueError: {shown}"


def test_an_unknown_shape_in_a_dry_run_names_its_line_once(usage_error, script):
    text = GOOD.replace("model(x).sum()", "model(x[torch.rand_like(x) > 0].view(-1, 8)).sum()")
    line = usage_error("measure", "--dry-run", "--script", script(text))
    assert line.count("train.py:11") == 1
    assert "masked_fill" in line


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError()",
        "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')",
        "RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')",
    ],
)
def test_out_of_memory_suggests_the_dry_run(usage_error, script, error):
    text = GOOD.replace("optimizer.step()", f"raise {error}")
    line = usage_error("measure", "--script", script(text))
    assert line.startswith("train.py:12 raised ")
    assert line.endswith("; --dry-run allocates nothing")


def test_out_of_memory_in_a_dry_run_does_not_suggest_it(usage_error, script):
    text = GOOD.replace("optimizer.step()", "raise MemoryError('no')")
    line = usage_error("measure", "--dry-run", "--script", script(text))
    assert line == "train.py:12 raised MemoryError: no"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_missing_device_in_a_script_is_named(usage_error, script, device):
    text = GOOD.replace("torch.ones(4, 8)", f"torch.ones(4, 8, device='{device}')")
    line = usage_error("measure", "--script", script(text))
    assert line.startswith("train.py:7 raised ")
    assert line.endswith(f"; there is no {device} here, and --dry-run needs none")


@pytest.mark.parametrize("where", ["x = torch.ones(4, 8)", "optimizer.step()"])
def test_ctrl_c_in_a_script_is_one_line_and_writes_nothing(memlab_command, script, tmp_path, where):
    text = GOOD.replace(where, "import signal; signal.raise_signal(signal.SIGINT)")
    outcome = memlab_command("measure", "--script", script(text))
    assert (outcome.status, outcome.out) == (130, "")
    assert outcome.err == "memlab: interrupted; nothing was written\n"
    assert not (tmp_path / "work").exists()


def test_an_interrupted_dry_run_ends(memlab_command, script):
    text = GOOD.replace("optimizer.step()", "import signal; signal.raise_signal(signal.SIGINT)")
    memlab_command("measure", "--dry-run", "--script", script(text))
    assert memlab.dry_run.active is None


def test_a_dry_run_of_a_cuda_script_notes_the_kernels_it_counts(memlab_command, script):
    moved = GOOD.replace("torch.ones(4, 8)", "torch.ones(4, 8).cuda()")
    for text, noted in ((GOOD, False), (moved, True)):
        outcome = memlab_command("measure", "--script", script(text), "--dry-run")
        assert ("note: the script uses an accelerator" in outcome.out) == noted
        assert "nothing is computed, so a printed loss is meaningless" in unfolded(outcome.out)
        assert all(len(line) <= 80 for line in outcome.out.splitlines())


MASKED = GOOD.replace("model(x).sum()", "model(x[torch.rand_like(x) > 0].view(-1, 8)).sum()")


@pytest.mark.few(1)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("assume", "said"), [("most", "every element"), ("0.5", "a fraction of 0.5 of the elements")]
)
def test_an_assumption_is_in_the_first_lines(memlab_command, script, device, assume, said):
    how = ("--dry-run", "--device", device, "--assume", assume)
    outcome = memlab_command("measure", "--script", script(MASKED), *how)
    assert outcome.status == 0
    first, _, _ = unfolded(outcome.out).partition(" peak ")
    assert "meaningless assumed where a size depends on values (train.py:11 step)" in first
    assert first.endswith(f"{said} is chosen")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch.compile itself
def test_how_compiled_code_is_counted_is_noted_in_the_first_lines(memlab_command, script):
    text = GOOD.replace("return step", "model.compile()\n    return step")
    assert text != GOOD
    outcome = memlab_command("measure", "--script", script(text), "--dry-run")
    first, _, _ = unfolded(outcome.out).partition(" peak ")
    assert "meaningless code under torch.compile is counted as the code that Inductor" in first


def test_a_refusal_suggests_an_assumption(usage_error, script):
    line = usage_error("measure", "--dry-run", "--script", script(MASKED))
    assert line.endswith("or set an assumption: --assume most, or a fraction (assume= in Python)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dry-run", "--assume", "all"), "got --assume all; give 'most'"),
        (("--dry-run", "--assume", "2"), "got --assume 2; give 'most'"),
        (("--assume", "most"), "got --assume without --dry-run"),
    ],
)
def test_a_wrong_assumption_is_one_line(usage_error, script, options, said):
    assert said in usage_error("measure", "--script", script(GOOD), *options)


def test_an_assumption_needs_a_script(usage_error):
    assert "without --script" in usage_error("measure", "--dry-run", "--assume", "most")
    assert "without --script" in usage_error("plan", "--model", "5m", "--assume", "most")
