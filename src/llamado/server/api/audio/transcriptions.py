"""OpenAI's transcriptions and translations: a chat that asks the model for the words of a sound.

The prompts are llama-server's (`convert_transcriptions_to_chatcmpl`, b11434), which has the form `json` only. Models
give no times, so the other forms have one segment for the whole sound.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.engine.request import Progress, Result, Token
from llamado.http.answer import error_response
from llamado.http.bodies import body_of
from llamado.http.form import Form, parse_form
from llamado.media.media import MediaKind
from llamado.server.api.routes import Routes
from llamado.server.errors import ApiError, invalid, not_supported
from llamado.server.generate.formats import answer_reader, data, was_cut
from llamado.server.generate.generator import Generator
from llamado.server.generate.request import GenerationRequest
from llamado.server.generate.streaming import EVENTS
from llamado.server.media.parts import ChatMedia
from llamado.text.dialects.dialect import Content

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_CONTENT_TYPES = {
    "text": "text/plain; charset=utf-8",
    "srt": "text/plain; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
_LFM2 = "<|tool_list_start|>"
"""In the templates of LFM2, which have their own prompt for transcriptions."""
_NUMBERS: Mapping[str, Callable[[str], int | float]] = {
    "temperature": float, "max_tokens": int, "seed": int, "top_p": float, "top_k": int,
}  # fmt: skip
"""Fields that go into the chat, as numbers: all fields of a form are text."""


def _number(form: Form, name: str, convert: Callable[[str], int | float]) -> int | float:
    try:
        value = convert(form.fields[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid(f"Field '{name}': expected a number, got {form.fields[name][:50]!r}")
    return value


def transcription_chat(form: Form, template: str, *, translate: bool) -> tuple[dict[str, Any], ChatMedia]:
    """Return the chat body for a form, and its sound. `template`: source of the chat template. Raises ApiError."""
    if "file" not in form.files:
        raise invalid("No input file found for transcription")
    if form.fields.get("response_format", "json") not in FORMATS:
        raise invalid(f"response_format must be one of {', '.join(FORMATS)}")
    media = ChatMedia()
    language = form.fields.get("language", "")
    prompt = form.fields.get("prompt", "")
    messages: list[dict[str, Any]] = []
    if translate:
        prompt = prompt or "Translate the audio to English text"
    elif _LFM2 in template:
        messages.append({"role": "system", "content": "Perform ASR."})
    else:
        prompt = prompt or "Transcribe audio to text"
    if language:
        prompt += f" (language: {language})"
    messages.append({"role": "user", "content": [{"type": "text", "text": prompt}, media.part(form.files["file"])]})
    body: dict[str, Any] = {
        name: _number(form, name, convert) for name, convert in _NUMBERS.items() if form.fields.get(name)
    }
    if form.fields.get("response_format") == "verbose_json":
        body |= {"logprobs": True, "top_logprobs": 1}
    return {**body, "messages": messages, "stream": form.fields.get("stream") == "true"}, media


class TranscriptFormat:
    """Answers and events of transcriptions. `form`: one of FORMATS; `media`: has the sound's duration."""

    media_type = EVENTS

    def __init__(self, request: GenerationRequest, *, form: str, media: ChatMedia, language: str, task: str) -> None:
        self._form, self._media, self._language, self._task = form, media, language, task
        self._request = request
        self._reader = answer_reader(request)

    def token(self, index: int, event: Token) -> bytes:
        parts = self._reader.push(event.text)
        return b"".join(
            data({"type": "transcript.text.delta", "delta": part.text}) for part in parts if isinstance(part, Content)
        )

    def progress(self, index: int, event: Progress) -> bytes:
        return b""

    def final(self, index: int, result: Result) -> bytes:
        rest = self._reader.finish(was_cut(self._request, result))
        deltas = [{"type": "transcript.text.delta", "delta": part.text} for part in rest if isinstance(part, Content)]
        return b"".join(map(data, [*deltas, self._done(result)]))

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return data({"error": error.error})

    def failure(self, error: ApiError) -> Response:
        return error_response(error)

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the whole body."""
        result = results[0]
        self._reader.push(result.content)
        self._reader.finish(was_cut(self._request, result))
        text, seconds = self._reader.content.strip(), self._media.prepared[0].seconds
        if self._form == "text":
            return f"{text}\n".encode()
        if self._form == "srt":
            return f"1\n{_clock(0, ',')} --> {_clock(seconds, ',')}\n{text}\n\n".encode()
        if self._form == "vtt":
            return f"WEBVTT\n\n{_clock(0, '.')} --> {_clock(seconds, '.')}\n{text}\n\n".encode()
        if self._form == "verbose_json":
            return orjson.dumps(self._verbose(result, text, seconds))
        return orjson.dumps(self._done(result))

    def _done(self, result: Result) -> dict[str, Any]:
        """Return the end of a stream, which is also llama-server's answer in the form `json`."""
        usage = {
            "type": "tokens",
            "input_tokens": result.n_prompt,
            "output_tokens": result.n_predicted,
            "total_tokens": result.n_prompt + result.n_predicted,
            "input_tokens_details": {"cached_tokens": result.n_cached},
        }
        return {"type": "transcript.text.done", "text": self._reader.content, "usage": usage}

    def _verbose(self, result: Result, text: str, seconds: float) -> dict[str, Any]:
        logprobs = [one.token.logprob for one in result.probs if math.isfinite(one.token.logprob)]
        raw = text.encode()
        segment = {
            "id": 0,
            "seek": 0,
            "start": 0.0,
            "end": round(seconds, 3),
            "text": text,
            "tokens": result.tokens,
            "temperature": self._request.params.sampling.temperature,
            "avg_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            "compression_ratio": len(raw) / len(zlib.compress(raw)),
        }
        return {
            "task": self._task,
            "language": self._language,
            "duration": round(seconds, 3),
            "text": text,
            "segments": [segment],
            "usage": {"type": "duration", "seconds": math.ceil(seconds)},
        }


