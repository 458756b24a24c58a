"""`/chats`: chats that the server keeps for the page, apart for each API key."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import client
from wire import serving

from llamado.commands import cli
from llamado.http.access import AccessRules
from llamado.page import chat_folder
from llamado.page.chat_folder import ChatConflict, ChatFolder

NEW = {"If-None-Match": "*"}


def if_match(response: httpx.Response) -> dict[str, str]:
    return {"If-Match": response.headers["etag"]}


async def test_a_chat_is_stored_changed_and_deleted(tmp_path: Path) -> None:
    async with client(chats=str(tmp_path)) as http:
        assert (await http.get("/props")).json()["chats_kept"] is True
        first = await http.put("/chats/a1", content=b'{"title":"one"}', headers=NEW)
        second = await http.put("/chats/a1", content=b'{"title":"two"}', headers=if_match(first))
        assert first.status_code == second.status_code == 200 and first.headers["etag"] != second.headers["etag"]
        got = await http.get("/chats/a1")
        assert (got.json(), got.headers["etag"]) == ({"title": "two"}, second.headers["etag"])
        listed = (await http.get("/chats")).json()
        assert [(one["id"], one["revision"]) for one in listed["chats"]] == [("a1", second.json()["revision"])]
        assert listed["chats"][0]["updated"] == second.json()["updated"] and listed["deleted"] == []
        assert (await http.delete("/chats/a1", headers=if_match(second))).status_code == 200
        listed = (await http.get("/chats")).json()
        assert (listed["chats"], listed["deleted"]) == ([], ["a1"])
        missing = await http.get("/chats/a1")
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
        again = await http.put("/chats/a1", content=b'{"title":"back"}', headers=NEW)
        assert again.status_code == 200 and (await http.get("/chats")).json()["deleted"] == []


async def test_a_missed_change_of_another_device_is_a_conflict(tmp_path: Path) -> None:
    async with client(chats=str(tmp_path)) as http:
        first = await http.put("/chats/a", content=b'{"n":1}', headers=NEW)
        await http.put("/chats/a", content=b'{"n":2}', headers=if_match(first))
        for late in (
            await http.put("/chats/a", content=b'{"n":3}', headers=if_match(first)),
            await http.put("/chats/a", content=b'{"n":3}', headers=NEW),
            await http.delete("/chats/a", headers=if_match(first)),
            await http.put("/chats/b", content=b'{"n":3}', headers=if_match(first)),
        ):
            assert late.status_code == 412 and "read it again" in late.json()["error"]["message"]
        assert (await http.get("/chats/a")).json() == {"n": 2}
        without = await http.put("/chats/a", content=b'{"n":3}')
        assert without.status_code == 428 and (await http.delete("/chats/a")).status_code == 428
        for id in ("a", "unknown"):
            assert (await http.delete(f"/chats/{id}", headers=NEW)).status_code == 400
        assert (await http.delete("/chats/b", headers=if_match(first))).status_code == 404


async def test_each_key_has_its_own_chats(tmp_path: Path) -> None:
    """The folders' names do not contain the keys; requests without a key get nothing."""
    async with client(chats=str(tmp_path), access=AccessRules(api_keys=(b"first-key", b"second-key"))) as http:
        mine, other = ({"Authorization": f"Bearer {key}-key"} for key in ("first", "second"))
        await http.put("/chats/a", content=b'{"mine":1}', headers=mine | NEW)
        assert (await http.get("/chats/a", headers=mine)).status_code == 200
        assert (await http.get("/chats/a", headers={"X-Api-Key": "first-key"})).status_code == 200
        assert (await http.get("/chats/a", headers=other)).status_code == 404
        owners = [(await http.get("/chats", headers=one)).json()["owner"] for one in (mine, other)]
        assert owners[0] != owners[1] and (await http.get("/chats", headers=other)).json()["chats"] == []
        for method, path in (("GET", "/chats"), ("GET", "/chats/a"), ("PUT", "/chats/a"), ("DELETE", "/chats/a")):
            assert (await http.request(method, path, headers=NEW)).status_code == 401
    names = [path.name for path in tmp_path.rglob("*")]
    assert owners[0] in names and not any("key" in name for name in names)


