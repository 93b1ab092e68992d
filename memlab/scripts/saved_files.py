"""Keep files of weights in the temporary folder, where the script finds them again.

A dry run has no values to save, so it writes placeholders (dry_runs/placeholders.py). In a real run
`torch.save` is redirected with the other files; safetensors, which opens files in Rust, gets the
path of the temporary folder here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memlab.dry_runs import placeholders
from memlab.dry_runs.weight_files import importers, in_dry_runs_too
from memlab.internals.replacing import replaced


def redirected(*, real: bool) -> AbstractContextManager[None]:
    """Let the script save weights inside `with`; its files must be isolated already."""
    return replaced(_paths_of_safetensors()) if real else placeholders.saved()


def _paths_of_safetensors() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    try:
        import safetensors.torch as module
    except ImportError:
        return {}
    openers = {(owner, "safe_open"): in_dry_runs_too for owner in importers()}
    return {(module, "serialize_file"): _writing, **openers}


def _writing(real: Callable[..., Any]) -> Callable[..., Any]:
    def serialize_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> Any:
        with open(filename, "wb") as file:
            path = file.name
        return real(tensors, path, *args, **options)

    return serialize_file
