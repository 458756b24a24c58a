"""Templates that use unbounded memory or time: each ends as an error, and other requests are unaffected."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers import chosen, first_of
from waiting import until

from llamado.text.template import chat
from llamado.text.template.chat import ChatTemplate, EndTokens, TemplateError

USER = [{"role": "user", "content": "hi"}]

TEXT = "{% set n = namespace(s='a b') %}{% for i in range(22) %}{% set n.s = n.s + n.s %}{% endfor %}"
LIST = "{% set n = namespace(s=['b', 'a']) %}{% for i in range(19) %}{% set n.s = n.s + n.s %}{% endfor %}"
HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{% for i in range(99) %}{{ g() }}{% endfor %}{% endmacro %}"
    "{% set g = f %}{% for i in range(99999) %}{% for j in range(99999) %}{{ f() }}{% endfor %}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ [1] * 1000000000 }}",
    "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.replace('', 'b' * 1000000).replace('b', 'c' * 1000000) }}",
    "{{ 'aaaa' | replace('a', 'b' * 8000000) }}",
    "{{ ('a\n' * 1000000) | indent(9999) }}",
    "{{ (['a' * 1000000] * 100000) | join }}",
    "{{ ''.join(['a' * 1000000] * 100000) }}",
    "{{ 10 ** 1000000000 }}",
    "{% set n = namespace(x=10) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
    "{{ range(10 ** 9) | list }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(a=1) }}",
    "{{ raise_exception.__globals__['time'] }}",
    "{{ cycler.__init__.__globals__ }}",
    # Doubling as far as it goes, then what makes more of it.
    TEXT + "{{ [n.s] * 100000 | join }}{{ ([n.s] * 100000) | join }}",
    TEXT + "{{ n.s | list | sort | length }}",
    TEXT + "{{ ('%s' * 100000) % (([n.s] * 100000) | join) }}",
    TEXT + "{{ ('%s' * 1000) | format(*([n.s] * 1000)) }}",
    TEXT + "{{ ('{0}' * 1000).format(n.s) }}",
    TEXT + "{% for i in range(99999) %}{% set x = n.s.encode('utf-32') %}{% endfor %}",
    TEXT + "{% for i in range(99999) %}{% set x = n.s.encode('punycode') %}{% endfor %}",
    TEXT + "{% for i in range(99999) %}{% set x = n.s | upper | lower | title %}{% endfor %}",
    TEXT + "{{ n.s.replace('a', n.s) }}",
    TEXT + "{{ n.s | replace('a', n.s) }}",
    TEXT + "{{ (n.s ~ n.s) * 1000000 }}",
    TEXT + "{{ n.s | urlize }}",
    TEXT + "{{ n.s | wordwrap(1) | indent(99) }}",
    TEXT + "{{ n.s | list | unique | list | length }}{{ n.s | batch(1) | list | tojson }}",
    TEXT + "{{ n.s.split('a') | map('center', 999) | join | length }}",
    LIST + "{{ n.s | sort | length }}",
    LIST + "{{ n.s | map('string') | join(',') | length }}",
    LIST + "{{ n.s | groupby('x') | list }}",
    LIST + "{{ n.s | tojson(indent=1000) | length }}",
    LIST + "{{ n.s | pprint | length }}",
    LIST + "{% for i in n.s %}{% for j in n.s %}{% endfor %}{% endfor %}",
    "{{ '\t'.expandtabs(10 ** 10) }}",
    "{{ 'a'.zfill(10 ** 10) }}",
    "{{ range(100000) | batch(1, 'a' * 100000) | map('join') | join }}{{ lipsum(99999999) }}",
    "{% for i in range(99999) %}{% for x in range(99999) | list | reverse %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f([n]) }}{% endmacro %}{{ f(1) }}",
    "{% macro f() %}{{ caller() }}{% call f() %}{% endcall %}{% endmacro %}{% call f() %}x{% endcall %}",
    "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set x = []  %}{{ x.append(x) }}{{ x | tojson }}",
    # What the compiler itself takes long for.
    "{% set x = " + "(" * 20000 + "1" + ")" * 20000 + " %}{{ x }}",
    "{% set x = [" + "[1,2,3,'abc',{'a': 1}]," * 150000 + "] %}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "{{ 1" + " + 1" * 20000 + " }}",
    "{{ " + "10 ** " * 4 + "10 }}",
]
EACH_LIMIT = (0, 1, 3, 4, 6, 12, 15, 22, 26, 27, 29, 57)
"""Indices of templates that exceed each limit once: time, depth, memory, the sandbox's lengths and its attributes."""


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.text.template.chat.SECONDS", 0.15, raising=False)


