"""The GPU that a script sees during a prediction."""

import functools
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from beside import another_thread
from quick import together

import memlab
from memlab.configs.targets import TARGETS
from memlab.prediction import fake_gpu

GIB = 2**30


def heard(ask, target: str = "cuda") -> Any:
    """Return the answer of `ask` in a prediction's builder, and check that the step's is equal."""
    answers = []

    def build():
        answers.append(ask())
        return (lambda: answers.append(ask())), None, None

    memlab.predict(build, device=target)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.fixture(params=[False, True])
def _with_or_without_a_driver(request, monkeypatch):
    """Make every call to the driver fail, on machines with and without a GPU."""

    def fail(*args: Any) -> None:
        raise AssertionError("the driver was called")

    if request.param:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_device_properties", "get_device_name", "mem_get_info", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", fail)
    monkeypatch.setattr(torch.cuda.memory, "reset_peak_memory_stats", fail)


@pytest.mark.few(1)
@pytest.mark.usefixtures("_with_or_without_a_driver")
@together(
    ("ask", "answer"),
    [
        (lambda: torch.cuda.is_available(), True),
        (lambda: torch.cuda.is_bf16_supported(), True),
        (lambda: torch.cuda.is_bf16_supported(including_emulation=False), True),
        (lambda: torch.cuda.device_count(), 1),
        (lambda: torch.cuda.current_device(), 0),
        (lambda: torch.cuda.memory.reset_peak_memory_stats(), None),
        (lambda: torch.cuda.is_initialized(), True),
        (lambda: torch.cuda.get_device_name(0), "NVIDIA A100-SXM4-80GB"),
        (lambda: torch.cuda.get_device_capability("cuda:0"), (8, 0)),
        (lambda: torch.cuda.get_device_properties(0).total_memory, 79.25 * GIB),
        (lambda: torch.cuda.get_device_properties(0).major, 8),
        (lambda: torch.cuda.get_device_properties(0).multi_processor_count, 108),
        (lambda: torch.cuda.mem_get_info(), (79.25 * GIB, 79.25 * GIB)),
        (lambda: torch.cuda.get_arch_list(), ["sm_80"]),
        (lambda: torch.cuda.is_current_stream_capturing(), False),
        (lambda: torch.accelerator.is_available(), True),
        (lambda: torch.accelerator.device_count(), 1),
        (lambda: torch.accelerator.current_accelerator(), torch.device("cuda")),
        (lambda: torch.accelerator.current_accelerator(check_available=True).type, "cuda"),
        (lambda: torch.accelerator.current_device_index(), 0),
        (lambda: torch.accelerator.synchronize(), None),
        (lambda: torch.cuda.manual_seed_all(0), None),
        (lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()), 1.0),
        (lambda: torch.cuda.utilization(), 0),
        (lambda: torch.cuda.memory_summary(), ""),
        (lambda: torch.cuda.memory.memory_snapshot(), []),
        (lambda: torch.cuda.memory._dump_snapshot("snapshot.pickle"), None),
        (lambda: torch.backends.cudnn.version() > 90000, True),
    ],
)
def test_there_is_one_gpu(ask, answer):
    assert heard(ask) == answer


def test_it_is_the_targets_gpu():
    card = heard(lambda: torch.cuda.get_device_properties(0), "cuda:hopper")
    assert (card.name, card.major, card.minor) == ("NVIDIA H100 80GB HBM3", 9, 0)
    assert card == fake_gpu.properties(TARGETS["cuda:hopper"])


def test_an_rtx_3060_has_28_multiprocessors():
    card = heard(lambda: torch.cuda.get_device_properties(0), "cuda:rtx3060")
    assert (card.name, card.multi_processor_count) == ("NVIDIA GeForce RTX 3060", 28)
    assert (card.major, card.minor, card.total_memory) == (8, 6, 11_931 * 2**20)
    assert card.warp_size == 32


@pytest.mark.parametrize(
    ("device", "arch", "warp_size"),
    [
        ("cuda:mi300x", "gfx942", 64),
        ("cuda:rx7900xtx", "gfx1100", 32),
        ("cuda:m3-max-64", "sm_80", 32),  # predicted as an A100
    ],
)
def test_an_amd_gpu_has_its_own_architecture_and_wavefront(device, arch, warp_size):
    asked = heard(
        lambda: (torch.cuda.get_arch_list(), torch.cuda.get_device_properties(0).warp_size),
        device,
    )
    assert asked == ([arch], warp_size)


