"""Notebooks, read as the plain JSON that they are: their cells and their first heading.

Nothing of them is run, and nothing of Jupyter is needed. A file that is no notebook, such as one
that is cut off or has a merge's conflict in it, is refused in one sentence with the remedy.
"""

import json
import re
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The notebook, each cell of which has a kind and a source; ValueError for what is none."""
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
        raise _unreadable(path, "its parts are not those of a notebook") from error
    except ValueError as error:
        raise _unreadable(path, str(error)) from error


def cells(path: Path) -> list[tuple[str, str]]:
    """(kind, source) of each cell; the kind is "code", "markdown" or "raw"."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in read(path)["cells"]]


def code_cells(path: Path) -> list[str]:
    """The sources of the code cells, magics and all; ValueError for what is no notebook."""
    return [source for kind, source in cells(path) if kind == "code"]


def heading(path: Path) -> str:
    """The first heading; "" if there is none."""
    for kind, source in cells(path):
        if kind == "markdown" and (found := re.search(r"^#+ +(.+?)\s*$", source, re.MULTILINE)):
            return found[1]
    return ""


def _unreadable(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} cannot be read as a notebook ({why.splitlines()[0]}); `memlab reset` with "
        f"the day's number puts your copy aside and makes a fresh one"
    )
