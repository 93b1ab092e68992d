"""Build the documentation site into site/public: `make site`.

    stage     copy the pages, notebooks and pictures of the repository into site/staged, where
              they keep their relative paths; write the pages of the API
    build     `mkdocs build --strict`: a warning fails
    check     follow every link and anchor of the HTML, and look for resources of other hosts

A link to a repository file without a page leads to the repository on the web.
"""

import json
import logging
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from posixpath import normpath

import griffe
import links
from formulas import with_formulas
from mkdocs.commands.build import build as build_html
from mkdocs.config import load_config
from npm_packages import KATEX, PYODIDE

SITE = Path(__file__).parent
ROOT = SITE.parent
STAGED, PUBLIC = SITE / "staged", SITE / "public"
PAGES = ("*.md", "docs/*.md", "solutions/*.ipynb")
ASSETS = ("images/*", "docs/drawings/*.svg")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]

# What the pages of the API show: a module or a package, and its title.
API = {
    "memlab": "Top level",
    "memlab.trace": "Traces",
    "memlab.allocator": "Allocator",
    "memlab.plot": "Plots",
    "memlab.monitoring": "Monitor",
    "memlab.planner": "Planner",
    "memlab.explain": "Explain",
    "memlab.optim": "Optimizers",
    "memlab.attention": "Attention",
    "memlab.losses": "Losses",
    "memlab.checkpointing": "Checkpointing",
    "memlab.compression": "Activation compression",
    "memlab.precision": "Precision",
    "memlab.quantize": "Quantization",
    "memlab.lora": "LoRA",
    "memlab.qlora": "QLoRA",
    "memlab.accumulation": "Gradient accumulation",
    "memlab.zero": "ZeRO",
    "memlab.offload": "Offloading",
    "memlab.ema": "Post-hoc EMA",
    "memlab.reference": "References",
}

# What the planner page needs of memlab: the formulas, and what they import.
PLANNER_FILES = (
    *("memlab/__init__.py", "memlab/units.py", "memlab/configs/*", "memlab/internals/__init__.py"),
    *("memlab/internals/lazy.py", "memlab/internals/sizes.py", "memlab/planner/__init__.py"),
    *("memlab/planner/formulas.py", "memlab/planner/recipes.py", "memlab/planner/cards.py"),
    *("memlab/planner/parallel.py", "memlab/zero/__init__.py", "memlab/zero/formulas.py"),
    "memlab/zero/stages.py",
    *("memlab/train/__init__.py", "memlab/train/adapters.py", "memlab/train/registry.py"),
    *("memlab/train/technique.py", "site/planner.py"),
)

# The guides: what a reader looks for first. Search shows them above lessons and logs.
GUIDES = ("MEASURE", "PLAN", "RUN", "EXPLAIN", "MONITOR", "HOWTO", "FRAMEWORKS")
BOOST = "---\nsearch:\n  boost: 2\n---\n\n"

FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
HEADING = re.compile(r"^#+ .*$", re.M)
TABLE = re.compile(r"^(\|.*\|\n)(\|[-:| ]+\|)((?:\n\|.*\|)+)", re.M)
UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|×|%|s)(?: |$))")  # the space before it
WORDS = re.compile(r"(?:[a-z]{2,}[,;]? ){3}")  # a sentence rather than a number
LINK = re.compile(r"(\]\()([^)\s]+)|((?:src|href)=\")([^\"]+)")


def main() -> None:
    logging.getLogger("mkdocs").addHandler(logging.StreamHandler())  # shows its warnings
    for folder in (STAGED, PUBLIC):
        shutil.rmtree(folder, ignore_errors=True)
    stage()
    config = load_config(str(SITE / "mkdocs.yml"), strict=True, repo_url=REPOSITORY)
    config.nav = expanded(config.nav)
    build_html(config)
    finish_notebooks()
    faults = links.faults(PUBLIC)
    sys.exit("\n".join(faults)) if faults else print(f"{PUBLIC}: {links.counted(PUBLIC)}")


# ------------------------------------------------------------------ stage


