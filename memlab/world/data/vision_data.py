"""Replace missing torchvision data sets by images of the same sizes.

The number of images, their size and the number of classes follow torchvision's documentation of
each data set. Folders of images have photographs of ImageNet's average size.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from memlab.internals.torch_internals import without_modes

Note = Callable[[str, str], None]  # (the missing thing, its stand-in)


class Images(NamedTuple):
    """What a data set holds. `channels` is 1 for grayscale."""

    training: int
    test: int
    height: int
    width: int
    channels: int
    classes: int


_MNIST = Images(60_000, 10_000, 28, 28, 1, 10)
_PHOTOGRAPHS = Images(1_281_167, 50_000, 400, 469, 3, 1000)  # ImageNet's average size
IMAGES = {
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST", "QMNIST"), _MNIST),
    "EMNIST": Images(112_800, 18_800, 28, 28, 1, 47),
    "USPS": Images(7291, 2007, 16, 16, 1, 10),
    "CIFAR10": Images(50_000, 10_000, 32, 32, 3, 10),
    "CIFAR100": Images(50_000, 10_000, 32, 32, 3, 100),
    "SVHN": Images(73_257, 26_032, 32, 32, 3, 10),
    "STL10": Images(5000, 8000, 96, 96, 3, 10),
    "CelebA": Images(162_770, 19_962, 218, 178, 3, 40),
    "Food101": Images(75_750, 25_250, 512, 512, 3, 101),
    "Flowers102": Images(1020, 6149, 500, 667, 3, 102),
    "OxfordIIITPet": Images(3680, 3669, 375, 500, 3, 37),
    "Caltech101": Images(8677, 8677, 200, 300, 3, 101),
    "Caltech256": Images(30_607, 30_607, 330, 400, 3, 257),
    "LSUN": Images(3_033_042, 3_033_042, 256, 341, 3, 10),
    "ImageNet": _PHOTOGRAPHS,
    "ImageFolder": _PHOTOGRAPHS,
}
# Constructors' arguments after root that say which part of the data is wanted.
_PARTS = ("train", "split", "image_set", "classes")


def stand_in(note: Note) -> Callable[[Any], Any]:
    """Return a replacement of the constructors in `torchvision.datasets`."""

    def replacing(real: Callable[..., None]) -> Callable[..., None]:
        def initialize(self: Any, root: Any = None, *args: Any, **kwargs: Any) -> None:
            try:
                real(self, root, *args, **kwargs)
            except (OSError, RuntimeError):
                images = next(
                    IMAGES[k.__name__] for k in type(self).__mro__ if k.__name__ in IMAGES
                )
                _stand_in(self, images, root, args, kwargs)
                note(
                    f"torchvision's {type(self).__name__} in {root}",
                    f"{len(self):,} black images of {images.width} × {images.height}",
                )

        return initialize

    return replacing


def _stand_in(made: Any, images: Images, root: Any, args: Any, kwargs: Any) -> None:
    """Turn a data set that could not be loaded into one of black images."""
    transforms = {
        name: kwargs[name]
        for name in ("transform", "target_transform", "transforms")
        if name in kwargs
    }
    if callable(args[0] if args else None):  # ImageFolder(root, transform)
        transforms.setdefault("transform", args[0])
    sys.modules["torchvision.datasets"].VisionDataset.__init__(made, root, **transforms)
    given = (*(kwargs[name] for name in _PARTS if name in kwargs), *args[:1])
    part = next((each for each in given if isinstance(each, (bool, str))), True)
    is_training = "train" in part if isinstance(part, str) else part
    made.train = is_training
    made.__class__ = _standing_in(type(made), [str(number) for number in range(images.classes)])
    count = images.training if is_training else images.test
    made._images, made._count = images, count
    with without_modes():
        if images.channels == 1:
            made.data = torch.zeros(count, images.height, images.width, dtype=torch.uint8)
            made.targets = torch.arange(count, dtype=torch.int64) % images.classes
        else:
            made.targets = [number % images.classes for number in range(count)]


def _standing_in(kind: type, classes: list[str]) -> type:
    """Return a class of the same name whose samples are black images."""
    class_to_idx = {name: number for number, name in enumerate(classes)}

    def length(self: Any) -> int:
        return self._count

    def sample(self: Any, index: int) -> tuple[Any, Any]:
        from PIL import Image

        images = self._images
        shape = (images.height, images.width) + ((3,) if images.channels == 3 else ())
        image = Image.fromarray(np.zeros(shape, np.uint8))
        target = int(index) % images.classes
        if self.transform is None and self.target_transform is None and self.transforms:
            return self.transforms(image, target)
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)

    members = {"__len__": length, "__getitem__": sample}
    named = {"classes": classes, "class_to_idx": class_to_idx}
    return type(kind.__name__, (kind,), {**members, **named})
