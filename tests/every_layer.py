"""A call of every layer class of torch.nn: constructor arguments and inputs."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Lists of other layers, base classes, and layers that need several GPUs or processes.
NOT_CALLED = {
    *(nn.Container, nn.DataParallel, nn.Module, nn.ModuleDict, nn.ModuleList, nn.ParameterDict),
    *(nn.ParameterList, nn.RNNBase, nn.RNNCellBase, nn.Sequential, nn.SyncBatchNorm),
}

Row = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape).add_(0.1).requires_grad_()


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def signs(*shape: int) -> Tensor:
    return torch.randint(2, shape).mul(2).sub(1).float()


def row(layer: type[nn.Module], *args: Any, on: Any = (6, 10), **kwargs: Any) -> Row:
    """`on` is the shape of one input, or a function that makes all of them."""
    inputs = on if callable(on) else lambda: (floats(*on),)
    return partial(layer, *args, **kwargs), inputs


LINE, IMAGE, VOLUME = (2, 4, 8), (2, 4, 8, 8), (2, 4, 6, 6, 6)
BY_DIMENSION = {"1d": LINE, "2d": IMAGE, "3d": VOLUME}
ARGUMENTS = {  # of layers that come in one, two and three dimensions
    **dict.fromkeys(("AdaptiveAvgPool", "AdaptiveMaxPool"), (3,)),
    **dict.fromkeys(("AvgPool", "MaxPool"), (2,)),
    **dict.fromkeys(("BatchNorm", "LazyBatchNorm", "LazyInstanceNorm", "Dropout"), ()),
    "InstanceNorm": (4, 1e-5, 0.1, True),
    "BatchNorm": (4,),
    **dict.fromkeys(("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"), (1,)),
    "ConstantPad": (1, 2.0),
    **dict.fromkeys(("Conv", "ConvTranspose"), (4, 6, 3)),
    **dict.fromkeys(("LazyConv", "LazyConvTranspose"), (6, 3)),
    "LPPool": (2, 2),
}


class InPlace(nn.Module):
    """A layer that writes into its input, which is no leaf here."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layer = layer(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 2)


VARIANTS = {  # other paths through torch
    "LSTM, projected": row(nn.LSTM, 12, 16, proj_size=5, on=(3, 4, 12)),
    "LSTM, two layers": row(nn.LSTM, 12, 16, 2, bidirectional=True, dropout=0.3, on=(3, 4, 12)),
    "GRU, two layers": row(nn.GRU, 12, 16, 2, batch_first=True, on=(3, 4, 12)),
    "RNN, ReLU": row(nn.RNN, 12, 16, nonlinearity="relu", on=(3, 4, 12)),
    "ReLU, in place": row(InPlace, nn.ReLU),
    "RReLU, in place": row(InPlace, nn.RReLU),
    "ELU, in place": row(InPlace, nn.ELU),
    "Dropout, in place": row(InPlace, nn.Dropout),
    "Conv2d, padded": row(nn.Conv2d, 4, 8, 3, 1, 1, padding_mode="reflect", on=IMAGE),
    "BatchNorm1d, no statistics": row(nn.BatchNorm1d, 10, track_running_stats=False),
    "Embedding, renormed": row(nn.Embedding, 11, 6, max_norm=1.0, on=lambda: (integers(11, 4, 5),)),
    "MultiheadAttention, dropout": row(
        nn.MultiheadAttention, 12, 3, dropout=0.2, on=lambda: (floats(5, 2, 12),) * 3
    ),
}


