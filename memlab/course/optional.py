"""Packages that a lesson compares with, and that need not be there."""

import importlib
import io
import logging
import warnings
from contextlib import redirect_stderr
from types import ModuleType

MISSING = 'not installed: pip install -e ".[oracles]" in the repository\'s folder'


def imported(name: str) -> ModuleType | None:
    """Return the module, imported without its warnings; None where it is not installed."""
    logging.disable()
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        return None
    finally:
        logging.disable(logging.NOTSET)
