"""Objects that the ranks of a script send each other, when one rank runs at a time.

A rank that runs alone gets what the other ranks would send:

    recv_object_list                   the objects that the sender sent; the sender must run first
    a pipeline's gradients' shapes     the shapes of the stage's own outputs
    a pipeline's vote on shapes        its own: whether the script gave its stage's shapes
    broadcast_object_list              the objects that the source sent; the source must run first
    all_gather_object, gather_object   its own object, from every rank
    scatter_object_list                its own part
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from memlab.internals.replacing import always
from memlab.internals.torch_internals import choose_inference_mode, stage_gradients
from memlab.world.entering import ByName, Replacements, enter


class NotYetSentError(BaseException):
    """This rank waits for an object of another one, which has not run. Scripts catch Exceptions."""

    def __init__(self, sender: int) -> None:
        super().__init__(f"the script waits for an object from rank {sender}, which has not run")
        self.sender = sender


class Messages:
    """What the ranks have sent, by sender and receiver."""

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[int, int | None], list[Any]] = defaultdict(list)
        self._unread: dict[int, deque[Any]] = {}
        self._unread_by_all: dict[int, deque[Any]] = {}

    def sent(self, sender: int, receiver: int) -> int:
        """Return how many objects one rank has sent another, alone or among all."""
        return len(self._sent[sender, receiver]) + len(self._sent[sender, None])

    def repeat(self, sender: int, instead_of: int, receiver: int) -> None:
        """Let `receiver` have what `sender` has sent to the rank at the same distance."""
        alike = self._sent[sender, sender + receiver - instead_of]
        self._sent[instead_of, receiver] = list(alike)

    @contextmanager
    def active(self, rank: int) -> Iterator[None]:
        """Let this rank send and receive inside `with`. It sends anew, and reads from the start."""
        if not dist.is_available():
            yield
            return
        for pair in [pair for pair in self._sent if pair[0] == rank]:
            del self._sent[pair]
        self._unread, self._unread_by_all = (
            {
                sender: deque(objects)
                for (sender, receiver), objects in self._sent.items()
                if receiver == wanted
            }
            for wanted in (rank, None)
        )
        with enter(self._stand_ins()):
            yield

    def _stand_ins(self) -> Replacements:
        functions = {
            "send_object_list": self._send,
            "recv_object_list": self._receive,
            "all_gather_object": _gather_from_all,
            "gather_object": _gather,
            "broadcast_object_list": self._broadcast,
            "scatter_object_list": _scatter,
        }
        return {
            "objects": ByName(lambda name: always(functions[name])),
            "receive_shapes": _with_gradients_of_outputs,
            "votes": _with_own_votes,
        }

    def _send(self, objects: list[Any], dst: int | None = None, *args: Any, **kwargs: Any) -> None:
        receiver = _global_rank(dst, kwargs.get("group_dst"), *args[:1], **_group(kwargs))
        self._sent[dist.get_rank(), receiver].extend(objects)

    def _receive(
        self, objects: list[Any], src: int | None = None, *args: Any, **kwargs: Any
    ) -> int:
        sender = _global_rank(src, kwargs.get("group_src"), *args[:1], **_group(kwargs))
        _fill(objects, self._unread, sender)
        return sender

    def _broadcast(
        self, objects: list[Any], src: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        source = _global_rank(src, kwargs.get("group_src"), *args[:1], **_group(kwargs))
        if source == dist.get_rank():
            self._sent[source, None].extend(objects)
            return
        _fill(objects, self._unread_by_all, source)


def _fill(objects: list[Any], unread_of: dict[int, deque[Any]], sender: int) -> None:
    """Replace the objects by the next ones that the sender has sent."""
    unread = unread_of.get(sender, deque())
    if len(unread) < len(objects):
        raise NotYetSentError(sender)
    objects[:] = [unread.popleft() for _ in objects]


def _with_gradients_of_outputs(real: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def receive(stage: Any, sender: int) -> Any:
        return real(stage, sender) if sender < stage.stage_index else stage_gradients(stage)

    return receive


def _with_own_votes(real: Callable[..., None]) -> Callable[..., None]:
    """Stages vote on whether all were given their shapes, and this rank's assume its own votes.

    From 2.14 on, torch refuses to vote in a fake process group, which receives nothing; here a rank
    receives what the ranks before it have sent.
    """

    def vote(schedule: Any, stages: list[Any], has_backward: bool, *args: Any) -> None:
        if not choose_inference_mode(stages, has_backward):
            real(schedule, stages, has_backward, *args)

    return vote


def _group(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"group": kwargs["group"]} if "group" in kwargs else {}


def _global_rank(rank: int | None, in_group: Any, group: Any = None) -> int:
    if rank is not None:
        return rank
    return in_group if group is None else dist.get_global_rank(group, in_group)


def _gather_from_all(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *_: Any,
    **kwargs: Any,
) -> None:
    if scatter_object_input_list:
        rank = dist.get_rank(kwargs.get("group"))
        scatter_object_output_list[0] = scatter_object_input_list[rank]
