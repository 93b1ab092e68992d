"""Read notebooks as plain JSON, without Jupyter and without running them.

A file other than a notebook, such as a truncated file or one with a merge conflict, is refused in
one sentence with the remedy.
"""

import json
import re
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """Return the notebook, whose cells all have a type and a source; raise ValueError otherwise."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
        if not notebook["cells"]:
            raise ValueError("it has no cells")
        for cell in notebook["cells"]:
            cell["cell_type"] + "".join(cell["source"])
        return notebook
    except KeyError as error:
        raise _unreadable(path, f"it has no {error.args[0]}") from error
    except (TypeError, RecursionError) as error:
        raise _unreadable(path, "its structure is not a notebook's") from error
    except ValueError as error:
        raise _unreadable(path, str(error)) from error


def cells(path: Path) -> list[tuple[str, str]]:
    """Return (type, source) of each cell; the type is "code", "markdown" or "raw"."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in read(path)["cells"]]


def code_cells(path: Path) -> list[str]:
    """Return the code cells' sources, including magics; raise ValueError if not a notebook."""
    return [source for kind, source in cells(path) if kind == "code"]


def heading(path: Path) -> str:
    """Return the first heading, or ""."""
    for kind, source in cells(path):
        if kind == "markdown" and (found := re.search(r"^#+ +(.+?)\s*$", source, re.MULTILINE)):
            return found[1]
    return ""


def _unreadable(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} cannot be read as a notebook ({why.splitlines()[0]}); `memlab reset` with "
        f"the day's number backs up your copy and makes a fresh one"
    )
