"""Models loaded from a folder in a prediction: as large as the same model built from its config."""

import json
import shutil

import pytest
import torch

import memlab

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its next version


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"))


def saved(path, **options):
    made = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=BF16)
    made.save_pretrained(path, **options)
    return path


def from_config():
    return AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=BF16).cuda()


def training(load):
    """Return a builder: AdamW on the weights that need a gradient of the model from `load()`."""

    def build():
        model = load()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights)
        tokens = torch.zeros(2, 16, dtype=torch.int64, device="cuda")

        def step():
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return step, model, optimizer

    return build


def born(events):
    """Return the bytes of each allocation, in order."""
    return [event.bytes for event in events if event.bytes > 0]


LOADERS = {
    "cuda()": lambda path: AutoModelForCausalLM.from_pretrained(path).cuda(),
    "to(cuda)": lambda path: AutoModelForCausalLM.from_pretrained(path).to("cuda"),
    "to(0)": lambda path: AutoModelForCausalLM.from_pretrained(path).to(0),
    **{
        f"device_map={where}": lambda path, where=where: AutoModelForCausalLM.from_pretrained(
            path, device_map=where
        )
        for where in ("auto", "cuda", "cuda:0")
    },
    "device_map={'': 0}": lambda path: AutoModelForCausalLM.from_pretrained(
        path, device_map={"": 0}
    ),
}


@pytest.fixture(scope="module")
def expected():
    return memlab.predict(training(from_config))


@pytest.mark.few(1)
@pytest.mark.parametrize("how", LOADERS)
def test_a_loaded_model_takes_the_bytes_of_one_from_its_config(folder, expected, how):
    assert_same_step(memlab.predict(training(lambda: LOADERS[how](folder))), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["cuda()", "device_map=auto"])
def test_a_folder_of_shards_takes_the_same_bytes(tmp_path, expected, how):
    saved(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 9
    assert_same_step(memlab.predict(training(lambda: LOADERS[how](tmp_path))), expected)


def assert_same_step(trace, expected):
    assert trace.peak_bytes == expected.peak_bytes
    assert trace.allocated_bytes == expected.allocated_bytes
    assert trace.at_peak == expected.at_peak
    assert born(trace.events) == born(expected.events)


def test_the_loader_allocates_the_models_bytes_at_once_and_then_weights_in_its_own_order(folder):
    trace = memlab.predict(training(lambda: LOADERS["device_map={'': 0}"](folder)))
    C, M, V, G = 256, 512, 1000, 128  # width, of the MLP, vocabulary, of keys and values
    layer = [C, *(C * M,) * 3, C, G * C, C * C, C * C, G * C]  # norms, mlp, k, o, q, v
    # by name: input_layernorm, mlp.*, post_attention_layernorm, self_attn.*
    weights = [V * C, V * C, *layer, *layer, C]  # lm_head, model.embed_tokens, layers, model.norm
    expected = [2 * count for count in weights]
    warmup, *loaded = born(trace.history)[: 1 + len(expected)]
    assert warmup >= sum(expected)
    assert warmup - sum(expected) < 512  # and the rotary frequencies
    assert loaded == expected


def test_weights_can_be_cast_while_they_are_loaded(folder, expected):
    load = lambda: AutoModelForCausalLM.from_pretrained(  # noqa: E731
        folder, dtype=torch.float32, device_map="cuda"
    )
    twice = memlab.predict(training(load)).at_peak["parameters"]
    assert twice == 2 * expected.at_peak["parameters"]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["cuda()", "device_map=auto"])
def test_weights_in_a_bin_file_take_the_same_bytes(folder, tmp_path, expected, how):
    shutil.copy(folder / "config.json", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_step(memlab.predict(training(lambda: LOADERS[how](tmp_path))), expected)


def test_a_plain_dry_run_counts_what_a_real_run_on_the_cpu_does(folder):
    def measured(load):
        model = load(folder)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        step = lambda: model(input_ids=tokens, labels=tokens).loss.backward()  # noqa: E731
        return memlab.measure(step, model=model).peak_bytes

    real = measured(AutoModelForCausalLM.from_pretrained)
    with memlab.dry_run():
        for load in (AutoModelForCausalLM.from_pretrained, *LOADERS.values()):
            assert measured(load) == real


def test_a_model_is_loaded_for_real_after_a_prediction(folder):
    memlab.predict(training(lambda: LOADERS["device_map=auto"](folder)))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss).item() is True


# ------------------------------------------------------------------ bad input