@pytest.mark.parametrize(
    "id", ["%2e%2e", "..%2Fx", "a%2Fb", "a%00", "A", "a_b", ".lock", "-a", "a.json", "ä", "a" * 65, "con.json"]
)
async def test_ids_cannot_leave_the_folder(tmp_path: Path, id: str) -> None:
    folder = tmp_path / "chats"
    async with client(chats=str(folder)) as http:
        for method in ("PUT", "GET", "DELETE"):
            response = await http.request(method, f"/chats/{id}", content=b"{}", headers=NEW)
            assert response.status_code in (400, 404), response.text
    assert [path.name for path in tmp_path.rglob("*")] == []


async def test_a_damaged_file_harms_no_other_chat(tmp_path: Path) -> None:
    """It is reported as damaged and can be replaced; the damaged bytes stay on the disk."""
    async with client(chats=str(tmp_path)) as http:
        for id in ("a", "b", "c"):
            await http.put(f"/chats/{id}", content=b'{"text":"hello"}', headers=NEW)
        folder = tmp_path / "everybody"
        cut, foreign = folder / "chat-a.json", folder / "chat-b.json"
        cut.write_bytes(cut.read_bytes()[:-3])
        foreign.write_bytes(b"\xff\x00")
        listed = (await http.get("/chats")).json()["chats"]
        found = {one["id"]: one["revision"] for one in listed}
        assert found["a"] == found["b"] == "damaged" != found["c"]
        for id in ("a", "b"):
            broken = await http.get(f"/chats/{id}")
            assert broken.status_code == 500 and "damaged" in broken.json()["error"]["message"]
            fixed = await http.put(f"/chats/{id}", content=b'{"text":"again"}', headers={"If-Match": '"damaged"'})
            assert fixed.status_code == 200 and (await http.get(f"/chats/{id}")).json() == {"text": "again"}
        assert (await http.get("/chats/c")).json() == {"text": "hello"}
        assert (folder / "chat-b.damaged").read_bytes() == b"\xff\x00"


async def test_sizes_and_numbers_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_folder, "MAX_CHATS", 2)
    monkeypatch.setattr("llamado.page.chats_api.MAX_CHAT_BYTES", 100)
    async with client(chats=str(tmp_path)) as http:
        stored = [await http.put(f"/chats/{id}", content=b"{}", headers=NEW) for id in "ab"]
        full = await http.put("/chats/c", content=b"{}", headers=NEW)
        assert full.status_code == 507 and "delete some" in full.json()["error"]["message"]
        assert (await http.put("/chats/a", content=b'{"x":1}', headers=if_match(stored[0]))).status_code == 200
        large = await http.put("/chats/b", content=b'{"x":"%s"}' % (b"y" * 100), headers=if_match(stored[1]))
        assert large.status_code == 413
        for body in (b"", b"[1]", b"text"):
            assert (await http.put("/chats/b", content=body, headers=if_match(stored[1]))).status_code == 400


def test_marks_of_deleted_chats_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_folder, "MAX_CHATS", 4)
    folder = ChatFolder(tmp_path)
    for n in range(20):
        folder.delete(f"c{n}", folder.write(f"c{n}", b"{}", None).revision)
        os.utime(tmp_path / f"deleted-c{n}", (n, n))
        _, deleted = folder.entries()
        assert len(deleted) <= 6 and {f"c{n}", f"c{max(n - 1, 0)}"} <= set(deleted)


def test_only_this_user_can_read_chats(tmp_path: Path) -> None:
    folder = ChatFolder(tmp_path / "chats")
    folder.delete("b", folder.write("b", b"{}", None).revision)
    folder.write("a", b"{}", None)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "chats").iterdir()}
    assert modes == {"chat-a.json": 0o600, "deleted-b": 0o600, ".lock": 0o600}
    assert stat.S_IMODE((tmp_path / "chats").stat().st_mode) == 0o700