@pytest.mark.slow  # all together
@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("source", chosen(HOSTILE, [HOSTILE[i] for i in EACH_LIMIT], lambda it: str(HOSTILE.index(it))))
def test_hostile_templates_end_as_an_error(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template") as caught:
        ChatTemplate(source, EndTokens("", "")).render(USER)
    assert len(str(caught.value)) < 2000
    assert ChatTemplate("{{ messages[0].content }}!", EndTokens("", "")).render(USER) == "hi!"


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS_AT_LOAD = "{{ 10 ** (10 ** 10) }}"
GREEDY = "{% for i in range(10) %}{% set x = 'a' * 10 ** 10 %}{% endfor %}"


@pytest.mark.slow
def test_errors_name_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.SECONDS == 2
    monkeypatch.setattr(chat, "SECONDS", 0.15)
    with pytest.raises(TemplateError, match=r"takes more than 0.15 s of computing; it may never end"):
        ChatTemplate(ENDLESS, EndTokens("", "")).render(USER)
    monkeypatch.undo()
    for source, limit in (
        (GREEDY, r"line 1: takes more than 512 MiB of memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", r"makes a text of more than 16,777,216 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"line 1: nests too deeply"),
    ):
        with pytest.raises(TemplateError, match=limit):
            ChatTemplate(source, EndTokens("", "")).render(USER)


@pytest.mark.slow
@pytest.mark.usefixtures("little_time")
def test_slow_templates_are_detected_at_load() -> None:
    with pytest.raises(TemplateError, match=r"takes more than 0.15 s of computing.*--chat-template"):
        ChatTemplate(ENDLESS_AT_LOAD, EndTokens("", ""))


@pytest.mark.slow
def test_template_capabilities_are_probed_within_limits() -> None:
    """One trial that takes too long is the last of its kind."""
    template = ChatTemplate(ENDLESS, EndTokens("", ""))
    before = os.times()
    assert template.features.strings and not template.caps["supports_tools"]
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5 * 0.3


@pytest.mark.full
def test_the_next_in_line_and_other_templates_go_on() -> None:
    hostile, harmless = ChatTemplate(ENDLESS, EndTokens("", "")), ChatTemplate("ok", EndTokens("", ""))
    errors: list[str] = []

    def render() -> None:
        try:
            hostile.render(USER)
        except TemplateError as error:
            errors.append(str(error))

    assert harmless.features.strings and hostile.features.strings
    threads = [threading.Thread(target=render) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert [harmless.render(USER) for _ in range(20)] == ["ok"] * 20
    assert not errors, "waited for the hostile ones"
    for thread in threads:
        thread.join()
    assert len(errors) == 3 and all("of computing" in error for error in errors)


# --- the processes

RENDERS = """
import sys
from llamado.text.template.chat import ChatTemplate, EndTokens
template = ChatTemplate(sys.argv[1], EndTokens("", ""))
template.features
print("compiled", flush=True)
sys.stdin.readline()
template.render([{"role": "user", "content": "hi"}])
"""


def renderers(parent: int) -> list[int]:
    """Processes that render for `parent`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if int(after_name[1]) == parent and b"llamado.text.template.sandbox" in command:
            found.append(int(path.name))
    return found


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for_end(process: int) -> None:
    until(lambda: ended(process), "the child did not end")


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that has compiled a template and renders it on request."""
    command = [sys.executable, "-c", RENDERS, request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"compiled\n"
        yield process
        process.kill()


@pytest.mark.slow
@linux
@pytest.mark.parametrize("started", ["ok"], indirect=True)
@pytest.mark.parametrize("kill", first_of([signal.SIGKILL, signal.SIGTERM]))
def test_no_child_is_left_when_its_parent_is_killed(started: subprocess.Popen[bytes], kill: signal.Signals) -> None:
    (child,) = renderers(started.pid)
    started.send_signal(kill)
    started.wait()
    wait_for_end(child)


@pytest.mark.full
@linux
@pytest.mark.parametrize("started", [ENDLESS], indirect=True)
def test_no_child_goes_on_rendering_for_a_parent_that_was_killed(started: subprocess.Popen[bytes]) -> None:
    (child,) = renderers(started.pid)
    started.communicate(b"\n")
    assert started.returncode == 1
    wait_for_end(child)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("started", ["ok"], indirect=True)
def test_children_end_silently_with_their_parent(started: subprocess.Popen[bytes]) -> None:
    (child,) = renderers(started.pid)
    assert started.communicate(b"\n") == (b"", b"")
    assert started.returncode == 0
    wait_for_end(child)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("started", ["ok"], indirect=True)
def test_a_child_that_was_killed_is_replaced(started: subprocess.Popen[bytes]) -> None:
    (child,) = renderers(started.pid)
    os.kill(child, signal.SIGKILL)
    wait_for_end(child)
    assert started.communicate(b"\n") == (b"", b"")
    assert started.returncode == 0


@pytest.mark.slow
@linux
def test_a_child_has_limits_no_secrets_and_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    command = [sys.executable, "-c", RENDERS, "ok"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"compiled\n"
        (child,) = renderers(process.pid)
        assert b"secret" in Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"secret" not in Path(f"/proc/{child}/environ").read_bytes()
        assert os.getpgid(child) == child != os.getpgid(process.pid)  # Ctrl-C of a terminal is not for the child
        assert resource.prlimit(child, resource.RLIMIT_DATA)[1] == 512 << 20
        assert resource.prlimit(child, resource.RLIMIT_CORE) == (0, 0)
        assert resource.prlimit(child, resource.RLIMIT_FSIZE) == (0, 0)
        process.kill()


def ask(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    assert process.stdin and process.stdout
    process.stdin.write(struct.pack("<Q", len(request)) + request)
    process.stdin.flush()
    (length,) = struct.unpack("<Q", process.stdout.read(8))
    return process.stdout.read(length)


@pytest.mark.slow
@linux
def test_memory_is_limited_and_given_back() -> None:
    doubling = "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
    request = '{"source": "' + doubling + '", "values": {}, "renders": [{}], "seconds": 60}'
    command = [sys.executable, "-P", "-m", "llamado.text.template.sandbox"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for _ in range(2):
            assert b"512 MiB of memory" in ask(process, request.encode())
        request = '{"source": "{{ x }}{{ y }}", "values": {"x": 1}, "renders": [{"y": 2}], "seconds": 1}'
        assert ask(process, request.encode()) == b'{"sizes": [2]}'
        assert process.stdout and process.stdout.read(2) == b"12"
        status = Path(f"/proc/{process.pid}/status").read_text()
        memory = {
            name: int(value.split()[0]) << 10
            for name, _, value in (x.partition(":") for x in status.splitlines())
            if name in ("VmHWM", "VmRSS")
        }
        assert memory["VmHWM"] < 600 << 20
        assert memory["VmRSS"] < 100 << 20
        assert process.stdin
        process.stdin.close()
        assert process.wait() == 0


@pytest.mark.slow
def test_the_largest_texts_that_are_allowed_fit_into_the_memory() -> None:
    text = "\U0001f600" * ((16 << 20) - 1)
    template = ChatTemplate("{{ messages[0].content }}", EndTokens("", ""))
    assert template.features.strings
    assert template.render([{"role": "user", "content": text}]) == text


def test_values_that_json_cannot_hold_are_an_error() -> None:
    template = ChatTemplate("{{ x }}", EndTokens("", ""))
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value, reason in ((object(), "JSON cannot hold"), (deep, "nested too deeply"), (10**5000, "JSON cannot hold")):
        with pytest.raises(TemplateError, match=reason):
            template.render(USER, x=value)
    assert template.render(USER, x="\ud800\x00é") == "\ud800\x00é"


@pytest.mark.parametrize("character", chosen(["a", "é", "€", "🦙", "\ud83e"], ["€", "🦙"]))
def test_long_texts_arrive_whole(character: str) -> None:
    """They are read in parts, which may end within a character."""
    text = "ab"[: len(character)] + character * 700_001
    template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", EndTokens("", ""))
    bare, prompt = template.render_both([{"role": "user", "content": text}])
    assert bare == text and prompt == text + ">"
