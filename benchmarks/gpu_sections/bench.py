"""What a section is given: jobs to have done, a place to tell, a place to keep what it finds."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common import RESULTS, ROOT, circumstances, put

from . import archive
from .configurations import FULL, SMALL, Size
from .jobs import Answer, Job

RECORDINGS = ROOT / "tests" / "recordings"


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

    def in_turn(self, task: str, names: Iterable[str]) -> dict[str, Answer]:
        """The answers to jobs that are timed, and so done one after the other.

        RuntimeError if one failed: readers are shown what is kept.
        """
        found: dict[str, Answer] = {}
        for name in names:
            found[name] = self.submit(task, name).result()
            self.say(f"{name}: {found[name].get('failure') or found[name]['what']}")
        if failures := [f"{name}: {a['failure']}" for name, a in found.items() if "failure" in a]:
            raise RuntimeError("; ".join(failures))
        return found

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
        entry = {**circumstances(self.facts["device"]), **content}
        put(self.results_path, "gpu", self.section, entry)

    def keep_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What a section that is not done yet has; a run that is killed leaves it."""
        self.keep({"complete": False, "rows": list(rows)})

    def keep_recording(self, recording: Mapping[str, Any]) -> None:
        """Put a history into the archive, with all that is needed to make the same step again."""
        if self.keeps:
            facts = {"facts": dict(self.facts), **circumstances(self.facts["device"])}
            archive.add(self.archive_path, {**recording, **facts})


def facts_by_name(found: Mapping[str, Answer]) -> dict[str, Any]:
    """All that the answers say, each fact under its answer's name."""
    return {
        f"{name}, {fact}": value
        for name, answer in found.items()
        for fact, value in answer.items()
        if fact != "what"
    }
