"""Vocabularies and walks for the tests of grammars."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.metadata import Metadata, StringArray
from llamado.text.grammar.compiler import Constraint, GrammarCompiler, Matcher
from llamado.text.grammar.source import GrammarSource, Trigger
from llamado.text.tokenizer.bpe import SPELLING
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)


def _metadata(tokens: list[tuple[str, int]], **extra: object) -> Metadata:
    values: dict[str, object] = {
        "tokenizer.ggml.tokens": StringArray.of([text for text, _ in tokens]),
        "tokenizer.ggml.token_type": np.array([kind for _, kind in tokens], np.int32),
    }
    return Metadata(values | {f"tokenizer.ggml.{key}": value for key, value in extra.items()})


@cache
def bytes_tokenizer() -> Tokenizer:
    """Byte pairs: every byte, a few words of JSON, control tokens, two of which end an answer."""
    merges = [
        "Ġ Ġ",
        '" :',
        ": Ġ",
        'Ġ "',
        "t r",
        "u e",
        "tr ue",
        '{ "',
        '" }',
        "l o",
        "lo l",
        "Ã ©",
        "ð Ł",
        "1 2",
        "a b",
    ]
    tokens = [(character, NORMAL) for character in SPELLING]
    tokens += [(merge.replace(" ", ""), NORMAL) for merge in merges]
    tokens += [(text, CONTROL) for text in SPECIAL]
    ids = {text: i for i, (text, _) in enumerate(tokens)}
    return load_tokenizer(
        _metadata(tokens, model="gpt2", pre="gpt-2", merges=StringArray.of(merges), eos_token_id=ids["<|im_end|>"])
    )


@cache
def pieces_tokenizer() -> Tokenizer:
    """SentencePiece: byte tokens, spaces as ▁, a space put in front of every text; thinking tags are plain text."""
    words = ["▁", "▁a", '{"', '":', "true", "▁the", "ab", "th", "ink", ">", "</", "<", "é", "x", "y", ">x", ">\n\n"]
    words += list('abcdefghijklmnopqrstuvwz0123456789{}[]:,.-_"')
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<end_of_turn>", CONTROL)]
    tokens += [(f"<0x{b:02X}>", BYTE) for b in range(256)]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(words))]
    tokens += [(word, NORMAL) for word in words]
    return load_tokenizer(_metadata(tokens, model="llama", scores=np.array(scores, np.float32)))


def bits(mask: NDArray[np.uint32] | None, n_vocab: int) -> list[int]:
    """The tokens that a mask allows."""
    if mask is None:
        return list(range(n_vocab))
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:n_vocab]).tolist()
    return found


def _has(mask: NDArray[np.uint32], token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


class Vocabulary:
    """A tokenizer with its compiler."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.compiler = GrammarCompiler(tokenizer)

    def constraint(self, kind: str, text: str, *triggers: Trigger, prompt: str = "") -> Constraint:
        source = GrammarSource(kind, text)  # type: ignore[arg-type]
        return self.compiler.compile(source, triggers=triggers, generation_prompt=prompt)

    def allowed(self, matcher: Matcher) -> list[int]:
        return bits(matcher.mask(), self.tokenizer.n_vocab)

    def may_end(self, matcher: Matcher) -> bool:
        mask = matcher.mask()
        return mask is None or any(_has(mask, token) for token in self.tokenizer.eog)

    def spell(self, text: str) -> list[int]:
        """Tokens of a text, control tokens among them, without a space in front."""
        tokens: list[int] = []
        for part in self.compiler.vocabulary.control_parts(text):
            if isinstance(part, str):
                tokens += self.compiler.vocabulary.spell_bytes(part.encode())
            else:
                tokens.append(part[1])
        return tokens

    def feed(self, matcher: Matcher, text: str) -> bool:
        """Generate a text; False where a mask excludes it."""
        for token in self.spell(text):
            mask = matcher.mask()
            if mask is not None and not _has(mask, token):
                return False
            matcher.accept(token)
        return True

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Return True if the whole text may be an answer."""
        matcher = constraint.start()
        return self.feed(matcher, text) and self.may_end(matcher)

    def walk(
        self, constraint: Constraint, random: random.Random, most: int = 300, *, special: bool = False
    ) -> str | None:
        """A random answer under a constraint; None where it did not end within `most` tokens.

        `special`: whether control tokens are part of its text.
        """
        matcher = constraint.start()
        out: list[int] = []
        for _ in range(most):
            allowed = self.allowed(matcher)
            n_ends = len(self.tokenizer.eog.intersection(allowed))
            if n_ends and (n_ends == len(allowed) or random.random() < 0.3):
                return self.tokenizer.join(out, special=special).decode()
            # Short tokens more often than there are, for answers that come to an end.
            token = random.choice(allowed)
            if random.random() < 0.5:
                token = min(random.choices(allowed, k=4), key=lambda t: len(self.tokenizer.piece(t)))
            if token in self.tokenizer.eog:
                continue
            matcher.accept(token)
            out.append(token)
        return None
