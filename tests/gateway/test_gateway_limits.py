"""Limits of keys, token counts, the circuit breaker, the prefix index, and gateway.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from stand_ins import RunningGateway, StandIn
from waiting import until

from llamado.gateway import limits
from llamado.gateway.breaker import FAILURES, LONGEST_PAUSE, Breaker, Circuit
from llamado.gateway.limits import KeyLimits, KeyUsage
from llamado.gateway.meter import TokenCount
from llamado.gateway.options import GatewayError, GatewayOptions, KeyOptions, ReplicaOptions, read_config, read_keys
from llamado.gateway.prefixes import BLOCK, LEAST_KNOWN, Prefixes, chain_of
from llamado.http.errors import ApiError

Make = Callable[..., StandIn]
Start = Callable[..., RunningGateway]


class Clock:
    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def use(clock: Clock, **limits: float) -> KeyUsage:
    return KeyUsage(KeyOptions(name="k", key="secret", **limits), clock)


def refused(one: KeyUsage, tokens: int = 0) -> ApiError:
    with pytest.raises(ApiError) as raised:
        one.admit(tokens)
    error = raised.value
    assert error.status == 429 and error.error["type"] == "rate_limit_error"
    return error


def test_requests_a_minute() -> None:
    clock = Clock()
    one = use(clock, requests_per_minute=6)
    for _ in range(6):
        one.admit(0)
    assert refused(one).retry_after == 10 and one.refused == {"requests_per_minute": 1}
    clock.now += 9.9
    refused(one)
    clock.now += 0.1
    one.admit(0)
    refused(one)
    clock.now += 3600  # at most one minute's worth is saved
    for _ in range(6):
        one.admit(0)
    refused(one)


def test_tokens_a_minute() -> None:
    clock = Clock()
    one = use(clock, tokens_per_minute=60)
    one.admit(50)
    one.settle(130, 50)
    assert refused(one).retry_after == 71  # 70 tokens of debt, and the bucket must be above zero
    clock.now += 69
    refused(one)
    clock.now += 2
    one.admit(0)
    assert one.tokens == 130 and one.requests == 2


def test_quotas_of_a_day() -> None:
    clock = Clock(86400 * 20000 + 86000.0)
    one = use(clock, tokens_per_day=100, requests_per_day=3)
    one.admit(40)
    one.settle(100, 40)
    assert refused(one).retry_after == 400
    clock.now += 400
    for _ in range(3):
        one.admit(0)
    error = refused(one)
    assert error.retry_after == 86400 and error.error["limit"] == "requests_per_day"


def test_quotas_survive_a_restart(tmp_path: Path) -> None:
    clock, file = Clock(86400 * 20000 + 100.0), tmp_path / "quotas.json"
    options = [KeyOptions(name="k", key="secret", tokens_per_day=100), KeyOptions(name="other", key="o")]
    first = KeyLimits(options, file, clock)
    first.usages[0].admit(40)
    first.usages[0].settle(90, 40)
    first.save()
    assert json.loads(file.read_text())["k"] == {"day": "2024-10-04", "requests": 1, "tokens": 90}
    assert "secret" not in file.read_text()
    again = KeyLimits(options, file, clock).usages[0]
    again.admit(10)
    assert refused(again).error["limit"] == "tokens_per_day"
    clock.now += 86400  # yesterday's usage does not count
    KeyLimits(options, file, clock).usages[0].admit(10)
    assert json.loads(file.read_text())["k"] == {"day": "2024-10-05", "requests": 0, "tokens": 0}


@pytest.mark.parametrize("text", ["", "[]", '{"k": 5}', '{"k": {"day": "2024-10-04", "requests": -1, "tokens": 0}}'])
def test_malformed_quota_files(text: str, tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    file.write_text(text)
    options = [KeyOptions(name="k", key="secret", tokens_per_day=100)]
    if text == "[]":  # a file without keys is valid
        KeyLimits(options, file)
        return
    with pytest.raises(GatewayError, match=r"quotas\.json: not a gateway's quota file"):
        KeyLimits(options, file)
    assert file.read_text() == text


def test_unusable_quota_files(tmp_path: Path) -> None:
    options = [KeyOptions(name="k", key="secret")]
    for file in (tmp_path / "no folder" / "quotas.json", tmp_path):
        with pytest.raises(GatewayError, match=f"quota_file: {file}: "):
            KeyLimits(options, file)
    with pytest.raises(GatewayError, match="there are no keys"):
        GatewayOptions(quota_file=tmp_path / "quotas.json")


@pytest.mark.slow
def test_quotas_are_saved_periodically_and_at_shutdown(
    stand_in: Make, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, file = stand_in("a"), tmp_path / "quotas.json"
    keys = (KeyOptions(name="small", key="s", tokens_per_day=10),)

    def ask(gateway: RunningGateway) -> int:
        headers = {"Authorization": "Bearer s"}
        return gateway.http.post("/v1/chat/completions", json={"messages": []}, headers=headers).status_code

    def used() -> Any:
        return json.loads(file.read_text())["small"]["tokens"]

    monkeypatch.setattr(limits, "KEPT_EVERY", 0.01)
    first = start_gateway(a, keys=keys, quota_file=file)
    assert ask(first) == 200
    until(lambda: used() == 8)  # tokens of one response
    monkeypatch.setattr(limits, "KEPT_EVERY", 3600.0)
    second = start_gateway(a, keys=keys, quota_file=file)
    assert ask(second) == 200 and used() == 8
    second.server.should_exit = True
    until(lambda: used() == 16)  # written at shutdown
    third = start_gateway(a, keys=keys, quota_file=file)
    assert ask(third) == 429


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ([b'{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":5,"total_tokens":8}}'], 8),
        ([b'{"tokens_predicted":7,', b'"tokens_eva', b'luated": 20,"content":"x"}'], 27),
        ([b'data: {"timings":{"cache_n":10,"prompt_n":2,"predicted_n":4}}\n\n'], 16),
        (
            [b'data: {"usage":{"input_tokens":9,"output_tokens":1}}\n\n', b'data: {"usage":{"output_tokens":30}}\n\n'],
            39,
        ),
        ([b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"], 28),  # cut off: an estimated prompt of 25 tokens and three events
        ([b'{"content":"' + b"x" * 400 + b'"}'], 128),  # estimated by size
        ([b'{"content":"\\"prompt_tokens\\": 1000000","usage":{"prompt_tokens":5,"completion_tokens":1}}'], 6),
    ],
)
def test_tokens_of_answers(parts: list[bytes], total: int) -> None:
    count = TokenCount(25)
    for part in parts:
        count.observe(part)
    assert count.total == total


def test_each_key_has_its_own_limits(stand_in: Make, start_gateway: Start) -> None:
    a = stand_in("a")
    keys = (KeyOptions(name="small", key="s", tokens_per_day=10), KeyOptions(name="large", key="l"))
    gateway = start_gateway(a, keys=keys)

    def ask(key: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return gateway.http.post("/v1/chat/completions", json={"messages": [], **body}, headers=headers)

    assert ask("nobody").status_code == 401 and gateway.http.get("/health").status_code == 200
    assert [ask("s").status_code, ask("s", stream=2).status_code] == [200, 200]  # 8 tokens each
    last = ask("s")
    assert last.status_code == 429 and int(last.headers["retry-after"]) >= 1
    assert last.json()["error"]["message"] == "key 'small' has used its 10 tokens a day"
    assert [ask("l").status_code for _ in range(4)] == [200] * 4
    assert gateway.http.get("/v1/models", headers={"X-Api-Key": "s"}).status_code == 200
    text = gateway.http.get("/metrics", headers={"X-Api-Key": "l"}).text
    assert 'llamado_gateway_key_tokens_total{key="small"} 16.0' in text
    assert 'llamado_gateway_key_refused_total{key="small",limit="tokens_per_day"} 1.0' in text
    assert all("authorization" not in headers for headers in a.headers)  # replicas do not see clients' keys


def test_the_replicas_count_is_charged(stand_in: Make, start_gateway: Start) -> None:
    """This holds for any response and for disconnects; without a count, the response's usage is charged."""
    a = stand_in("a")
    gateway = start_gateway(a, keys=(KeyOptions(name="k", key="s", tokens_per_day=100_000),))
    (use,) = gateway.server.gateway._limits.usages
    gateway.http.headers.update({"Authorization": "Bearer s", "X-Llamado-Usage-Id": "0" * 32, "X-Request-Id": "same"})
    for body, tokens in (({"used": 1000}, 1000), ({"used": 500, "stream": 3}, 1500), ({}, 1508), ({"used": 0}, 1508)):
        assert gateway.ask(**body).status_code == 200 and use.tokens == tokens
    with gateway.streaming(hold="rest", used=300) as answer:
        next(answer.iter_text())
    until(lambda: use.tokens == 1808)
    assert "0" * 32 not in a.used
    assert gateway.ask(status=400).status_code == 400 and use.tokens == 1808
    with gateway.streaming(hold="rest") as answer:  # one event of a response without `usage`
        next(answer.iter_text())
    until(lambda: 1808 < use.tokens < 1900 and not a.cancelled < 2)


