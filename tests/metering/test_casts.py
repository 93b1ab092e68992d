"""Autocast inside decomposed composite operators acts as it does without the meter."""

from contextlib import ExitStack

import pytest
import torch

import memlab
from memlab.internals.replacing import replaced
from memlab.metering.casts import Casts

aten = torch.ops.aten

# Under inference mode each of these reaches a dispatch mode undecomposed. The CPU's autocast lowers
# the matmuls inside.
COMPOSITES = {
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, ([2], [2])),
    "multi_dot": lambda x: torch.linalg.multi_dot([x[0], x[0].T, x[0]]),
}


@pytest.fixture(params=COMPOSITES)
def composite(request):
    return COMPOSITES[request.param]


def births(trace: memlab.Trace) -> list[tuple[str, tuple[int, ...]]]:
    return [(e.dtype, e.shape) for e in trace.events if e.bytes > 0 and e.phase != "before"]


def test_a_metered_composite_has_the_same_result_as_without_the_meter(composite):
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        unwatched = composite(x)
        with memlab.meter():
            watched = composite(x)
    assert unwatched.dtype == torch.bfloat16
    assert torch.equal(watched, unwatched)


def test_autocast_may_begin_while_metering(composite):
    def step() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return composite(torch.ones(4, 16, 64))

    trace = memlab.measure(step)
    with memlab.dry_run():
        assert births(memlab.measure(step)) == births(trace)
    assert "bfloat16" in {dtype for dtype, _ in births(trace)}


def test_autocast_may_end_while_metering(composite):
    x = torch.ones(4, 16, 64)
    lowered, not_lowered = (
        torch.autocast("cpu", torch.bfloat16, enabled=on) for on in (True, False)
    )
    with torch.inference_mode(), lowered, memlab.meter() as running, not_lowered:
        composite(x)
    assert {dtype for dtype, _ in births(running.trace)} == {"float32"}


@pytest.mark.parametrize(("name", "dtype"), [("tensordot", "float32"), ("einsum", "bfloat16")])
def test_operators_inside_a_cast_composite_are_not_cast_again(name, dtype):
    """CUDA's autocast runs tensordot in the widest input dtype, einsum in the lower one."""

    def step() -> torch.Tensor:
        x = torch.ones(4, 16, 64, device="cuda")
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            return COMPOSITES[name](x)

    found = births(memlab.predict(lambda: (step, None, None), steps=1))
    assert [got for got, _ in found if got != "uint8"][-1] == dtype  # bytes are workspaces


# ------------------------------------------------------------------ with a mode's dispatch keys

CPU_KEY = torch._C.DispatchKey.AutocastCPU
ON_NO_LIST, ON_BOTH, ON_THE_CPUS = aten.expand_as.default, aten.matmul.default, aten.inverse.default


def lowers(casts: Casts, *around) -> bool:
    """Return whether autocast applies inside these nested composites, outermost first."""
    with torch.autocast("cpu", torch.bfloat16), ExitStack() as stack:
        stack.enter_context(replaced(casts.replacements()))
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(CPU_KEY)))
        for func in around:
            stack.enter_context(casts.inside(func))
        return not torch._C._dispatch_tls_is_dispatch_key_excluded(CPU_KEY)


def test_a_listed_composite_is_cast_once_at_any_nesting_depth():
    assert lowers(Casts(), ON_NO_LIST)
    assert lowers(Casts(), ON_NO_LIST, ON_NO_LIST)
    assert not lowers(Casts(), ON_BOTH)
    assert not lowers(Casts(), ON_BOTH, ON_NO_LIST)


def test_each_device_has_its_own_list():
    assert not lowers(Casts("cpu"), ON_THE_CPUS)
    assert lowers(Casts("cuda"), ON_THE_CPUS)


def test_stop_restores_torchs_function():
    before = torch.set_autocast_enabled
    with memlab.meter():
        assert torch.set_autocast_enabled is not before
    assert torch.set_autocast_enabled is before
