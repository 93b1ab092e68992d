"""In a dry run, a launch of any library's Triton kernel does nothing but forget values."""

import pytest
import torch

import memlab

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("tests.dry_runs.own_kernels")


def predicted_bytes(launch):
    def build():
        model = torch.nn.Linear(64, 64, device="cuda")

        def step():
            y = model(torch.ones(8, 64, device="cuda"))
            result = torch.zeros_like(y)
            launch(y, result)
            (y + result).sum().backward()

        return step, model, None

    return [event.bytes for event in memlab.predict(build, steps=1).events]


@pytest.mark.parametrize("kernel", [kernels.twice, kernels.tuned], ids=["plain", "autotuned"])
def test_a_launch_allocates_nothing(kernel):
    launched = predicted_bytes(lambda x, y: kernel[(8,)](x, y, x.numel(), BLOCK=64))
    assert launched == predicted_bytes(lambda x, y: None)


def test_what_a_kernel_may_have_written_is_unknown():
    with memlab.dry_run():
        counts = torch.zeros(4, dtype=torch.int64)
        assert counts.tolist() == [0, 0, 0, 0]
        kernels.twice[(1,)](torch.ones(4), counts, 4, BLOCK=4)
        assert counts.tolist() == [1, 1, 1, 1]  # what a dry run reads for unknown integers


def test_after_the_dry_run_launches_are_as_before():
    before = triton.runtime.jit.JITFunction.run
    with memlab.dry_run():
        assert triton.runtime.jit.JITFunction.run is not before
    assert triton.runtime.jit.JITFunction.run is before
