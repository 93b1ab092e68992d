"""Helpers shared by all kernels, each against the equivalent torch operator."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from close import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from memlab.kernels import launching
from memlab.kernels.arithmetic import cast, matmul_add
from memlab.kernels.launching import INTERPRETED, block_count, launch, observed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@triton.jit
def matmul_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    indices = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = matmul_add(
        tl.load(a_ptr + indices), tl.load(b_ptr + indices), tl.zeros((N, N), tl.float32)
    )
    tl.store(out_ptr + indices, acc)


@triton.jit
def rounding_kernel(x_ptr, out_ptr, N: tl.constexpr):
    indices = tl.arange(0, N)
    tl.store(out_ptr + indices, cast(tl.load(x_ptr + indices), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_add_accumulates_in_float32(dtype, device):
    a, b = (torch.randn(32, 32, device=device).to(dtype) for _ in range(2))
    out = torch.empty(32, 32, device=device)
    launch(matmul_kernel, (1,), a, b, out, N=32)
    exact = a.double() @ b.double()
    assert_close(out, exact.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_rounds_to_nearest_with_ties_to_even(dtype, device):
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-8, 255.5, 0.0, -0.0]
    beyond = [3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
    x = torch.tensor([*ties, *beyond, *torch.randn(243).tolist()], device=device)
    out = torch.empty(256, dtype=dtype, device=device)
    launch(rounding_kernel, (1,), x, out, N=256)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("count", "size", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)]
)
def test_the_last_block_may_be_short(count, size, expected):
    assert block_count(count, size) == expected


def test_meta_and_fake_tensors_run_nothing_but_are_observed():
    launches = []
    with FakeTensorMode():
        fake = torch.empty(256)
    meta = torch.empty(256, device="meta")
    with observed(lambda kernel, arguments, constants: launches.append((kernel, constants))):
        launch(rounding_kernel, (1,), fake, fake, N=256)
        launch(rounding_kernel, (1,), meta, meta, N=256)
    launch(rounding_kernel, (1,), meta, meta, N=256)
    assert launches == [(rounding_kernel, {"N": 256})] * 2


def test_an_empty_grid_runs_nothing(device):
    out = torch.full((256,), 7.0, device=device)
    launch(rounding_kernel, (0,), torch.zeros(256, device=device), out, N=256)
    assert (out == 7).all()


def test_a_launch_without_gpu_and_interpreter_is_an_error(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    x = torch.zeros(256)
    with pytest.raises(RuntimeError, match=r"got tensors on cpu, and .* set TRITON_INTERPRET=1"):
        launch(rounding_kernel, (1,), x, x, N=256)


def test_tensors_on_two_devices_are_refused():
    real, meta = torch.zeros(256), torch.zeros(256, device="meta")
    with pytest.raises(RuntimeError, match="got tensors on cpu and on meta; move all"):
        launch(rounding_kernel, (1,), real, meta, N=256)


def rounded_to_bfloat16(x):
    out = torch.empty(256, dtype=torch.bfloat16, device=x.device)
    launch(rounding_kernel, (1,), x, out, N=256)
    return out


def test_torch_compile_breaks_the_graph_at_a_launch(device):
    x = torch.randn(256, device=device)
    by_compile = torch.compile(lambda x: rounded_to_bfloat16(x + 1) * 2, backend="eager")
    assert torch.equal(by_compile(x), rounded_to_bfloat16(x + 1) * 2)


def test_tracing_operators_is_refused():
    with pytest.raises(RuntimeError, match=r"got a recording of operators \(torch.export"):
        make_fx(rounded_to_bfloat16, tracing_mode="fake")(torch.randn(256))


def failure_of(script: str, **environment: str) -> str:
    """Return the last line of stderr of a Python subprocess."""
    other_variables = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env={**other_variables, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 1
    return completed.stderr.strip().splitlines()[-1]


def test_importing_kernels_without_triton_names_the_alternatives():
    message = failure_of("import sys; sys.modules['triton'] = None; import memlab.kernels")
    assert message.startswith(
        "ImportError: memlab.kernels needs Triton, which is not installed; install it"
    )


def test_requesting_the_interpreter_too_late_is_refused():
    script = "import os, triton; os.environ['TRITON_INTERPRET'] = '1'; import memlab.kernels"
    assert "after Triton was imported" in failure_of(script)


def test_memlab_works_without_triton():
    modules = "import memlab, memlab.train, memlab.cli, memlab.planner, memlab.course"
    script = f"import sys; sys.modules['triton'] = None; {modules}; sys.exit(1)"
    assert failure_of(f"{script.replace('sys.exit(1)', '1/0')}").startswith("ZeroDivisionError")


@pytest.mark.skipif(not INTERPRETED, reason="there is a compiler")
def test_compiled_for_is_refused_with_the_interpreter():
    from memlab.kernels.compiling import compiled_for

    with (
        pytest.raises(RuntimeError, match=r"got TRITON_INTERPRET=1, .*; unset it"),
        compiled_for(89),
    ):
        pass


SNIPPET = """
import triton, triton.language as tl
from memlab.kernels.launching import launch

@triton.jit
def copy(x_ptr, out_ptr, count, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < count), at < count)

x = torch.empty(4096, device="meta")
with compiled_for({capability}) as made:
    for count in (4096, 4096, 4095):
        launch(copy, (4,), x, x, count, N=1024, num_warps=4)
report(made)
"""


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_a_kernel_is_compiled_once_for_each_specialization(compiled, tmp_path, capability):
    path = tmp_path / "snippet.py"  # Triton reads kernel source from a file
    path.write_text(SNIPPET.format(capability=capability))
    made = compiled(f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))")
    assert [(m["name"], m["spilled"], m["capability"]) for m in made] == [
        ("copy", 0, capability)
    ] * 2
    # 4,096 is a multiple of 16, so four elements are loaded at once; 4,095 is not.
    assert ["ld.global.v4" in m["ptx"] or "v4.b32" in m["ptx"] for m in made] == [True, False]