def stage() -> None:
    """Fill STAGED."""
    pages = {path.relative_to(ROOT).as_posix() for path in found(ROOT, *PAGES)}
    assets = {path.relative_to(ROOT).as_posix() for path in found(ROOT, *ASSETS)}
    for name in sorted(pages):
        text = (ROOT / name).read_text(encoding="utf-8")
        change = staged_notebook if name.endswith(".ipynb") else staged_markdown
        write(STAGED / name, change(text, name, pages | assets))
    for name in assets:
        copy(ROOT / name, STAGED / name)
    for path in found(SITE / "pages", "*"):
        copy(path, STAGED / path.name)
    for path in found(SITE / "assets", "*"):
        copy(path, STAGED / "assets" / path.name)
    dist = KATEX.folder(ROOT) / "dist"
    for path in KATEX.files(ROOT):
        copy(path, STAGED / "assets/katex" / path.relative_to(dist))
    for module, title in API.items():
        write(STAGED / f"api/{title.lower().replace(' ', '-')}.md", api_page(module, title))
    stage_planner()
    command = [sys.executable, SITE / "example_report.py", STAGED / "assets/report.html"]
    subprocess.run(command, check=True)


def stage_planner() -> None:
    """Copy Python for the browser, and what it runs there."""
    for path in PYODIDE.files(ROOT):
        copy(path, STAGED / "assets/pyodide" / path.name)
    with zipfile.ZipFile(STAGED / "assets/memlab.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found(ROOT, *PLANNER_FILES):
            archive.write(path, path.relative_to(ROOT))
    large = [*found(STAGED / "assets/pyodide", "*.wasm", "*.zip"), Path(archive.filename)]
    page = (STAGED / "planner.md").read_text(encoding="utf-8")
    write(
        STAGED / "planner.md",
        page.replace("{{ bytes }}", str(sum(path.stat().st_size for path in large))),
    )


def staged_markdown(text: str, name: str, staged: set[str]) -> str:
    """Return the page with links that lead somewhere on the site."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [relinked(text[end : fence.start()], name, staged), fence[0]]
        end = fence.end()
    parts.append(relinked(text[end:], name, staged))
    boost = BOOST if Path(name).stem in GUIDES else ""
    return boost + TABLE.sub(table_for_screens, "".join(parts))


def table_for_screens(table: re.Match[str]) -> str:
    """Return the table with sentences aligned to the left, and units beside their numbers."""
    columns = zip(*(row.split("|")[1:-1] for row in table[3].split("\n")[1:]), strict=False)
    sides = table[2].split("|")[1:-1]
    for n, cells in enumerate(columns):
        if any(WORDS.search(cell) for cell in cells):
            sides[n] = " --- "
    rows = "|".join(
        cell if "`" in cell else UNIT.sub("\N{NO-BREAK SPACE}", cell)
        for cell in table[3].split("|")
    )
    return f"{table[1]}|{'|'.join(sides)}|{rows}"


def relinked(prose: str, name: str, staged: set[str]) -> str:
    def changed(match: re.Match[str]) -> str:
        before, target = (match[1], match[2]) if match[1] else (match[3], match[4])
        return before + destination(target, name, staged)

    return LINK.sub(changed, prose)


def destination(target: str, name: str, staged: set[str]) -> str:
    """Return where a link of the page `name` leads: as it is, or into the repository.

    Raises FileNotFoundError for a file missing in the repository.
    """
    path, hash_, anchor = target.partition("#")
    if re.match(r"\w+:", target) or not path:
        return target
    file = normpath(f"{Path(name).parent.as_posix()}/{path}")
    if file in staged:
        return target
    if not (ROOT / file).exists():
        raise FileNotFoundError(f"{name} links to {target}, which does not exist; fix the link")
    kind = "tree" if (ROOT / file).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{file}{hash_}{anchor}"


def staged_notebook(text: str, name: str, staged: set[str]) -> str:
    """Return the executed notebook with a link to the one with stubs. nbconvert leaves links as
    they are, so those to files lead into the repository."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["metadata"].pop("tags", None)  # they are for the tests
    lesson = name.replace("solutions/", "lessons/")
    seen: Counter[str] = Counter()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            source = relinked("".join(cell["source"]), name, staged=set())
            cell["source"] = HEADING.sub(lambda found: unique_heading(found[0], seen), source)
    where = destination(f"../{lesson}", name, staged=set())
    first = notebook["cells"][0]
    first["source"] += (
        f"\n\nThis page shows the solutions. To solve the exercises, open the "
        f"[lesson with stubs]({where}): `memlab start {int(name[13:15])}`."
    )
    return json.dumps(notebook)


def unique_heading(line: str, seen: Counter[str]) -> str:
    """Return a heading that mkdocs-jupyter's table of contents can link to: without code, and
    numbered if it stands there again."""
    # Its table of contents drops code and numbers repeated headings; nbconvert's ids do neither,
    # and four links led nowhere.
    plain = line.replace("`", "")
    seen[plain] += 1
    return plain if seen[plain] == 1 else f"{plain} ({seen[plain]})"


# ------------------------------------------------------------------ pages of notebooks

NO_ALT = 'alt="No description has been provided for this image"'
TITLE = re.compile(r"""(?:title\(|title=)f?(["'])(.*?)\1""")


def finish_notebooks() -> None:
    """Draw the formulas, and replace nbconvert's text for pictures by their titles."""
    for path in found(STAGED, "solutions/*.ipynb"):
        page = PUBLIC / path.relative_to(STAGED).with_suffix("") / "index.html"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        html = with_formulas(page.read_text(encoding="utf-8"), cells, ROOT)
        titles = pictures(cells)
        if html.count(NO_ALT) != len(titles):
            raise ValueError(f"{page} has not {len(titles)} pictures without a text")
        for title in titles:
            html = html.replace(NO_ALT, f'alt="{escape(title)}"', 1)
        page.write_text(html, encoding="utf-8")


def pictures(cells: list[dict]) -> list[str]:
    """Return what each picture shows: the titles in the cell's code, else the section's heading."""
    texts, heading = [], ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (HEADING.findall(source) or [heading])[-1]
            continue
        titles = [title.replace("\\n", " ") for _, title in TITLE.findall(source)]
        known = [title for title in titles if "{" not in title]
        text = "; ".join(known) or heading.lstrip("# ")
        images = [out for out in cell["outputs"] if "image/png" in out.get("data", {})]
        texts += [f"Plot: {text}"] * len(images)
    return texts


# ------------------------------------------------------------------ files


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def found(folder: Path, *patterns: str) -> Iterator[Path]:
    """Yield the files that a pattern names. Raises FileNotFoundError for one without files."""
    for pattern in patterns:
        paths = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not paths:
            raise FileNotFoundError(f"no file is called {folder / pattern}")
        yield from paths


# ------------------------------------------------------------------ API and navigation


@cache
def package() -> griffe.Object:
    """memlab, read without importing it."""
    # Once: griffe reads the whole package at each load.
    return griffe.load("memlab", search_paths=[str(ROOT)], allow_inspection=False)


def api_page(module: str, title: str) -> str:
    """Return a page of directives for mkdocstrings: the module's docstring, then each name."""
    loaded = package() if module == "memlab" else package()[module.removeprefix("memlab.")]
    names = loaded.exports or [
        name
        for name, member in loaded.members.items()
        if member.is_public and not member.is_alias and not member.is_attribute
    ]
    head = f"# {title}\n\n`{module}`\n\n::: {module}\n    options:\n"
    head += "      members: false\n      show_root_heading: false\n"
    directives = [f"\n::: {module}.{name}\n" for name in sorted(names, key=str.lower)]
    return head + "".join(directives)


def expanded(nav: list[dict]) -> list[dict]:
    """Return the navigation with the pages of each pattern in the pattern's place."""
    return [{title: pages_of(entry) for title, entry in item.items()} for item in nav]


def pages_of(entry: str | dict | list) -> str | dict | list:
    if isinstance(entry, list):
        parts = [pages_of(part) for part in entry]
        return [page for part in parts for page in (part if isinstance(part, list) else [part])]
    if isinstance(entry, dict) or "*" not in entry:
        return entry
    if entry.startswith("api/"):
        return [{title: f"api/{title.lower().replace(' ', '-')}.md"} for title in API.values()]
    names = (path.relative_to(STAGED).as_posix() for path in found(STAGED, entry))
    return [{title_of(STAGED / name): name} for name in names]


def title_of(notebook: Path) -> str:
    """Return the first heading of a notebook."""
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"]
    return "".join(first).splitlines()[0].removeprefix("# ")


if __name__ == "__main__":
    main()
