"""Autocast inside compositions that the meter takes apart: as it is unwatched."""

from contextlib import ExitStack

import pytest
import torch

import memlab
from memlab.metering.casts import Casts

aten = torch.ops.aten

# Under inference mode each reaches a dispatch mode whole, and consists of products that the CPU's
# autocast lowers.
COMPOSITIONS = {
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, ([2], [2])),
    "multi_dot": lambda x: torch.linalg.multi_dot([x[0], x[0].T, x[0]]),
}


@pytest.fixture(params=COMPOSITIONS)
def composition(request):
    return COMPOSITIONS[request.param]


def births(trace: memlab.Trace) -> list[tuple[str, tuple[int, ...]]]:
    return [(e.dtype, e.shape) for e in trace.events if e.bytes > 0 and e.phase != "before"]


def test_a_metered_composition_computes_what_it_does_unwatched(composition):
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        unwatched = composition(x)
        with memlab.meter():
            watched = composition(x)
    assert unwatched.dtype == torch.bfloat16
    assert torch.equal(watched, unwatched)


def test_autocast_may_begin_inside_the_metering(composition):
    def step() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return composition(torch.ones(4, 16, 64))

    trace = memlab.measure(step)
    with memlab.dry_run():
        assert births(memlab.measure(step)) == births(trace)
    assert "bfloat16" in {dtype for dtype, _ in births(trace)}


def test_autocast_may_end_inside_the_metering(composition):
    x = torch.ones(4, 16, 64)
    lowered, not_lowered = (
        torch.autocast("cpu", torch.bfloat16, enabled=on) for on in (True, False)
    )
    with torch.inference_mode(), lowered, memlab.meter() as running, not_lowered:
        composition(x)
    assert {dtype for dtype, _ in births(running.trace)} == {"float32"}


@pytest.mark.parametrize(("name", "dtype"), [("tensordot", "float32"), ("einsum", "bfloat16")])
def test_inside_what_autocast_has_cast_nothing_is_cast_again(name, dtype):
    """CUDA's autocast takes tensordot in the widest dtype of its inputs, einsum in the lower."""

    def step() -> torch.Tensor:
        x = torch.ones(4, 16, 64, device="cuda")
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            return COMPOSITIONS[name](x)

    found = births(memlab.predict(lambda: (step, None, None), steps=1))
    assert [got for got, _ in found if got != "uint8"][-1] == dtype  # bytes are workspaces


# ------------------------------------------------------------------ as a mode is called

CPU_KEY = torch._C.DispatchKey.AutocastCPU
ON_NO_LIST, ON_BOTH, ON_THE_CPUS = aten.expand_as.default, aten.matmul.default, aten.inverse.default


def lowers(casts: Casts, *around) -> bool:
    """Whether autocast sees what is inside these compositions, the outermost first."""
    with torch.autocast("cpu", torch.bfloat16), ExitStack() as stack:
        casts.start()
        stack.callback(casts.stop)
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(CPU_KEY)))
        for func in around:
            stack.enter_context(casts.inside(func))
        return not torch._C._dispatch_tls_is_dispatch_key_excluded(CPU_KEY)


def test_what_autocast_names_is_cast_once_however_deep_its_parts_lie():
    assert lowers(Casts(), ON_NO_LIST)
    assert lowers(Casts(), ON_NO_LIST, ON_NO_LIST)
    assert not lowers(Casts(), ON_BOTH)
    assert not lowers(Casts(), ON_BOTH, ON_NO_LIST)


def test_the_list_is_the_devices_own():
    assert not lowers(Casts("cpu"), ON_THE_CPUS)
    assert lowers(Casts("cuda"), ON_THE_CPUS)


def test_torch_has_its_own_function_back():
    before = torch.set_autocast_enabled
    with memlab.meter():
        assert torch.set_autocast_enabled is not before
    assert torch.set_autocast_enabled is before
