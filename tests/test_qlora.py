"""QLoRA: gradients of bitsandbytes and peft, nothing kept for backward, and exact bytes.

Each check of a layer is a function, and `WRONG` has layers that must fail it.
"""

import copy
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from close import assert_close
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import memlab
from memlab.checkpointing import checkpoint
from memlab.lora import LoRALinear, adapters, merge_lora
from memlab.model import GPT, PRESETS
from memlab.qlora import (
    NF4Linear,
    _MatmulNF4,
    add_qlora,
    prepare_for_low_bits,
    quantize_layers,
)
from memlab.quantize import dequantize_nf4, nf4_bytes, quantize_nf4

IN, OUT, RANK = 192, 320, 4
CODEBOOK_BYTES = 4 * (16 + 256)


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(columns: int = IN, rows: int = OUT, *, bias: bool = True, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias, dtype=dtype)


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(linear(), nn.SiLU(), linear(OUT, IN, bias=False)).to(dtype)


def with_random_changes(model: nn.Module) -> nn.Module:
    for index, layer in enumerate(m for m in model.modules() if isinstance(m, LoRALinear)):
        layer.up.data.copy_(seeded(*layer.up.shape, seed=index) * 0.1)
    return model


# ------------------------------------------------------------------ checks of a layer

Layer = Callable[[nn.Linear], nn.Module]


def check_values(layer: Layer) -> None:
    """Output and input gradient match a linear layer with the decoded weight."""
    original = linear()
    weight = dequantize_nf4(quantize_nf4(original.weight))
    got, wanted = (seeded(5, 7, IN).requires_grad_() for _ in range(2))
    out = layer(copy.deepcopy(original))(got)
    expected = wanted @ weight.T + original.bias.detach()
    assert_close(out, expected)
    gradient = seeded(5, 7, OUT, seed=1)
    out.backward(gradient)
    expected.backward(gradient)
    assert_close(got.grad, wanted.grad)


def check_nothing_is_saved(layer: Layer) -> None:
    """Neither through autograd's hooks nor otherwise: only the output stays alive."""
    saved: list[Tensor] = []
    made, x = layer(linear()), seeded(512, IN).requires_grad_()
    outputs: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs.append(made(x))
    assert saved == []
    outputs.clear()
    trace = memlab.measure(lambda: outputs.append(made(x)), model=made)
    held = sum(b.nbytes for b in {*made.buffers(), *made.parameters()}) + x.nbytes
    assert sum(trace.at_end.values()) == held + outputs[-1].nbytes


def check_transient(layer: Layer) -> None:
    """Each pass holds one decoded weight in the dtype of its matmul, beside what it returns."""
    rows, columns, tokens = 2048, 1024, 2048  # results are larger than the decoder's temporaries
    made = layer(linear(columns, rows, bias=False, dtype=torch.bfloat16))
    x = seeded(tokens, columns, dtype=torch.bfloat16).requires_grad_()
    decoded, results = 2 * rows * columns, {"forward": 2 * tokens * rows, "backward": x.nbytes}
    held = sum(buffer.nbytes for buffer in made.buffers()) + x.nbytes

    out = made(x)
    gradient = torch.ones_like(out)
    forward = memlab.measure(lambda: made(x))
    assert forward.peak_bytes == held + decoded + results["forward"]
    one = seeded(1, columns, dtype=torch.bfloat16)
    while_decoding = memlab.measure(lambda: made(one)).peak_bytes - held - one.nbytes
    assert 0 < while_decoding - decoded < 1.6 * 2**20  # a chunk's temporaries
    backward = memlab.measure(lambda: torch.autograd.grad(out, x, gradient))
    held += out.nbytes + gradient.nbytes
    assert backward.peak_bytes == held + decoded + results["backward"]


CHECKS = (check_values, check_nothing_is_saved, check_transient)