def test_a_gpu_without_cuda_has_its_own_name_and_memory():
    card = heard(lambda: torch.cuda.get_device_properties(0), "cuda:m3-max-64")
    assert (card.name, card.total_memory) == ("Apple M3 Max", 48 * 2**30)
    assert (card.major, card.minor, card.multi_processor_count) == (8, 0, 108)


@pytest.mark.few(1)
@pytest.mark.parametrize(("device", "native"), [("cuda:t4", False), ("cuda:rtx3060", True)])
def test_bfloat16_is_emulated_before_ampere(device, native):
    assert heard(lambda: torch.cuda.is_bf16_supported(), device)
    assert heard(lambda: torch.cuda.is_bf16_supported(including_emulation=False), device) == native
    assert heard(lambda: torch.cuda.is_tf32_supported(), device) == native


def test_before_and_after_torch_reports_the_machine():
    asked = (torch.cuda.is_available, torch.cuda.get_device_name, torch.accelerator.is_available)
    there = torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available()
    heard(lambda: torch.cuda.is_available())
    assert asked == (
        torch.cuda.is_available,
        torch.cuda.get_device_name,
        torch.accelerator.is_available,
    )
    assert there == (
        torch.cuda.is_available(),
        torch.cuda.device_count(),
        torch.accelerator.is_available(),
    )


def test_a_plain_dry_run_reports_the_machine():
    with memlab.dry_run():
        assert torch.cuda.is_available() == torch.accelerator.is_available()
        assert torch.accelerator.is_available() == (
            torch.accelerator.current_accelerator(check_available=True) is not None
        )


def test_memlab_only_uses_an_accelerator_that_is_available():
    """With CUDA but no driver, `current_accelerator()` is CUDA while `is_available()` is False."""
    folder = Path(memlab.__file__).parent
    calls = re.compile(r"current_accelerator\((?!check_available=True\))")
    assert [path for path in folder.rglob("*.py") if calls.search(path.read_text("utf-8"))] == []


def test_a_script_that_checks_for_a_gpu_has_the_same_prediction():
    def build(device: torch.device | None = None):
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        model = torch.nn.Linear(256, 256).to(device)
        batch = torch.randn(8, 256, device=device)

        def step() -> None:
            with torch.autocast(device.type, dtype), torch.random.fork_rng():
                model(batch).sum().backward()

        return step, model, None

    asked = memlab.predict(build)
    told = memlab.predict(lambda: build(torch.device("cuda")))
    assert (asked.at_peak, asked.memory, asked.notes) == (told.at_peak, told.memory, told.notes)
    assert not any("nothing on an accelerator" in note for note in asked.notes)


def test_libraries_have_caches_of_their_own_in_a_prediction(monkeypatch):
    """transformers caches answers; accelerate has process-wide state."""
    library = ModuleType("transformers.utils.import_utils")
    library.is_cuda = functools.lru_cache(lambda: torch.cuda.is_available())
    user = ModuleType("transformers.a_user")
    user.is_cuda = library.is_cuda
    states = ModuleType("accelerate.state")
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        setattr(states, name, type(name, (), {"_shared_state": {}}))
    shared = states.PartialState._shared_state
    shared["device"] = "cpu"
    for module in (library, user, states):
        origin = f"/site-packages/{module.__name__.replace('.', '/')}.py"
        module.__spec__ = ModuleSpec(module.__name__, None, origin=origin)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def device() -> str:
        return states.PartialState._shared_state.setdefault("device", "cuda")

    def ask() -> bool:
        assert elsewhere(lambda: (library.is_cuda(), user.is_cuda())) == (before, before)
        assert elsewhere(device) == "cpu"
        return library.is_cuda() and user.is_cuda() and device() == "cuda"

    before = library.is_cuda()
    with another_thread() as elsewhere:
        assert heard(ask)
    assert library.is_cuda() == before
    assert shared == {"device": "cpu"}


def test_the_gpu_has_a_generator():
    """torch.compile's functions take one, where checkpointed blocks draw random numbers."""

    def build():
        [generator] = torch.cuda.default_generators
        return lambda: generator.clone_state().manual_seed(3), None, None

    memlab.predict(build, device="cuda:h100")
