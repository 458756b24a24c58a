"""Operations: health with slots, overload, request ids, logs, sleep, traces, end of the parent process."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, client, run, served
from server_processes import ServerProcess
from tiers import first_of
from waiting import GUARD, until, until_async
from wire import serving

from llamado.commands.cli import make_parser
from llamado.commands.serve import serve_settings
from llamado.devices.split.placement import Placement
from llamado.engine.errors import QueueFull
from llamado.engine.options import COMPILING, FETCHING, EngineOptions, ModelSource
from llamado.engine.request import Request
from llamado.flags import parse
from llamado.http.access import AccessRules
from llamado.http.monitoring import logs
from llamado.http.monitoring.logs import BackgroundHandler, LogFormatter
from llamado.http.monitoring.request_log import Record, current, request_id
from llamado.loglines import LineFormatter
from llamado.router.presets import environment
from llamado.server.app import reason_of
from llamado.server.live.log_tail import LogTail
from llamado.server.load import LoadLog
from llamado.server.ops.banner import layer_devices, overview
from llamado.server.ops.sleep import Sleep
from llamado.server.ops.tracing import RequestTracer, TracingError, open_tracing
from llamado.server.settings import Settings
from llamado.server.switches import Switches
from llamado.text.grammar.source import GrammarError

Start = Callable[..., tuple[ServerProcess, str]]


def wait_ready(url: str) -> None:
    until(lambda: httpx.get(f"{url}/health").status_code == 200, "not ready")


async def busy(http: Any, n: int) -> None:
    """Wait until `n` requests are processed."""
    await until_async(lambda: http.engine.busy == n, lambda: f"{http.engine.busy} requests at work")


# -- health, slots, overload -----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_health_with_slots() -> None:
    async with client(FakeEngine(n_slots=1, delay=0.05)) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        idle = await http.get("/health?include_slots")
        assert idle.json() == {"status": "ok", "slots_idle": 1, "slots_processing": 0}
        assert (await http.get("/health?fail_on_no_slot=1")).json() == {"status": "ok"}
        answer = asyncio.ensure_future(http.post("/completion", json={"prompt": "a"}))
        await busy(http, 1)
        full = await http.get("/health?include_slots=1")
        assert (full.status_code, full.json()["slots_processing"]) == (200, 1)
        full = await http.get("/v1/health?include_slots&fail_on_no_slot")
        assert full.status_code == 503
        assert full.json() == {"status": "no slot available", "slots_idle": 0, "slots_processing": 1}
        slots = await http.get("/slots?fail_on_no_slot=1")
        assert slots.status_code == 503 and slots.json()["error"]["message"] == "no slot available"
        assert (await http.get("/slots?fail_on_no_slot=")).status_code == 200
        assert (await answer).status_code == 200


@pytest.mark.slow
async def test_one_free_slot_is_enough() -> None:
    async with client(FakeEngine(n_slots=2, delay=0.05)) as http:
        answer = asyncio.ensure_future(http.post("/completion", json={"prompt": "a"}))
        await busy(http, 1)
        for path in ("/slots?fail_on_no_slot=1", "/health?fail_on_no_slot=1"):
            assert (await http.get(path)).status_code == 200
        assert (await answer).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_503_with_retry_after(stream: bool) -> None:
    async with client() as http:
        http.engine.fail = QueueFull(8, 7)
        response = await http.post("/completion", json={"prompt": "a", "stream": stream})
        assert response.status_code == 503 and response.headers["retry-after"] == "7"
        assert response.json()["error"]["type"] == "unavailable_error"
        http.engine.fail = GrammarError("line 1: no rule")
        response = await http.post("/completion", json={"prompt": "a", "stream": stream})
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


async def test_properties_are_changed_only_with_props() -> None:
    async with client(props=True) as http:
        assert (await http.post("/props", json={"a": 1})).json() == {"success": True}
        assert (await http.get("/props")).json()["endpoint_props"] is True
    async with client() as http:
        assert (await http.post("/props", json={})).status_code == 501


# -- request ids and logs --------------------------------------------------------------------------------------------


async def test_every_answer_has_an_id() -> None:
    async with client(access=AccessRules(api_keys=(b"k",))) as http:
        seen = set()
        for path in ("/health", "/props", "/nope"):  # also refused requests
            seen.add((await http.get(path)).headers["x-request-id"])
        assert len(seen) == 3
        assert (await http.get("/health", headers={"X-Request-Id": "my-1"})).headers["x-request-id"] == "my-1"


def test_ids_cannot_forge_a_line() -> None:
    assert request_id(b"abc") == "abc"
    for given in (b"", b"a b", b"a\nb", b"\x1b[31m", b"a" * 129, "ä".encode()):
        assert request_id(given) != given.decode("latin-1") and len(request_id(given)) == 16


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The program's log as JSON lines."""
    stream = io.StringIO()
    logger = logging.getLogger("llamado")
    before = logger.handlers, logger.level, logger.propagate
    handler = BackgroundHandler(stream)
    handler.setFormatter(LogFormatter(prefix=False, timestamps=False, as_json=True, verbose=False))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    yield stream
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def written(stream: io.StringIO) -> list[dict[str, Any]]:
    for handler in logging.getLogger("llamado").handlers:
        handler.flush()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_log_line_per_request(log: io.StringIO) -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.n_cached = 2
        async with client(engine) as http:
            headers = {"X-Request-Id": "r1"}
            await http.post("/completion", json={"prompt": "abc", "n_predict": 2}, headers=headers)
            for looked_at in ("/health", "/slots", "/props"):
                assert (await http.get(looked_at)).status_code == 200
            await http.get("/no%1b[31m%0awhere", headers={"X-Request-Id": "r2"})

    run(work())
    lines = written(log)
    assert [line["request_id"] for line in lines] == ["r1", "r2"]
    first = lines[0]
    pattern = (
        r"127\.0\.0\.1 POST /completion 200, [\d.]+ ms, fake: 3 \(2 cached\) \+ 2 tokens, first after [\d.]+ ms, "
        r"333\.3 tokens/s"
    )
    assert re.fullmatch(pattern, first["message"])
    assert first["client"] == "127.0.0.1" and first["model"] == "fake"
    assert 0 < first["first_token_ms"] < first["duration_ms"]
    assert (first["method"], first["path"], first["status"]) == ("POST", "/completion", 200)
    assert (first["prompt_tokens"], first["cached_tokens"], first["predicted_tokens"]) == (3, 2, 2)
    assert first["tokens_per_second"] == 333.333 and first["duration_ms"] > 0 and "cancelled" not in first
    assert lines[1]["message"].partition(" 404, ")[0] == "127.0.0.1 GET /no\\x1b[31m\\nwhere"
    assert lines[1]["status"] == 404 and lines[1]["reason"] == "File Not Found"


