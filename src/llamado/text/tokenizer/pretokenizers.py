"""Pre-tokenizer rules: cut the text of a BPE vocabulary into words before merging, by `tokenizer.ggml.pre`.

A rule is a list of patterns. The first cuts the text into its matches and the stretches between them; each further one
cuts those pieces again and sees nothing beyond a piece's ends. Patterns over Unicode categories run on the output of
`unicode_classes.reduce`, which turns them into byte-sized character sets of llama.cpp's Unicode version; patterns with
characters beyond ASCII run on the text itself. The rules are those of the models' `tokenizer.json`, as far as llama.cpp
(`src/llama-vocab.cpp`) follows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.parts import PART_LENGTH, parts_of
from llamado.text.tokenizer.unicode_classes import LETTER, MARK, NUMBER, PUNCTUATION, SPACE, SYMBOL, WHITESPACE, reduce

# Members of character sets over a reduced text. Whitespace is [\t\n\v\f\r ]: no other is below U+0080.
_W = r"\t-\r "
_L = "A-Za-z" + LETTER
_UPPER = "A-Z" + LETTER  # the case of letters beyond ASCII is ignored
_LOWER = "a-z" + LETTER
_N = "0-9" + NUMBER
_P = r"!-#%-*,-/:;?@\[-\]_{}" + PUNCTUATION
_S = r"$+<->^`|~" + SYMBOL
_M = MARK
_HAN = "\x86"  # Chinese characters, if a rule separates them from other letters

_CONTRACTION = "'(?:[stmd]|re|ve|ll)"
_ANY_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_LAST_SPACE_ALONE = rf"[{_W}]+(?![^{_W}])|[{_W}]+"  # a run leaves its last space to the word after it
_NEWLINES = rf"[{_W}]*[\r\n]+"


def _gpt2(numbers: str = rf" ?[{_N}]+") -> str:
    return rf"{_CONTRACTION}| ?[{_L}]+|{numbers}| ?[^{_W}{_L}{_N}]+|{_LAST_SPACE_ALONE}"


def _llama3(
    *,
    contraction: str = _ANY_CONTRACTION + "|",
    letters: str = rf"[^\r\n{_L}{_N}]?[{_L}]+",
    numbers: str = rf"[{_N}]{{1,3}}",
    others: str = rf" ?[^{_W}{_L}{_N}]+[\r\n]*",
    newlines: str = _NEWLINES,
    spaces: str = _LAST_SPACE_ALONE,
) -> str:
    return rf"{contraction}{letters}|{numbers}|{others}|{newlines}|{spaces}"


def _cased(upper: str, lower: str, suffix: str, numbers: str) -> str:
    """o200k and tekken: a word ends where a lowercase letter precedes an uppercase one."""
    head = rf"[^\r\n{_L}{_N}]?"
    letters = rf"{head}[{upper}]*[{lower}]+{suffix}|{head}[{upper}]+[{lower}]*{suffix}"
    return _llama3(contraction="", letters=letters, numbers=numbers, others=rf" ?[^{_W}{_L}{_N}]+[\r\n/]*")


_GPT2 = _gpt2()
# The single-digit rule and GPT-2's as one: a run of whitespace before a digit keeps its last space.
_SMOLLM = rf"[{_N}]|{_CONTRACTION}| ?[{_L}]+| ?[^{_W}{_L}{_N}]+|[{_W}]+(?![^{_W}{_N}])|[{_W}]+"
_LLAMA3 = _llama3()
_QWEN2 = _llama3(numbers=f"[{_N}]")
_LETTERS_AND_MARKS = rf"[^\r\n{_L}{_N}]?[{_L}{_M}]+(?:{_ANY_CONTRACTION})?"
_DEEPSEEK3 = (
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n{_L}{_P}{_S}]?[{_L}{_M}]+| ?[{_P}{_S}]+[\r\n]*|{_NEWLINES}|{_LAST_SPACE_ALONE}"
)
_SPARK = _DEEPSEEK3.replace(rf"[{_P}{_S}]+[\r\n]*|{_NEWLINES}", rf"[{_P}{_S}]+|[\r\n]")
_CASCADE = "|".join(rf"[{_W}]{{{n}}}(?![^{_W}])" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + rf"|[{_W}]"

# Patterns over the text itself. As in llama.cpp, whitespace beyond ASCII counts as whitespace.
_CJK = "[一-龥ࠀ-一가-퟿]+"
_CJK_KANA = "[一-龥぀-ゟ゠-ヿ]+"
# Cased letters of Latin, Greek, Cyrillic and related scripts. Escaped, since several change under normalization.
_EUROPEAN = (
    rf"[{_W}]?["
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    r"\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    r"\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    r"\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    r"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    r"]+"
)
_ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_SENTENCE = rf" ?[^({_W}|.,!?…。，、।۔،)]+"

# Unicode blocks, not scripts (llama.cpp's unicode_cpt_is_han).
_HAN_RUN = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef\U0002f800-\U0002fa1f]+"
)

_BEYOND_ASCII_SPACE = dict.fromkeys(WHITESPACE, SPACE)


class _Splitter(Protocol):
    @property
    def reduced(self) -> bool:
        """True if it uses the reduced text."""
        ...

    def spans(self, subject: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield borders to cut at inside a piece, ascending; a span may be empty."""
        ...