def unpooling(pool: type[nn.Module], shape: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    def inputs() -> tuple[Any, ...]:
        pooled, places = pool(2, return_indices=True)(torch.randn(shape))
        return pooled.detach().requires_grad_(), places

    return inputs


def of_batch(layer: type[nn.Module], **kwargs: Any) -> Row:
    """Of a loss of predictions and targets that are equally large."""
    return row(layer, on=lambda: (floats(6, 10), torch.randn(6, 10)), **kwargs)


def rows() -> dict[type[nn.Module], Row]:
    """Return the row of each layer class that has one."""
    found = {
        getattr(nn, name + dimension): row(getattr(nn, name + dimension), *arguments, on=shape)
        for name, arguments in ARGUMENTS.items()
        for dimension, shape in BY_DIMENSION.items()
    }
    for name in (
        *("AlphaDropout", "CELU", "Dropout", "ELU", "Flatten", "GELU", "GLU", "Hardshrink"),
        *("Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish"),
        *("PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink"),
        *("Softsign", "Tanh", "Tanhshrink"),
    ):
        found[getattr(nn, name)] = row(getattr(nn, name))
    for name in ("LogSoftmax", "Softmax", "Softmin"):
        found[getattr(nn, name)] = row(getattr(nn, name), dim=1)
    for name in ("HuberLoss", "L1Loss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss"):
        found[getattr(nn, name)] = of_batch(getattr(nn, name))
    for name in ("CosineSimilarity", "PairwiseDistance"):
        found[getattr(nn, name)] = row(getattr(nn, name), on=lambda: (floats(6, 10), floats(6, 10)))
    for name in ("RNN", "LSTM", "GRU"):
        found[getattr(nn, name)] = row(getattr(nn, name), 12, 16, on=(3, 4, 12))
        found[getattr(nn, f"{name}Cell")] = row(getattr(nn, f"{name}Cell"), 12, 16, on=(4, 12))
    for dimension, shape in BY_DIMENSION.items():
        layer, pool = (getattr(nn, name + dimension) for name in ("MaxUnpool", "MaxPool"))
        found[layer] = row(layer, 2, on=unpooling(pool, shape))
    by_class = lambda: (floats(6, 10), integers(10, 6))  # noqa: E731
    by_sign = lambda: (floats(6, 10), signs(6, 10))  # noqa: E731
    triplet = lambda: (floats(6, 10), floats(6, 10), floats(6, 10))  # noqa: E731
    sequences = lambda: (floats(5, 2, 12), floats(4, 2, 12))  # noqa: E731
    log_probs = lambda: (floats(9, 2, 5).log_softmax(2), integers(4, 2, 3) + 1)  # noqa: E731
    transformer = {"nhead": 3, "dim_feedforward": 16}
    others = [
        row(
            nn.AdaptiveLogSoftmaxWithLoss,
            10,
            12,
            [4, 8],
            on=lambda: (floats(6, 10), integers(12, 6)),
        ),
        row(nn.BCELoss, on=lambda: (floats(6, 10).sigmoid(), torch.rand(6, 10))),
        row(nn.BCEWithLogitsLoss, on=lambda: (floats(6, 10), torch.rand(6, 10))),
        row(nn.Bilinear, 10, 7, 5, on=lambda: (floats(6, 10), floats(6, 7))),
        row(nn.CTCLoss, on=lambda: (*log_probs(), torch.tensor([9, 8]), torch.tensor([3, 2]))),
        row(nn.ChannelShuffle, 2, on=IMAGE),
        row(nn.CosineEmbeddingLoss, on=lambda: (floats(6, 10), floats(6, 10), signs(6))),
        row(nn.CrossEntropyLoss, label_smoothing=0.1, on=by_class),
        row(nn.CrossMapLRN2d, 3, on=IMAGE),
        row(nn.Embedding, 11, 6, on=lambda: (integers(11, 4, 5),)),
        row(nn.EmbeddingBag, 11, 6, mode="max", on=lambda: (integers(11, 4, 5),)),
        row(nn.FeatureAlphaDropout, on=IMAGE),
        row(nn.Fold, (5, 5), 2, on=(2, 4, 16)),
        row(nn.FractionalMaxPool2d, 2, output_size=4, on=IMAGE),
        row(nn.FractionalMaxPool3d, 2, output_size=3, on=VOLUME),
        row(nn.GaussianNLLLoss, on=lambda: (floats(6, 10), torch.randn(6, 10), positive(6, 10))),
        row(nn.GroupNorm, 2, 4, on=IMAGE),
        row(nn.HingeEmbeddingLoss, on=by_sign),
        row(nn.KLDivLoss, reduction="batchmean", on=lambda: (floats(6, 10), torch.rand(6, 10))),
        row(nn.LayerNorm, 10),
        row(nn.LazyLinear, 7),
        row(nn.Linear, 10, 7, on=(3, 6, 10)),
        row(nn.LocalResponseNorm, 3, on=IMAGE),
        row(nn.MarginRankingLoss, on=lambda: (floats(6), floats(6), signs(6))),
        row(nn.MultiLabelMarginLoss, on=lambda: (floats(6, 10), integers(10, 6, 10))),
        row(nn.MultiLabelSoftMarginLoss, on=lambda: (floats(6, 10), integers(2, 6, 10).float())),
        row(nn.MultiMarginLoss, on=by_class),
        row(nn.MultiheadAttention, 12, 3, on=lambda: (floats(5, 2, 12),) * 3),
        row(nn.NLLLoss, on=by_class),
        row(nn.PixelShuffle, 2, on=IMAGE),
        row(nn.PixelUnshuffle, 2, on=IMAGE),
        row(nn.RMSNorm, 10),
        row(nn.SoftMarginLoss, on=by_sign),
        row(nn.Softmax2d, on=IMAGE),
        row(nn.Threshold, 0.1, 2.0),
        row(nn.Transformer, 12, 3, 1, 1, 16, on=sequences),
        row(nn.TransformerDecoder, nn.TransformerDecoderLayer(12, **transformer), 2, on=sequences),
        row(nn.TransformerDecoderLayer, 12, **transformer, on=sequences),
        row(
            nn.TransformerEncoder,
            nn.TransformerEncoderLayer(12, **transformer),
            2,
            enable_nested_tensor=False,
            on=(5, 2, 12),
        ),
        row(nn.TransformerEncoderLayer, 12, **transformer, on=(5, 2, 12)),
        row(nn.TripletMarginLoss, on=triplet),
        row(nn.TripletMarginWithDistanceLoss, on=triplet),
        row(nn.Unflatten, 1, (2, 5)),
        row(nn.Unfold, 2, on=IMAGE),
        row(nn.Upsample, scale_factor=2, mode="bicubic", on=IMAGE),
        row(nn.UpsamplingBilinear2d, scale_factor=2, on=IMAGE),
        row(nn.UpsamplingNearest2d, scale_factor=2, on=IMAGE),
    ]
    found |= {build.func: (build, inputs) for build, inputs in others}
    if layer := getattr(nn, "LinearCrossEntropyLoss", None):  # from torch 2.13 on
        found[layer] = row(layer, 10, 12, on=lambda: (floats(6, 10), integers(12, 6)))
    with_warning = nn.NLLLoss2d
    found[with_warning] = row(with_warning, on=lambda: (floats(2, 4, 5, 5), integers(4, 2, 5, 5)))
    return found


def layers_of_torch() -> list[type[nn.Module]]:
    """Return every layer class of torch.nn that can be called."""
    classes = (found for _, found in inspect.getmembers(nn, inspect.isclass))
    return [found for found in classes if issubclass(found, nn.Module) and found not in NOT_CALLED]


def outputs_of(result: Any) -> list[Tensor]:
    """Return the outputs that have a gradient, at any depth of tuples."""
    if isinstance(result, Tensor):
        return [result] if result.requires_grad else []
    return [output for part in result or () for output in outputs_of(part)]


ROWS = rows()
CALLS = {found.__name__: ROWS.get(found) for found in layers_of_torch()} | VARIANTS
