"""Draft tokens of one sequence that are being evaluated."""

from __future__ import annotations

from collections import deque

from llamado.engine.drafts.contract import Draft


class PendingDraft:
    """The draft tokens behind the end of a sequence that are in flight, in order.

    Each chosen token is compared with the first of these. If it differs, all draft tokens behind it are wrong, in every
    batch. `epoch` separates batches that were started before such a mismatch from later ones.
    """

    __slots__ = ("_waiting", "epoch", "judged", "n_accepted", "n_drafted", "n_moves")

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Draft, int]] = deque()
        self.epoch = 0
        self.n_moves = 0
        """Number of cell moves when the last of them was started."""
        self.n_drafted = self.n_accepted = 0
        self.judged: list[tuple[Draft, int, bool]] = []
        """Accepted and rejected draft tokens, as (draft, position in it, accepted), for `DraftManager.learn`."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> list[int]:
        return [token for token, _, _ in self._waiting]

    @property
    def drafts(self) -> list[Draft]:
        """The drafts of these tokens, each once and in order."""
        return list(dict.fromkeys(draft for _, draft, _ in self._waiting))

    def add(self, draft: Draft) -> None:
        """Add a draft that is being evaluated."""
        self._waiting.extend((token, draft, place) for place, token in enumerate(draft.tokens))
        self.n_drafted += len(draft.tokens)

    def verify(self, token: int) -> bool:
        """Return True if the chosen token is the drafted one; otherwise drop all draft tokens."""
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
        """Drop all draft tokens."""
        if self._waiting:
            self._waiting.clear()
            self.epoch += 1
