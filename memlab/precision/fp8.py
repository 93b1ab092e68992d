"""FP8 matmuls for the linear layers of a model: casts with scales, outside of the model.

Saves    inputs that linear layers keep for backward take 1 byte per element, not 2. Layers with the
         same input (query, key and value) share one FP8 copy. Weights, gradients and optimizer
         state keep their size.
Costs    rounding to 4 significant bits (E4M3) or 3 (E5M2), and casts. Attention keeps its output
         for itself, so the FP8 copy for the layer behind it is additional.
Source   Micikevicius et al. 2022, arXiv 2209.05433; DeepSeek-V3, arXiv 2412.19437, section 3.3.

Adds to memlab.reference.fp8: shared copies, tiles, delayed scales, kept copies of weights, biases,
autocast, `torch._scaled_mm`, and whole models.

    names = convert_to_fp8(model, "tensor")     # weights stay parameters in their own dtype
    ...                                         # train as before
    advance_scales(model)                       # only "delayed": after each optimizer step

    recipe     scales                                                       gradients
    tensor     one per tensor, from its own amax                            E5M2
    delayed    one per tensor, from the largest amax of the last 16 steps   E5M2
    block      1 × 128 of inputs and gradients, 128 × 128 of weights        E4M3

What a layer with an input of n tokens and K features, and N outputs, has beside its weight W:

    forward     x8, n·K bytes, kept for backward; W8, N·K bytes, freed (kept: `keep_weights`)
    backward    W8 once more, g8, n·N bytes; on CUDA also W8ᵀ, g8ᵀ and x8ᵀ, one matmul at a time

An FP8 matmul of an NVIDIA GPU before Blackwell reads both operands along the summed dimension, so
two of the three matmuls need transposed copies. Tiles of 1 × 128 lie along that dimension, so
"block" decodes x8 for the weight's gradient and casts it again in tiles of 128 × 1.

`torch._scaled_mm` multiplies where it can (see `has_scaled_mm`). Otherwise the codes are decoded to
float32 and multiplied there: equal rounding of the operands, exact products and float32 sums, but
no speed, and temporaries of 4 bytes per element. On the CPU one operator decodes and multiplies, so
that a meter sees the tensors of a GPU. A cast, too, has a float32 copy of its tensor on the way; a
fused kernel has none.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.internals.layer_names import is_inner
from memlab.internals.scaled_mm import scaled_mm_on_cpu
from memlab.internals.torch_internals import scaled_mm
from memlab.internals.transforms import require_no_transform

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 2.0**-100  # so that neither a scale nor its reciprocal overflows
MULTIPLE = 16  # of every dimension of an FP8 matmul on CUDA
FP8_CAPABILITY = (8, 9)  # the first NVIDIA GPUs with FP8 matmuls

Tile = tuple[int, int]  # rows and columns that share a scale


@dataclass(frozen=True)
class FP8Recipe:
    """How tensors are cast.

    inputs, weights   tiles that share a scale; None: the whole tensor. Gradients have the tiles of
                      inputs
    gradients         the format of gradients
    history           take scales from the largest amax of so many steps; 0: from the tensor itself
    keep_weights      keep the FP8 copy of each weight until its backward, instead of casting again
    share_inputs      let layers with the same input share its FP8 copy
    """

    inputs: Tile | None = None
    weights: Tile | None = None
    gradients: torch.dtype = E5M2
    history: int = 0
    keep_weights: bool = False
    share_inputs: bool = True

    def __post_init__(self) -> None:
        if (self.inputs is None) != (self.weights is None) or (self.inputs and self.history):
            raise ValueError(
                f"got {self}; give tiles for inputs and weights, or for neither; and a history "
                f"only without tiles"
            )


RECIPES = {
    "tensor": FP8Recipe(),
    "delayed": FP8Recipe(history=16),
    "block": FP8Recipe((1, 128), (128, 128), gradients=E4M3),
}


# ------------------------------------------------------------------ casts


class Scaled(NamedTuple):
    """A matrix in FP8: codes (n, k), and scales () or (⌈n/rows⌉, ⌈k/columns⌉) in float32."""

    codes: Tensor
    scales: Tensor
    tile: Tile | None

    def transposed(self) -> "Scaled":
        """Return a view of the transposed matrix."""
        return Scaled(self.codes.T, self.scales.T if self.tile else self.scales, _turned(self.tile))


def _turned(tile: Tile | None) -> Tile | None:
    return tile and tile[::-1]


@torch.no_grad()
def quantize_fp8(
    x: Tensor, dtype: torch.dtype = E4M3, tile: Tile | None = None, *, amax: Tensor | None = None
) -> Scaled:
    """Cast a matrix (n, k) to FP8. An `amax` () replaces the matrix's own; larger values saturate.

    Raises ValueError for any other dtype.
    """
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"got {dtype}; give torch.float8_e4m3fn or torch.float8_e5m2")
    if tile is None:
        return Scaled(*_cast(x, _amax(x) if amax is None else amax, dtype), None)
    (n, k), (rows, columns) = x.shape, tile
    padded = F.pad(x, (0, -k % columns, 0, -n % rows)) if k % columns or n % rows else x
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (·, rows, ·, columns)
    most, least = (extreme((1, 3), keepdim=True) for extreme in (tiles.amax, tiles.amin))
    codes, scales = _cast(tiles, torch.maximum(most, -least), dtype)
    codes = codes.reshape(padded.shape)
    return Scaled(codes if padded is x else codes[:n, :k].clone(), scales[:, 0, :, 0].clone(), tile)


@torch.no_grad()
def dequantize_fp8(x: Scaled) -> Tensor:
    """Return the float32 matrix (n, k)."""
    if x.tile is None:
        return x.codes.float() * x.scales
    (n, k), (rows, columns) = x.codes.shape, x.tile
    by_element = x.scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return x.codes.float() * by_element


def _amax(x: Tensor) -> Tensor:
    """Return the largest |x| (), without a tensor of all of them."""
    if not x.numel():
        return x.new_zeros(())
    least, most = x.aminmax()
    return torch.maximum(most, -least)


def _cast(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of x, and scales of the shape of amax. Makes one float32 copy of x."""
    largest = torch.finfo(dtype).max
    amax = amax.float().clamp(min=SMALLEST_AMAX)
    # An outlier of 100 × spoils INT8, one of 10,000 × E4M3: elements far below the amax lose no
    # precision until they are subnormal (benchmarks/fp8.py).
    in_steps = x.to(torch.float32, copy=True).mul_(largest / amax)
    # torch 2.11 casts values above the largest to NaN.
    return in_steps.clamp_(-largest, largest).to(dtype), amax / largest