@dataclass(frozen=True)
class _Pattern:
    source: str
    reduced: bool

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.source)

    def spans(self, subject: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return (match.span() for match in self.compiled.finditer(subject, start, stop))


@dataclass(frozen=True)
class _SpaceAtEnd:
    """Whitespace that ends a piece (as a pattern, it would take n² steps to fail)."""

    reduced: bool = True

    def spans(self, subject: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        kept = len(subject[start:stop].rstrip("\t\n\v\f\r "))
        if start + kept < stop:
            yield start + kept, stop


@dataclass(frozen=True)
class _Triples:
    """Cuts runs of digits into threes from the right; with `open_start`, text before a run stays with its first
    digits.
    """

    digits: str
    reduced: bool
    open_start: bool

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(f"[{self.digits}]+")

    def spans(self, subject: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for match in self.compiled.finditer(subject, start, stop):
            first, last = match.span()
            if self.open_start:
                places = range(last, first, -3)
            else:
                places = range(last - 3, first - 1, -3)
            yield from ((place, place) for place in reversed(places))


def _classes(source: str) -> _Pattern:
    return _Pattern(source, True)


def _literal(source: str) -> _Pattern:
    return _Pattern(source, False)


@dataclass(frozen=True)
class PreTokenizer:
    """One rule and the flags that llama.cpp ties to its name: `words(text)` cuts, the flags affect the rest of the
    tokenizer.
    """

    cutters: tuple[_Splitter, ...]
    ignore_merges: bool = False  # a word that is in the vocabulary is one token
    add_bos: bool = False
    add_sep: bool = False
    clean_spaces: bool = True
    no_bos: bool = False  # the vocabulary has no beginning-of-sequence token unless the file has its id
    byte_encode: bool = True  # False: spaces are written ▁ and unknown characters as <0xXX>, as in SentencePiece
    newlines_whole: bool = False  # a run of line feeds that is in the vocabulary is one token
    han: bool = False  # Chinese characters are a separate class
    whole: _Pattern | None = None  # the only cutter, if it is a pattern that leaves no character out

    def words(self, text: str) -> list[str]:
        """Cut `text` into its words, in order and without loss."""
        reduced = self._reduced(text)
        if self.whole:
            pattern = self.whole.compiled
            if reduced is text or not self.whole.reduced:
                return pattern.findall(text)
            return [text[m.start() : m.end()] for m in pattern.finditer(reduced)]
        return list(self._pieces(text, reduced))

    def each_word(self, text: str) -> Iterable[str]:
        """Cut like `words`, but long texts one word at a time, so that other threads may run in between."""
        if len(text) <= PART_LENGTH:
            return self.words(text)
        reduced = self._reduced(text)
        if self.whole is None:
            return self._pieces(text, reduced)
        subject = reduced if self.whole.reduced else text
        return (text[m.start() : m.end()] for m in self.whole.compiled.finditer(subject))

    def _reduced(self, text: str) -> str:
        reduced = reduce(text)
        if not self.han or reduced is text:
            return reduced
        parts, end = [], 0
        for match in _HAN_RUN.finditer(text):
            parts += [reduced[end : match.start()], _HAN * (match.end() - match.start())]
            end = match.end()
        return "".join([*parts, reduced[end:]])

    def _pieces(self, text: str, reduced: str) -> Iterator[str]:
        literal = text
        if reduced is not text:
            literal = "".join(part.translate(_BEYOND_ASCII_SPACE) for part in parts_of(text))
        ends = [0, len(text)]
        for cutter in self.cutters:
            ends = _cut(cutter, reduced if cutter.reduced else literal, ends)
        return (text[a:b] for a, b in pairwise(ends))


def _cut(cutter: _Splitter, subject: str, ends: list[int]) -> list[int]:
    """Cut each piece between successive `ends` at the borders of the spans inside it."""
    cuts = [0]
    for start, stop in pairwise(ends):
        for span in cutter.spans(subject, start, stop):
            for place in span:
                if place > cuts[-1]:
                    cuts.append(place)
        if stop > cuts[-1]:
            cuts.append(stop)
    return cuts


def _rule(*cutters: _Splitter, covers: bool = False, **flags: bool) -> PreTokenizer:
    """Return a rule; `covers`: its only pattern leaves no character out."""
    whole = cutters[0] if covers else None
    assert whole is None or isinstance(whole, _Pattern)
    return PreTokenizer(cutters, whole=whole, **flags)


_GPT2_RULE = _rule(_classes(_GPT2), covers=True)
_SMOLLM_RULE = _rule(_classes(_SMOLLM), covers=True)
_LLAMA3_RULE = _rule(_classes(_LLAMA3), covers=True)
_QWEN2_RULE = _rule(_classes(_QWEN2), covers=True)
_DEEPSEEK3_RULE = _rule(_classes(f"[{_N}]{{1,3}}"), _literal(_CJK_KANA), _classes(_DEEPSEEK3), clean_spaces=False)
_O200K_RULE = _rule(
    _classes(_cased(_UPPER, _LOWER, f"(?:{_ANY_CONTRACTION})?", f"[{_N}]{{1,3}}")), covers=True, clean_spaces=False
)
_BLOOM_RULE = _rule(_literal(_SENTENCE))
_LINES_RULE = _rule(_literal(r"[^\n]+|\n+"), covers=True, byte_encode=False, newlines_whole=True)
_BAILING_RULE = _rule(_classes(_llama3(numbers=f"[{_N}]", newlines=rf"[{_W}]*[\r\n]")), covers=True, clean_spaces=False)
_DEFAULT_RULE = _rule(_classes(rf"[{_P}$+<=>^~|]+"), _classes(_GPT2), _classes(f"[{_N}]+"), _literal("[0-9][0-9][0-9]"))

_RULES: dict[tuple[str, ...], PreTokenizer] = {
    ("", "default"): _DEFAULT_RULE,
    (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ): replace(_LLAMA3_RULE, ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe"): _LLAMA3_RULE,
    ("chatglm-bpe",): replace(_LLAMA3_RULE, no_bos=True),
    ("glm4", "glm5"): replace(_LLAMA3_RULE, no_bos=True, ignore_merges=True),
    ("jais-2",): _rule(_classes(_llama3(spaces=_CASCADE)), covers=True),
    ("minicpm5",): _rule(_classes(f"[{_N}]{{1,3}}"), _classes(_llama3(numbers=f"[{_N}]+")), ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"): replace(
        _QWEN2_RULE, clean_spaces=False
    ),
    ("stablelm2", "megrez"): _QWEN2_RULE,
    ("qwen35",): _rule(
        _classes(
            _llama3(
                letters=rf"[^\r\n{_L}{_N}]?[{_L}{_M}]+",
                numbers=f"[{_N}]",
                others=rf" ?[^{_W}{_L}{_M}{_N}]+[\r\n]*",
            )
        ),
        covers=True,
        clean_spaces=False,
    ),
    ("ufakzeka",): _rule(_classes(_llama3(contraction="", numbers=f"[{_N}]")), covers=True, clean_spaces=False),
    ("seed-coder",): _rule(
        _classes(_llama3(numbers=f"[{_N}]", others=rf" ?[^{_W}{_L}{_N}]+")), covers=True, clean_spaces=False
    ),
    ("laguna",): _rule(_literal(r"[^\n]+|\n+"), _classes(_QWEN2), clean_spaces=False),
    ("bailingmoe", "bailingmoe2", "llada-moe"): _BAILING_RULE,
    ("exaone-moe",): _rule(
        _classes(
            _llama3(
                letters=rf"[^\r\n{_L}{_N}]?(?:[{_L}][{_M}]*(?: [{_L}][{_M}]*)*)+",
                numbers=f"[{_N}]",
                others=rf" ?[^{_W}{_L}{_N}]+[\r\n/]?",
                newlines=rf"[{_W}]*[\r\n]",
            )
        ),
        covers=True,
    ),
    (
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "gigachat",
        "jina-v2-es",
        "jina-v2-de",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "mpt",
        "olmo",
        "jais",
        "exaone4",
    ): _GPT2_RULE,
    ("trillion", "granite-docling"): replace(_GPT2_RULE, clean_spaces=False),
    ("jina-v1-en", "jina-v2-code", "roberta-bpe"): replace(_GPT2_RULE, add_sep=True),
    ("smollm", "command-r"): replace(_SMOLLM_RULE, clean_spaces=False),
    ("starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"): _SMOLLM_RULE,
    ("falcon",): _rule(_classes(rf"[{_P}$+<=>^~|`]+"), _classes(_GPT2), _literal("[0-9][0-9][0-9]")),
    ("poro-chat",): replace(_BLOOM_RULE, clean_spaces=False),
    ("bloom", "gpt3-finnish"): _BLOOM_RULE,
    ("viking",): _rule(_literal(_SENTENCE), _classes(f"[{_N}]"), clean_spaces=False),
    ("deepseek-llm",): _rule(
        _literal(r"[\r\n]"),
        _literal(_EUROPEAN),
        _literal(rf"[{_W}]?[!-/:-~！-／：-～‘-‟　-。]+"),
        _SpaceAtEnd(),
        _literal(_CJK),
        _classes(f"[{_N}]+"),
        clean_spaces=False,
    ),
    ("deepseek-coder",): _rule(
        _literal(r"[\r\n]"),
        _classes(rf"[{_W}]?[{_L}]+"),
        _classes(rf"[{_W}]?[{_P}]+"),
        _literal(_CJK),
        _classes(f"[{_N}]"),
        clean_spaces=False,
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3_RULE,
    ("kimi-k2",): _rule(
        _classes(
            _llama3(
                contraction=f"{_HAN}+|",
                letters=rf"[^\r\n{_L}{_N}{_HAN}]?[{_L}]+(?:{_ANY_CONTRACTION})?",
                others=rf" ?[^{_W}{_L}{_N}{_HAN}]+[\r\n]*",
            )
        ),
        covers=True,
        clean_spaces=False,
        han=True,
    ),
    ("spark2_5",): _rule(
        _classes(f"[{_N}]{{1,3}}"), _literal(_CJK_KANA), _classes(_SPARK), _classes(f"[{_N}]"), clean_spaces=False
    ),
    ("youtu",): _rule(
        _literal(f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CJK_KANA}"),
        _classes(
            _llama3(
                contraction="",
                letters=_LETTERS_AND_MARKS,
                numbers=f"[{_N}]",
                others=rf" ?[^{_W}{_L}{_N}]+[\r\n/]*",
            )
        ),
        clean_spaces=False,
        ignore_merges=True,
    ),
    ("tekken",): _rule(
        _classes(_cased(_UPPER, _LOWER, "", f"[{_N}]")),
        covers=True,
        clean_spaces=False,
        ignore_merges=True,
        add_bos=True,
    ),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _O200K_RULE,
    ("granite-embed-multi-97m",): _rule(
        _classes(_cased(_UPPER + _M, _LOWER + _M, f"(?:{_ANY_CONTRACTION})?", f"[{_N}]{{1,3}}")),
        covers=True,
        clean_spaces=False,
        ignore_merges=True,
    ),
    ("superbpe",): _rule(_classes(f"[{_N}]+"), _Triples("0-9", False, False), clean_spaces=False),
    ("tiny_aya", "cohere2moe"): _rule(
        _Triples(_N, True, True),
        _classes(
            _llama3(
                contraction="",
                letters=_LETTERS_AND_MARKS,
                numbers=f"[{_N}]{{1,3}}",
                others=rf" ?[^{_W}{_L}{_N}]+[\r\n/]*",
            )
        ),
        clean_spaces=False,
    ),
    ("afmoe",): _rule(_Triples(_N, True, True), _literal(_ASIAN), _classes(_DEEPSEEK3), clean_spaces=False),
    ("chameleon",): _rule(
        _literal("<sentinel:[0-9]+>"),
        _literal("IMGIMG[A-I]{1,4}Z"),
        _literal(r"[\t\n]|    |  "),
        _classes(f"[{_N}]"),
        _classes(rf"[{_P}!-/:-@\[-`{{-~]"),
        _classes(_GPT2),
        add_bos=True,
        clean_spaces=False,
    ),
    ("gemma4", "granite-embed-multi-311m"): _LINES_RULE,
    ("sarvam-moe",): replace(_LINES_RULE, clean_spaces=False, newlines_whole=False),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for names, rule in _RULES.items() for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the rule for a value of `tokenizer.ggml.pre`; raises `TokenizerError` for an unknown one."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(n for n in PRE_TOKENIZERS if n))
        raise TokenizerError(
            f"pre-tokenizer '{name}' (tokenizer.ggml.pre) is not supported; supported: {known}"
        ) from None
