"""Run several ranks of a script, one after another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memlab.scripts.launch import Launch
from memlab.scripts.messages import Messages, NotYetSentError
from memlab.scripts.running import Outcome, run


def run_ranks(launch: Launch, ranks: Sequence[int] = (), **settings: Any) -> dict[int, Outcome]:
    """Run these ranks, and those whose objects they wait for; return the outcomes of all.

    Without `ranks`, rank 0 runs, and every rank that it sends tensors to or receives them from, and
    so on: the stages of a pipeline. `settings` are those of `run`.

    Raises NotYetSentError if two ranks wait for each other.
    """
    messages, outcomes = Messages(), {}
    followed = [] if ranks else [0]

    def ran(rank: int, waiting: tuple[int, ...] = ()) -> None:
        while rank not in outcomes:
            try:
                outcomes[rank] = run(replace(launch, rank=rank), messages=messages, **settings)
            except NotYetSentError as error:
                if error.sender in waiting:  # it goes on with what this rank has sent
                    raise
                known = messages.sent(error.sender, rank)
                try:
                    ran(error.sender, (*waiting, rank))
                except NotYetSentError:
                    if messages.sent(error.sender, rank) <= known:
                        raise

    for rank in ranks:
        ran(rank)
    while followed:
        ran(rank := followed.pop(0))
        peers = {
            peer
            for transfer in outcomes[rank].transfers
            if transfer.kind in ("send", "receive")
            for peer in transfer.ranks
        }
        followed += sorted(peers - set(outcomes) - set(followed))
    return dict(sorted(outcomes.items()))