def test_the_circuit_breaker() -> None:
    clock = Clock(0.0)
    one = Breaker(clock)
    for _ in range(FAILURES - 1):
        one.record_failure(one.begin())
    one.record_success(one.begin())
    for _ in range(FAILURES):
        assert one.allows_request
        one.record_failure(one.begin())
    assert one.state is Circuit.OPEN and not one.allows_request
    one.record_success(False)  # of an earlier request
    assert one.state is Circuit.OPEN
    pauses = []
    for _ in range(8):
        began = clock.now
        while not one.allows_request:
            clock.now += 0.5
        pauses.append(clock.now - began)
        assert one.begin() and not one.allows_request  # one probe at a time
        one.record_failure(True)
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    clock.now += LONGEST_PAUSE
    one.release_probe(one.begin())  # its client disconnected: the next request is the probe
    one.record_success(one.begin())
    assert one.state is Circuit.CLOSED and one.allows_request
    for _ in range(FAILURES):
        one.record_failure(one.begin())
    assert one.state is Circuit.OPEN
    clock.now += 1
    assert one.state is Circuit.HALF_OPEN, "pauses start over after a success"


def said(*texts: str, **more: Any) -> Any:
    return {"messages": [{"role": "user", "content": text} for text in texts], **more}


def test_the_prefix_index() -> None:
    prefixes = Prefixes()
    long = "x" * 2 * BLOCK
    first = chain_of(said(long))
    prefixes.add(first, 1)
    assert prefixes.cached_bytes(chain_of(said(long, "and then"))) == {1: first[-1][1]}
    assert prefixes.cached_bytes(chain_of(said(long, tools=[{}]))) == {}  # templates put tools first
    assert prefixes.cached_bytes(chain_of(said(long, model="other"))) == {}
    changed = prefixes.cached_bytes(chain_of(said(long[:-1] + "y")))
    assert changed[1] < first[-1][1] and changed[1] >= LEAST_KNOWN
    prefixes.add(chain_of({"prompt": "p" * LEAST_KNOWN}), 2)
    assert prefixes.cached_bytes(chain_of({"prompt": "p" * LEAST_KNOWN})) == {2: LEAST_KNOWN}
    prefixes.add(chain_of({"prompt": "q" * (LEAST_KNOWN - 1)}), 2)
    assert prefixes.cached_bytes(chain_of({"prompt": "q" * (LEAST_KNOWN - 1)})) == {}
    assert chain_of({"prompt": [1, 2, 3] * 500})[0] == chain_of({"prompt": [1, 2, 3] * 600})[0]
    for first_half, second_half in ("ab", "cd"):
        prefixes.add(chain_of({"prompt": first_half * BLOCK + second_half * BLOCK}), 3)
    assert prefixes.cached_bytes(chain_of({"prompt": "a" * BLOCK + "d" * BLOCK})) == {3: BLOCK}  # d followed c only
    for nothing in (None, [], {}, {"prompt": 5}, {"messages": 7}):
        assert chain_of(nothing) == []


