"""Files of weights in a dry run: fake tensors with the file's shapes, whose bytes stay unread.

    safetensors    maps the file into memory and calls `torch.asarray` on parts of the map; here
                   the file is not mapped, and the tensors are fake. For an accelerator it would
                   copy bytes to an address, so the file is opened for the CPU, and each tensor is
                   moved when it is read
    torch.jit.load reads the file, and its tensors become fake
    torch.load     makes fake tensors itself, without a storage on their device; here they have one.
                   Files from before torch 1.6 give tensors on "meta". Random states in files have
                   no values, so setting one has no effect
    transformers   loads weights in threads, which a dry run does not see; its own setting makes it
                   load them one after another, in the order of the threads' starts. Copies that
                   threads make ahead of the model are not counted

Small tensors, such as counters and the settings of quantized weights, have their real values.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from memlab.dry_runs import fake_accelerator, known_values
from memlab.dry_runs.fake_accelerator import to_stand_in
from memlab.internals.torch_internals import FakeTensor, without_modes
from memlab.metering.dry import DryRun

_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # read by transformers 5 at each load
_TORCH = ("pt", "torch", "pytorch")


def _without_threads(real: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
    """Return how the environment is read, in which transformers loads weights without threads."""
    # No mode is active in those threads, so the weights were real
    # (test_a_loaded_model_takes_the_bytes_of_one_from_its_config). Not measured: what four loader
    # threads reserve on a GPU.
    return lambda variables, name: "1" if name == _NO_THREADS else real(variables, name)


class _FileBytes:
    """A range of a file's bytes. A map of a file larger than the memory would fail."""

    def __init__(self, path: str, start: int, stop: int) -> None:
        self._path, self._start, self.nbytes = path, start, stop - start

    def untyped(self) -> "_FileBytes":
        return self

    def __getitem__(self, part: slice) -> "_FileBytes":
        return _FileBytes(self._path, self._start + part.start, self._start + part.stop)

    def read(self) -> bytearray:
        with open(self._path, "rb") as file:
            file.seek(self._start)
            return bytearray(file.read(self.nbytes))


def _from_file(filename: str, shared: bool = False, nbytes: int = 0) -> _FileBytes:
    # Linux refuses to map a file larger than memory (test_a_file_larger_than_any_memory_is_opened).
    return _FileBytes(filename, 0, nbytes)


def _asarray(data: Any, **options: Any) -> torch.Tensor:
    """Return a fake tensor of a file's bytes, with their values if they are few."""
    if not isinstance(data, _FileBytes):
        return fake_accelerator.FUNCTIONS[torch.asarray](data, **options)
    fake = torch.empty(data.nbytes, dtype=torch.uint8)
    if 0 < data.nbytes <= known_values.BOUND:
        with without_modes():
            values = torch.frombuffer(data.read(), dtype=torch.uint8)
        known_values.borrow(fake, values)
    return fake


FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.asarray: _asarray}

# ------------------------------------------------------------------ safetensors


class _Moved:
    """A file, or a slice of one, whose tensors move to a device when they are read."""

    def __init__(self, opened: Any, device: Any) -> None:
        self._opened, self._device = opened, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> "_Moved":
        self._opened.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._opened[index].to(self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._opened.get_tensor(name).to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._opened.offset_keys()}

    def get_slice(self, name: str) -> "_Moved":
        return _Moved(self._opened.get_slice(name), self._device)


def in_dry_runs_too(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `safe_open` for real and dry runs, of the file that Python's `open` opens."""

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        """Modules imported in a dry run keep this function, so check that one is active."""
        filename = python_path(filename)
        if DryRun.active is None or framework not in _TORCH:
            return real(filename, framework, device, **options)
        # Opened for "cuda", safetensors would write to the address of `torch.empty(...)`, which is
        # 0 for a fake tensor: a segmentation fault
        # (test_safetensors_moves_each_tensor_when_it_is_read).
        opened = real(filename, framework)
        return opened if str(device) == "cpu" else _Moved(opened, device)

    return safe_open


def python_path(filename: Any) -> str:
    """Return the path that Python's `open` opens, which `memlab run` redirects; libraries that open
    files themselves need it."""
    with open(filename, "rb") as file:
        return os.fspath(file.name)


# ------------------------------------------------------------------ torch.load


class _Storages:
    """The storages of the file that `torch.load` is reading, each made once on its device."""

    def __init__(self) -> None:
        self._made: dict[Any, torch.Tensor] = {}  # bytes on the device, by the offset in the file

    def load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **options: Any) -> Any:
            outer, self._made = self._made, {}
            try:
                return real(*args, **options)
            finally:
                self._made = outer

        return load

    def restore(self, real: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        """Return a function that gives a loaded tensor its storage on its device."""

        def restored(tensor: torch.Tensor) -> torch.Tensor:
            tensor, storage = real(tensor), tensor.untyped_storage()
            if not isinstance(tensor, FakeTensor) or storage._fake_device is None:
                return tensor
            device, place = to_stand_in(tensor.fake_device), storage._checkpoint_offset
            if place not in self._made:
                self._made[place] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            made = torch.empty(0, dtype=tensor.dtype, device=device)
            parts = tensor.storage_offset(), tensor.shape, tensor.stride()
            made.set_(self._made[place].untyped_storage(), *parts)
            return made.requires_grad_(tensor.requires_grad)

        return restored


def _jit_load(real: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        with without_modes():  # C++ mixes fake tensors with storages of the file
            path = python_path(f) if isinstance(f, (str, os.PathLike)) else f
            loaded = real(path, "cpu", *args, **options)
        for module in loaded.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    options = {"dtype": tensor.dtype, "requires_grad": tensor.requires_grad}
                    tensors[name] = torch.empty(tensor.shape, device=map_location, **options)
        return loaded

    return load


def _set_rng_state(real: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a function that leaves the random state as it is if a file's state has no values."""

    def set_rng_state(new_state: torch.Tensor) -> None:
        if not isinstance(new_state, FakeTensor):
            real(new_state)

    return set_rng_state


def stand_ins() -> dict[str, Callable[[Any], Any]]:
    storages = _Storages()
    return {
        "file_bytes": lambda real: _from_file,
        "without_threads": _without_threads,
        "load": storages.load,
        "jit_load": _jit_load,
        "restore": storages.restore,
        "set_rng_state": _set_rng_state,
        "safe_open": in_dry_runs_too,
    }
