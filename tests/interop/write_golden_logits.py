"""Write tests/models/golden_logits.json anew with the real llama.cpp, or only the rows of the small models named.

PYTHONPATH=tests python tests/interop/write_golden_logits.py [NAME …]
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import golden_logits as golden
import httpx
import numpy as np
from conftest import peer_programs
from golden_logits import KEYS, Key
from peer_server import FLAGS, llama_server
from tiny import TINY, make

from llamado.models import Output

_PRINTABLE = 100
"""A token of every small vocabulary that is a whole character: after others the server may leave out a report."""


def _log_probabilities(client: httpx.Client, n: int) -> dict[int, float]:
    """The likeliest tokens behind the first `n`."""
    body = {"prompt": golden.TOKENS[:n].tolist(), "n_predict": 1, "n_probs": golden.N_KEPT, "cache_prompt": False}
    body["logit_bias"] = [[_PRINTABLE, 1000.0]]  # it changes the token that is drawn, not the report
    answer = client.post("/completion", json=body).raise_for_status().json()
    return {top["id"]: top["logprob"] for top in answer["completion_probabilities"][0]["top_logprobs"]}


def _largest(row: list[float]) -> dict[int, float]:
    places = np.argsort(-np.abs(row))[: golden.N_KEPT]
    return {int(i): row[i] for i in places}


def theirs(programs: Path, key: Key, folder: Path) -> dict[int, dict[int, float]]:
    """The golden rows of a key."""
    path, log = make(TINY[key.name], folder / "m.gguf"), folder / "server.log"
    flags = ["-c", str(golden.N_CTX), "-b", "256", "-ub", "256", "-t", "2", "--no-warmup", "-np", "1"]
    if key.output is Output.LOGITS:
        with llama_server(programs, path, log, *flags, "-fa", "on", *FLAGS.get(key.name, [])) as client:
            return {at: _log_probabilities(client, at + 1) for at in golden.POSITIONS}
    if key.output is Output.HIDDEN:
        with llama_server(programs, path, log, *flags, "--embeddings", "--pooling", "none") as client:
            body = {"content": [golden.TOKENS.tolist()], "embd_normalize": -1}
            vectors = client.post("/embedding", json=body).raise_for_status().json()[0]["embedding"]
        return {at: _largest(vectors[at]) for at in golden.POSITIONS}
    with llama_server(programs, path, log, *flags, "--reranking") as client:
        body = {"query": golden.QUERY, "documents": golden.DOCUMENTS}
        results = client.post("/rerank", json=body).raise_for_status().json()["results"]
    return {entry["index"]: {0: entry["relevance_score"]} for entry in results}


def main() -> None:
    """Write rows one after the other; those of small models that do not exist any more are left out."""
    programs = peer_programs()
    if programs is None:
        sys.exit("the real llama.cpp is not installed: run benchmarks/peer.sh")
    names = sys.argv[1:]
    if unknown := set(names) - {key.name for key in KEYS.values()}:
        sys.exit(f"no small models: {', '.join(sorted(unknown))}")
    kept = {text: rows for text, rows in golden.read().items() if text in KEYS}
    failed = []
    for text, key in KEYS.items():
        if names and key.name not in names:
            continue
        print(text, flush=True)
        kept.pop(text, None)
        try:
            with TemporaryDirectory() as folder:
                found = theirs(programs, key, Path(folder))
            kept[text] = {at: {i: round(value, 5) for i, value in found[at].items()} for at in sorted(found)}
        except (AssertionError, httpx.HTTPError) as error:
            failed.append(f"{text}: {error}")
        golden.write(kept)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
