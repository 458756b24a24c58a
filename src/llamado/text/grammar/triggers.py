"""What starts a lazy grammar, made ready for one vocabulary; patterns only of a size that is known before compiling."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import regex  # type: ignore[import-untyped]

from llamado.text.grammar.source import GrammarError, Trigger
from llamado.text.grammar.vocabulary import GuidedVocabulary

MAX_TRIGGERS = 64
MAX_PATTERN = 2_000  # characters
MAX_NODES = 10_000  # of all patterns of a request together, some 100 bytes each

_compiling = threading.Lock()  # one pattern at a time: so that many of them keep no more than one core

_PIECE = re.compile(
    r"""
    (?P<class>\[\^?\]?(?:\\.|\[:\^?\w+:\]|\[(?!:)|[^\\\[\]])*+\])
    | (?P<open>\((?!\*|\?(?!:|=|!|<=|<!|<[A-Za-z_]\w*+>))(?:\?(?:<?[=!]|:|<\w++>))?)
    | (?P<close>\))
    | \{(?P<least>[0-9]*+)(?P<more>,(?P<most>[0-9]*+))?+(?<!\{)\}
    | (?P<repeat>[*+?])
    | (?P<alternative>\|)
    | (?P<atom>\\.|[^\\(\[])
    """,
    re.VERBOSE | re.DOTALL,
)


class Triggers:
    """Triggers made ready for one vocabulary. Raises GrammarError."""

    def __init__(self, triggers: Sequence[Trigger], vocabulary: GuidedVocabulary) -> None:
        if len(triggers) > MAX_TRIGGERS:
            raise GrammarError(f"{len(triggers)} grammar triggers are too many; at most {MAX_TRIGGERS} are allowed")
        self.tokens: set[int] = set()
        self.words: list[bytes] = []
        self.patterns: list[regex.Pattern[str]] = []
        nodes = 0
        for trigger in triggers:
            if trigger.kind == "pattern":
                nodes += pattern_nodes(trigger.value)
                if nodes > MAX_NODES:
                    raise GrammarError(
                        f"the grammar trigger {_shown(trigger.value)} has too many repeated parts: written out, the "
                        f"patterns of a request may have {MAX_NODES} nodes; repeat less, or fewer times"
                    )
                self.patterns.append(_compiled(trigger.value))
            elif trigger.kind == "token":
                self.tokens.add(_token(trigger, vocabulary))
            elif trigger.value:
                self.words.append(trigger.value.encode("utf-8", "replace"))
            else:
                raise GrammarError("a grammar trigger is empty; give the word that starts the grammar")
        self.reach = max(map(len, self.words), default=1) - 1
        """How many bytes before a token a word that ends in it may begin."""


def pattern_nodes(pattern: str) -> int:
    """The nodes `regex` makes of a pattern: characters, classes and groups, repeated parts each time they are repeated.

    What is repeated at least n times is written out n times, and once more where it may be repeated on. Raises
    GrammarError for what ECMAScript's expressions do not have either, look-behind and named groups apart.
    """
    if len(pattern) > MAX_PATTERN:
        raise GrammarError(f"a grammar trigger of {len(pattern)} characters is too long; at most {MAX_PATTERN}")
    around: list[int] = []  # nodes before each group that is open
    nodes = last = at = 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if piece is None:
            raise GrammarError(f"the grammar trigger {_shown(pattern)} is not supported from {_shown(pattern[at:])} on")
        at = piece.end()
        if piece["open"]:
            around.append(nodes)
            nodes = last = 0
        elif piece["close"]:
            if not around:
                raise GrammarError(f"the grammar trigger {_shown(pattern)} closes a group that was not opened")
            last = nodes + 1
            nodes = around.pop() + last
        elif piece["least"] is not None and (piece["least"] or piece["more"]):
            least = int(piece["least"][:9] or 0)
            times = max(1, least + (piece["more"] is not None and piece["most"] != piece["least"]))
            nodes += last * (times - 1)
            last *= times
        elif piece["repeat"]:
            if piece["repeat"] == "+":
                nodes += last
                last *= 2
        elif piece["alternative"]:
            nodes += 1
            last = 0
        else:
            last = len(piece[0])
            nodes += last
    return nodes


def _compiled(pattern: str) -> regex.Pattern[str]:
    source = pattern
    if len(source) > 1 and source.startswith("^") and source.endswith("$") and not source.endswith("\\$"):
        source = source[:-1] + r"\Z"  # ECMAScript's $ does not look past a final line feed
    try:
        with _compiling:
            try:
                return regex.compile(source, cache_pattern=False)
            finally:
                regex.purge()  # it remembers something of each pattern nevertheless
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise GrammarError(f"the grammar trigger {_shown(pattern)} is no regular expression: {error}") from None


def _shown(pattern: str) -> str:
    return repr(pattern[:200])


def _token(trigger: Trigger, vocabulary: GuidedVocabulary) -> int:
    if 0 <= trigger.token < vocabulary.tokenizer.n_vocab:
        return trigger.token
    tokens = vocabulary.spell(trigger.value)
    if len(tokens) != 1:
        raise GrammarError(f"the grammar trigger {trigger.value!r} is not one token of this model; use a word instead")
    return tokens[0]
