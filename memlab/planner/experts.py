"""Formulas for expert parallelism: a mixture's experts divided over e ranks.

A layer has E experts of 3·C·F weights, and a router of C·E. Each of a rank's n tokens chooses k
experts. The ranks have E/e experts each, so a token's copy travels to its expert and back:

    weights     (E/e)·3·C·F + C·E on each rank
    sent        n·k·C·(e − 1)/e elements to the experts, as many back, and both again in backward;
                the busiest rank gets r tokens and sends back all but its own, (r − r/e)·C
    busiest     imbalance·N·k/E tokens for one expert, of the N = n·e tokens of all ranks; the other
                experts share the rest evenly
    saved       for each token of an expert: its input, gate, up and their product,
                (C + 4·F) elements with SiLU's output

The rank with the busiest expert saves most, and the others wait for it. A token chooses different
experts, so one expert gets at most N tokens.

Source   Lepikhin et al. 2020, arXiv 2006.16668, section 3.2 (all-to-all); Fedus et al. 2021, arXiv
         2101.03961, section 2.2 (capacity).
"""

from dataclasses import dataclass

MATRICES = 3  # gate, up and down
ALL_TO_ALLS = 4  # to the experts and back, in forward and in backward


@dataclass(frozen=True)
class Mixture:
    """A layer with experts.

    hidden_size        C
    intermediate_size  F of one expert
    experts            E
    chosen             k experts for each token
    """

    hidden_size: int
    intermediate_size: int
    experts: int
    chosen: int

    def __post_init__(self) -> None:
        for name, got in vars(self).items():
            if not isinstance(got, int) or got < 1:
                raise ValueError(f"got {name}={got!r}; give an integer from 1")
        if self.chosen > self.experts:
            raise ValueError(
                f"got {self.chosen} chosen of {self.experts} experts; choose at most all of them"
            )

    def weights(self, ranks: int = 1) -> int:
        """Return a rank's weights: its experts, and the whole router."""
        expert = MATRICES * self.hidden_size * self.intermediate_size
        return self._own(ranks) * expert + self.hidden_size * self.experts

    def _own(self, ranks: int) -> int:
        if ranks < 1 or self.experts % ranks:
            raise ValueError(
                f"got {self.experts} experts for {ranks} ranks; use a divisor as the number of "
                f"ranks"
            )
        return self.experts // ranks

    def sent_elements(
        self, tokens: int, ranks: int, imbalance: float = 1.0, *, recomputed: bool = False
    ) -> int:
        """Return the elements that the busiest rank sends for the layer in a step, if each rank
        has `tokens` tokens and the ranks route alike.

        Half of the all-to-alls send its own tokens to their experts, and half return the tokens
        that it received. A layer recomputed in backward repeats forward's two.
        """
        got = self.busiest_rank_tokens(tokens * ranks, ranks, imbalance)
        pairs = (ALL_TO_ALLS + 2 * recomputed) // 2
        copies = (tokens * self.chosen + got) * ranks - 2 * got  # times the ranks; r/e stay here
        return pairs * copies * self.hidden_size // ranks

    def tokens_of_experts(self, tokens: int, imbalance: float = 1.0) -> list[int]:
        """Return the tokens of each expert, the busiest first, of `tokens` tokens of all ranks.

        `imbalance` is the busiest expert's share relative to the average, as in
        `memlab run --assume imbalance:N`. Raises ValueError for a number below 1.
        """
        if not 1 <= imbalance < float("inf"):
            raise ValueError(f"got an imbalance of {imbalance}; give a number from 1, such as 2")
        if self.chosen == self.experts:
            return [tokens] * self.experts
        busiest = min(tokens, round(imbalance * tokens * self.chosen / self.experts))
        rest, others = tokens * self.chosen - busiest, self.experts - 1
        return [busiest, *(rest // others + (place < rest % others) for place in range(others))]

    def busiest_rank_tokens(self, tokens: int, ranks: int, imbalance: float = 1.0) -> int:
        """Return the tokens of the rank with the busiest expert, which has E/e of the experts."""
        return sum(self.tokens_of_experts(tokens, imbalance)[: self._own(ranks)])

    def saved_bytes(
        self, tokens: int, ranks: int, imbalance: float = 1.0, *, element_bytes: int = 2
    ) -> int:
        """Return what the experts of the busiest rank save for backward, of all ranks' tokens."""
        routed = self.busiest_rank_tokens(tokens, ranks, imbalance)
        return routed * element_bytes * (self.hidden_size + 4 * self.intermediate_size)
