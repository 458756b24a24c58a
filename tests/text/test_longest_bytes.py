"""RWKV's vocabulary: at each place of a text the longest token that fits, whatever bytes that are."""

from __future__ import annotations

from pathlib import Path

import gguf
from tiny_models import add_rwkv_vocabulary

from llamado.gguf.reader import GGUFFile
from llamado.text.tokenizer.rwkv import unescape
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer


def made(path: Path) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "rwkv7")
    add_rwkv_vocabulary(writer, 512)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        return load_tokenizer(file.metadata)


def test_spellings_are_those_of_python() -> None:
    for data in (b"plain", b"\n\t\r\\", bytes(range(256)), b'it\'s "so"', b"\\x41"):
        assert unescape(repr(data)[2:-1].encode()) == data


def test_the_longest_token_wins(tmp_path: Path) -> None:
    tokenizer = made(tmp_path / "m.gguf")
    texts = sorted({tokenizer.piece(i) for i in range(1, 512)})
    for text in ("", "a", " the end\n\n", "it's déjà \0 \\x41 \U0001f642", "</s> <s"):
        ids, at = tokenizer.encode(text, add_special=True), 0
        for i in ids:
            piece = tokenizer.piece(i)
            assert piece == max((t for t in texts if text.encode()[at:].startswith(t)), key=len)
            at += len(piece)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<s>a") == [0, 98]
    assert tokenizer.eog >= {0, 11}