def test_a_missing_shard_raises_the_loaders_own_error(tmp_path):
    folder = saved(tmp_path, max_shard_size="500KB")
    (folder / "model-00003-of-00009.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00003-of-00009"):
        memlab.predict(training(lambda: LOADERS["device_map=auto"](folder)))


def test_a_folder_without_weights_raises_the_loaders_own_error(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        memlab.predict(training(lambda: LOADERS["cuda()"](tmp_path)))


def test_a_config_of_another_shape_raises_the_loaders_own_error(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 999}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        memlab.predict(training(lambda: LOADERS["cuda()"](tmp_path)))


# ------------------------------------------------------------------ quantized weights

QUANTIZED = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)  # elements in linear layers


def lora(folder, **options):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    model = LlamaForCausalLM.from_pretrained(folder, device_map={"": 0}, **options)
    model = peft.prepare_model_for_kbit_training(model)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj"])).train()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "stored", "bits"),
    [
        ("uint8", QUANTIZED // 2, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("int8", QUANTIZED, {"load_in_8bit": True}),
    ],
)
def test_weights_are_quantized_from_a_folder_as_from_tensors(folder, dtype, stored, bits):
    def from_tensors():
        made = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
        return lora(None, config=made.config, state_dict=made.state_dict(), dtype=BF16, **settings)

    settings = {"quantization_config": BitsAndBytesConfig(**bits)}
    trace = memlab.predict(training(lambda: lora(folder, **settings)))
    expected = memlab.predict(training(from_tensors))
    weights = [e for e in trace.events if e.phase == "before" and e.category == "parameters"]
    assert sum(e.bytes for e in weights if e.dtype == dtype) == stored
    assert born(trace.history) == born(expected.history)
    assert born(trace.events) == born(expected.events)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "bits", [{"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}]
)
def test_a_quantized_checkpoint_takes_the_bytes_of_quantizing_while_loading(folder, tmp_path, bits):
    settings = {"quantization_config": BitsAndBytesConfig(**bits)}
    LlamaForCausalLM.from_pretrained(folder, **settings).save_pretrained(tmp_path)
    loaded = memlab.predict(training(lambda: lora(tmp_path)))
    made = memlab.predict(training(lambda: lora(folder, **settings)))
    codebook = 1024 * ("load_in_4bit" in bits)  # which bitsandbytes keeps after quantizing
    assert loaded.at_peak["parameters"] == made.at_peak["parameters"]
    assert loaded.peak_bytes == made.peak_bytes - codebook


# ------------------------------------------------------------------ safetensors and torch.load


@pytest.mark.parametrize("device", ["cuda", 0])
def test_safetensors_moves_each_tensor_when_it_is_read(tmp_path, device):
    path = tmp_path / "weights.safetensors"
    tensors = {"a": torch.zeros(2048).half(), "b": torch.zeros(2048), "c": torch.zeros(64, 64)}
    safetensors_torch.save_file(tensors, path)  # float32 before float16

    def build():
        read = safetensors_torch.load_file(path, device=device)
        with safetensors.safe_open(path, "pt", device=device) as file:
            parts = file.get_slice("c")[:16], file.get_tensor("a")
        return (lambda: (read, parts)), None, None

    trace = memlab.predict(build)
    whole = [4 * 2048, 4 * 64 * 64, 2 * 2048]
    assert born(trace.history) == [*whole, 4 * 16 * 64, 2 * 2048]


def test_torch_load_puts_each_storage_on_the_device_once(tmp_path):
    path = tmp_path / "weights.pt"
    tied = torch.randn(512, 1024)
    torch.save({"a": tied, "b": tied, "c": tied.half(), "d": tied[1:, 2:].T}, path)

    def build():
        read = torch.load(path, map_location="cuda")
        assert read["d"].shape == (1022, 511)
        assert {tensor.device.type for tensor in read.values()} == {"cuda"}
        return (lambda: read["a"].add_(1)), None, None

    trace = memlab.predict(build)
    assert [e.bytes for e in trace.history if e.bytes > 0] == [4 * 512 * 1024, 2 * 512 * 1024]


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_on_the_host_counts_nothing_on_the_device(tmp_path, mmap):
    path = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(64, 128).state_dict(), path)

    def build():
        model = torch.nn.Linear(64, 128)
        model.load_state_dict(torch.load(path, map_location="cpu", mmap=mmap))
        model.cuda()
        return (lambda: None), model, None

    assert memlab.predict(build).peak_bytes == 4 * (64 * 128 + 128)
