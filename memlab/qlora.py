"""QLoRA: frozen weights in 4 bits, decoded each time they are used, and LoRA beside them.

Saves    the frozen weights take 0.516 bytes per element (memlab.quantize.nf4) instead of 2 in
         bfloat16. As with LoRA, they have no gradients and no optimizer state.
Costs    decoding each weight in the forward pass and again in backward, which takes one decoded
         weight at a time; and the rounding error of 4 bits.
Source   Dettmers et al. 2023, arXiv 2305.14314, equation 5.

Adds to memlab.reference.qlora: shared codebooks, biases, autocast, a dtype of the matmuls, and
whole models.

    y = x · decode(W)ᵀ + (alpha/rank) · x Aᵀ Bᵀ                                 equation 5
    ∂L/∂x = ∂L/∂y · decode(W) + …                  backward decodes W again: nothing else is kept

Backward needs W to compute the gradient of x, but not x, because W has no gradient. So the 4-bit
layer saves no activation. For a weight of n elements in a dtype of w bytes, each pass holds n·w
bytes for as long as its matmul runs, and a chunk's temporaries while it decodes.

    names = add_qlora(model, rank=8)          # quantizes, freezes and adds adapters
    prepare_for_low_bits(model)               # optional, what peft does by default
    ...                                       # train; save adapters(model)

Only the adapters have optimizer state. bitsandbytes' paged optimizers keep it on the host while it
is not needed: `memlab.offload.OffloadedOptimizer`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from memlab.internals.layer_names import is_inner
from memlab.internals.transforms import require_no_transform
from memlab.lora import add_lora, named_layers, replace_layer
from memlab.quantize import NF4, Codebooks, dequantize_nf4, nf4_codebooks, quantize_nf4

Select = Callable[[str], bool]  # of a layer's name


class SharedCodebooks(nn.Module):
    """The codebooks of all 4-bit layers of a model, 1,088 bytes.

    Stored as integers of the same bits, because `model.to(dtype)` casts floating-point buffers.
    """

    levels: Tensor
    absmax: Tensor

    def __init__(self, codebooks: Codebooks) -> None:
        super().__init__()
        for name, tensor in codebooks._asdict().items():
            self.register_buffer(name, tensor.view(torch.int32), persistent=False)

    def as_floats(self) -> Codebooks:
        return Codebooks(self.levels.view(torch.float32), self.absmax.view(torch.float32))


class NF4Linear(nn.Module):
    """A frozen linear layer whose weight is kept in NF4 and decoded for each use.

    Its tensors are buffers: codes, and absmax, scales and mean as integers of the same bits, which
    `model.to(dtype)` leaves alone. The matmul runs in `compute_dtype`, by default autocast's dtype
    or the input's; the output has autocast's dtype or the input's.
    """

    codes: Tensor
    absmax: Tensor
    scales: Tensor | None
    mean: Tensor | None

    def __init__(
        self,
        linear: nn.Linear,
        *,
        double: bool = True,
        compute_dtype: torch.dtype | None = None,
        codebooks: SharedCodebooks | None = None,
    ) -> None:
        super().__init__()
        weight = linear.weight
        if codebooks is None:
            codebooks = SharedCodebooks(nf4_codebooks(weight.device))
        q = quantize_nf4(weight, double=double, codebooks=codebooks.as_floats())
        self.codebooks = codebooks
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_dtype, self.block, self.compute_dtype = q.dtype, q.block, compute_dtype
        self.register_buffer("codes", q.codes)
        for name in ("absmax", "scales", "mean"):
            self.register_buffer(name, _as_integers(getattr(q, name)))
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def quantized(self) -> NF4:
        """Return the weight; it shares the layer's tensors."""
        absmax = self.absmax if self.scales is not None else self.absmax.view(torch.float32)
        return NF4(
            self.codes,
            absmax,
            None if self.scales is None else self.scales.view(torch.float32),
            None if self.mean is None else self.mean.view(torch.float32),
            self.codebooks.as_floats(),
            torch.Size((self.out_features, self.in_features)),
            self.weight_dtype,
            self.block,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        inner = self.compute_dtype or dtype
        bias = None if self.bias is None else self.bias.to(inner)
        require_no_transform("a quantized layer", "differentiate with torch.autograd", (x,))
        return _MatmulNF4.apply(x.to(inner), self.quantized(), bias).to(dtype)

    @torch.no_grad()
    def decoded(self) -> nn.Linear:
        """Return an nn.Linear with the decoded weight, frozen like this layer."""
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, bias=has_bias, device="meta")
        linear.weight = nn.Parameter(dequantize_nf4(self.quantized()), requires_grad=False)
        linear.bias = self.bias
        return linear

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, nf4"


