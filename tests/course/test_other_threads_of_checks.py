"""Checks watch the thread that asked and those that it starts, and leave other threads alone."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memlab.course import model_parallel
from memlab.course.ownwork import NotOwnWork, watched


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a new thread, or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Elsewhere:
    """A thread from before the check, which starts threads of its own when asked."""

    def __init__(self) -> None:
        self.todo, self.done, self.work, self.found = threading.Event(), threading.Event(), None, []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.todo.wait()
        self.found.append(in_a_thread(self.work))
        self.done.set()

    def result_of(self, work: Callable[[], Any]) -> Any:
        self.work = work
        self.todo.set()
        assert self.done.wait(60)
        return self.found[0]


def call_forbidden() -> str:
    torch.amp.GradScaler("cpu", enabled=False)
    return "called"


def test_a_forbidden_call_counts_in_threads_that_the_answer_starts():
    with watched(in_a_thread, ["torch.amp.GradScaler"]) as seen:
        assert isinstance(in_a_thread(call_forbidden), NotOwnWork)
    assert seen == ["torch.amp.GradScaler"]


def test_a_call_in_another_threads_thread_does_not_count():
    elsewhere = Elsewhere()
    with watched(in_a_thread, ["torch.amp.GradScaler"]) as seen:
        assert elsewhere.result_of(call_forbidden) == "called"
    assert seen == []


def test_the_profile_function_of_other_threads_stays():
    events: list[str] = []

    def profile(frame: Any, event: str, called: Any) -> None:
        events.append(event)

    elsewhere, before = Elsewhere(), threading.getprofile()
    threading.setprofile(profile)
    try:
        with watched(in_a_thread, ["torch.amp.GradScaler"]):
            events.clear()
            assert elsewhere.result_of(sys.getprofile) is profile
            assert "call" in events
        assert threading.getprofile() is profile
    finally:
        threading.setprofile(before)


def test_collectives_of_another_thread_are_not_counted(monkeypatch: pytest.MonkeyPatch):
    reduced: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x: reduced.append(x.numel()))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    elsewhere, x = Elsewhere(), torch.ones(6)
    with model_parallel.counted() as sent:
        elsewhere.result_of(lambda: dist.all_reduce(x))
        assert (reduced, sent) == ([6], {})
        dist.all_reduce(x)
    assert sent == {"all_reduce": 24}  # 2 · (R − 1)/R · 6 elements of 4 bytes
    assert reduced == [6, 6]