def test_a_first_line_that_is_too_long_is_damage(tmp_path: Path) -> None:
    folder = ChatFolder(tmp_path)
    (tmp_path / "chat-a.json").write_bytes(b'{"revision":"%s","bytes":0}\n' % (b"0" * 300))
    for head in (b"[]", b"{}", b'{"revision":1,"bytes":0}', b'{"revision":"x","bytes":"0"}', b"null"):
        (tmp_path / "chat-b.json").write_bytes(head + b"\n")
        assert [entry.revision for entry in folder.entries()[0]] == ["damaged", "damaged"], head


def test_a_failed_write_leaves_the_chat_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ChatFolder(tmp_path)
    entry = folder.write("a", b'{"n":1}', None)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        folder.write("a", b'{"n":2}', entry.revision)
    assert folder.read("a") == (b'{"n":1}', entry.revision) and len(folder.entries()[0]) == 1
    monkeypatch.undo()
    folder.write("a", b'{"n":2}', entry.revision)
    with pytest.raises(ChatConflict):
        folder.write("a", b'{"n":3}', entry.revision)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Any]:
    with serving(chats=str(tmp_path)) as found:
        yield found


def test_other_sites_and_names_are_refused(wire: Any) -> None:
    """The rules of all endpoints hold: CSRF, DNS rebinding."""
    own = {"Origin": wire.url, **NEW}
    assert httpx.put(f"{wire.url}/chats/a", content=b"{}", headers=own).status_code == 200
    foreign = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert httpx.put(f"{wire.url}/chats/b", content=b"{}", headers=foreign | NEW).status_code == 403
    assert httpx.delete(f"{wire.url}/chats/a", headers=foreign | {"If-Match": "x"}).status_code == 403
    read = httpx.get(f"{wire.url}/chats", headers=foreign)
    assert read.headers.get("access-control-allow-origin") != "https://evil.example"
    assert httpx.get(f"{wire.url}/chats", headers={"Host": "rebound.example"}).status_code == 403


async def test_chats_need_no_model(tmp_path: Path) -> None:
    async with client(chats=str(tmp_path), loaded=False) as http:
        assert (await http.get("/slots")).status_code == 503
        assert (await http.put("/chats/a", content=b"{}", headers=NEW)).status_code == 200


async def test_a_server_without_the_flag_keeps_nothing(tmp_path: Path) -> None:
    async with client() as http:
        assert "chats_kept" not in (await http.get("/props")).json()
        assert (await http.get("/chats")).status_code == 501
        response = await http.put("/chats/a", content=b"{}", headers=NEW)
        assert response.status_code == 501 and "--chats FOLDER" in response.json()["error"]["message"]


def test_the_folder_must_be_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["serve", "-m", "x.gguf", "--chats", str(tmp_path / "file" / "chats")]) != 0
    assert "--chats" in capsys.readouterr().err


def test_the_list_reads_changed_chats_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks for it every ten seconds."""
    folder = ChatFolder(tmp_path)
    first = folder.write("a", b'{"n":1}', None)
    folder.write("b", b'{"n":2}', None)
    read: list[bytes] = []
    read_head = chat_folder._read_head
    monkeypatch.setattr(chat_folder, "_read_head", lambda line: read.append(line) or read_head(line))
    listed = folder.entries()
    assert len(read) == 2 and folder.entries() == listed and len(read) == 2
    other = ChatFolder(tmp_path)  # another server with the same folder; the size stays the same
    changed = other.write("a", b'{"n":9}', first.revision)
    other.delete("b", listed[0][[one.id for one in listed[0]].index("b")].revision)
    read.clear()
    assert folder.entries() == ([changed], ["b"]) and len(read) == 1