def _clock(seconds: float, point: str) -> str:
    ms = round(1000 * seconds)
    return f"{ms // 3_600_000:02d}:{ms // 60_000 % 60:02d}:{ms // 1000 % 60:02d}{point}{ms % 1000:03d}"


def transcriptions_router(generator: Generator) -> Routes:
    """Return the routes of transcriptions and translations."""
    router = Routes("generate")

    async def answer(request: Request, *, translate: bool) -> Response:
        served = generator.served
        if MediaKind.AUDIO not in served.media_kinds:
            raise not_supported("The current model does not support audio input.")
        body = await body_of(request.scope).read(request.scope, request.receive)
        form = await parse_form(body, request.headers.get("content-type", ""))
        chat, media = transcription_chat(form, served.template.source, translate=translate)
        kind = form.fields.get("response_format", "json")
        if chat["stream"] and kind not in ("json", "text"):
            raise invalid(f"response_format {kind} cannot be streamed")
        make = partial(
            TranscriptFormat,
            form=kind,
            media=media,
            language=form.fields.get("language", ""),
            task="translate" if translate else "transcribe",
        )
        response = await generator.chat(chat, make, media=media)
        if kind in _CONTENT_TYPES and not chat["stream"]:
            response.headers["content-type"] = _CONTENT_TYPES[kind]
        return response

    @router.post("/v1/audio/transcriptions", hidden=True)
    @router.post("/audio/transcriptions", hidden=True)
    async def transcriptions(request: Request) -> Response:
        return await answer(request, translate=False)

    @router.post("/v1/audio/translations", hidden=True)
    @router.post("/audio/translations", hidden=True)
    async def translations(request: Request) -> Response:
        return await answer(request, translate=True)

    return router