def test_unused_prefixes_are_forgotten() -> None:
    prefixes = Prefixes(most=20)
    kept = chain_of(said("k" * 2000))
    prefixes.add(kept, 1)
    for i in range(100):
        prefixes.add(chain_of(said(f"{i}" * 2000)), 1)
        prefixes.add(kept, 1)
        assert len(prefixes) <= 20
    assert prefixes.cached_bytes(kept) == {1: kept[-1][1]}
    assert prefixes.cached_bytes(chain_of(said("3" * 2000))) == {}


def test_reading_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "replicas:\n  - http://h:1\n  - {url: 'http://h:2/', name: two, weight: 2, key: k}\n"
        "backups: [http://h:3]\nhealth_timeout: 2\nadmin_key: a\nlabels: {pool_id: p}\n"
        "keys:\n  - {name: n, key: s, tokens_per_day: 5}\nquota_file: q.json\n"
    )
    config = read_config(str(path))
    options = GatewayOptions(**config)
    assert [(r.name, r.url, r.weight, r.key, r.backup) for r in options.replicas] == [
        ("h:1", "http://h:1", 1.0, "", False),
        ("two", "http://h:2", 2, "k", False),
        ("h:3", "http://h:3", 1.0, "", True),
    ]
    assert options.health_timeout == 2 and options.admin_key == "a" and options.labels == {"pool_id": "p"}
    assert options.quota_file == Path("q.json")
    assert options.keys == (KeyOptions(name="n", key="s", tokens_per_day=5),) and "'s'" not in repr(options)
    path.write_text("- {name: n, key: s}\n")
    assert read_keys(str(path)) == (KeyOptions(name="n", key="s"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replica: []", "did you mean 'replicas'"),
        ("replicas: 5", "replicas: expected a list"),
        ("replicas: [{name: x}]", "replicas[0]: 'url' is missing"),
        ("replicas: [{url: 'http://h', wieght: 1}]", "did you mean 'weight'"),
        ("replicas: [{url: 'http://h', weight: true}]", "weight: expected int or float"),
        ("replicas: ['ftp://h:1']", "is not a replica's address"),
        ("replicas: ['http://h', 'http://h']", "two replicas have the name 'h'"),
        ("keys: [{name: a, key: k}, {name: b, key: k}]", "two of the keys are the same"),
        ("keys: [{name: a, key: k, tokens_per_day: 0}]", "tokens_per_day: expected more than 0"),
        ("quota_file: 5", "quota_file: expected a text, got 5"),
        ("health_timeout: soon", "health_timeout: expected a number"),
        ("health_timeout: 0", "health_timeout: expected seconds, more than 0"),
        ("[", "invalid YAML"),
    ],
)
def test_invalid_configurations(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(GatewayError) as raised:
        GatewayOptions(**read_config(str(path)))
    assert said in str(raised.value)


def test_addresses() -> None:
    assert ReplicaOptions(url="h:1").url == "http://h:1" and ReplicaOptions(url="h:1").name == "h:1"
    for url in ("", "ftp://h", "http://", "http://h:99999", "http://h:x"):
        with pytest.raises(GatewayError):
            ReplicaOptions(url=url)
