"""One source gives an executed solution and a lesson, always with the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from rich.console import Console

from memlab.course import build
from memlab.course.build import build_day, differences, main, sources
from memlab.course.source import in_bytes

ROOT = Path(__file__).parents[2]
REMEDY = "python -m memlab.course.build 5"

SOURCE = '''\
# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Some Python 3.99
#     name: some-python
# ---

# %% [markdown]
# # Day 5: halves

# %%
import os
import sys


def exercise(id_, answer):
    """Stand in for the course's exercise: return the reference for a stub."""
    try:
        answer(5)
    except NotImplementedError as error:
        print(f"[ ] {error}")
        return lambda n: (n // 2, n - n // 2)
    print(f"[ok] {id_}")
    return answer


# %%
def halves(n):
    """Two whole numbers that add up to n."""
    ### BEGIN SOLUTION
    smaller = n // 2

    # what is left
    return smaller, n - smaller
    ### END SOLUTION


# %%
halves = exercise("5.1", halves)
halves(7)


# %%
def larger(n):
    ### BEGIN SOLUTION
    return max(halves(n))
    ### END SOLUTION
    ### BEGIN STUB
    # pair = halves(n)
    # if n:
    #     return pair[0]  # is it the larger?
    #
    # raise NotImplementedError
    ### END STUB


# %% tags=["nbval-ignore-output"] reason="no two are equal"
print(os.getpid() > 0)

# %%
print("first", flush=True)
print("second")
halves(2)

# %% tags=["raises-exception"] reason="shows the error"
halves("a")

# %%
names = "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONHASHSEED", "MPLBACKEND"
print({name: os.environ.get(name) for name in names})
print(os.path.basename(os.getcwd()))
'''


@pytest.fixture
def course(tmp_path):
    """Write a course from {file name: text} and return its root."""

    def make(texts: dict[str, str]) -> Path:
        (tmp_path / "solutions").mkdir(exist_ok=True)
        for name, text in texts.items():
            (tmp_path / "solutions" / name).write_text(text, encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("course")
    (root / "solutions").mkdir()
    (root / "solutions" / "day05_halves.py").write_text(SOURCE, encoding="utf-8")
    build_day(root / "solutions" / "day05_halves.py")
    return root


@pytest.fixture
def built(built_once, tmp_path):
    """A built course of one day; each test gets a copy."""
    return shutil.copytree(built_once, tmp_path / "built")


def files(root):
    """Return {path: bytes} of all files below a folder."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def solution(root):
    return json.loads((root / "solutions" / "day05_halves.ipynb").read_bytes())


# ------------------------------------------------------------------ execution


def test_a_lesson_has_no_outputs_and_both_notebooks_are_valid(built):
    for folder in ("solutions", "lessons"):
        nbformat.validate(nbformat.read(built / folder / "day05_halves.ipynb", as_version=4))
    lesson = json.loads((built / "lessons" / "day05_halves.ipynb").read_bytes())
    cells = [cell for cell in lesson["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * 8
    assert [cell["execution_count"] for cell in cells] == [None] * 8


def test_building_twice_gives_the_same_bytes(built):
    before = files(built)
    build_day(built / "solutions" / "day05_halves.py")
    assert files(built) == before


def test_a_solution_is_its_source_with_outputs(built):
    cells = [cell for cell in solution(built)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert cells[2]["outputs"] == [
        {"name": "stdout", "output_type": "stream", "text": ["[ok] 5.1\n"]},
        {
            "data": {"text/plain": ["(3, 4)"]},
            "execution_count": 3,
            "metadata": {},
            "output_type": "execute_result",
        },
    ]
    assert [cell["metadata"].get("tags") for cell in cells[4:7:2]] == [
        ["nbval-ignore-output"],
        ["raises-exception"],
    ]
    assert all(set(cell["metadata"]) <= {"tags", "reason"} for cell in cells)


def test_printed_text_is_joined_into_one_output(built):
    streams = [out for out in solution(built)["cells"][6]["outputs"] if "name" in out]
    assert [out["text"] for out in streams] == [["first\n", "second\n"]]


def test_an_expected_error_is_stored_in_one_line_without_paths(built):
    message = "unsupported operand type(s) for //: 'str' and 'int'"
    assert solution(built)["cells"][7]["outputs"] == [
        {
            "ename": "TypeError",
            "evalue": message,
            "output_type": "error",
            "traceback": [f"TypeError: {message}"],
        }
    ]


def test_the_kernel_has_a_reproducible_environment(built):
    assert os.environ["MPLBACKEND"] == "Agg"  # in the tests, not in the kernel
    assert solution(built)["cells"][8]["outputs"][0]["text"] == [
        "{'OMP_NUM_THREADS': '1', 'OMP_WAIT_POLICY': 'PASSIVE', 'PYTHONHASHSEED': '0', "
        "'MPLBACKEND': 'module://matplotlib_inline.backend_inline'}\n",
        "solutions\n",
    ]


def test_a_cell_that_raises_leaves_both_files_unchanged(built, capsys):
    text = SOURCE + "\n# %%\nwrong = halves(\n    None\n)\n"
    (built / "solutions" / "day05_halves.py").write_text(text)
    line = SOURCE.count("\n") + 3
    before = files(built)
    assert main(["5"], root=built) == 2
    assert capsys.readouterr() == (
        "",
        f"solutions/day05_halves.py:{line}: the cell 'wrong = halves(' raised TypeError: "
        "unsupported operand type(s) for //: 'NoneType' and 'int'\n",
    )
    assert files(built) == before


def test_a_cell_that_raises_writes_no_file_and_other_days_are_built(course, capsys):
    root = course(
        {
            "day01_a.py": "# %%\nraise ValueError('first\\nsecond')\n",
            "day02_b.py": "# %%\nimport os\n\n# %%\nos._exit(1)\n",
            "day03_c.py": "# %%\nx = (\n",
            "day04_d.py": "# %%\n1\n",
        }
    )
    assert main([], root=root) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "solutions/day01_a.py:2: the cell \"raise ValueError('first\\\\nsecond')\" raised "
        "ValueError: first",
        "solutions/day02_b.py:5: the cell 'os._exit(1)' ended the kernel",
        "solutions/day03_c.py:2: the cell is not valid Python: '(' was never closed",
    ]
    assert out.startswith("day 4: 1 cells")
    made = [name for name in files(root) if name.endswith(".ipynb")]
    assert made == ["lessons/day04_d.ipynb", "solutions/day04_d.ipynb"]


def test_a_kernel_that_does_not_start_is_one_line(course, capfd, monkeypatch):
    monkeypatch.setattr(build, "ENVIRONMENT", {"PYTHONHOME": "nowhere"})
    root = course({"day01_a.py": "# %%\n1\n"})
    assert main([], root=root) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("Kernel died before replying to kernel_info")
    assert list(files(root)) == ["solutions/day01_a.py"]


def test_a_missing_kernel_is_one_line_with_the_remedy(course, capfd, monkeypatch):
    monkeypatch.setattr(KernelSpecManager, "kernel_dirs", [])
    monkeypatch.setitem(sys.modules, "ipykernel.kernelspec", None)  # as if there were no ipykernel
    root = course({"day01_a.py": "# %%\n1\n", "day02_b.py": "# %%\n2\n"})
    assert main([], root=root) == 2
    assert capfd.readouterr() == (
        "",
        "there is no Jupyter kernel python3 to execute notebooks with: pip install -e '.[lab]'\n",
    )
    assert list(files(root)) == ["solutions/day01_a.py", "solutions/day02_b.py"]


INTERRUPTIBLE = """\
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # even if the tests run in the background
from memlab.course.build import main
sys.exit(main([], root=Path(sys.argv[1])))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_leaves_no_kernel_and_no_partial_file(course):
    sleep = "# %%\nimport os, pathlib, time\n"
    sleep += "pathlib.Path('new').write_text(str(os.getpid()))\nos.rename('new', 'pid')\n"
    sleep += "time.sleep(600)\n"
    root = course({"day05_halves.py": sleep})
    before = files(root)
    command = [sys.executable, "-c", INTERRUPTIBLE, str(root)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    pid = root / "solutions" / "pid"
    while not pid.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "interrupted; the notebooks of this day are unchanged\n"
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    pid.unlink()
    assert files(root) == before


def test_each_day_prints_its_cpu_seconds_and_the_limit(course, capsys, monkeypatch):
    monkeypatch.setattr(build, "execute", lambda notebook, *_: (executed(notebook), 11.26))
    assert main([], root=course({"day01_a.py": "# %%\n1\n\n# %%\n2\n"})) == 0
    assert capsys.readouterr() == ("day 1: 2 cells, 11.3 CPU-seconds (limit 20)\n", "")


def test_a_day_over_the_limit_is_a_warning(course, capsys, monkeypatch):
    monkeypatch.setattr(build, "execute", lambda notebook, *_: (executed(notebook), 20.1))
    assert main([], root=course({"day01_a.py": "# %%\n1\n"})) == 0
    assert capsys.readouterr() == (
        "day 1: 1 cells, 20.1 CPU-seconds (limit 20)\n",
        "warning: day 1 takes over 20 CPU-seconds; make it smaller\n",
    )


def executed(notebook):
    """Return the notebook as executed cells without outputs."""
    cells = enumerate(notebook["cells"], 1)
    return notebook | {"cells": [cell | {"execution_count": count} for count, cell in cells]}


def test_cpu_seconds_are_the_kernels(course):
    text = "# %%\nimport time\ntime.process_time = lambda: 12.5\n"
    _, cpu_seconds = build_day(course({"day01_a.py": text}) / "solutions" / "day01_a.py")
    assert cpu_seconds == 12.5


def test_a_terminal_shows_a_progress_bar(course, monkeypatch):
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(build, "Console", lambda stderr: console)
    build_day(course({"day01_a.py": "# %%\n1\n\n# %%\n2\n"}) / "solutions" / "day01_a.py")
    assert "day 1" in shown.getvalue()
    assert "2/2" in shown.getvalue()


def test_a_lint_finding_is_an_error_but_the_files_are_kept(course, capsys):
    root = course({"day01_a.py": "# %%\nobject()\n"})
    assert main([], root=root) == 1
    error = capsys.readouterr().err
    start = "solutions/day01_a.ipynb: cell 1 (object()): an address in an output"
    assert error.startswith(start)
    assert error.count("\n") == 1
    assert (root / "solutions" / "day01_a.ipynb").exists()


# ------------------------------------------------------------------ --check


def test_new_prose_keeps_the_outputs(built, monkeypatch):
    solution, lesson = build.notebooks(built / "solutions" / "day05_halves.py")
    before = json.loads(solution.read_bytes())
    monkeypatch.setattr(build, "execute", None)
    source = built / "solutions" / "day05_halves.py"
    text = source.read_text("utf-8")
    source.write_text(text.replace("Day 5: halves", "Day 5: two halves\n#\n# New."), "utf-8")
    assert main(["--text", "5"], built) == 0
    after = json.loads(solution.read_bytes())
    assert differences(built) == []
    assert "".join(after["cells"][0]["source"]) == "# Day 5: two halves\n\nNew."
    assert "two halves" in lesson.read_text(encoding="utf-8")
    outputs = [[c.get("outputs") for c in found["cells"]] for found in (before, after)]
    assert outputs[0] == outputs[1]
    assert any(outputs[1])


def test_new_code_needs_a_build(built, capsys):
    source = built / "solutions" / "day05_halves.py"
    before = source.with_suffix(".ipynb").read_bytes()
    source.write_text(source.read_text("utf-8").replace("halves(7)", "halves(9)"), "utf-8")
    assert main(["--text", "5"], built) == 2
    assert "run python -m memlab.course.build 5" in capsys.readouterr().err
    assert source.with_suffix(".ipynb").read_bytes() == before


def test_a_check_after_a_build_is_silent(built, capsys):
    assert main(["--check"], root=built) == 0
    assert capsys.readouterr() == ("", "")


def test_a_check_executes_and_writes_nothing(built, monkeypatch):
    monkeypatch.setattr(build, "execute", lambda *_: pytest.fail("executed"))
    source = built / "solutions" / "day05_halves.py"
    source.write_text(SOURCE.replace("print", "raise "))
    before = files(built)
    main(["--check"], root=built)
    assert files(built) == before


def changed(path, change):
    """Change a notebook's file in place."""
    notebook = json.loads(path.read_bytes())
    change(notebook)
    path.write_bytes(in_bytes(nbformat.from_dict(notebook)))


def test_a_check_does_not_compare_outputs(built):
    path = built / "solutions" / "day05_halves.ipynb"
    changed(path, lambda notebook: notebook["cells"][2].update(outputs=[]))
    assert differences(built) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda n: n["cells"][1].update(source="1"), "differs from its source"),
        (lambda n: n["cells"][1].update(id="1"), "differs from its source"),
        (lambda n: n["cells"][1]["metadata"].update(tags=["x"]), "differs from its source"),
        (lambda n: n["metadata"]["language_info"].update(version="3"), "differs from its source"),
        (lambda n: n["cells"].pop(), "differs from its source"),
        (
            lambda n: n["cells"][2].update(execution_count=None),
            "has cells that were not executed in order",
        ),
        (
            lambda n: n["cells"][2].update(execution_count=9),
            "has cells that were not executed in order",
        ),
    ],
)
def test_a_check_names_a_solution_that_differs_from_its_source(built, change, complaint):
    changed(built / "solutions" / "day05_halves.ipynb", change)
    assert differences(built) == [f"solutions/day05_halves.ipynb {complaint}: {REMEDY}"]


def test_a_check_names_a_file_that_is_not_a_notebook(built):
    (built / "solutions" / "day05_halves.ipynb").write_text("[1, 2")
    assert differences(built) == [f"solutions/day05_halves.ipynb is not a notebook: {REMEDY}"]


def test_a_check_compares_the_bytes_of_a_lesson(built):
    lesson = built / "lessons" / "day05_halves.ipynb"
    lesson.write_bytes(lesson.read_bytes() + b"\n")
    assert differences(built) == [f"lessons/day05_halves.ipynb differs from its source: {REMEDY}"]


def test_a_check_after_an_edit_of_the_source_names_both_notebooks(built, capsys):
    (built / "solutions" / "day05_halves.py").write_text(SOURCE.replace("Day 5: h", "Day 5: H"))
    assert main(["--check"], root=built) == 1
    assert capsys.readouterr() == (
        "",
        f"solutions/day05_halves.ipynb differs from its source: {REMEDY}\n"
        f"lessons/day05_halves.ipynb differs from its source: {REMEDY}\n",
    )


def test_a_check_names_missing_notebooks_and_missing_sources(built, capsys):
    for folder in ("solutions", "lessons"):
        path = built / folder / "day05_halves.ipynb"
        path.rename(path.with_name("day05_old.ipynb"))
    assert main(["--check", "5"], root=built) == 1
    gone = "has no source solutions/day05_old.py: write or delete it"
    assert capsys.readouterr().err.splitlines() == [
        f"solutions/day05_halves.ipynb is missing: {REMEDY}",
        f"lessons/day05_halves.ipynb is missing: {REMEDY}",
        f"lessons/day05_old.ipynb {gone}",
        f"solutions/day05_old.ipynb {gone}",
    ]


def test_a_check_of_one_day_ignores_the_others(built, course):
    (built / "solutions" / "day06_new.py").write_text("# %%\n1\n")
    (built / "lessons" / "day07_old.ipynb").write_text("")
    assert differences(built, [5]) == []
    assert len(differences(built, [5, 6])) == 2
    assert len(differences(built)) == 3


def test_an_invalid_source_ends_a_check(course, capsys):
    assert main(["--check"], root=course({"day01_a.py": "# %%\nx = (\n"})) == 2
    assert capsys.readouterr().err.startswith(
        "solutions/day01_a.py:2: the cell is not valid Python"
    )


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize("arguments", [[], ["--check"], ["5"]])
def test_a_course_without_sources_is_refused(tmp_path, capsys, arguments):
    assert main(arguments, root=tmp_path) == 2
    wanted = f"no sources: {tmp_path / 'solutions'} has no dayNN_name.py\n"
    assert capsys.readouterr() == ("", wanted)


def test_an_unknown_day_is_refused(course, capsys):
    root = course({"day01_a.py": "", "day02_b.py": "", "helpers.py": ""})
    assert [path.name for path in sources(root)] == ["day01_a.py", "day02_b.py"]
    assert main(["2", "7"], root=root) == 2
    assert capsys.readouterr().err == "no source of day 7 in solutions/; there are days 1, 2\n"


def test_help_explains_the_format_of_a_source(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for word in ("--check", "DAY", "### BEGIN SOLUTION", "### BEGIN STUB", "exercise("):
        assert word in shown


# ------------------------------------------------------------------ nbval


def nbval(*arguments):
    """Run pytest on notebooks with this repository's configuration; return its last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    command += ["-c", str(ROOT / "pyproject.toml")]
    # The kernel needs the same environment as during a build.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    environment |= build.ENVIRONMENT
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    return run.returncode, run.stdout.splitlines()[-1]


@pytest.mark.slow
def test_nbval_passes_the_solution_strictly_until_an_output_is_edited(built):
    path = built / "solutions" / "day05_halves.ipynb"
    status, last = nbval("--nbval", path)
    assert (status, last.split(" in ")[0]) == (0, "8 passed")
    changed(path, lambda notebook: notebook["cells"][3]["outputs"][0].update(text="[ok] 5.2\n"))
    status, last = nbval("--nbval", path)
    assert (status, last.split(" in ")[0]) == (1, "1 failed, 7 passed")


@pytest.mark.slow
def test_nbval_passes_the_lesson_with_its_stubs(built):
    status, last = nbval("--nbval-lax", built / "lessons" / "day05_halves.ipynb")
    assert (status, last.split(" in ")[0]) == (0, "8 passed")


def test_the_bill_option_measures_the_bill(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("memlab.course.build.store", lambda: asked.append("bill"))
    assert main(["--bill"], root=tmp_path) == 0
    assert asked == ["bill"]
