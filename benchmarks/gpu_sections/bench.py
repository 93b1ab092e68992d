"""What a section is given: jobs to have done, a place to tell, a place to keep what it finds."""

import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from common import RESULTS, ROOT

import memlab
from memlab.files import write_beside

from . import archive
from .configurations import FULL, SMALL, Size
from .jobs import Answer, Job

RECORDINGS = ROOT / "tests" / "recordings"


class Report(NamedTuple):
    """What a section has to say."""

    sentence: str  # for the summary
    markdown: str
    plain: dict[str, Any]  # for the results


class Server(Protocol):
    """Whoever answers jobs."""

    def submit(self, job: Job) -> "Future[Answer]": ...


@dataclass
class Bench:
    """One run of the script, as its sections see it."""

    facts: Mapping[str, Any]
    server: Server
    small: bool
    rehearsal: bool
    out: Path | None  # None: the project's own folders
    keeps: bool = True  # whether anything is written
    section: str = ""

    @property
    def size(self) -> Size:
        return SMALL if self.small else FULL

    @property
    def target(self) -> str:
        return self.facts["target"]

    @property
    def total_bytes(self) -> int:
        return self.facts["total_bytes"]

    def submit(self, task: str, configuration: str = "", **options: Any) -> "Future[Answer]":
        """Have a job done, in a process of its own; of recordings, `name` is the one in the
        archive."""
        job = Job(task, configuration, **options, small=self.small, rehearsal=self.rehearsal)
        return self.server.submit(job)

    def say(self, line: str) -> None:
        """A line for whoever waits."""
        print(f"{self.section}: {line}", file=sys.stderr, flush=True)

    # -------------------------------------------------------------- what is kept

    @property
    def name(self) -> str:
        """The device as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.facts["device"].lower()).strip("-")

    @property
    def results_path(self) -> Path:
        return (self.out or RESULTS) / f"{self.name}.json"

    @property
    def archive_path(self) -> Path:
        return (self.out or RECORDINGS) / f"{self.name}{archive.SUFFIX}"

    def keep(self, content: Mapping[str, Any]) -> None:
        """Put what the section has found so far into the results, in the place of what was there
        of it; the other sections stay."""
        if not self.keeps:
            return
        path = self.results_path
        path.parent.mkdir(parents=True, exist_ok=True)
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        entry = {**circumstances(self.facts), **content}
        results.setdefault("gpu", {})[self.section] = entry
        with write_beside(path) as beside:
            text = json.dumps(results, indent=1, ensure_ascii=False)
            beside.write_text(text + "\n", encoding="utf-8")

    def keep_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What a section that is not done yet has; a run that is killed leaves it."""
        self.keep({"complete": False, "rows": list(rows)})

    def keep_recording(self, recording: Mapping[str, Any]) -> None:
        """Put a history into the archive, with all that is needed to make the same step again."""
        if self.keeps:
            facts = {"facts": dict(self.facts), **circumstances(self.facts)}
            archive.add(self.archive_path, {**recording, **facts})


def circumstances(facts: Mapping[str, Any]) -> dict[str, str]:
    """What a number holds for."""
    return {
        "device": facts["device"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memlab": memlab.__version__,
        "date": date.today().isoformat(),
    }


def heading(facts: Mapping[str, Any]) -> str:
    """A Markdown heading with device, versions and date in it."""
    words = circumstances(facts)
    software = ", ".join(f"{name} {words[name]}" for name in ("torch", "python", "memlab"))
    return f"# On a GPU: {words['device']}, {software}, {words['date']}"
