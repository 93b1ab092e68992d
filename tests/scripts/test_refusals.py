"""A refusal is named where it caused the error or may have, and only there."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from memlab.world.data.hub import UnavailableError

PERMITTED = "--allow-writes permits it"
GIT = "the script asked for the program git, and was refused"
EXAMPLE = "the script asked for a connection to example.org, and was refused"
MISSING = "if that makes the missing file, pass --allow-writes"


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Return what is added to the error of a script."""
    monkeypatch.chdir(tmp_path)

    def of(source):
        Path("train.py").write_text("import os, socket, subprocess, sys\n" + dedent(source))
        with pytest.raises((Exception, SystemExit)) as caught:
            run(launch_of(["train.py"]))
        return getattr(caught.value, "__notes__", [])

    return of


DOWNLOAD = "socket.create_connection(('example.org', 80))"
CAUGHT = f"""
try: {DOWNLOAD}
except OSError: pass
try: subprocess.run(["git", "rev-parse", "HEAD", "--short=8", "-q*"])
except OSError: pass
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "source",
    ["1 / 0", "raise RuntimeError('shapes differ')", "import a_module_of_nobody", "sys.exit(3)"],
)
def test_an_error_of_its_own_names_no_refusal(notes, source):
    assert notes(CAUGHT + source) == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (DOWNLOAD, PERMITTED),
        ("subprocess.run(['git', 'push'])", PERMITTED),
        (
            f"try: {DOWNLOAD}\nexcept OSError as e: raise ValueError('no data') from e",
            f"memlab run does not connect to example.org; {PERMITTED}",
        ),
        (
            f"try: {DOWNLOAD}\nexcept OSError: raise ValueError('no data')",
            f"memlab run does not connect to example.org; {PERMITTED}",
        ),
        ("subprocess.run(['nobodys-program'])", "this machine does not have it either"),
        (
            "subprocess.run([sys.executable, 'train2.py'])",
            f"if it trains, give its command to memlab run; {PERMITTED}",
        ),
        (
            "assert os.system('git push') == 0",
            f"{GIT}; if its exit status matters, pass --allow-writes",
        ),
        ("os.system('git log > log'); open('log')", f"{GIT}; {MISSING}"),
        (f"try: {DOWNLOAD}\nexcept OSError: pass\nopen('data.txt')", f"{EXAMPLE}; {MISSING}"),
    ],
)
def test_the_refusal_that_an_error_came_of_is_named_with_its_remedy(notes, source, expected):
    assert notes(source) == [expected]


def test_a_program_that_does_not_name_a_missing_file_is_not_named(notes):
    assert notes("os.system('git status'); open('data.txt')") == []


def test_a_download_that_a_stand_in_replaced_is_not_named(notes, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    source = """
        import torch
        torch.hub.load_state_dict_from_url("https://example.org/weights.pth")
        open("style.jpg")
        """
    assert notes(source) == []


COMPILED = "import torch.utils.cpp_extension as c; c.load('fused', ['fused.cu'])"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("real", "expected"),
    [(False, "it cannot be predicted, because"), (True, "pass --allow-writes with --real")],
)
def test_a_script_that_compiles_an_extension_is_told_whether_it_can_be_measured(
    tmp_path, monkeypatch, real, expected
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(COMPILED)
    with pytest.raises(UnavailableError, match=f"compiles the extension fused; {expected}"):
        run(launch_of(["train.py"]), real=real)


def test_a_script_may_go_on_without_its_extension(tmp_path, monkeypatch):
    """StyleGAN catches the error, and uses its slower implementation."""
    monkeypatch.chdir(tmp_path)
    source = f"""
        try:
            {COMPILED}
        except Exception:
            import torch
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        """
    Path("train.py").write_text(dedent(source))
    assert run(launch_of(["train.py"])).steps == 2
    assert sys.modules["torch.utils.cpp_extension"].load.__module__ == "torch.utils.cpp_extension"
