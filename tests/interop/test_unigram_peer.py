"""Unigram vocabularies: the same ids and texts as the real llama.cpp has, of a small vocabulary with rules."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from charsmaps import charsmap
from peer_server import llama_server
from tiny import TINY, make
from tiny.spec import N_VOCAB
from tiny_models import CONTROL, CORPUS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, learn_merges

from llamado.gguf.reader import GGUFFile
from llamado.text.tokenizer.tokenizer import load_tokenizer

pytestmark = [pytest.mark.interop, pytest.mark.full]

RULES = {
    "\t": " ", "\n": " ", "\u00a0": " ", "\u3000": " ", "\u200b": "", "\ufeff": "", "ﬁ": "fi", "½": "1⁄2",
    "e\u0301": "é", "n\u0303": "ñ", "Ａ": "A", "…": "...", "<\u0338": "≮", "<": "<", "™": "TM", "\r\n": " ", "’": "'",
}  # fmt: skip

TEXTS = [
    "", " ", "  ", "the quick brown fox", " the  quick\n\nbrown\tfox ", "Once upon a time, there was 12 of them.",
    "a<mask>b <mask> c", "<\u0338 <mask\u0338", "the\u200bquick  ﬁne½ e\u0301 <s></s> ▁▁x", "漢語 漢字 漢",
    "Ωmega ∂x", "ＡＢ…™’",
    "\r\n\r\n a\u3000b\u00a0c", "n\u0303 n \u0303 éé e\u0301\u0301", "😀😀 x 😀", "\ufeffthe\x00 end", "<<< <mas <mask",
]  # fmt: skip


def texts() -> list[str]:
    """Return the texts above, and characters of them and of the corpus joined at odd places."""
    rng = random.Random(7)
    whole = "".join(TEXTS) + CORPUS + "".join(RULES)
    alphabet = [*whole, *RULES, "▁", "<mask>", "</s>", "  "]
    glued = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(300)]
    return [*TEXTS, *glued, CORPUS * 3]


def add_unigram_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Pieces of the corpus and single characters, a user's own token, one that is unused; rules."""
    letters = sorted({*CORPUS, *"▁éñ'.-1234567890<>TM漢語"} - {" "})
    words = [["▁", *word] for word in CORPUS.split()]
    pieces = list(dict.fromkeys(a + b for a, b in learn_merges(words, 200)))
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "▁▁", *pieces, *letters]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, USER_DEFINED, UNUSED, *[NORMAL] * (len(pieces) + len(letters))]
    n_unused = n_vocab - len(tokens)
    rng = np.random.default_rng(3)
    scores = [0.0] * 4 + [-2.0, -3.0] + [*(-5 - rng.random(len(pieces)) * 3), *(-8 - rng.random(len(letters)) * 4)]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + [f"[UNUSED_{i}]" for i in range(n_unused)])
    writer.add_token_types(types + [UNUSED] * n_unused)
    writer.add_token_scores([*map(float, scores), *[-50.0] * n_unused])
    writer.add_precompiled_charsmap(charsmap(RULES).tobytes())
    for name, token in (("bos", 0), ("padding", 1), ("eos", 2), ("unknown", 3), ("mask", 4)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


@pytest.mark.parametrize(("prefix", "merge"), [(True, True), (True, False), (False, False)])
def test_ids_and_texts(
    peer_bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: bool, merge: bool
) -> None:
    def vocabulary(writer: gguf.GGUFWriter, n_vocab: int, pre: str) -> None:
        add_unigram_vocabulary(writer, n_vocab)
        writer.add_add_space_prefix(prefix)
        writer.add_remove_extra_whitespaces(merge)

    monkeypatch.setattr("tiny.spec.add_bpe_vocabulary", vocabulary)
    path = make(TINY["bert"], tmp_path / "m.gguf")
    assert N_VOCAB == 512
    with GGUFFile.open(path) as file:
        tokenizer = load_tokenizer(file.metadata)
    wrong: list[tuple[Any, ...]] = []
    with llama_server(peer_bin, path, tmp_path / "server.log", "--embeddings", "-c", "64", "--no-warmup") as client:
        for text in texts():
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
