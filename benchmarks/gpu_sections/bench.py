"""The interface of a section: submit jobs, print progress, store results."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common import RESULTS, ROOT, circumstances, put
from evidence_steps.measurements import EVIDENCE, put_own_steps

from . import archive
from .configurations import FULL, SMALL, Size
from .jobs import Answer, Job

RECORDINGS = ROOT / "tests" / "recordings"


class Server(Protocol):
    """Answers jobs."""

    def submit(self, job: Job) -> "Future[Answer]": ...


@dataclass
class Bench:
    """One run of the script."""

    facts: Mapping[str, Any]
    server: Server
    small: bool
    rehearsal: bool
    out: Path | None  # None for the repository's folders
    keeps: bool = True  # write results and recordings
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
        """Run a job in its own process; `name` is a recording's name in the archive."""
        job = Job(task, configuration, **options, small=self.small, rehearsal=self.rehearsal)
        return self.server.submit(job)

    def in_turn(self, task: str, names: Iterable[str]) -> dict[str, Answer]:
        """Run jobs one after another, because they are timed, and return their answers.

        Raises RuntimeError if one failed, so that incomplete results are not stored.
        """
        found: dict[str, Answer] = {}
        for name in names:
            found[name] = self.submit(task, name).result()
            self.say(f"{name}: {found[name].get('failure') or found[name]['what']}")
        if failures := [f"{name}: {a['failure']}" for name, a in found.items() if "failure" in a]:
            raise RuntimeError("; ".join(failures))
        return found

    def say(self, line: str) -> None:
        """Print a line of progress."""
        print(f"{self.section}: {line}", file=sys.stderr, flush=True)

    # -------------------------------------------------------------- results

    @property
    def name(self) -> str:
        """Return the device's name as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.facts["device"].lower()).strip("-")

    @property
    def results_path(self) -> Path:
        return (self.out or RESULTS) / f"{self.name}.json"

    @property
    def archive_path(self) -> Path:
        return (self.out or RECORDINGS) / f"{self.name}{archive.SUFFIX}"

    def keep(self, content: Mapping[str, Any]) -> None:
        """Write the section's results so far, and keep the other sections."""
        if not self.keeps:
            return
        entry = {**circumstances(self.facts["device"]), **content}
        put(self.results_path, "gpu", self.section, entry)

    def keep_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of an unfinished section, in case the run is killed."""
        self.keep({"complete": False, "rows": list(rows)})

    def keep_evidence(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the measured rows for benchmarks/evidence.py."""
        if self.keeps:
            put_own_steps(
                self.out or EVIDENCE,
                self.name,
                {
                    "gpu": self.facts["device"],
                    "target": self.target,
                    "small": self.small,
                    **circumstances(self.facts["device"]),
                },
                [row for row in rows if "failure" not in row],
            )

    def keep_recording(self, recording: Mapping[str, Any]) -> None:
        """Append a recording to the archive, with device and versions."""
        if self.keeps:
            facts = {"facts": dict(self.facts), **circumstances(self.facts["device"])}
            archive.add(self.archive_path, {**recording, **facts})


def facts_by_name(found: Mapping[str, Answer]) -> dict[str, Any]:
    """Flatten answers to {"name, fact": value}."""
    return {
        f"{name}, {fact}": value
        for name, answer in found.items()
        for fact, value in answer.items()
        if fact != "what"
    }
