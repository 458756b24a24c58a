"""Chat backend that runs a model in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llamado.commands.chat.backend import Answer, AnswerPiece, AnswerStats, Message, partial_stats
from llamado.engine.loaded_model import MOST_TOKENS, LoadedModel
from llamado.library.media import ChatMedia
from llamado.text.dialects import Conversation, Reasoning, prepare
from llamado.text.dialects.answer import AnswerReader, CallPart


class LocalBackend:
    """Chat backend for a loaded model."""

    def __init__(self, llama: LoadedModel, name: str) -> None:
        self._llama = llama
        self.name = name
        self.notes: Sequence[str] = ()
        if llama.lacks and llama.defaults.n_predict < 0:
            self.notes = (f"answers end after {MOST_TOKENS:,} tokens (-n changes it)",)

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Answer:
        llama, options = self._llama, dict(settings)
        media = ChatMedia(llama)
        plain = media.take([{"role": one["role"], "content": one["content"]} for one in messages])
        prepared = prepare(llama.template, Conversation(messages=plain, parse_tool_calls=False))
        seen = [llama.tokenize(text) for text in prepared.preserved]
        options["preserved"] = frozenset(tokens[0] for tokens in seen if len(tokens) == 1)
        if prepared.stops:
            options["stop"] = [*options.get("stop", llama.defaults.stop), *prepared.stops]
        reader = AnswerReader(prepared.parser(), prepared.given)
        began, first, n = time.perf_counter(), None, 0
        tokens, spans = media.prompt(prepared.prompt)
        events = llama.events(tokens, media=spans, **options)
        try:
            while True:
                token = next(events)
                parts = reader.push(token.text)
                first, n = first or time.perf_counter(), n + len(token.tokens)
                yield from _pieces(parts, partial_stats(n, began, first, len(tokens)))
        except StopIteration as end:
            result = end.value
            yield from _pieces(reader.finish())
        finally:
            events.close()
        return AnswerStats(
            n_prompt=result.n_prompt,
            n_cached=result.n_cached,
            n_predicted=result.n_predicted,
            tokens_per_second=result.timings.predicted_per_second or None,
            first_seconds=None if first is None else first - began,
            cut=result.stop_type == "limit",
        )

    def close(self) -> None:
        self._llama.close()


def _pieces(parts: Sequence[Any], so_far: AnswerStats | None = None) -> list[AnswerPiece]:
    texts = [part for part in parts if not isinstance(part, CallPart)]
    return [AnswerPiece(part.text, isinstance(part, Reasoning), so_far) for part in texts]
