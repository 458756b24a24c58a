"""PLaMo's vocabulary: the same ids and texts as the real llama.cpp has, of a small one with odd scores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from peer_server import llama_server
from tiny import TINY, make
from tiny_models import BYTE, CONTROL, CORPUS, NORMAL, UNKNOWN, UNUSED, learn_merges

from llamado.gguf.reader import GGUFFile
from llamado.text.tokenizer.tokenizer import load_tokenizer

pytestmark = [pytest.mark.interop, pytest.mark.full]

SPECIAL = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", "<|plamo:op|>"]
TEXTS = [
    "", " ", "  ", "the quick brown fox", "Once upon a time, there was 12 of them.\n\n", "漢字 仮名 漢", "😀😀 x",
    "\ufeffthe", "a\ufeff", "<|plamo:op|>user\nhi<|plamo:op|>", "▁x ▁", "é\u0301\x01", "<0x41>", "<0x4",
]  # fmt: skip


def add_plamo_vocabulary(writer: gguf.GGUFWriter, n_vocab: int, pre: str) -> None:
    words = [list(word) for word in CORPUS.replace(" ", " \x00").split("\x00")]
    pieces = list(dict.fromkeys(a + b for a, b in learn_merges(words, 130)))
    letters = sorted({*CORPUS, *"▁漢é"} - {"q"})
    tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *pieces, *letters][:n_vocab]
    kinds = [UNKNOWN, *[CONTROL] * 4, *[BYTE] * 256]
    kinds += [NORMAL] * (len(tokens) - len(kinds))
    rng = np.random.default_rng(3)
    scores = [0.0] * 261 + [float(-rng.integers(20, 160)) / 8 for _ in range(len(tokens) - 261)]
    scores[300], scores[301], scores[302] = -1999.5, -2000.5, -1200.0
    n_unused = n_vocab - len(tokens)
    writer.add_tokenizer_model("plamo2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(n_unused))])
    writer.add_token_types([*kinds, *[UNUSED] * n_unused])
    writer.add_token_scores([*scores, *[-1000.0] * n_unused])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(4)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)


def test_ids_and_texts(peer_bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiny.spec.add_bpe_vocabulary", add_plamo_vocabulary)
    path = make(TINY["llama"], tmp_path / "m.gguf")
    rng = random.Random(7)
    alphabet = [*CORPUS, *SPECIAL, *"".join(TEXTS)]
    glued = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(300)]
    with GGUFFile.open(path) as file:
        tokenizer = load_tokenizer(file.metadata)
    wrong: list[tuple[Any, ...]] = []
    with llama_server(peer_bin, path, tmp_path / "server.log", "-c", "64", "--no-warmup") as client:
        for text in [*TEXTS, *glued, CORPUS * 3]:
            for special in (True, False):
                body = {"content": text, "add_special": special, "parse_special": special}
                theirs = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
                ours = tokenizer.encode(text, add_special=special, parse_special=special)
                if ours != theirs:
                    wrong.append((text, special, ours, theirs))
            back = client.post("/detokenize", json={"tokens": ours}).raise_for_status().json()["content"]
            if back != tokenizer.join(ours).decode("utf-8", "replace"):
                wrong.append((text, back))
    assert not wrong, (len(wrong), wrong[:5])