def test_lines_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("llamado", logging.WARNING, "", 0, "hot", (), None)
    plain = LogFormatter(prefix=False, timestamps=False, as_json=False, verbose=False)
    assert plain.format(record) == "warning: hot"
    token = current.set(Record("r1", "GET", "/"))
    assert plain.format(record) == "warning: [r1] hot"
    current.reset(token)
    assert LineFormatter().format(record) == "hot"
    monkeypatch.setenv("TZ", "XXX-3:30")  # a time zone east of Greenwich
    time.tzset()
    try:
        record.created, record.msecs = 86400.042, 42.0
        timed = LogFormatter(prefix=True, timestamps=True, as_json=False, verbose=False)
        assert timed.format(record) == "1970-01-02 03:30:00.042 warning: hot"
        assert LineFormatter(timed=True).format(record) == "1970-01-02 03:30:00.042 hot"
        as_json = LogFormatter(prefix=True, timestamps=True, as_json=True, verbose=False)
        assert json.loads(as_json.format(record))["timestamp"] == "1970-01-02T00:00:00.042Z"
    finally:
        monkeypatch.undo()
        time.tzset()
    colored = LogFormatter(prefix=False, timestamps=True, as_json=False, verbose=False, colors=True)
    assert colored.format(record).startswith("\x1b[33m19") and colored.format(record).endswith("warning: hot\x1b[0m")


