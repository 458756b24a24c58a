"""Suffix drafter: propose the tokens that followed the longest matching suffix, in this sequence or in earlier outputs.

A suffix automaton (Blumer et al. 1985; as a source of drafts: SAM decoding, Hu et al. 2024, and suffix decoding, Oliaro
et al. 2024) finds that suffix in constant time per token, independent of the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamado.engine.drafts.contract import NO_PROPOSAL, Drafter, DraftKind, Proposal

_CLASSES = (1, 2, 3, 4, 6, 9, 13, 21, 34)  # least matching tokens of each mark
_FIRST_GUESSES = (0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
_SHARED = 100  # added to the marks of matches in earlier outputs
_UPWARDS = 24  # states of shorter suffixes whose last position is updated with each token
_TOKENS = 1 << 16  # tokens of earlier outputs in each of two automata; a token takes some 400 bytes there
_LONGEST = 1 << 15  # most tokens of a sequence that are indexed
_CATCH_UP = 4096  # most tokens that are read in a step: some milliseconds


class SuffixAutomaton:
    """All substrings of a text, and the last end of each.

    States are numbers; state 0 is the empty substring. The substrings of a state all end at the same positions, and the
    longest has `length[state]` tokens. `link[state]` is the state of its longest suffix that also ends elsewhere.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.length = [0]
        self.link = [-1]
        self.last_end = [0]
        """End of the last occurrence of a state's substrings, in tokens of the text, except at the text's own end."""
        self._whole = 0

    def append(self, token: int) -> None:
        """Append a token to the text."""
        next_, length, link, last_end = self.next, self.length, self.link, self.last_end
        state, end = self._whole, len(self.text)
        for _ in range(_UPWARDS):
            if state <= 0:
                break
            last_end[state] = end
            state = link[state]
        self.text.append(token)
        new = len(length)
        length.append(end + 1)
        next_.append({})
        link.append(0)
        last_end.append(end + 1)
        state = self._whole
        while state >= 0 and token not in next_[state]:
            next_[state][token] = new
            state = link[state]
        if state >= 0:
            other = next_[state][token]
            if length[other] == length[state] + 1:
                link[new] = other
            else:
                link[new] = self._split(state, other, token)
                link[other] = link[new]
        self._whole = new

    def _split(self, state: int, other: int, token: int) -> int:
        """Make a state for the shorter substrings of `other`, which end at one more position."""
        clone = len(self.length)
        self.length.append(self.length[state] + 1)
        self.next.append(dict(self.next[other]))
        self.link.append(self.link[other])
        self.last_end.append(self.last_end[other])
        while state >= 0 and self.next[state].get(token) == other:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def repeated(self) -> tuple[int, int]:
        """Return the state and length of the longest suffix of the text that occurred before."""
        state = max(self.link[self._whole], 0)
        return state, self.length[state]

    def follow(self, state: int, n: int, token: int) -> tuple[int, int]:
        """Extend a match with another text by one token: from `n` tokens in `state` to the new state and length."""
        while state > 0 and self.length[self.link[state]] >= n:  # the state was split since
            state = self.link[state]
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            n = self.length[state]
        found = self.next[state].get(token)
        return (0, 0) if found is None else (found, n + 1)


def _mark(n: int) -> int:
    return sum(n >= least for least in _CLASSES)


def _continued(automaton: SuffixAutomaton, state: int, n: int, most: int, base: int) -> Proposal:
    """Propose the tokens that followed a match of `n` tokens; past the end of the text the proposal repeats itself."""
    text = automaton.text
    while state > 0 and automaton.last_end[state] == len(text):  # nothing followed yet
        state = automaton.link[state]
        n = automaton.length[state]
    if state <= 0:
        return NO_PROPOSAL
    at = automaton.last_end[state]
    tokens = text[at : at + most]
    for k in range(most - len(tokens)):
        tokens.append(tokens[k])
    return Proposal(tokens, [base + _mark(n + k) for k in range(len(tokens))])


class _OutputHistory:
    """The newest outputs of an engine, in two automata; the older is dropped when the newer is full."""

    def __init__(self) -> None:
        self.old: SuffixAutomaton | None = None
        self.new = SuffixAutomaton()
        self._n_texts = 0

    def add(self, tokens: Sequence[int]) -> None:
        if len(self.new.text) + len(tokens) >= _TOKENS:
            self.old, self.new = self.new, SuffixAutomaton()
        self._n_texts += 1
        for token in tokens[-_TOKENS:]:
            self.new.append(token)
        self.new.append(-self._n_texts)  # a separator: no match extends into the next text


class _Match:
    """The end of a sequence in one of those automata."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state = self.n = 0

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.state, self.n = self.automaton.follow(self.state, self.n, token)

    def propose(self, ahead: Sequence[int], most: int) -> Proposal:
        state, n = self.state, self.n
        for token in ahead:
            state, n = self.automaton.follow(state, n, token)
        while state > 0 and self.automaton.length[self.automaton.link[state]] >= n:
            state = self.automaton.link[state]
        found = _continued(self.automaton, state, n, most, _SHARED)
        whole = next((k for k, token in enumerate(found.tokens) if token < 0), most)  # another text begins
        return Proposal(found.tokens[:whole], found.marks[:whole])


class _SuffixDrafter(Drafter):
    def __init__(self, shared: _OutputHistory | None) -> None:
        self._shared = shared
        self.forget()

    def forget(self) -> None:
        self._own = SuffixAutomaton()
        self._skipped = -1
        self._matches: list[_Match] = []
        self._followed = 0

    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        if self._skipped < 0 or len(self._own.text) >= 2 * _LONGEST:
            self._own = SuffixAutomaton()
            self._skipped = max(0, len(history) - _LONGEST)
        own = self._own
        known = self._skipped + len(own.text)
        for token in history[known : known + _CATCH_UP]:
            own.append(token)
        if self._skipped + len(own.text) < len(history):
            return NO_PROPOSAL
        state, n = own.repeated()
        for token in ahead:
            state, n = own.follow(state, n, token)
        found = _continued(own, state, n, most, 0)
        if self._shared is None:
            return found
        best = found
        for match in self._find(history):
            other = match.propose(ahead, most)
            if other.tokens and (not best.tokens or other.marks[0] % _SHARED > best.marks[0] % _SHARED):
                best = other
        return best

    def _find(self, history: Sequence[int]) -> list[_Match]:
        """Return the matches of the sequence's end in earlier outputs."""
        assert self._shared is not None
        automata = [a for a in (self._shared.new, self._shared.old) if a is not None and a.text]
        if [match.automaton for match in self._matches] != automata:
            self._matches = [_Match(automaton) for automaton in automata]
            self._followed = max(0, len(history) - _CLASSES[-1])
        for match in self._matches:
            match.follow(history[self._followed :])
        self._followed = len(history)
        return self._matches

    def end(self, history: Sequence[int], n_prompt: int) -> None:
        if self._shared is not None and len(history) > n_prompt:
            # include the end of the prompt as context of the answer
            self._shared.add(history[max(0, n_prompt - _CLASSES[-1]) :])


class Suffix(DraftKind):
    """`shared`: True to use the outputs of other sequences, too."""

    name = "suffix"

    def __init__(self, *, shared: bool = True) -> None:
        self._shared = _OutputHistory() if shared else None

    def first_guess(self, mark: int) -> float:
        """Longer matches are accepted more often."""
        return _FIRST_GUESSES[min(mark % _SHARED, len(_FIRST_GUESSES)) - 1]

    def drafter(self) -> Drafter:
        return _SuffixDrafter(self._shared)
