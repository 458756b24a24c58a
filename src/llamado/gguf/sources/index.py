"""Wheel lookup as in pip: the user's pip configuration, simple indexes (PEP 503, 691) and find-links."""

from __future__ import annotations

import ast
import os
import re
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

import httpx

from llamado.gguf.errors import SourceError
from llamado.gguf.sources.fetch import display_url
from llamado.installation import python_command
from llamado.outgoing import open_client, read_json

DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.1"
# pip reads its options in this order, later ones win; the options for installing also apply to fetching.
_SECTIONS = ("global", "install", "download", ":env:")


@dataclass(frozen=True, slots=True)
class PipConfig:
    """The user's pip settings for package sources."""

    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    find_links: tuple[str, ...] = ()
    proxy: str | None = None
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: frozenset[str] = field(default_factory=frozenset)
    timeout: float = 30.0

    @classmethod
    def of(cls, options: Mapping[str, str]) -> PipConfig:
        """Build from pip's long option names (`index-url` …)."""
        indexes = [options.get("index-url", DEFAULT_INDEX), *options.get("extra-index-url", "").split()]
        if options.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
            indexes = []
        try:
            timeout = max(float(options.get("timeout", options.get("default-timeout", 30))), 1.0)
        except ValueError:
            timeout = 30.0
        return cls(
            indexes=tuple(indexes),
            find_links=tuple(options.get("find-links", "").split()),
            proxy=options.get("proxy") or None,
            cert=options.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"),
            client_cert=options.get("client-cert") or None,
            trusted_hosts=frozenset(options.get("trusted-host", "").split()),
            timeout=timeout,
        )

    @classmethod
    def read(cls) -> PipConfig:
        """Read pip's configuration files and `PIP_*` variables; only the variables if pip is not installed."""
        sections: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS}
        for line in _pip_config_list().splitlines():
            name, _, literal = line.partition("=")
            section, _, option = name.rpartition(".")
            try:
                value = ast.literal_eval(literal)
            except (ValueError, SyntaxError):
                continue
            if section in sections and isinstance(value, str):
                sections[section][option] = value
        for name, value in os.environ.items():
            if name.startswith("PIP_"):
                sections[":env:"][name.removeprefix("PIP_").lower().replace("_", "-")] = value
        options: dict[str, str] = {}
        for section in _SECTIONS:
            options |= sections[section]
        return cls.of(options)

    def client(self) -> httpx.Client:
        """Return an HTTP client with the user's proxy, certificates and credentials."""
        verify: ssl.SSLContext | bool = True
        try:
            if self.cert or self.client_cert:
                verify = ssl.create_default_context(cafile=self.cert)
                if self.client_cert:
                    verify.load_cert_chain(self.client_cert)
            auth: httpx.Auth | None = None
            try:
                auth = httpx.NetRCAuth()
            except FileNotFoundError:
                pass
            mounts = {f"https://{host}": httpx.HTTPTransport(verify=False) for host in self.trusted_hosts}
            return open_client(
                follow_redirects=True,
                timeout=self.timeout,
                verify=verify,
                auth=auth,
                proxy=self.proxy,
                mounts=mounts,
                headers={"User-Agent": "llamado"},
            )
        except (OSError, ValueError) as error:
            raise SourceError(
                f"pip's proxy or certificate settings cannot be used: {error}; see `pip config list`"
            ) from error