class _MatmulNF4(torch.autograd.Function):
    """x · decode(W)ᵀ + bias, which keeps only a reference to the layer's codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: NF4, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        with torch.autocast(x.device.type, enabled=False):  # x has its dtype already
            return F.linear(x, _decode(weight, x), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ _decode(ctx.weight, gradient), None, None


def _decode(weight: NF4, like: Tensor) -> Tensor:
    """Return the weight (out, in) in the dtype of `like`."""
    return dequantize_nf4(weight, like.new_empty(weight.shape))


def _as_integers(tensor: Tensor | None) -> Tensor | None:
    """Return 4-byte floats as integers of the same bits; others as they are."""
    if tensor is None or tensor.dtype != torch.float32:
        return tensor
    return tensor.view(torch.int32)


# ------------------------------------------------------------------ models


def add_qlora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    where: Select = is_inner,
    adapt: Select | None = None,
    double: bool = True,
    compute_dtype: torch.dtype | None = None,
    adapter_dtype: torch.dtype | None = None,
) -> list[str]:
    """Freeze the model, quantize nn.Linear layers, and add adapters. Return the adapted names.

    Args:
        alpha: scales the adapters' change by alpha/rank; None scales it by 2.
        where: selects the layers to quantize by name; by default all but output layers,
            as bitsandbytes does.
        adapt: selects which of them get an adapter; by default all.
        double: quantize the absmax values too.
        compute_dtype: dtype of the matmuls; by default autocast's or the input's.
        adapter_dtype: dtype of the adapters, by default the weights'. peft's are float32.
    """
    chosen = where if adapt is None else lambda name: where(name) and adapt(name)
    names = add_lora(model, rank, alpha=alpha, where=chosen)
    quantize_layers(model, where=where, double=double, compute_dtype=compute_dtype)
    if adapter_dtype is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:  # the adapters alone
                parameter.data = parameter.data.to(adapter_dtype)
    return names


def quantize_layers(
    model: nn.Module,
    *,
    where: Select = is_inner,
    double: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Replace nn.Linear layers by NF4Linear, also inside of LoRALinear, one after another.

    A replaced layer is freed before the next is quantized, unless the caller keeps it. A layer used
    twice in the model stays shared, and all layers share the codebooks.
    """
    names = [
        name
        for name, layer in named_layers(model)
        if isinstance(layer, nn.Linear) and where(name.removesuffix(".frozen"))
    ]
    made = WeakIdKeyDictionary()  # the old layer: the new one
    codebooks: dict[torch.device, SharedCodebooks] = {}
    for name in names:
        layer = dict(named_layers(model))[name]
        if not isinstance(layer, nn.Linear):  # replaced already, in a parent with two names
            continue
        device = layer.weight.device
        if device not in codebooks:
            codebooks[device] = SharedCodebooks(nf4_codebooks(device))
        if layer not in made:
            made[layer] = NF4Linear(
                layer, double=double, compute_dtype=compute_dtype, codebooks=codebooks[device]
            )
        replace_layer(model, name, made[layer])


def prepare_for_low_bits(model: nn.Module) -> list[str]:
    """Cast every 16-bit parameter to float32: norms, embeddings, output layers, biases, adapters.

    As peft's `prepare_model_for_kbit_training` does, for stability, to a model in 4 bits. Each such
    element takes 2 bytes more. The larger cost is that norms then return float32, so activations
    are float32 too, unless autocast is on. Return the names.
    """
    halves = (torch.float16, torch.bfloat16)
    names = [name for name, parameter in model.named_parameters() if parameter.dtype in halves]
    for name in names:
        parameter = model.get_parameter(name)
        # A 4-bit layer returns its input's dtype, so a step of Llama 2 7B on 4 × 1,024 tokens needs
        # 43.7 GiB in a plain loop, and 30.2 under autocast. Without this it is 37.1 in a plain
        # loop: peft's float32 adapters each keep a float32 copy of their input.
        parameter.data = parameter.data.float()
    return names
