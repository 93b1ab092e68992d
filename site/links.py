"""Check the HTML of a site: every link leads somewhere, and nothing comes from another host."""

from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements whose resource the browser loads by itself, and the attribute that names it.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "next", "prev", "alternate", "edit"}  # kinds of <link>


class Page(HTMLParser):
    """The ids of a page, the addresses that it links to, and the ones that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.linked.append(values["href"])
        loads = tag in LOADED and NOT_LOADED.isdisjoint(values.get("rel", "").split())
        if loads and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


@cache
def page(path: Path) -> Page:
    return Page(path)


def faults(site: Path) -> list[str]:
    """Return one sentence for each link without a target and each resource of another host."""
    return [f"{path.relative_to(site)}: {fault}" for path in pages(site) for fault in of(path)]


def counted(site: Path) -> str:
    """Return how much was checked."""
    found = pages(site)
    return f"{len(found)} pages, {sum(len(page(path).linked) for path in found):,} links"


def pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def of(path: Path) -> Iterator[str]:
    here = page(path)
    for address in here.loaded:
        parts = urlsplit(address)
        if parts.netloc:
            yield f"loads {address} from another host; copy it into the site"
        elif not parts.scheme and not target(path, parts.path).is_file():
            yield f"loads {address}, which does not exist"
    for address in dict.fromkeys(here.linked):
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        file = target(path, parts.path)
        if not file.is_file():
            yield f"links to {address}, which does not exist"
        elif parts.fragment and unquote(parts.fragment) not in page(file).ids:
            yield f"links to {address}, but that page has no such heading"


def target(path: Path, address: str) -> Path:
    """Return the file that a relative address leads to."""
    if not address:
        return path
    file = (path.parent / unquote(address)).resolve()
    return file / "index.html" if file.is_dir() else file
