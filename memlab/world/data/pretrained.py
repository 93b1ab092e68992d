"""Stand in for pretrained weights that torch.hub, torchvision and timm would download.

torch.hub.load_state_dict_from_url
              returns a state dict without entries; a model that loads it keeps its own random
              weights, after a copy of them has been in memory, as the file's weights would have
              been. So it does if the script renames the entries or picks a part. torchvision
              loads its models' weights this way
timm          its models keep their random weights
torch.hub.load
              runs code of a repository. pytorch/vision has the models of torchvision; without
              any other repository the script stops with a sentence
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import hub, nn

from memlab.world.data.hub import Note, UnavailableError

_VISION = "pytorch/vision"
_BRANCHES = ("main", "master")  # that torch.hub looks for


class MissingWeights(dict[str, Any]):
    """The state dict of a file not on this machine; its parts are such dicts too, and the
    script may remove any entry."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device if isinstance(device, (str, torch.device)) else "cpu"

    def __missing__(self, key: Any) -> "MissingWeights":
        return MissingWeights(self.device)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(key, *(default or (self[key],)))


class Pretrained:
    """The stand-ins of one run."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._are_missing = False  # whether some weights of a URL were

    def stand_ins(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "hub_load": self._load,
            "weights_of_url": self._load_from_url,
            "load_state_dict": self._load_state_dict,
            "original": _original,
            "timm_weights": self._load_pretrained,
        }

    # ------------------------------------------------------------------ torch.hub and torchvision

    def _load_from_url(self, real: Callable[..., Any]) -> Callable[..., Any]:
        real = _original(real)

        @functools.wraps(real)
        def load_state_dict_from_url(
            url: str, model_dir: Any = None, map_location: Any = None, *args: Any, **options: Any
        ) -> Any:
            try:
                return real(url, model_dir, map_location, *args, **options)
            except OSError:
                name = options.get("file_name") or os.path.basename(url)
            self._note(f"the weights of {name}", "random weights")
            self._are_missing = True
            return MissingWeights(map_location)

        return load_state_dict_from_url

    def _load_state_dict(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def load_state_dict(module: nn.Module, state_dict: Any, *args: Any, **options: Any) -> Any:
            if isinstance(state_dict, MissingWeights):
                state_dict = {**_random(module, state_dict.device), **state_dict}
            elif self._are_missing and state_dict == {}:  # made of the missing entries
                state_dict = _random(module, "cpu")
            return real(module, state_dict, *args, **options)

        return load_state_dict

    def _load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def load(repo_or_dir: str, model: str, *args: Any, **options: Any) -> Any:
            if options.get("source", "github") != "github" or _is_here(repo_or_dir):
                return real(repo_or_dir, model, *args, **options)
            repository = repo_or_dir.partition(":")[0]
            own = ("source", "trust_repo", "force_reload", "verbose", "skip_validation")
            if repository == _VISION and (found := _model_of_torchvision(model)) is not None:
                self._note(f"the repository {_VISION}", f"{model} of torchvision")
                return found(*args, **{k: v for k, v in options.items() if k not in own})
            raise UnavailableError(
                f"the model's code is in the repository {repo_or_dir}, and torch.hub has no copy "
                f"on this machine; call torch.hub.load({repo_or_dir!r}, {model!r}) once outside "
                f"memlab run, with a network connection"
            )

        return load

    # ------------------------------------------------------------------ timm

    def _load_pretrained(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def load(model: nn.Module, pretrained_cfg: Any = None, *args: Any, **options: Any) -> None:
            try:
                real(model, pretrained_cfg, *args, **options)
            except OSError:
                config = pretrained_cfg or getattr(model, "pretrained_cfg", None) or {}
                name = config.get("architecture") or type(model).__name__
                self._note(f"the weights of timm's {name}", "random weights")

        return load


def _original(function: Any) -> Any:
    """Return the function that a replacement of another run wraps; modules may still hold it."""
    return getattr(function, "__wrapped__", function)


def _random(module: nn.Module, device: Any) -> dict[str, torch.Tensor]:
    """Return copies of a module's own weights on the device of the file's."""
    return {
        name: torch.empty_like(weight, device=device)
        if weight.is_meta
        else weight.detach().to(device, copy=True)
        for name, weight in module.state_dict().items()
        if isinstance(weight, torch.Tensor)
    }


def _is_here(repository: str) -> bool:
    """Return whether torch.hub has downloaded the repository `owner/name` or `owner/name:ref`."""
    name, _, ref = repository.partition(":")
    folders = (f"{name}_{each}".replace("/", "_") for each in ([ref] if ref else _BRANCHES))
    return any(os.path.isdir(os.path.join(hub.get_dir(), folder)) for folder in folders)


def _model_of_torchvision(name: str) -> Callable[..., nn.Module] | None:
    try:
        return getattr(importlib.import_module("torchvision.models"), name, None)
    except ImportError:
        return None
