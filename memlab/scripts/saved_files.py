"""Keep checkpoints in the temporary folder, where the script finds them again.

torch.save     of a dry run has no values, and writes placeholders (dry_runs/placeholders.py)
safetensors    in a dry run too; in a real run it opens files in Rust, and gets the path in the
               temporary folder here
tokenizers     opens files in Rust as well
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from memlab.dry_runs import placeholders
from memlab.dry_runs.weight_files import in_dry_runs_too, python_path, users_of_safe_open
from memlab.internals.imports import when_imported
from memlab.internals.replacing import replaced


@contextmanager
def redirected(*, real: bool) -> Iterator[None]:
    """Let the script save its model inside `with`; its files must be isolated already."""
    weights = replaced(_paths_of_safetensors()) if real else placeholders.saved()
    with ExitStack() as stack:
        stack.enter_context(weights)

        def redirect(tokenizers: ModuleType) -> None:
            paths = {"save": _writing, "from_file": _reading}
            stack.enter_context(
                replaced({(tokenizers.Tokenizer, name): by for name, by in paths.items()})
            )

        stack.enter_context(when_imported({"tokenizers": redirect}))
        yield


def _paths_of_safetensors() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    try:
        import safetensors.torch as module
    except ImportError:
        return {}
    openers = {(owner, "safe_open"): in_dry_runs_too for owner in users_of_safe_open()}
    return {(module, "serialize_file"): _writing, **openers}


def _writing(real: Callable[..., Any]) -> Callable[..., Any]:
    def write(written: Any, filename: Any, *args: Any, **options: Any) -> Any:
        with open(filename, "wb") as file:
            path = file.name
        return real(written, path, *args, **options)

    return write


def _reading(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda filename: real(python_path(filename))