class _Wrong(nn.Module):
    """A 4-bit layer with a mistake."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.right = NF4Linear(original)

    def forward(self, x: Tensor) -> Tensor:
        return _MatmulNF4.apply(x, self.right.quantized(), self.right.bias)


class DecodesOutsideOfAutogradsFunction(_Wrong):
    """F.linear saves the decoded weight for backward."""

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantize_nf4(self.right.quantized(), x.new_empty(self.right.quantized().shape))
        return nn.functional.linear(x, weight, self.right.bias)


class DecodesInFloat32(_Wrong):
    """The decoded weight is cast once more, so two of them exist at once."""

    def forward(self, x: Tensor) -> Tensor:
        return DecodesInFloat32.Matmul.apply(x, self.right.quantized(), self.right.bias)

    class Matmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.weight = weight
            decoded = dequantize_nf4(weight, torch.empty(weight.shape)).to(x.dtype)
            return nn.functional.linear(x, decoded, bias)

        backward = _MatmulNF4.backward


class StopsTheGradient(_Wrong):
    """The layer is frozen, so its input gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = self.right(x)
        return out + 0 * x.sum()


class ForgetsTheBias(_Wrong):
    """The bias is lost."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original)
        self.right.bias = None


class SavesItsInput(_Wrong):
    """x is kept, as for a weight with a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return SavesItsInput.Matmul.apply(x, self.right.quantized(), self.right.bias)

    class Matmul(_MatmulNF4):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x)
            return _MatmulNF4.forward(ctx, x, weight, bias)


WRONG = {
    DecodesOutsideOfAutogradsFunction: check_nothing_is_saved,
    DecodesInFloat32: check_transient,
    StopsTheGradient: check_values,
    ForgetsTheBias: check_values,
    SavesItsInput: check_nothing_is_saved,
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_layer_passes(check):
    check(NF4Linear)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_layer_fails(wrong):
    with pytest.raises(AssertionError):
        WRONG[wrong](wrong)


# ------------------------------------------------------------------ against bitsandbytes and peft


def with_peft(model: nn.Module, dtype: torch.dtype, double: bool) -> nn.Module:
    """Quantize with bitsandbytes and add peft's adapters."""
    modules = pytest.importorskip("bitsandbytes").nn
    peft = pytest.importorskip("peft")
    holder = nn.Module()
    holder.layers = nn.Sequential()
    for layer in model:
        if isinstance(layer, nn.Linear):
            four = modules.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=dtype,
                compress_statistics=double,
                quant_type="nf4",
            )
            four.weight = modules.Params4bit(
                layer.weight.data.clone(),
                requires_grad=False,
                compress_statistics=double,
                quant_type="nf4",
                module=four,
            )
            if layer.bias is not None:
                four.bias = nn.Parameter(layer.bias.data.clone())
            layer = four.to("cpu")  # quantizes
        holder.layers.append(layer)
    holder.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0", "2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.LoraModel(holder, config, "default").model.layers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)]
)
def test_gradients_equal_bitsandbytes_and_peft(dtype, tolerance, double):
    """Within a few roundings of the dtype, relative to the largest gradient of a tensor."""
    theirs = with_peft(two_layers(dtype), dtype, double)
    ours = two_layers(dtype)
    add_qlora(ours, RANK, double=double, adapter_dtype=torch.float32)
    with_random_changes(ours)
    for mine, other in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        assert torch.equal(mine.frozen.codes, other.base_layer.weight.view(-1))
        if double:  # bitsandbytes' coarse grid: see memlab.quantize.nf4
            mine.frozen.absmax.copy_(other.base_layer.weight.quant_state.absmax)
        other.lora_A["default"].weight.data = mine.down.data.clone()
        other.lora_B["default"].weight.data = mine.up.data.clone()
    x = seeded(64, IN, dtype=dtype)
    for model in (ours, theirs):
        model(x).float().square().mean().backward()
    for mine, other in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        pairs = (
            (mine.down, other.lora_A["default"].weight),
            (mine.up, other.lora_B["default"].weight),
        )
        for ours_, theirs_ in pairs:
            assert ours_.grad.dtype == theirs_.grad.dtype == torch.float32
            difference = (ours_.grad - theirs_.grad).abs().max()
            assert difference <= tolerance * theirs_.grad.abs().max()


# ------------------------------------------------------------------ whole models


def gpt(dtype: torch.dtype = torch.float32, preset: str = "tiny") -> GPT:
    torch.manual_seed(0)
    model = GPT(PRESETS[preset], dtype=dtype)
    add_qlora(model, RANK)
    return with_random_changes(model)


TOKENS = torch.arange(64).view(2, 32)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(TOKENS, TOKENS).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_only_adapters_are_trained_and_every_inner_layer_is_quantized():
    model = gpt()
    assert not any(isinstance(m, nn.Linear) for m in model.blocks.modules())
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"down", "up"}
    assert set(gradients(model)) == set(adapters(model))