def _pip_config_list() -> str:
    # pip finds its configuration files on every platform and in every virtual environment.
    try:
        done = subprocess.run(
            python_command("-m", "pip", "config", "list"), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file offered by an index: its name, an HTTP or `file:` URL, and its SHA-256 if the index gives one."""

    file_name: str
    url: str
    sha256: str | None = None

    @property
    def local_path(self) -> Path | None:
        """Return the path if the file is on this machine, else None."""
        return _local_path(self.url)


def find_wheel(config: PipConfig, client: httpx.Client, project: str, version: str) -> IndexFile:
    """Return the wheel of `project` with exactly this `version`; raise `SourceError` listing the places searched."""
    looked: list[str] = []
    for place in _places(config, project):
        try:
            links = _read_place(client, place)
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            looked.append(f"{_shown_place(place)} ({error or type(error).__name__})")
            continue
        looked.append(_shown_place(place))
        for link in links:
            if _is_wheel_of(link.file_name, project, version):
                return link
    raise SourceError(
        f"no wheel {project} {version} in "
        + (", ".join(looked) or "any index, as pip's configuration allows none")
        + "; "
        "check the network and `pip config list`, set PIP_INDEX_URL to an index that has it, or use a local .gguf file"
    )


def _places(config: PipConfig, project: str) -> Iterator[str]:
    """Yield the folders and pages to search, local ones first."""
    page = re.sub(r"[-_.]+", "-", project).lower()
    places = [*config.find_links, *(index.rstrip("/") + f"/{page}/" for index in config.indexes)]
    yield from sorted(places, key=lambda place: _local_path(place) is None)


def _local_path(place: str) -> Path | None:
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    if parts.scheme in ("http", "https"):
        return None
    return Path(place).expanduser()


def _shown_place(place: str) -> str:
    return place if _local_path(place) is not None else display_url(place)


def _read_place(client: httpx.Client, place: str) -> list[IndexFile]:
    path = _local_path(place)
    if path is not None:
        page = path / "index.html" if path.is_dir() else path
        if path.is_dir() and not page.is_file():
            return [IndexFile(file.name, file.absolute().as_uri()) for file in sorted(path.glob("*.whl"))]
        if not page.is_file():
            return []
        return parse_html(page.read_text("utf-8", "replace"), page.absolute().as_uri())
    response = client.get(place, headers={"Accept": _ACCEPT})
    if response.status_code == 404:
        return []
    response.raise_for_status()
    base = str(response.url)
    kind = response.headers.get("content-type", "").partition(";")[0].strip()
    links = parse_json(read_json(response), base) if kind.endswith("json") else parse_html(response.text, base)
    links = [link for link in links if link.local_path is None]  # an index speaks of no files of this machine
    return [_with_credentials(link, place) for link in links]


def _with_credentials(link: IndexFile, index: str) -> IndexFile:
    """Apply the credentials in the URL of an index to files on the same host."""
    here, there = httpx.URL(index), httpx.URL(link.url)
    if not here.userinfo or there.userinfo or (here.scheme, here.netloc) != (there.scheme, there.netloc):
        return link
    url = there.copy_with(username=here.username, password=here.password)
    return IndexFile(link.file_name, str(url), link.sha256)


def parse_json(page: object, base: str) -> list[IndexFile]:
    """Parse the files of a PEP 691 project page; raise ValueError if it is malformed."""
    files = page.get("files") if isinstance(page, dict) else None
    if not isinstance(files, list):
        raise ValueError("the index page has no list of files")
    links = []
    for file in files:
        if isinstance(file, dict) and isinstance(name := file.get("filename"), str):
            hashes = file.get("hashes")
            sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
            links.append(
                IndexFile(name, urljoin(base, str(file.get("url", ""))), sha256 if isinstance(sha256, str) else None)
            )
    return links


def parse_html(page: str, base: str) -> list[IndexFile]:
    """Parse the files of a PEP 503 project page."""
    parser = _Anchors(base)
    parser.feed(page)
    links = []
    for href in parser.hrefs:
        url, _, fragment = urljoin(parser.base, href).partition("#")
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        links.append(IndexFile(name, url, sha256))
    return links


class _Anchors(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "base" and href:
            self.base = urljoin(self.base, href)
        elif tag == "a" and href:
            self.hrefs.append(href)


def _is_wheel_of(file_name: str, project: str, version: str) -> bool:
    if not file_name.endswith(".whl"):
        return False
    name, _, rest = file_name.partition("-")
    return re.sub(r"[-_.]+", "-", name).lower() == re.sub(r"[-_.]+", "-", project).lower() and rest.startswith(
        version + "-"
    )
