"""Tokenizing of prompts in all shapes of llama-server: text, tokens, both mixed, objects, and arrays of them.

Prompts with pictures and sounds get the ids of their media, which are below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamado.media.chunks import MediaPrompt, Piece
from llamado.media.chunks import tokenize as tokenize_media
from llamado.server.errors import invalid, too_long
from llamado.server.generate.json_values import type_name
from llamado.server.media.parts import ChatMedia, PreparedMedia, PromptMedia
from llamado.server.model import ServedModel, ServedTokenizer

# Most characters of one text. A prompt of a million tokens has about half as many. A single word of this length, which
# only a hostile client sends, takes a minute to tokenize.
MOST_TEXT = 1 << 23

_SHAPES = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, or a list of '
    "mixed strings & tokens."
)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def encode(text: str, tokenizer: ServedTokenizer, *, add_special: bool, parse_special: bool) -> list[int]:
    """Return the tokens of a text. Raises ApiError for more than MOST_TEXT characters."""
    if len(text) > MOST_TEXT:
        raise invalid(f"a text of {len(text)} characters is too long; at most {MOST_TEXT} are allowed")
    return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)


def tokenize_mixed(content: Any, tokenizer: ServedTokenizer, *, add_special: bool, parse_special: bool) -> list[int]:
    """Return the tokens of a string, or of a list of strings and tokens. Raises ApiError.

    `add_special` affects only a string at the beginning.
    """
    if isinstance(content, str):
        return encode(content, tokenizer, add_special=add_special, parse_special=parse_special)
    if not isinstance(content, list):
        raise invalid(f"type must be string, but is {type_name(content)}")
    tokens: list[int] = []
    for i, item in enumerate(content):
        if isinstance(item, str):
            tokens += encode(item, tokenizer, add_special=add_special and i == 0, parse_special=parse_special)
        elif isinstance(item, (int, float)):
            tokens.append(int(item))
        else:
            raise invalid(f"type must be number, but is {type_name(item)}")
    return tokens


def _with_media(text: str, media: Sequence[PreparedMedia], marker: str, tokenizer: ServedTokenizer) -> MediaPrompt:
    """Return the tokens of a text in which each marker stands for the next of `media`. Raises ApiError."""

    def encode_part(text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return encode(text, tokenizer, add_special=add_special, parse_special=parse_special)

    bos = tokenizer.bos if tokenizer.add_bos else None
    eos = tokenizer.eos if tokenizer.add_eos else None
    try:
        return tokenize_media(text, media, encode_part, tokenizer.find, _pieces, bos=bos, eos=eos, marker=marker)
    except ValueError as error:
        raise invalid(f"Failed to tokenize prompt: {error}; /props has the marker (media_marker)") from None


def _pieces(media: PreparedMedia) -> Sequence[Piece]:
    return media.pieces


def _tokenize_one(prompt: Any, tokenizer: ServedTokenizer, marker: str) -> MediaPrompt:
    if isinstance(prompt, PromptMedia):
        return _with_media(prompt.text, prompt.prepared, marker, tokenizer)
    tokens = _tokens_of(prompt, tokenizer)
    _check_tokens(tokens, tokenizer)
    return MediaPrompt(tokens)


def _tokens_of(prompt: Any, tokenizer: ServedTokenizer) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt, tokenizer, add_special=True, parse_special=True)
    if isinstance(prompt, list):
        if all(_is_int(item) for item in prompt):
            return list(prompt)
        if any(_is_int(item) for item in prompt) and any(isinstance(item, str) for item in prompt):
            return tokenize_mixed(prompt, tokenizer, add_special=True, parse_special=True)
    elif isinstance(prompt, dict) and "prompt_string" in prompt:
        if prompt.get("multimodal_data") is not None:
            raise invalid("Multimodal data provided, but model does not support multimodal requests.")
        return tokenize_mixed(prompt["prompt_string"], tokenizer, add_special=True, parse_special=True)
    raise invalid(_SHAPES)


def tokenize_prompts(prompt: Any, tokenizer: ServedTokenizer, *, most: int, marker: str = "") -> list[MediaPrompt]:
    """Return the tokens of each prompt of a request; `marker`: that of prompts with media.

    Raises ApiError for a wrong shape, more than `most` prompts, or a token outside the vocabulary.
    """
    if isinstance(prompt, list) and not any(_is_int(item) for item in prompt):
        if len(prompt) > most:
            raise invalid(f"{len(prompt)} prompts in one request; at most {most} are allowed")
        prompts = [_tokenize_one(item, tokenizer, marker) for item in prompt]
    else:
        prompts = [_tokenize_one(prompt, tokenizer, marker)]
    if not prompts:
        raise invalid('"prompt" must not be empty')
    return prompts


def _check_tokens(tokens: Sequence[int], tokenizer: ServedTokenizer) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < tokenizer.n_vocab):
        raise invalid("Prompt contains invalid tokens")


def prompts_in_context(prompt: Any, served: ServedModel, *, most: int) -> list[MediaPrompt]:
    """Tokenize as `tokenize_prompts`. Raises ApiError for a prompt that does not fit into the context, too."""
    for item in prompt if isinstance(prompt, list) else [prompt]:
        _check_length(_n_characters(item), served)
    found = tokenize_prompts(prompt, served.tokenizer, most=most, marker=served.media_marker)
    return [_in_context(one, served) for one in found]


def chat_in_context(
    prompt: str, served: ServedModel, prefix: Sequence[int] = (), media: ChatMedia | None = None
) -> MediaPrompt:
    """Return the tokens of a rendered chat behind those of `prefix`. Raises ApiError if the context is too small."""
    if prefix:
        if media is not None and media.references:
            raise invalid("pictures cannot follow a context: send all messages to /api/chat")
        _check_tokens(prefix, served.tokenizer)
        more = encode(prompt, served.tokenizer, add_special=False, parse_special=True)
        return _in_context(MediaPrompt([*prefix, *more]), served)
    return _in_context(tokenize_chat(prompt, served, media), served)


def tokenize_chat(prompt: str, served: ServedModel, media: ChatMedia | None = None) -> MediaPrompt:
    """Return the tokens of a rendered chat, also if they do not fit into the context. Raises ApiError."""
    _check_length(len(prompt), served)
    if media is None or not media.references:
        return MediaPrompt(encode(prompt, served.tokenizer, add_special=True, parse_special=True))
    n = prompt.count(media.marker)
    if n != len(media.references):
        raise invalid(
            f"the chat template shows {n} of {len(media.references)} pictures and sounds: put them into the last "
            "message of the user"
        )
    return _with_media(prompt, media.prepared, media.marker, served.tokenizer)


def prompt_text(prompt: MediaPrompt, tokenizer: ServedTokenizer, marker: str) -> str:
    """Return a prompt as text, with `marker` for each of its media chunks."""
    texts: list[str] = []
    at = 0
    for span in (*prompt.spans, None):
        stop = len(prompt.tokens) if span is None else span.start
        texts.append(tokenizer.decode(prompt.tokens[at:stop], special=True))
        if span is not None:
            texts.append(marker)
            at = span.stop
    return "".join(texts)


def _in_context(prompt: MediaPrompt, served: ServedModel) -> MediaPrompt:
    if len(prompt.tokens) >= served.info.n_ctx:
        raise too_long(len(prompt.tokens), served.info.n_ctx)
    return prompt


def _n_characters(prompt: Any) -> int:
    """Return the number of characters of text in a prompt of any shape."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, PromptMedia):
        return len(prompt.text)
    if isinstance(prompt, dict):
        return _n_characters(prompt.get("prompt_string"))
    return sum(len(item) for item in prompt if isinstance(item, str)) if isinstance(prompt, list) else 0


def _check_length(n_characters: int, served: ServedModel) -> None:
    """Raise ApiError for a text that cannot fit into the context, before tokenizing it, which may take a minute."""
    n_ctx = served.info.n_ctx
    longest = served.longest_token() if n_characters > n_ctx else 0
    if longest and n_characters > n_ctx * longest:
        raise too_long(n_characters // longest, n_ctx, at_least=True)
