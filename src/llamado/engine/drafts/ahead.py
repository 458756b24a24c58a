"""Drafted tokens of one sequence that are on their way: nobody knows yet whether they are right."""

from __future__ import annotations

from collections import deque

from llamado.engine.drafts.contract import Draft


class Ahead:
    """What was drafted behind the end of a sequence, in order.

    As tokens are chosen each is compared with the first of these. Where one differs all behind it are wrong, whatever
    batch they are in: `epoch` tells batches that were started before from those after.
    """

    __slots__ = ("_waiting", "epoch", "judged", "n_accepted", "n_drafted", "n_moves")

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Draft, int]] = deque()
        self.epoch = 0
        self.n_moves = 0
        """How often cells had been moved when the last of them was started."""
        self.n_drafted = self.n_accepted = 0
        self.judged: list[tuple[Draft, int, bool]] = []
        """Drafts of which a token was found right or wrong, and its place in them, for whoever learns from it."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> list[int]:
        return [token for token, _, _ in self._waiting]

    @property
    def drafts(self) -> list[Draft]:
        """Those of the tokens, each once and in order."""
        return list(dict.fromkeys(draft for _, draft, _ in self._waiting))

    def add(self, draft: Draft) -> None:
        """It is evaluated, too."""
        self._waiting.extend((token, draft, place) for place, token in enumerate(draft.tokens))
        self.n_drafted += len(draft.tokens)

    def judge(self, token: int) -> bool:
        """A token was chosen: whether it is the one that was drafted; where it is not, all that was is dropped."""
        if not self._waiting:
            return False
        drafted, draft, place = self._waiting[0]
        right = drafted == token
        self.judged.append((draft, place, right))
        if not right:
            self.drop()
            return False
        self._waiting.popleft()
        draft.accepted += 1
        self.n_accepted += 1
        return True

    def drop(self) -> None:
        """None of them counts any more."""
        if self._waiting:
            self._waiting.clear()
            self.epoch += 1
