"""Formulas of the notebooks, which are in TeX, as HTML that needs no script."""

import json
import re
import subprocess
from html import escape
from pathlib import Path

from npm_packages import KATEX

FORMULA = re.compile(r"\$\$(.+?)\$\$", re.S)
RENDER = """
const katex = require(process.argv[1]);
const formulas = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const settings = { displayMode: true, throwOnError: true };
console.log(JSON.stringify(formulas.map((tex) => katex.renderToString(tex, settings))));
"""


def with_formulas(html: str, cells: list[dict], root: Path) -> str:
    """Return a notebook's page with the formulas of its cells rendered."""
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    formulas = [tex for text in texts for tex in FORMULA.findall(text)]
    for tex, drawn in zip(formulas, rendered(formulas, root), strict=True):
        written = f"$${escape(tex, quote=False)}$$"
        if written not in html:
            raise ValueError(f"the page of a notebook lacks its formula {tex!r}")
        html = html.replace(written, drawn, 1)
    return html


def rendered(formulas: list[str], root: Path) -> list[str]:
    """Return each formula as HTML. Raises RuntimeError for one that KaTeX does not know."""
    if not formulas:
        return []
    command = ["node", "-e", RENDER, str(KATEX.folder(root) / "dist/katex.min.js")]
    given = json.dumps(formulas)
    done = subprocess.run(command, input=given, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"KaTeX failed: {done.stderr}")
    return json.loads(done.stdout)