def test_adapters_may_stand_beside_some_of_the_quantized_layers():
    model = GPT(PRESETS["tiny"])
    names = add_qlora(model, RANK, adapt=lambda name: "attention" in name)
    assert len(names) == 4 * PRESETS["tiny"].layers
    assert sum(isinstance(m, NF4Linear) for m in model.modules()) == 7 * PRESETS["tiny"].layers
    assert sum(isinstance(m, LoRALinear) for m in model.modules()) == len(names)


def test_output_layers_stay_as_they_are_by_default():
    model = nn.ModuleDict({"inner": linear(), "lm_head": linear(OUT, 64)})
    assert add_qlora(model, RANK) == ["inner"]
    assert type(model["lm_head"]) is nn.Linear
    add = GPT(PRESETS["tiny"])
    add_qlora(add, RANK, where=lambda name: name.endswith("query"))
    assert sum(isinstance(m, NF4Linear) for m in add.modules()) == PRESETS["tiny"].layers


def test_checkpointing_changes_no_gradient():
    model = gpt()
    before = gradients(model)
    for block in model.blocks:
        block.forward = lambda x, run=block.forward: checkpoint(run, x)
    after = gradients(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_torchs_checkpointing_changes_no_gradient():
    model = gpt()
    before = gradients(model)
    for block in model.blocks:
        block.forward = lambda x, run=block.forward: torch.utils.checkpoint.checkpoint(
            run, x, use_reentrant=False
        )
    after = gradients(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_autocast_decides_the_dtype_of_the_output():
    layer = NF4Linear(linear())
    x = seeded(3, IN).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.float32
    wanted = layer(x.bfloat16())
    assert torch.equal(out, wanted)


def test_the_compute_dtype_is_that_of_the_matmul_alone():
    layer = NF4Linear(linear(), compute_dtype=torch.bfloat16)
    x = seeded(3, IN)
    assert torch.equal(layer(x), layer(x.bfloat16()).float())
    assert layer(x).dtype == torch.float32


def test_casting_the_model_leaves_the_quantized_weights_alone():
    model = gpt()
    before = {n: b.clone() for n, b in model.named_buffers() if "frozen" in n}
    model.to(torch.bfloat16)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers() if n in before)
    assert model(TOKENS, TOKENS).dtype == torch.bfloat16


def test_copies_and_state_dicts_have_the_same_values():
    model = gpt()
    twin = copy.deepcopy(model)
    other = gpt()
    for buffer in other.blocks.buffers():
        buffer.zero_()
    other.load_state_dict(model.state_dict())
    other.blocks.load_state_dict(model.blocks.state_dict())
    assert torch.equal(twin(TOKENS), model(TOKENS))
    assert len({id(m) for m in twin.modules() if type(m).__name__ == "SharedCodebooks"}) == 1


def test_merging_gives_linear_layers_with_the_same_function():
    model = gpt()
    before = model(TOKENS)
    merge_lora(model)
    assert not any(isinstance(m, LoRALinear | NF4Linear) for m in model.modules())
    assert_close(model(TOKENS), before)


def test_a_shared_layer_is_quantized_once():
    layer = linear(IN, IN)
    model = nn.Sequential(layer, nn.SiLU(), layer)
    quantize_layers(model)
    assert isinstance(model[0], NF4Linear)
    assert model[0] is model[2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "opt"])
def test_transformers_models_train(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    sizes |= {"ffn_dim": 128} if kind == "opt" else {"intermediate_size": 128}
    sizes |= {"word_embed_proj_dim": 64} if kind == "opt" else {}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = add_qlora(model, RANK)
    assert names
    assert not any(name.endswith(("lm_head", "embed_out")) for name in names)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model(TOKENS, labels=TOKENS).loss.backward()
    ups = [p for name, p in model.named_parameters() if name.endswith("up") and p.requires_grad]
    assert all(p.grad.abs().sum() > 0 for p in ups)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("double", "per_weight", "mean"), [(False, 0.5625, 0), (True, 0.515869140625, 4)]
)
def test_the_meter_sees_the_bytes_per_weight(double, per_weight, mean):
    rows, columns = 512, 1024  # whole blocks of absmax
    layers = nn.Sequential(*(linear(columns, rows, bias=False) for _ in range(3)))
    quantize_layers(layers, double=double)
    trace = memlab.measure(lambda: [b.sum() for b in layers.buffers()], model=layers)
    wanted = 3 * (per_weight * rows * columns + mean) + CODEBOOK_BYTES
    assert trace.at_end["buffers"] == wanted
    assert 3 * nf4_bytes(rows * columns, double=double) + CODEBOOK_BYTES == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("dry", [False, True])