def fp8_bytes(rows: int, columns: int, tile: Tile | None = None) -> int:
    """Return the bytes of a matrix in FP8: a byte per element, and 4 for each scale."""
    scales = 1 if tile is None else -(-rows // tile[0]) * -(-columns // tile[1])
    return rows * columns + 4 * scales


# ------------------------------------------------------------------ matmuls


def has_scaled_mm(a: Scaled, b: Scaled) -> bool:
    """Return whether `torch._scaled_mm` multiplies these two.

    It does for one scale per tensor on NVIDIA GPUs from capability 8.9 on if all dimensions are
    multiples of 16 and the formats are not both E5M2. AMD's MI300 has two formats of its own, which
    this file does not cast to.
    """
    if a.codes.device.type != "cuda" or torch.version.hip or not _has_one_scale(a, b):
        return False
    return (
        torch.cuda.get_device_capability(a.codes.device) >= FP8_CAPABILITY
        and all(size % MULTIPLE == 0 for size in (*a.codes.shape, *b.codes.shape))
        and E4M3 in (a.codes.dtype, b.codes.dtype)
    )


def _has_one_scale(a: Scaled, b: Scaled) -> bool:
    return not (a.tile or b.tile) and a.codes.numel() > 0


def matmul_fp8(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Return a (n, k) times b (k, m) in `dtype`, summed in float32."""
    if a.codes.device.type == "cpu" and _has_one_scale(a, b):
        return scaled_mm_on_cpu(a.codes, b.codes, a.scales, b.scales, dtype)
    if not has_scaled_mm(a, b):
        with torch.autocast(a.codes.device.type, enabled=False):
            return (dequantize_fp8(a) @ dequantize_fp8(b)).to(dtype)
    left, right = a.codes, b.codes
    if left.device.type == "cuda":  # its kernel wants rows of a and columns of b to be contiguous
        left, right = left.contiguous(), right.T.contiguous().T
    return scaled_mm(left, right, scale_a=a.scales, scale_b=b.scales, out_dtype=dtype)


class _LinearFP8(torch.autograd.Function):
    """x (n, in) times weight (out, in) transposed. `x8` is the FP8 copy of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, layer: "FP8Linear"
    ) -> Tensor:
        recipe = layer.recipe
        x8, w8 = Scaled(codes, scales, recipe.inputs), layer.weight_in_fp8(weight)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kept = [weight if needs_x and not recipe.keep_weights else None]
        kept += [*w8[:2]] if needs_x and recipe.keep_weights else [None, None]
        kept += [*x8[:2]] if needs_weight else [None, None]
        # torchao's float8 training keeps x in bfloat16 instead and casts it again in backward, so
        # it saves no activations (test_values_are_torchaos_and_bytes_are_not).
        ctx.save_for_backward(*kept)
        ctx.layer, ctx.dtypes = layer, (x.dtype, weight.dtype)
        return matmul_fp8(x8, w8.transposed(), layer.output_dtype(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, recipe = ctx.layer, ctx.layer.recipe
        weight, w_codes, w_scales, x_codes, x_scales = ctx.saved_tensors
        in_rows = recipe.inputs
        amax = None if layer.gradient_scale is None else layer.gradient_scale.amax(gradient)
        g8 = quantize_fp8(gradient, recipe.gradients, in_rows, amax=amax)
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            kept = weight is None
            w8 = Scaled(w_codes, w_scales, recipe.weights) if kept else layer.weight_in_fp8(weight)
            for_x = matmul_fp8(g8, w8, ctx.dtypes[0])  # (n, in)
            del w8
        if ctx.needs_input_grad[1]:
            x8 = Scaled(x_codes, x_scales, in_rows)
            if in_rows is not None:  # tiles along the tokens, which this matmul sums over
                g8 = quantize_fp8(gradient, recipe.gradients, _turned(in_rows))
                x8 = quantize_fp8(dequantize_fp8(x8), E4M3, _turned(in_rows))
            for_weight = matmul_fp8(g8.transposed(), x8, ctx.dtypes[1])  # (out, in)
        return for_x, for_weight, None, None, None


# ------------------------------------------------------------------ layers


class AmaxHistory(nn.Module):
    """The largest |x| of each of the last steps, and of this one so far: 4·(steps + 1) bytes.

    `advance` ends a step, so that all micro-batches of a step, and blocks recomputed by
    checkpointing, have the same scale.
    """

    past: Tensor
    now: Tensor

    def __init__(self, steps: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(steps, dtype=torch.float32, device=device))
        self.register_buffer("now", torch.zeros((), dtype=torch.float32, device=device))

    @torch.no_grad()
    def amax(self, x: Tensor) -> Tensor:
        """Record the amax of x, and return the largest one of the past; in the first step, its own.

        A GPU's kernel finds the amax while it casts, so this scale saves it a pass over x.
        """
        own = _amax(x).to(self.now.dtype)
        if self.training:
            torch.maximum(self.now, own, out=self.now)
        past = self.past.amax()
        return torch.where(past > 0, past, own)

    @torch.no_grad()
    def advance(self) -> None:
        self.past.copy_(torch.cat([self.now.view(1), self.past[:-1]]))
        self.now.zero_()


class LastCast:
    """The FP8 copy of a model's last layer input: the next layer takes it if its input is the same.

    Both are known by weak references, so nothing lives longer because of this.
    """

    def __init__(self) -> None:
        self._input: Callable[[], Tensor | None] = lambda: None
        self._parts: tuple[Callable[[], Tensor | None], ...] = ()
        self._key: tuple[Any, ...] = ()

    def get(self, x: Tensor, tile: Tile | None) -> Scaled | None:
        """Return the copy of x with these tiles, if it still exists and x has not changed."""
        if self._input() is not x or self._key != (x._version, tile):
            return None
        codes, scales = (part() for part in self._parts)
        return None if codes is None or scales is None else Scaled(codes, scales, tile)

    def put(self, x: Tensor, copy: Scaled) -> None:
        self._input = weakref.ref(x)
        self._parts = (weakref.ref(copy.codes), weakref.ref(copy.scales))
        self._key = (x._version, copy.tile)

    def __reduce__(self) -> tuple[type["LastCast"], tuple[()]]:
        return LastCast, ()  # a copied or pickled model starts without one


class FP8Linear(nn.Linear):
    """A linear layer whose three matmuls run in FP8. It shares the parameters of `linear`.

    The output has autocast's dtype, or the input's.
    """

    def __init__(self, linear: nn.Linear, recipe: FP8Recipe, last: LastCast) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.recipe, self.last = recipe, last
        device = linear.weight.device
        for name in ("input_scale", "weight_scale", "gradient_scale"):
            made = AmaxHistory(recipe.history, device) if recipe.history else None
            self.register_module(name, made)
        self.train(linear.training)

    def output_dtype(self, x: Tensor) -> torch.dtype:
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

    def weight_in_fp8(self, weight: Tensor) -> Scaled:
        scale: Any = self.weight_scale
        amax = None if scale is None else scale.amax(weight)
        return quantize_fp8(weight, E4M3, self.recipe.weights, amax=amax)

    def _input_in_fp8(self, x: Tensor) -> Scaled:
        # If query, key and value each keep their own copy of the input, FP8 saves only 1 % of a 7B
        # step, shared 5 % (test_layers_with_the_same_input_share_its_copy_and_other_inputs_do_not).
        if not self.recipe.share_inputs or x.is_inference():  # which has no version to compare
            return self._cast_input(x)
        if (copy := self.last.get(x, self.recipe.inputs)) is None:
            copy = self._cast_input(x)
            self.last.put(x, copy)
        return copy

    def _cast_input(self, x: Tensor) -> Scaled:
        scale: Any = self.input_scale
        amax = None if scale is None else scale.amax(x)
        return quantize_fp8(x.detach().flatten(0, -2), E4M3, self.recipe.inputs, amax=amax)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        x8 = self._input_in_fp8(x if x.ndim > 1 else x.unsqueeze(0))
        require_no_transform("an FP8 layer", "differentiate with torch.autograd", (x,))
        out = _LinearFP8.apply(x.reshape(-1, self.in_features), self.weight, *x8[:2], self)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


# ------------------------------------------------------------------ models


def convert_to_fp8(
    model: nn.Module,
    recipe: str | FP8Recipe = "tensor",
    *,
    where: Callable[[str], bool] = is_inner,
) -> list[str]:
    """Run the matmuls of nn.Linear layers in FP8. Return the layers' names.

    Args:
        recipe: one of RECIPES, or your own.
        where: selects layers by name; by default all but output layers, which DeepSeek-V3 keeps in
            BF16 too.

    Parameters stay the same objects, so an optimizer made before is still theirs. A layer used
    twice in the model stays shared. Subclasses of nn.Linear with a forward of their own are left
    alone. Raises ValueError if the recipe is unknown, or if `where` selects no layer.
    """
    chosen = _recipe(recipe)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [n for n, m in modules.items() if n and _is_plain_linear(m) and where(n)]
    last, made = LastCast(), {}
    for name in names:
        layer, (path, _, child) = modules[name], name.rpartition(".")
        if layer not in made:
            made[layer] = FP8Linear(layer, chosen, last)
        setattr(modules[path], child, made[layer])
    if not names:
        raise ValueError(
            f"where= selected no nn.Linear layer of {type(model).__name__}; select at least one of "
            f"its layers by name, such as `lambda name: True`"
        )
    return names


def _recipe(given: str | FP8Recipe) -> FP8Recipe:
    if isinstance(given, FP8Recipe):
        return given
    if given not in RECIPES:
        raise ValueError(f"got recipe {given!r}; give {', '.join(RECIPES)}, or an FP8Recipe")
    return RECIPES[given]


def _is_plain_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def advance_scales(model: nn.Module) -> None:
    """End a step of delayed scales. Call it after each optimizer step; others don't need it."""
    for module in model.modules():
        if isinstance(module, AmaxHistory):
            module.advance()
