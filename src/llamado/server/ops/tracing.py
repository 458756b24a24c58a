"""OpenTelemetry traces with one span per request; off by default, needs the extra `otel`.

Attributes follow OpenTelemetry's conventions for HTTP servers and for generative AI (`gen_ai.…`); a `traceparent`
header (W3C Trace Context) makes the span a child of the caller's.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llamado import __version__
from llamado.errors import LlamadoError
from llamado.http.monitoring.request_log import Record
from llamado.installation import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger("llamado.server")

_DEFAULT_ENDPOINT = "http://localhost:4318"  # of OTLP over HTTP, by the OpenTelemetry specification
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/responses": "chat",
    "/completion": "text_completion",
    "/completions": "text_completion",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/embedding": "embeddings",
    "/embeddings": "embeddings",
    "/v1/embeddings": "embeddings",
}


class TracingError(LlamadoError):
    """Tracing was requested but is not available."""


class RequestTracer:
    """Tracer of requests: one span each, exported in the background."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME") or "llamado"
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("llamado", __version__)
        self._context = TraceContextTextMapPropagator()
        self._server, self._failed = SpanKind.SERVER, StatusCode.ERROR

    def begin(self, record: Record, headers: Mapping[bytes, bytes]) -> Span:
        """Start the span of a new request."""
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        return self._tracer.start_span(
            f"{record.method} {record.path}",
            context=self._context.extract(carrier),
            kind=self._server,
            attributes={
                "http.request.method": record.method,
                "url.path": record.path,
                "llamado.request.id": record.id,
            },
        )

    def end(self, span: Span, record: Record, route: str, model: str) -> None:
        """End the span of a request; `route` is "" for a path without an endpoint."""
        attributes: dict[str, Any] = {"http.response.status_code": record.status}
        if route:
            attributes["http.route"] = route
        operation = _OPERATIONS.get(route)
        if operation is not None:
            span.update_name(f"{operation} {model}")
            attributes |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "llamado",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.usage.input_tokens": record.n_prompt,
                "gen_ai.usage.output_tokens": record.n_predicted,
            }
            if record.stops:
                attributes["gen_ai.response.finish_reasons"] = [
                    {"limit": "length", "cancelled": "cancelled", "interrupted": "error"}.get(stop, "stop")
                    for stop in record.stops
                ]
            if record.first_token is not None:
                attributes["gen_ai.response.time_to_first_chunk"] = record.first_token - record.began
                ago = time.perf_counter() - record.first_token
                span.add_event("gen_ai.first_token", timestamp=time.time_ns() - int(ago * 1e9))
        span.set_attributes(attributes)
        if record.status >= 500:
            span.set_status(self._failed)
        span.end()

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


def open_tracing(enabled: bool, environ: Mapping[str, str] = os.environ) -> RequestTracer | None:
    """Return a tracer if `--otel` or the environment enables tracing, else None.

    Raises TracingError if `enabled` (`--otel`) but the extra is not installed.
    """
    if not enabled and not any(environ.get(name) for name in ENDPOINTS):
        return None
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        # Imported by name, because type checkers run without the exporter.
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        message = f'OpenTelemetry, the extra "otel", is not installed: {install_command("otel")}'
        if enabled:
            raise TracingError(f"--otel: {message}") from None
        # The variable may be meant for other programs of this machine.
        log.warning("no traces although %s is set: %s", next(n for n in ENDPOINTS if environ.get(n)), message)
        return None
    # Its messages, such as that no collector accepts the traces, go into this log and not to standard error.
    library, own = logging.getLogger("opentelemetry"), logging.getLogger("llamado")
    library.handlers, library.propagate = own.handlers, False
    where = next((environ[name] for name in reversed(ENDPOINTS) if environ.get(name)), _DEFAULT_ENDPOINT)
    log.info("traces are sent to %s", where)
    return RequestTracer(otlp.OTLPSpanExporter())
