"""bitsandbytes' layers in a prediction: the allocations of their CUDA kernels."""

import pytest
import torch
from torch import nn

import memlab
from memlab.allocator import simulate
from memlab.configs.evidence import accuracy

bitsandbytes = pytest.importorskip("bitsandbytes")
IN, OUT = 1024, 2048
HALF = 2 * IN * OUT  # bytes of the weight in float16
WORKSPACE, LT_WORKSPACE = 8_519_680, 2**20


def four_bits(rows, *, bias=False, double=False, device="cuda:t4"):
    """Predict one layer, forward and backward."""

    def build():
        layer = nn.Linear(IN, OUT, bias, dtype=torch.float16)
        made = bitsandbytes.nn.Linear4bit(
            IN, OUT, bias, torch.float16, quant_type="nf4", compress_statistics=double
        )
        made.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data, quant_type="nf4", compress_statistics=double, module=made
        )
        made.bias = layer.bias
        made.cuda()
        x = torch.ones(rows, IN, device="cuda", dtype=torch.float16, requires_grad=True)
        return (lambda: made(x).sum().backward()), made, None

    return memlab.predict(build, device=device)


def eight_bits(rows, threshold, *, trains=True):
    def build():
        layer = bitsandbytes.nn.Linear8bitLt(
            IN, OUT, False, has_fp16_weights=False, threshold=threshold
        )
        layer.half().cuda().train(trains)
        x = torch.ones(rows, IN, device="cuda", dtype=torch.float16, requires_grad=True)
        return (lambda: layer(x).sum().backward()), layer, None

    return memlab.predict(build)


def allocated(trace, phase):
    """Return the sizes allocated in a phase, without the loss, its gradient and scratch of sums."""
    return [e.bytes for e in trace.events if e.phase == phase and e.bytes > 8192]


def copied_gradient(rows):
    """Return the bytes of the copy that a matmul makes of the expanded gradient of a sum."""
    return 2 * rows * OUT


def test_a_four_bit_matmul_with_many_rows_holds_the_dequantized_weight():
    trace = four_bits(2048)
    assert allocated(trace, "forward") == [HALF, 2 * 2048 * OUT]
    assert allocated(trace, "backward") == [HALF, 2 * 2048 * IN, copied_gradient(2048)]


@pytest.mark.parametrize(
    ("device", "rows", "dequantizes"),
    [("cuda:t4", 64, False), ("cuda:t4", 65, True), ("cuda:hopper", 64, True)],
)
def test_the_card_and_the_rows_choose_the_four_bit_kernel(device, rows, dequantizes):
    weight = [HALF] * dequantizes
    assert allocated(four_bits(rows, device=device), "forward") == [*weight, 2 * rows * OUT]


def test_a_four_bit_matmul_uses_the_workspaces_of_its_matmul():
    def workspaces(trace):
        events = (e for e in trace.history if e.category == "workspace")
        return sorted(e.bytes for e in events if e.bytes in (WORKSPACE, LT_WORKSPACE))

    assert workspaces(four_bits(64)) == [WORKSPACE]  # of backward
    assert workspaces(four_bits(2048)) == [WORKSPACE, WORKSPACE]
    assert workspaces(four_bits(2048, bias=True)) == [LT_WORKSPACE, WORKSPACE, WORKSPACE]


def test_nested_statistics_are_dequantized_twice():
    absmax = 4 * IN * OUT // 64
    forward = allocated(four_bits(2048, double=True), "forward")
    assert forward == [absmax, absmax, HALF, 2 * 2048 * OUT]


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_an_eight_bit_layer_takes_the_path_of_cuda(threshold):
    rows = 512
    outliers = [2 * rows * IN, rows * IN] if threshold else []  # |x|, |x| >= 6
    trace = eight_bits(rows, threshold)
    assert allocated(trace, "forward") == [
        *(rows * IN, *outliers),  # x in 8 bits
        *(4 * rows * OUT, 2 * rows * OUT),  # the product in int32 and in float16
    ]
    assert allocated(trace, "backward") == [HALF, 2 * rows * IN, copied_gradient(rows)]


def test_an_eight_bit_weight_is_one_byte_per_element():
    parameters = eight_bits(512, 0.0).at_peak["parameters"]
    assert parameters == IN * OUT + 2 * 512 * IN  # and x, which needs a gradient


def test_the_library_is_unchanged_after_a_prediction():
    functions = bitsandbytes.autograd._functions
    before = functions.MatMul8bitFp, hasattr(torch._C, "_cuda_getCurrentRawStream")
    eight_bits(512, 6.0)
    assert (functions.MatMul8bitFp, hasattr(torch._C, "_cuda_getCurrentRawStream")) == before


# ------------------------------------------------------------------ empty_cache


@pytest.mark.few(2)
@pytest.mark.parametrize("empties", [False, True])
@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator])
def test_a_prediction_empties_the_cache_where_the_script_does(module, empties):
    mib = 2**20

    def build():
        torch.empty(100 * mib, dtype=torch.uint8, device="cuda")
        if empties:
            module.empty_cache()
        return (lambda: torch.empty(150 * mib, dtype=torch.uint8, device="cuda")), None, None

    trace = memlab.predict(build, steps=1)
    assert trace.reserved_bytes == (150 if empties else 250) * mib
    assert simulate(trace).reserved_bytes == trace.reserved_bytes


def test_a_device_index_is_an_accelerator_without_one():
    with memlab.dry_run():
        assert torch.device(0) == torch.device("cuda:0")
        assert torch.device("cpu", 0).index == 0


# ------------------------------------------------------------------ transformers and LoRA


def lora(layers, **quantization):
    """Predict LoRA on a small Llama that transformers' loader quantizes."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def build():
        config = transformers.LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
        )
        made = transformers.LlamaForCausalLM(config)
        model = type(made).from_pretrained(
            None,
            config=config,
            state_dict=made.state_dict(),
            quantization_config=transformers.BitsAndBytesConfig(**quantization),
            device_map={"": 0},
            dtype=torch.float16,
        )
        model = peft.prepare_model_for_kbit_training(model)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj"]))
        model.train()
        tokens = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        step = lambda: model(input_ids=tokens, labels=tokens).loss.backward()  # noqa: E731
        return step, model, None

    return memlab.predict(build)


WEIGHTS = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256  # of one layer


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")  # of transformers, about its next version
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("int8", {"load_in_8bit": True, "llm_int8_threshold": 0.0}),
        ("int8", {"load_in_8bit": True, "llm_int8_threshold": 6.0}),
        ("uint8", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    ],
)
def test_lora_on_weights_that_the_loader_quantizes_has_their_bytes(dtype, quantization):
    trace = lora(2, **quantization)
    weights = [e for e in trace.events if e.phase == "before" and e.category == "parameters"]
    stored = sum(e.bytes for e in weights if e.dtype == dtype)
    assert stored == 2 * WEIGHTS // (1 if dtype == "int8" else 2)
    assert trace.at_peak["gradients"] == 2 * 4 * 8 * (256 + 256)  # of the factors, in float32


def test_a_four_bit_step_reports_the_errors_of_measured_four_bit_steps():
    assert accuracy("4-bit weights") in four_bits(8).notes