@pytest.mark.slow
def test_logging_never_waits_for_the_reader() -> None:
    read, write = os.pipe()
    handler = BackgroundHandler(os.fdopen(write, "w"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    for i in range(30_000):  # more than a pipe and the queue hold
        logger.warning("line %d, %s", i, "x" * 50)
    with os.fdopen(read) as reader:
        lines = []
        while "dropped" not in (line := reader.readline()):
            lines.append(line)
    assert lines[0].startswith("line 0, ") and len(lines) > 1000


def test_names_cannot_forge_a_line() -> None:
    """In text and in JSON, in the router's history, and in the reason of an error."""
    forged = "a\nerror: hacked\x1b[31m\r\x9b\u2028.gguf"
    record = logging.LogRecord("llamado", logging.INFO, "", 0, "model %s loaded", (forged,), None)
    record.fields = {"path": forged}
    expected = r"model a\nerror: hacked\x1b[31m\r\x9b\u2028.gguf loaded"
    text, as_json = (LogFormatter(prefix=False, timestamps=False, as_json=j, verbose=False) for j in (False, True))
    assert text.format(record) == expected and json.loads(as_json.format(record))["message"] == expected
    assert all(c.isprintable() for c in as_json.format(record))
    book = LogTail()
    book.emit(record)
    assert book.history() == expected.encode() + b"\n"
    try:
        raise ValueError(forged)
    except ValueError:
        failed = logging.LogRecord("llamado", logging.INFO, "", 0, "no", (), sys.exc_info())
    assert text.format(failed).startswith(r"no: ValueError: a\nerror: hacked") and text.format(failed).isprintable()
    # The log of other commands, such as the worker.
    command = (
        "import logging; from llamado.commands.cli import _log_to_stderr as to; from argparse import Namespace as N;"
    )
    command += "to(N(verbose=False, log_timestamps=False)); logging.getLogger('llamado.rpc').warning('%s', 'a\\nb')"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stderr == "a\\nb\n"
    lines = LogFormatter(prefix=False, timestamps=False, as_json=False, verbose=True).format(failed).split("\n")
    assert len(lines) > 2 and all(line.startswith("    ") and line.isprintable() for line in lines[1:])


def test_idle_slots_are_logged(log: io.StringIO) -> None:
    """llama-server's line, once for concurrent answers."""
    logging.getLogger("llamado").setLevel(logging.DEBUG)

    async def work() -> None:
        async with client(FakeEngine(delay=0.01)) as http:
            bodies = [{"prompt": "a", "stream": i == 0, "n_predict": 5 * (i + 1)} for i in range(3)]
            await asyncio.gather(*(http.post("/completion", json=body) for body in bodies))
            await http.post(
                "/completion", json={"prompt": "a", "n_predict": 10**9, "n_probs": 10**9}
            )  # a refused request

    run(work())
    lines = [line["message"] for line in written(log)]
    assert lines.count("all slots are idle") == 1 and "/completion 200" not in lines[-1]


def test_times_of_lines_and_local_pages_are_the_default() -> None:
    flags, _ = parse(make_parser("serve"), "serve", ["-m", "x"])
    assert (
        flags.log_timestamps and serve_settings(flags).access.cors_origins == AccessRules().cors_origins == "localhost"
    )
    # A router adds the times of its models' lines.
    assert environment()["LLAMA_ARG_LOG_TIMESTAMPS"] == "0"


@pytest.mark.slow
def test_slow_parts_of_loading_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Fetching is logged at its start and its end, compiling if it takes longer than a moment."""
    caplog.set_level("INFO", "llamado.server")
    progress: list[str] = []
    load_log = LoadLog(lambda what, *_: progress.append(what), patience=0.0)
    for done in (0, 500_000, 1_000_000, 1_000_000):
        load_log(f"{FETCHING}tiny", done, 1_000_000)
    load_log(COMPILING, 0, 2)
    load_log._timer.join(GUARD)
    load_log(COMPILING, 1, 2)
    load_log.end()
    assert [record.message for record in caplog.records] == [
        "fetching tiny: 0.0 of 1.0 MB", "fetching tiny: 1.0 of 1.0 MB",
        "compiling kernels for this processor: the first start takes some seconds for it, later ones find them",
    ]  # fmt: skip
    assert progress == [f"{FETCHING}tiny"] * 4 + [COMPILING] * 2
    quick = LoadLog(lambda *_: None, patience=60)
    quick(COMPILING, 0, 2)
    quick.end()
    quick._timer.join(GUARD)
    assert len(caplog.records) == 3


def test_more_threads_than_processors_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.server.ops.banner.cores", lambda: 4)
    model = served(FakeEngine())
    for n, logged in ((None, False), (4, False), (5, True)):
        settings = Settings(source=ModelSource(spec="m"), engine=EngineOptions(n_threads=n))
        assert any("5 on 4 processors" in line for line in overview(settings, model, [])) == logged


def test_the_reason_of_an_error_is_found_in_every_form_of_bodies() -> None:
    for body in (b'{"error": {"message": "no"}}', b'{"error": "no"}', b'{"code": 400, "message": "no"}'):
        assert reason_of(body) == "no", body
    for body in (b"", b"[1]", b'{"error": null}', b'{"choices": []}', b'"no"'):
        assert reason_of(body) == "", body


@pytest.mark.slow
def test_reasons_and_cancelled_answers_are_logged(log: io.StringIO) -> None:
    with (
        serving(FakeEngine("x" * 1000, delay=0.02), access=AccessRules(api_keys=(b"k",))) as wire,
        httpx.Client(base_url=wire.url, headers={"X-Api-Key": "k"}, timeout=GUARD) as http,
    ):
        http.post("/completion", json={"prompt": "a", "n_predict": "many"}, headers={"X-Request-Id": "bad"})
        http.post("/completion", content=b"{" + b"x" * 1000, headers={"X-Request-Id": "odd"})
        http.get("/v1/models", headers={"X-Request-Id": "locked", "X-Api-Key": ""})
        body = {"prompt": "abc", "stream": True}
        with http.stream("POST", "/completion", json=body, headers={"X-Request-Id": "broken-True"}) as answer:
            next(answer.iter_lines())
        headers = {"X-Request-Id": "broken-False"}
        with pytest.raises(httpx.ReadTimeout):  # the client disconnects during the answer
            http.post("/completion", json={"prompt": "abc"}, headers=headers, timeout=2)
        while not any(line.get("request_id") == "broken-False" for line in written(log)):
            time.sleep(0.02)
    lines = {line["request_id"]: line for line in written(log) if "request_id" in line and "path" in line}
    assert lines["bad"]["status"] == 400 and "n_predict" in lines["bad"]["reason"]
    assert lines["bad"]["message"].endswith(lines["bad"]["reason"])
    assert lines["odd"]["reason"].startswith("parse error")
    assert lines["locked"]["status"] == 401 and lines["locked"]["reason"] == "Invalid API Key"
    for name in ("broken-True", "broken-False"):
        assert lines[name]["prompt_tokens"] == 3 and 0 < lines[name]["predicted_tokens"] < 1000
        assert lines[name]["first_token_ms"] > 0 and lines[name]["client"] == "127.0.0.1"


@pytest.mark.slow
def test_log_file(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from llamado.http.monitoring import logs;"
        "logs.configure(file=sys.argv[1], as_json=True, verbosity=int(sys.argv[2]));"
        "logging.getLogger('llamado.x').info('hello'); logging.getLogger('llamado.x').debug('no')"
    )
    for verbosity, shown in ((3, ["hello"]), (1, [])):  # a low verbosity is for the terminal
        file = tmp_path / f"log{verbosity}"
        command = [sys.executable, "-c", code, str(file), str(verbosity)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == shown
        assert json.loads(file.read_text())["message"] == "hello"
    with pytest.raises(logs.LogFileError, match="--log-file"):
        logs.configure(file=str(tmp_path / "no" / "log"))


def test_overview() -> None:
    settings = Settings(
        source=ModelSource(spec="fake"),
        engine=EngineOptions(unified=False),
        access=AccessRules(api_keys=(b"a", b"b")),
        switches=Switches(metrics=True, api_prefix="/llama", sleep_idle_seconds=9),
    )
    engine = FakeEngine()
    text = "\n".join(overview(settings, served(engine), ["http://0.0.0.0:1"]))
    assert "http://127.0.0.1:1/llama/ (open it in a browser, elsewhere by this machine's name)" in text
    text = "\n".join(overview(settings, served(engine), ["http://127.0.0.1:1"]))
    engine.close()
    for part in (
        "fake",
        "4096 tokens for each of 4 slots",
        "http://127.0.0.1:1/llama/ (open",
        "/metrics",
        "2 keys",
        "after 9 s",
    ):
        assert part in text
    assert layer_devices(["CPU", "RPC0"], Placement((0, 1), 1), 2) == [
        "layer 0: CPU", "layer 1: RPC0", "head: RPC0", "embedding: CPU",
    ]  # fmt: skip
    assert layer_devices(["CPU"], None, 1) == ["layer 0: CPU", "head: CPU", "embedding: CPU"]


# -- sleep -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_objects")
@pytest.mark.slow
async def test_an_idle_model_is_unloaded_and_reloaded() -> None:
    async with client() as http:
        engines = [http.engine]
        state = http.state

        def load() -> Any:
            engines.append(FakeEngine())
            return served(engines[-1])

        closed: list[float] = []
        state.served = served(http.engine)
        object.__setattr__(state.served, "close", closed.append)
        state.sleep = sleep = Sleep(state, load, 0.2)
        watch = asyncio.ensure_future(sleep.watch())
        try:
            for _ in range(6000):
                if sleep.asleep and closed:
                    break
                # Probes neither wake it nor keep it awake.
                for path in ("/health", "/props", "/v1/models", "/metrics"):
                    await http.get(path)
                await asyncio.sleep(0.01)
            assert sleep.asleep and closed and len(engines) == 1
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert (await http.get("/props")).json()["is_sleeping"] is True
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "fake"
            assert (await http.get("/nowhere")).status_code == 404
            assert sleep.asleep
            # Concurrent requests wait for one reload.
            body = {"prompt": "a", "n_predict": 2}
            answers = await asyncio.gather(*(http.post("/completion", json=body) for _ in range(3)))
            assert [a.status_code for a in answers] == [200] * 3 and len(engines) == 2
            assert engines[1].requests and not engines[0].requests
            assert (await http.get("/props")).json()["is_sleeping"] is False
        finally:
            watch.cancel()
            for engine in engines:
                engine.close()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.slow
@pytest.mark.parametrize("path", first_of(["/health", "/metrics", "/v1/health", "/props", "/models", "/v1/models"], 2))
def test_monitoring_does_not_wake_the_model(path: str) -> None:
    assert not woken("GET", path)
    assert not woken("HEAD", path)


@pytest.mark.usefixtures("few_objects")
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/slots", "/lora-adapters"])
def test_other_get_requests_wake_the_model(path: str) -> None:
    """llama-server wakes its model for them, too."""
    assert woken("GET", path)
    assert woken("POST", "/props")


def woken(method: str, path: str) -> bool:
    """Return True if a request wakes a sleeping model."""

    async def work() -> bool:
        async with client(metrics=True) as http:
            http.state.sleep = sleep = Sleep(http.state, lambda: served(http.engine), 3600)
            await sleep._fall_asleep()
            assert (await http.request(method, path)).status_code in (200, 501)
            return not sleep.asleep

    found: bool = run(work())
    return found


async def ticks(sleep: Sleep, n: int) -> None:
    """Wait for at least `n` checks of the sleep timer."""
    looks = 0
    idle = sleep._idle

    def looked() -> bool:
        nonlocal looks
        looks += 1
        return idle()

    sleep._idle = looked  # type: ignore[method-assign]
    await until_async(lambda: looks >= n or sleep.asleep)
    sleep._idle = idle  # type: ignore[method-assign]


@pytest.mark.usefixtures("few_objects")
@pytest.mark.slow
@pytest.mark.parametrize("where", ["at the endpoint", "in the engine"])
async def test_running_requests_keep_the_model_awake(where: str) -> None:
    """Both a request before the engine and one in the engine without its client."""
    async with client(FakeEngine(delay=0.05, answer="x" * 1000)) as http:
        http.state.sleep = sleep = Sleep(http.state, lambda: served(http.engine), 0.02)
        watch = asyncio.ensure_future(sleep.watch())
        try:
            if where == "at the endpoint":
                async with sleep.awake():
                    await ticks(sleep, 20)
                    assert not sleep.asleep
            else:
                http.engine.submit(Request(prompt=[1]), lambda event: None)
                await busy(http, 1)
                await ticks(sleep, 20)
                assert not sleep.asleep
                http.engine.cancelled.append(1)
                await busy(http, 0)
            await ticks(sleep, 6000)
            assert sleep.asleep
        finally:
            watch.cancel()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.slow
async def test_a_failed_reload_is_retried() -> None:
    async with client() as http:
        failing = [True]

        def load() -> Any:
            if failing:
                raise OSError("the file is gone")
            return served(http.engine)

        http.state.sleep = Sleep(http.state, load, 3600)
        await http.state.sleep._fall_asleep()
        response = await http.post("/completion", json={"prompt": "a"})
        assert response.status_code == 503 and "the file is gone" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "5" and (await http.get("/health")).status_code == 200
        failing.clear()
        assert (await http.post("/completion", json={"prompt": "a"})).status_code == 200


@pytest.mark.slow
def test_sleep_in_a_process(fake_server: Start) -> None:
    """The model is unloaded after a while and reloaded for an answer."""
    process, url = fake_server("sleep=1", "json")
    wait_ready(url)
    while not httpx.get(f"{url}/props", timeout=60).json()["is_sleeping"]:
        time.sleep(0.02)
    answer = httpx.post(f"{url}/completion", json={"prompt": "a", "n_predict": 2}, timeout=60)
    assert answer.json()["content"] == "xx"
    process.terminate()
    assert process.wait(60) == 0
    log = process.log()
    messages = [json.loads(line)["message"] for line in log.splitlines()]
    words = ("the model is unloaded", "waking up", "awake after", "POST /completion 200")
    moments = [next(i for i, text in enumerate(messages) if word in text) for word in words]
    assert moments == sorted(moments), messages


# -- the parent process ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_ends_with_its_parent(fake_server: Callable[..., tuple[ServerProcess, str]], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write = os.open(pipe, os.O_RDWR)
    process, url = fake_server(f"parent={pipe}")
    wait_ready(url)
    os.write(write, b"still there")
    assert httpx.get(f"{url}/health").status_code == 200
    os.close(write)
    assert process.wait(GUARD) == 0
    assert "parent process ended" in process.log()


# -- traces ----------------------------------------------------------------------------------------------------------


def test_spans() -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()

    async def work() -> None:
        async with client() as http:
            http.state.tracing = RequestTracer(exporter)
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            body = {"prompt": "abc", "n_predict": 2, "stream": True}
            await http.post("/v1/completions", json=body, headers={"traceparent": parent})
            http.engine.fail = RuntimeError("broken")
            await http.post("/completion", json={"prompt": "a"})
            await http.get("/nowhere")
            http.state.tracing.close()

    run(work())
    first, second, third = exporter.get_finished_spans()
    assert first.name == "text_completion fake" and first.kind.name == "SERVER"
    assert f"{first.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{first.parent.span_id:016x}" == "b7ad6b7169203331"
    assert first.attributes["gen_ai.usage.input_tokens"] == 3 and first.attributes["gen_ai.usage.output_tokens"] == 2
    assert first.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert first.attributes["http.route"] == "/v1/completions" and first.attributes["http.response.status_code"] == 200
    assert [e.name for e in first.events] == ["gen_ai.first_token"]
    assert first.start_time <= first.events[0].timestamp <= first.end_time
    assert second.status.status_code.name == "ERROR" and second.parent is None
    assert third.name == "GET /nowhere" and "http.route" not in third.attributes


def test_messages_of_the_exporter_are_logged(monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(OTLPSpanExporter=memory.InMemorySpanExporter))
    library = logging.getLogger("opentelemetry")
    monkeypatch.setattr(library, "handlers", [])
    monkeypatch.setattr(library, "propagate", True)
    for environ, where in (
        ({}, "http://localhost:4318"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}, "http://h:1"),
    ):
        tracing = open_tracing(True, environ)
        assert tracing is not None
        logging.getLogger(name).warning("no collector responds")
        tracing.close()
        *_, started, warned = written(log)
        assert started["message"] == f"traces are sent to {where}"
        assert (warned["message"], warned["source"]) == ("no collector responds", name)


def test_traces_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracing(False, {}) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r'the extra "otel", is not installed: .*install'):
        open_tracing(True, {})
    assert open_tracing(False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}) is None
    assert open_tracing(True, {"OTEL_SDK_DISABLED": "true"}) is None
