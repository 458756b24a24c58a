"""Resumable streams without a server: buffer, limits, ages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from llamado.http.errors import ApiError
from llamado.http.exchange import CONVERSATION
from llamado.http.resumable import registry as registry_module
from llamado.http.resumable.buffer import StreamBuffer, StreamLost
from llamado.http.resumable.registry import StreamRegistry
from llamado.http.resumable.requests import LONGEST_ID, is_streamed, requested_id


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def opened(streams: StreamRegistry, id: bytes = b"a") -> StreamBuffer:
    stream = streams.open(id)
    assert stream is not None
    return stream


async def read_all(stream: StreamBuffer, offset: int = 0) -> bytes:
    found = b""
    while part := await stream.read(offset + len(found)):
        found += part
    return found


def test_readers_get_each_byte_once() -> None:
    """Two live readers, one of them from the middle, and one after the end."""

    async def work() -> None:
        streams = StreamRegistry()
        stream = opened(streams)
        early = asyncio.ensure_future(read_all(stream))
        streams.append(stream, b"one ")
        middle = asyncio.ensure_future(read_all(stream, 2))
        await asyncio.sleep(0)
        streams.append(stream, b"two ")
        await asyncio.sleep(0)
        streams.append(stream, b"x" * 200_000)
        streams.finish(stream)
        expected = b"one two " + b"x" * 200_000
        assert await early == await read_all(stream) == expected
        assert await middle == expected[2:]

    run(work())


def test_an_offset_beyond_the_end_waits_for_its_byte() -> None:
    async def work() -> None:
        streams = StreamRegistry()
        stream = opened(streams)
        beyond, far = (asyncio.ensure_future(read_all(stream, offset)) for offset in (3, 2**64 - 1))
        await asyncio.sleep(0)
        streams.append(stream, b"abcde")
        streams.finish(stream)
        assert (await beyond, await far) == (b"de", b"")

    run(work())


def test_a_cancelled_reader_leaves_the_others() -> None:
    async def work() -> None:
        streams = StreamRegistry()
        stream = opened(streams)
        gone, stays = (asyncio.ensure_future(read_all(stream)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        streams.append(stream, b"a")
        streams.finish(stream)
        assert await stays == b"a"

    run(work())


def test_the_oldest_bytes_are_dropped() -> None:
    async def work() -> None:
        streams = StreamRegistry(stream_bytes=10)
        stream = opened(streams)
        streams.append(stream, b"0123456")
        streams.append(stream, b"789abc")
        assert (stream.first, stream.end) == (3, 13)
        streams.append(stream, b"x" * 30)  # more than fits
        assert (stream.first, stream.end) == (33, 43)
        streams.finish(stream)
        with pytest.raises(StreamLost):
            await stream.read(32)
        assert await read_all(stream, 33) == b"x" * 10

    run(work())


def test_a_new_stream_stops_the_earlier_one() -> None:
    async def work() -> None:
        streams = StreamRegistry()
        stream = opened(streams)
        waiting = asyncio.ensure_future(read_all(stream))
        stopping = asyncio.ensure_future(stream.wait_for_stop())
        await asyncio.sleep(0)
        streams.append(stream, b"a")
        new = opened(streams)
        await stopping
        assert await waiting == b"a" and stream.is_stopped
        streams.append(stream, b"b")  # by a writer that has not noticed yet
        streams.finish(stream)
        assert streams.find(b"a") is new and len(streams) == 1
        assert [state["total_bytes"] for state in streams.look_up([b"a"])] == [0]

    run(work())


def test_a_stream_that_no_client_can_resume_is_stopped() -> None:
    """Its last reader left longer ago than the buffer reaches back."""

    async def work() -> None:
        streams = StreamRegistry(stream_bytes=10)
        read, left = opened(streams, b"read"), opened(streams, b"left")
        for stream in (read, left):
            streams.append(stream, b"x" * 15)
        streams.leave(left)
        for stream in (read, left):
            streams.append(stream, b"x" * 10)
        assert (left.first, left.is_stopped) == (15, False)
        for stream in (read, left):
            streams.append(stream, b"x")
        assert left.is_stopped and streams.find(b"left") is None and not read.is_stopped

    run(work())


def test_an_earlier_writer_does_not_touch_the_new_stream() -> None:
    """The writer of the replaced stream notices the stop late. That stream has no readers and has dropped bytes."""

    async def work() -> None:
        streams = StreamRegistry()
        earlier = opened(streams)
        streams.leave(earlier)
        streams.append(earlier, b"x" * 100_000)
        new = opened(streams)
        assert earlier.first > earlier.left_at
        streams.append(earlier, b"y")
        assert streams.find(b"a") is new and not new.is_stopped

    run(work())


def test_readers_of_a_failed_writer_are_cut_off() -> None:
    async def work() -> None:
        streams = StreamRegistry()
        stream = opened(streams)
        streams.append(stream, b"a")
        streams.finish(stream, was_cut=True)
        with pytest.raises(StreamLost):
            await read_all(stream)

    run(work())


def test_there_is_a_limit_for_all_streams_together() -> None:
    """Ended streams make room, the oldest first; then a stream drops its own oldest bytes."""

    async def work() -> None:
        streams = StreamRegistry(most_bytes=100, stream_bytes=60)
        for name in (b"old", b"new"):
            stream = opened(streams, name)
            streams.append(stream, name[:1] * 40)
            streams.finish(stream)
        running = opened(streams, b"running")
        streams.append(running, b"r" * 30)
        assert streams.find(b"old") is None and streams.find(b"new") is not None
        other = opened(streams, b"other")
        streams.append(other, b"x" * 80)
        assert streams.find(b"new") is None and other.size == 60
        streams.append(running, b"r" * 30)
        assert (running.size, running.first, other.size) == (40, 20, 60)

    run(work())


def test_each_stream_has_its_share_of_the_bytes() -> None:
    """Running streams that use all bytes do not cut off the client of another one."""

    async def work() -> None:
        streams = StreamRegistry(most_streams=4, most_bytes=100, stream_bytes=60)
        for name in (b"a", b"b"):
            streams.append(opened(streams, name), b"x" * 60)
        late = opened(streams, b"late")
        streams.append(late, b"0123456789" * 2)
        assert await late.read(0) == b"0123456789" * 2
        streams.append(late, b"x" * 10)
        assert late.size == 25

    run(work())


def test_ended_streams_without_readers_make_room_first() -> None:
    """A slow client still gets the end of its answer."""

    async def work() -> None:
        streams = StreamRegistry(most_streams=3)
        slow, left, other = (opened(streams, name) for name in (b"slow", b"left", b"other"))
        for stream in (slow, left, other):
            streams.finish(stream)
        streams.leave(left)
        opened(streams, b"new")
        assert streams.find(b"slow") is slow and streams.find(b"left") is None
        opened(streams, b"newer")
        assert streams.find(b"slow") is None

    run(work())


def test_the_number_of_streams_is_limited() -> None:
    """Ended streams make room, running ones do not: their clients would lose an answer that another client started."""

    async def work() -> None:
        streams = StreamRegistry(most_streams=3)
        running = [opened(streams, b"%d" % i) for i in range(2)]
        streams.finish(opened(streams, b"ended"))
        running.append(opened(streams, b"2"))
        assert streams.find(b"ended") is None and len(streams) == 3
        assert streams.open(b"3") is None and len(streams) == 3
        streams.finish(running[1])
        for i in range(5000):
            streams.finish(opened(streams, b"more %d" % i))
        assert len(streams) == 3 and streams.find(b"0") is running[0]

    run(work())


def test_ended_streams_expire_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        timers: list[tuple[float, Any]] = []
        monkeypatch.setattr(loop, "call_at", lambda at, call: timers.append((at, call)) or loop)
        now = 1000.0
        monkeypatch.setattr(loop, "time", lambda: now)
        streams = StreamRegistry()
        first, second, third = (opened(streams, name) for name in (b"1", b"2", b"3"))
        streams.append(second, b"a" * 100_000)
        streams.finish(first)
        now = 1100.0
        streams.finish(second)
        assert [at for at, _ in timers] == [1300.0]  # one timer for all
        now = 1300.0
        timers.pop()[1]()
        assert streams.find(b"1") is None and streams.find(b"2") is second
        now = 1400.0
        (expires, expire) = timers.pop()
        expire()
        assert expires == 1400.0 and not timers and streams.find(b"3") is third and len(streams) == 1
        with pytest.raises(StreamLost):  # a slow reader of a dropped stream does not keep its bytes
            await second.read(0)

    run(work())


def test_lookups_return_each_stream_once() -> None:
    async def work() -> None:
        streams = StreamRegistry()
        for id in (b"a", b"a::m/x", b"ab", b"a::m/x::y", b"b::m", b"\xff"):
            opened(streams, id)
        names = [state["conversation_id"] for state in streams.look_up([b"b", b"a", b"a::m/x", b"none"])]
        assert names == ["b::m", "a", "a::m/x", "a::m/x::y"]
        assert [state["conversation_id"] for state in streams.look_up([b"\xff"])] == ["\ufffd"]
        streams.finish(streams.find(b"a"))  # type: ignore[arg-type]
        (state,) = (one for one in streams.look_up([b"a"]) if one["conversation_id"] == "a")
        assert state["is_done"] and state["completed_at"] >= state["started_at"] > 0

    run(work())


def test_hostile_ids_cost_little_to_look_up() -> None:
    """The number of results is that of the streams, for any ids."""

    async def work() -> None:
        streams = StreamRegistry()
        id = b"::" * (LONGEST_ID // 2)
        for end in range(50):
            opened(streams, id[:-2] + b"%02d" % end)
        assert len(streams.look_up([id[: 2 * n] for n in range(LONGEST_ID // 2)])) == 50

    run(work())


def test_a_shutdown_stops_streams_without_readers() -> None:
    async def work() -> None:
        streams = StreamRegistry()
        left, read = opened(streams, b"left"), opened(streams, b"read")
        streams.leave(left)
        streams.close()
        assert left.is_stopped and not read.is_stopped
        streams.leave(read)
        assert read.is_stopped and not len(streams)

    run(work())


def scope_of(id: bytes, path: str = "/v1/chat/completions", method: str = "POST") -> dict[str, Any]:
    return {"method": method, "path": path, "headers": [(CONVERSATION, id)]}


def test_only_streaming_endpoints_have_streams() -> None:
    assert requested_id(scope_of(b"a")) == b"a"
    assert requested_id(scope_of(b"\xff\x00 ")) == b"\xff\x00 "
    assert requested_id(scope_of(b"a", "/v1/chat/completions/control")) == b""
    assert requested_id(scope_of(b"a", method="GET")) == b""
    assert requested_id(scope_of(b"")) == requested_id({**scope_of(b"a"), "headers": []}) == b""
    assert requested_id(scope_of(b"x" * LONGEST_ID))
    with pytest.raises(ApiError, match="at most 2048 bytes"):
        requested_id(scope_of(b"x" * (LONGEST_ID + 1)))


def test_bodies_that_ask_for_a_stream() -> None:
    assert is_streamed({"stream": True}, "/v1/messages") and is_streamed({"stream": "true"}, "/audio/transcriptions")
    assert is_streamed({}, "/api/chat") and not is_streamed({"stream": False}, "/api/chat")
    assert not is_streamed({}, "/completion") and not is_streamed([], "/api/chat")


def test_the_limits_are_those_of_llama_server() -> None:
    assert (registry_module.STREAM_BYTES, registry_module.KEEP_SECONDS) == (4 << 20, 300.0)
