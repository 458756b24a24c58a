"""HTTP servers on loopback that stand in for a package index and for the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """Files by path, how they are served, and what was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # content types, by path
    headers: dict[str, str] = field(default_factory=dict)  # sent with every response
    ranges: bool = True
    password: str | None = None  # an Authorization header that must be there
    cut_after: int | None = None  # bytes of a body after which the connection breaks …
    cuts: int = 0  # … this many times
    failures: list[int] = field(default_factory=list)  # status codes that the next requests for files get
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    linked: dict[str, str] = field(default_factory=dict)  # SHA-256 that the hub gives for files, by path
    sent: dict[str, int] = field(default_factory=dict)  # bytes of bodies, by path, before they are on their way
    url: str = ""

    def ranges_asked(self) -> list[str | None]:
        return [asked_range for method, path, asked_range in self.asked if method == "GET" and path.endswith(".whl")]


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked_range = self.headers.get("Range")
            site.asked.append((self.command, path, asked_range))
            content = site.files.get(path)
            if site.password is not None and self.headers.get("Authorization") != site.password:
                return self.begin(401, b"", {})
            if content is None:
                return self.begin(404, b"", {})
            if site.failures and path.endswith(".whl"):
                return self.begin(site.failures.pop(0), b"", {})
            status, extra = 200, {"Content-Type": site.kinds.get(path, "application/octet-stream")}
            if path in site.linked:
                extra["X-Linked-ETag"] = f'"{site.linked[path]}"'
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked_range or "")
            if match and site.ranges:
                start = int(match[1])
                if start >= len(content):
                    return self.begin(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                end = min(int(match[2]) + 1 if match[2] else len(content), len(content))
                status, extra["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(content)}"
                content = content[start:end]
            return self.begin(status, content, extra, body=body)

        def begin(self, status: int, content: bytes, extra: dict[str, str], *, body: bool = True) -> None:
            self.send_response(status)
            for name, value in (site.headers | extra | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if not body:
                return
            if site.cuts and site.cut_after is not None and len(content) > site.cut_after:
                site.cuts -= 1
                self.wfile.write(content[: site.cut_after])
                self.wfile.flush()
                self.close_connection = True
                return
            path = self.path.partition("?")[0]
            for at in range(0, len(content), 65536):
                piece = content[at : at + 65536]
                # Counted first: who has the last piece goes on at once, and finds it counted.
                site.sent[path] = site.sent.get(path, 0) + len(piece)
                try:
                    self.wfile.write(piece)
                except ConnectionError:
                    self.close_connection = True
                    return

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def add_wheel(
    site: Site, project: str, version: str, content: bytes, *, style: str = "html", sha256: bool = True
) -> str:
    """Publish a wheel on a simple index at `/simple`, as an HTML (PEP 503) or JSON (PEP 691) page; returns its path."""
    name = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
    path = f"/files/{project}/{name}"
    site.files[path] = content
    digest = hashlib.sha256(content).hexdigest()
    page = f"/simple/{project}/"
    if style == "json":
        entry = {"filename": name, "url": f"../..{path}", "hashes": {"sha256": digest} if sha256 else {}}
        site.files[page] = json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": [entry]}).encode()
        site.kinds[page] = "application/vnd.pypi.simple.v1+json"
    else:
        fragment = f"#sha256={digest}" if sha256 else ""
        older = f'<a href="../../files/{project}/{name.replace(version, "0.0.1")}">older</a>'
        site.files[page] = f'<!DOCTYPE html><body>{older}<a href="../..{path}{fragment}">{name}</a></body>'.encode()
        site.kinds[page] = "text/html; charset=utf-8"
    return path


def add_repo(site: Site, repo: str, files: dict[str, bytes]) -> None:
    """Publish a model repository the way the hub's API shows it."""
    commit = hashlib.sha1(repo.encode()).hexdigest()
    siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
    info = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings}
    site.files[f"/api/models/{repo}"] = json.dumps(info).encode()
    site.kinds[f"/api/models/{repo}"] = "application/json"
    site.headers |= {"X-Repo-Commit": commit}
    for name, content in files.items():
        site.files[f"/{repo}/resolve/main/{name}"] = content
        site.files[f"/{repo}/resolve/{commit}/{name}"] = content
