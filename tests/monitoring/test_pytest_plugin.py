"""The marker `memory_budget`, in tests that pytest runs in here."""

import subprocess
import sys

import pytest

# `torch._inductor.test_operators` registers operators and cannot be imported twice.
import torch._dynamo  # noqa: F401 - pytester forgets imports, and this allows only one

import memlab.pytest_plugin
from memlab.pytest_plugin.budgets import Budget
from memlab.trace import Event, Trace

pytest_plugins = ["pytester"]

OPTIONS = ("-Werror", "--strict-markers", "-p", "no:cacheprovider")


@pytest.fixture
def run(pytester):
    """Run a file of tests with the plugin, warnings as errors.

    If the plugin is installed too, pytest loads it once, because both have the same name.
    """

    def run(source: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=source)
        return pytester.runpytest_inprocess(*OPTIONS, plugins=[memlab.pytest_plugin])

    return run


def test_a_test_within_its_budget_passes(run):
    run(
        """
        import pytest, torch

        @pytest.mark.memory_budget("8 KiB")
        def test_small():
            torch.zeros(1024)
            torch.zeros(1024)
        """
    ).assert_outcomes(passed=1)


def test_a_test_beyond_its_budget_fails_with_peak_budget_and_lines(run):
    result = run(
        """
        import pytest, torch

        @pytest.mark.memory_budget("6 KiB")
        def test_large():
            first = torch.zeros(1024)
            second = [torch.ones(512) for _ in range(3)]
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Memory budget exceeded: the peak is 10.00 KiB allocated, the budget 6.00 KiB *",
            "These lines allocated most of what is alive at the peak:",
            "*6.00 KiB in 3 tensors: test_it.py:6 *, float32 (512,) by aten.ones.default",
            "*4.00 KiB in 1 tensor: test_it.py:5 test_large, float32 (1024,) by aten.zeros.default",
        ]
    )


def test_what_fixtures_allocate_does_not_count(run):
    run(
        """
        import pytest, torch

        @pytest.fixture
        def model():
            return torch.nn.Linear(512, 512)

        @pytest.mark.memory_budget("8 KiB")
        def test_forward(model):
            model(torch.zeros(1, 512))
        """
    ).assert_outcomes(passed=1)


def test_a_class_and_a_parametrized_test_have_budgets(run):
    run(
        """
        import pytest, torch

        @pytest.mark.memory_budget("4 KiB")
        class TestIt:
            @pytest.mark.parametrize("size", [1024, 2048])
            def test_size(self, size):
                torch.zeros(size)
        """
    ).assert_outcomes(passed=1, failed=1)


def test_a_failure_or_skip_of_the_test_itself_stays(run):
    result = run(
        """
        import pytest, torch

        @pytest.mark.memory_budget("1 KiB")
        def test_fails():
            torch.zeros(1024)
            assert 1 == 2

        @pytest.mark.memory_budget("1 KiB")
        def test_skips():
            pytest.skip("not here")
        """
    )
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
    result.stdout.no_fnmatch_line("*Memory budget exceeded*")


@pytest.mark.slow
def test_a_budget_for_a_gpu_is_predicted_without_one(pytester):
    pytester.makepyfile(
        test_it="""
        import pytest, torch

        def build():
            model = torch.nn.Linear(8192, 8192, bias=False, device="cuda")
            optimizer = torch.optim.AdamW(model.parameters())

            def step():
                optimizer.zero_grad()
                model(torch.zeros(16, 8192, device="cuda")).sum().backward()
                optimizer.step()

            return step, model, optimizer

        @pytest.mark.memory_budget("1.3 GiB", device="cuda:rtx4090")
        def test_two_steps_need_weights_gradients_and_state():
            return build()

        @pytest.mark.memory_budget("0.9 GiB", device="cuda:rtx4090")
        def test_that_is_too_much():
            return build()

        @pytest.mark.memory_budget("0.9 GiB", device="cuda:rtx4090")
        def test_a_step_alone_that_is_too_much():
            return build()[0]

        @pytest.mark.memory_budget("0.3 GiB", device="cuda:rtx4090")
        def test_a_body_alone():
            build()

        @pytest.mark.memory_budget(device="cuda:rtx4090")
        def test_it_fits_the_card():
            return build()

        @pytest.mark.memory_budget(device="cuda:rtx4090")
        def test_too_much_for_the_card():
            return torch.zeros(25 * 2**28, device="cuda")
        """
    )
    result = pytester.runpytest_subprocess("-p", "memlab.pytest_plugin", *OPTIONS)
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*test_that_is_too_much*",
            "Memory budget exceeded: the peak is 1.27 GiB allocated, the budget 921.60 MiB *",
            "Predicted for cuda:rtx4090: 1.27 GiB allocated, 1.27 GiB reserved.",
            "*768.00 MiB in 3 tensors: test_it.py:10 step, float32 (8192, 8192) by *",
            "*256.00 MiB in 1 tensor: test_it.py:9 step, float32 (8192, 8192) by aten.mm.default *",
            "*test_too_much_for_the_card*",
            "*the peak is 25.00 GiB reserved, the budget 22.92 GiB (2.08 GiB over the budget).",
        ]
    )


def test_tests_whose_memory_cannot_be_measured_are_refused(run):
    result = run(
        """
        import unittest
        import pytest

        class TestOld(unittest.TestCase):
            @pytest.mark.memory_budget("1 GiB")
            def test_it(self):
                pass

        @pytest.mark.memory_budget("1 GiB")
        async def test_later():
            pass
        """
    )
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*memory_budget does not work on unittest.TestCase*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": "1.5"}, "got '1.5' as a number of bytes"),
        ({}, "pass a limit such as '1.5 GiB'"),
        ({"device": "cuda"}, r"got no limit and device='cuda'"),
    ],
)
def test_a_marker_without_a_usable_limit_says_what_to_pass(arguments, message):
    with pytest.raises(ValueError, match=message):
        Budget.from_marker(**arguments)


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ('"16 bananas"', "*got '16 bananas'*"),
        ("-5", "*got*-5*"),
        ('"1 GiB", devices="cuda"', "got memory_budget('1 GiB', devices='cuda'); pass one limit*"),
        ('"1 GiB", "x"', "got memory_budget('1 GiB', 'x'); pass one limit*"),
        ("", "*pass a limit such as '1.5 GiB'*"),
    ],
)
def test_a_wrong_marker_is_one_sentence_without_memlabs_code(run, marker, words):
    result = run(
        f"""
        import pytest

        @pytest.mark.memory_budget({marker})
        def test_it():
            pass
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([words])
    result.stdout.no_fnmatch_line("*budgets.py*")
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_budget_that_is_exceeded_says_by_how_much():
    rounding = Event(24 * 2**20, 1, "rounding", "", "", "before", "uint8", ())
    text = Budget(16 * 2**20)._text(Trace((rounding,)), 24 * 2**20)
    assert "the budget 16.00 MiB (8.00 MiB over the budget)." in text
    assert text.endswith("uint8 ()")


def test_tests_without_the_marker_import_no_torch(tmp_path):
    """In a process of its own, with the plugin as users name it; twice if it is installed."""
    (tmp_path / "test_light.py").write_text(
        "import sys\n\ndef test_light():\n    assert 'torch' not in sys.modules\n"
    )
    options = (
        "-p",
        "memlab.pytest_plugin",
        "-Werror",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_marker_is_listed(pytester):
    result = pytester.runpytest_inprocess("--markers", plugins=[memlab.pytest_plugin])
    result.stdout.fnmatch_lines(["@pytest.mark.memory_budget(limit, [*], device=None*"])
