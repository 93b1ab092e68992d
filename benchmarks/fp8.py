"""FP8 matmuls: the errors of a linear layer by scale and outlier, what it keeps, and time ratios.

    python benchmarks/fp8.py

- Errors: output, input gradient and weight gradient against float64, as relative norm and cosine.
  One input feature is an outlier; upstream gradients of the tokens span seven decades.
- Bytes: what forward leaves for backward, measured.
- Time: one forward and backward of the layer against BF16, and against torchao's emulation (if
  installed). Measured side by side. On a CPU nothing multiplies in FP8, so this is what the casts
  and the decoding cost.

Prints Markdown and writes `benchmarks/results/<machine>.json`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from common import (
    compared,
    heading,
    parser_with_results,
    save,
    set_environment,
    table,
    timed,
)
from torch import Tensor, nn

import memlab
from memlab.precision import FP8Recipe, convert_to_fp8
from memlab.precision.fp8 import E4M3, RECIPES

ROUNDS = 15
TOKENS, IN, OUT = 256, 512, 384
OUTLIERS = (1, 100, 10_000, 100_000)
WAYS = {
    "BF16": None,
    "per tensor, E5M2 gradients": RECIPES["tensor"],
    "per tensor, E4M3 gradients": FP8Recipe(gradients=E4M3),
    "1 × 128 and 128 × 128, E4M3 gradients": RECIPES["block"],
}
RESULTS = ("y", "dx", "dW")


def layer_of(recipe: FP8Recipe | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False)).bfloat16()
    if recipe:
        convert_to_fp8(model, recipe)
    return model[0]


def tensors(outlier: float) -> tuple[Tensor, Tensor]:
    """An input (TOKENS, IN) with a large feature, and an upstream gradient (TOKENS, OUT)."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, IN, generator=random)
    x[:, 0] *= outlier
    sizes = torch.logspace(-11, -4, TOKENS).view(-1, 1)
    return x.bfloat16(), (sizes * torch.randn(TOKENS, OUT, generator=random)).bfloat16()


def passes(layer: nn.Module, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    layer.zero_grad()
    given = x.clone().requires_grad_()
    out = layer(given)
    out.backward(upstream)
    return out.detach(), given.grad, layer.weight.grad


def errors(recipe: FP8Recipe | None, outlier: float) -> dict[str, tuple[float, float]]:
    """The mean over rows of relative error and cosine, of each result against float64.

    Rows are tokens, or a weight's outputs. The largest row would dominate a norm over all of them.
    """
    x, upstream = tensors(outlier)
    layer = layer_of(recipe)
    weight = layer.weight.detach().double()
    exact = x.double() @ weight.T, upstream.double() @ weight, upstream.double().T @ x.double()
    found = {}
    for name, got, wanted in zip(RESULTS, passes(layer, x, upstream), exact, strict=True):
        off = (got.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        cosine = torch.cosine_similarity(got.double(), wanted, dim=1, eps=1e-30)
        found[name] = off.mean().item(), cosine.mean().item()
    return found


def kept_bytes(recipe: FP8Recipe | None) -> int:
    """Bytes that a forward pass leaves for backward, without its output."""
    layer, leaf, outputs = layer_of(recipe), tensors(1)[0].requires_grad_(), []
    trace = memlab.measure(lambda: outputs.append(layer(leaf * 1)), model=layer)
    new = sum(event.bytes for event in trace.events if event.phase != "before")
    return new - outputs[0].nbytes


def runs() -> dict[str, Callable[[], float]]:
    """A forward and backward pass of each layer; the first is compared with the others."""
    x, upstream = tensors(1)
    layers = {"FP8 per tensor": layer_of(RECIPES["tensor"]), "BF16": layer_of(None)}
    if importlib.util.find_spec("torchao"):
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig(emulate=True)
        made = nn.Sequential(layer_of(None))
        layers["torchao's emulation"] = float8.convert_to_float8_training(made, config=config)[0]
    return {name: timed(partial(passes, layer, x, upstream)) for name, layer in layers.items()}


def errors_table(found: dict[str, dict[int, dict[str, tuple[float, float]]]]) -> str:
    rows = [
        (way, f"{outlier:,} ×", *(f"{off:.2%}, {cosine:.5f}" for off, cosine in each.values()))
        for way, by_outlier in found.items()
        for outlier, each in by_outlier.items()
    ]
    return table(("scales", "outlier", *(f"{name}: error, cosine" for name in RESULTS)), rows)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = parser_with_results(__doc__, ROUNDS).parse_args(words)
    print(heading("FP8 matmuls"), end="\n\n")
    found = {way: {n: errors(recipe, n) for n in OUTLIERS} for way, recipe in WAYS.items()}
    print(errors_table(found), end="\n\n")
    kept = {way: kept_bytes(recipe) for way, recipe in WAYS.items()}
    elements = TOKENS * IN
    rows = [(way, f"{count:,}", f"{count / elements:.4f}") for way, count in kept.items()]
    print(table(("scales", "bytes kept", "per input element"), rows), end="\n\n")
    times = compared(runs(), given.rounds)
    rows = [(name, str(ratio)) for name, ratio in times.items()]
    print(table(("time of FP8 against", "ratio (quartiles)"), rows))
    save(given.results, "fp8", "errors", found)
    save(given.results, "fp8", "bytes", kept)
    save(given.results, "fp8", "times", {name: ratio.median for name, ratio in times.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