def test_a_training_holds_codes_and_adapters_gradients_and_state(dry):
    config = PRESETS["tiny"]

    def holdings() -> dict[str, int]:
        model = gpt(torch.bfloat16)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.zeros_like(TOKENS), torch.zeros_like(TOKENS)).backward()
            optimizer.step()

        step()
        return memlab.measure(step, model=model, optimizer=optimizer).at_end

    if dry:
        with memlab.dry_run():
            found = holdings()
    else:
        found = holdings()
    C, F, KD = config.hidden_size, config.intermediate_size, config.kv_heads * config.head_dim
    shapes = [(C, C), (C, KD), (C, KD), (C, C), (C, F), (C, F), (F, C)]
    codes = config.layers * sum(nf4_bytes(rows * columns) for rows, columns in shapes)
    added = config.layers * sum(RANK * (rows + columns) for rows, columns in shapes)
    rotary = config.seq_len * config.head_dim * 2
    ends = config.vocab_size * C + C + config.layers * 2 * C
    assert found["buffers"] == codes + CODEBOOK_BYTES + rotary
    assert found["parameters"] == 2 * (ends + added)
    assert found["gradients"] == found["optimizer_state"] == 2 * added


def test_a_prediction_for_cuda_runs():
    def build():
        model = gpt(torch.bfloat16).to("cuda")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        tokens = TOKENS.to("cuda")

        def step() -> None:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, model, optimizer

    trace = memlab.predict(build)
    assert trace.allocated_bytes > 0


# ------------------------------------------------------------------ prepare_for_low_bits


def peak_of_a_step(model: nn.Module, *, autocast: bool = False) -> tuple[int, int]:
    """Return the parameters' bytes and the bytes of everything else at the peak."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, tokens)
        loss.backward()
        model.zero_grad()

    tokens = torch.zeros(4, 256, dtype=torch.long)
    trace = memlab.measure(step, model=model)
    held = trace.at_peak["parameters"]
    return held, trace.peak_bytes - held


@pytest.mark.slow
def test_preparing_takes_two_bytes_per_element_and_nearly_doubles_the_activations():
    with memlab.dry_run():
        model = gpt(torch.bfloat16, "5m")
        elements = sum(p.numel() for p in model.parameters())
        parameters, others = peak_of_a_step(model)
        names = prepare_for_low_bits(model)
        assert len(names) == len(list(model.parameters()))
        prepared, activations = peak_of_a_step(model)
        assert prepared - parameters == 2 * elements
        assert 1.8 < activations / others < 2
        _, with_autocast = peak_of_a_step(model, autocast=True)
        assert with_autocast < activations
    assert prepare_for_low_bits(model) == []


@pytest.mark.filterwarnings("ignore")
def test_preparing_casts_what_peft_casts():
    peft = pytest.importorskip("peft")
    ours, theirs = two_layers(torch.bfloat16), two_layers(torch.bfloat16)
    for model in (ours, theirs):
        quantize_layers(model)
        model.append(nn.LayerNorm(IN, dtype=torch.bfloat16))
    prepare_for_low_bits(ours)
    peft.prepare_model_for_kbit_training(theirs)
    mine, other = ({n: p.dtype for n, p in m.named_parameters()} for m in (ours, theirs))
    assert (
        mine
        == other
        == {"0.bias": torch.float32, "3.weight": torch.float32, "3.bias": torch.float32}
    )


def test_a_layer_is_freed_before_the_next_is_quantized(monkeypatch):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def quantized(*arguments, **options):
        alive.append(sum(weight() is not None for weight in weights))
        return quantize_nf4(*arguments, **options)

    monkeypatch.setattr("memlab.qlora.quantize_nf4", quantized)
    quantize_layers(model, where=lambda name: True)
    assert alive == [4, 3, 2, 1]


def test_a_layer_in_a_module_with_two_names_is_quantized_once():
    inner = nn.Sequential(nn.Linear(64, 64))
    model = nn.Sequential(inner, inner)
    quantize_layers(model, where=lambda name: True)
    assert model[0][0] is model[1][0]
    assert isinstance(model[0][0], NF4Linear)
