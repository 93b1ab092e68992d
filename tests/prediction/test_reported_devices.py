"""In a prediction, libraries read CUDA as the device of a tensor on CUDA."""

import pytest
import torch
from traces import births, predicted

import memlab


def inside(look):
    """Return look(x on the GPU, y on the CPU) in a prediction."""
    answers = []
    predicted(lambda device: answers.append(look(torch.zeros(2, device=device), torch.zeros(2))))
    return answers[-1]


def test_a_tensor_on_the_gpu_reads_cuda():
    read = inside(lambda x, y: (str(x.device), x.device.type, x.is_cuda, x.is_cpu))
    assert read == ("cuda:0", "cuda", True, False)


def test_a_tensor_on_the_cpu_reads_cpu():
    assert inside(lambda x, y: (str(y.device), y.is_cuda, y.is_cpu)) == ("cpu", False, True)


def test_a_tensor_on_the_reported_device_is_on_the_gpu():
    for make in (
        lambda x, y: torch.ones(2, device=x.device),
        lambda x, y: y.to(x.device),
        lambda x, y: y.new_ones(2, device=x.device),
        lambda x, y: torch.nn.Linear(2, 2).to(x.device).weight[0],
        lambda x, y: x.detach().clone(),
    ):
        assert inside(lambda x, y, make=make: (x + make(x, y)).device == x.device)


def test_the_default_device_reads_cuda():
    def default(*_) -> str:
        with torch.device("cuda"):
            return str(torch.get_default_device())

    assert inside(default) == "cuda:0"
    assert inside(lambda x, y: str(torch.get_default_device())) == "cpu"


def test_the_reported_device_ends_with_the_prediction():
    inside(lambda x, y: x)
    with memlab.dry_run():
        assert (str(torch.zeros(2).device), torch.zeros(2).is_cuda) == ("cpu", False)


def test_a_cast_that_peft_makes_on_the_cpu_only_is_not_predicted():
    peft = pytest.importorskip("peft")

    def merge(device):
        base = torch.nn.Sequential(torch.nn.Linear(8, 8)).to(device, torch.bfloat16)
        config = peft.LoraConfig(target_modules=["0"])
        adapted = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
        adapted.base_model.model[0].get_delta_weight("default")

    products = births(predicted(merge), "aten.mm")
    assert (2 * 8 * 8, "bfloat16") in products
    assert (4 * 8 * 8, "float32") not in products


def test_a_mixture_of_experts_is_a_loop_on_a_gpu_without_grouped_matmuls():
    moe = pytest.importorskip("transformers.integrations.moe")
    answers = {}

    def choose(device):
        x = torch.zeros(8, 16, device=device)
        answers[torch.cuda.get_device_capability()] = moe._can_use_grouped_mm(x, x, x)

    for target in ("cuda", "cuda:t4"):
        memlab.predict(lambda: (lambda: choose("cuda"), None, None), steps=1, device=target)
    assert answers == {(8, 0): True, (7, 5): False}
