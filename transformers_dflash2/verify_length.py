# Copyright 2026 The transformers_dflash2 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How many drafted tokens of a round the target is asked about.

A drafted token that is refused costs the target a row and gives nothing. The drafter can tell in advance: `confidence`
estimates for every slot how likely its token is accepted once all before it are, and the running product, the
*survival* `S[k]`, how likely slot `k` pays. The rule is the usual one of DSpark: slots are verified while `S[k]` is at
least a threshold, and at least one always is.

**Why the law of the output does not change.** Write `d[1], d[2], ...` for the drafted tokens, `q[k]` for the law that
`d[k]` was drawn from and `p[k]` for the target's law, both given the text and `d[1..k-1]`. Speculative sampling works
because the token that is tested has the law `q[k]`. It keeps working when the decision to test slot `k` says nothing
about `d[k]`: when it is a function of the past, of `d[1..k-1]` and of noise that `d[k]` does not use. Then

* where slot `k` is tested, `d[k]` still has the law `q[k]`, and test and residual turn it into `p[k]`;
* where the block ends before slot `k`, the token there is the target's own draw, from `p[k]`;

so the token at slot `k` has the law `p[k]` in either case, and the next slot starts from a text of the right law.

The signals used here obey that. The rows of a block are computed from committed tokens and masks, never from drafted
ones; the confidence of slot `k` is a function of row `k` and `d[k-1]`, or the largest entry of `q[k]`, whichever token
was drawn from it. The recent acceptance is that of earlier rounds. In a batch all rows verify as many slots as the one
that wants most, and the draws of one row say nothing about those of another.

What is *not* allowed is to look at the drawn token: with `p = q = (0.6, 0.4)`, leaving out slot 1 when token 2 was
drawn gives token 1 with probability `0.6 + 0.4 * 0.6`. Nor may the target's answer shorten a block.
"""

import torch

from .functional_dspark import survival


# Survival under which a slot is not verified when the caller gives no threshold. `benchmarks/verify_length.py` shows
# what it trades: with 0.1 hardly a token is lost, with more the rows fall faster than the tokens.
DEFAULT_THRESHOLD = 0.1
# Of the running sums that compare estimated with observed acceptance: what a round leaves of the earlier ones, and how
# many tests the estimate is trusted for before there is anything to compare.
_MEMORY = 0.9
_PRIOR_TESTS = 8.0


class VerifyLength:
    """
    The number of slots to verify, round by round, for one `generate` call.

    Args:
        threshold (`float`): Smallest survival of a slot that is verified.
        calibrates (`bool`): Whether confidences are scaled by the ratio of observed to estimated acceptance in recent
            rounds. For drafters whose confidence is the probability of their own walk and was never trained to be an
            acceptance rate.
    """

    def __init__(self, threshold: float = DEFAULT_THRESHOLD, *, calibrates: bool = False):
        self.threshold, self.calibrates = threshold, calibrates
        self._estimated = self._observed = _PRIOR_TESTS
        # Of the round that is going on, per row and slot.
        self._confidence: list[list[float]] = []

    @property
    def scale(self) -> float:
        """What confidences are multiplied by."""
        return self._observed / max(self._estimated, 1e-6) if self.calibrates else 1.0

    def choose(self, confidence: torch.Tensor, rows: list[int]) -> int:
        """
        Slots to verify in the next round; reads device memory once.

        Args:
            confidence (`torch.Tensor` of shape `(batch, slots)`): The drafter's estimates; NaN in an unusable row.
            rows (`list[int]`): Rows that are not finished.

        Returns:
            `int`: From 1 to `slots`, the same for all rows.
        """
        self._estimated, self._observed = _MEMORY * self._estimated, _MEMORY * self._observed
        counts = (survival(confidence * self.scale) >= self.threshold).sum(dim=-1, keepdim=True)
        packed = torch.cat([counts.float(), confidence.float()], dim=1).tolist()
        self._confidence = [row[1:] for row in packed]
        return max([1, *(int(packed[row][0]) for row in rows)])

    def observe(self, row: int, accepted: int, verified: int) -> None:
        """
        Learn from a row's round.

        Args:
            row (`int`): The row.
            accepted (`int`): Verified tokens that were accepted.
            verified (`int`): Tokens that were verified.
        """
        tested = min(accepted + 1, verified)
        self._estimated += sum(self._confidence[row][:tested])
        self._observed += accepted


__all__ = ["DEFAULT_THRESHOLD", "VerifyLength"]
