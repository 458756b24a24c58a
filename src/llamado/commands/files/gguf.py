"""`llamado gguf split|merge|set`: split a GGUF file, merge its parts, or change a key.

The flags of llama-gguf-split also work: `--split IN OUT` and `--merge IN OUT`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from llamado.errors import LlamadoError
from llamado.flags import FlagError
from llamado.gguf.edit.keys import format_value, header_with, rewrite, with_value
from llamado.gguf.edit.parts import PartSize, merge_parts, merged_fields, plan_parts, write_parts
from llamado.gguf.errors import GgufError
from llamado.gguf.header import Header
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.resolve import progress_bar
from llamado.gguf.sources.stored import file_of
from llamado.models import load_model
from llamado.terminal.console import Console
from llamado.terminal.text import print
from llamado.text.tokenizer.tokenizer import load_tokenizer

VERBS = {
    "split": "split FILE OUT        split FILE into OUT-00001-of-0000N.gguf, …",
    "merge": "merge FIRST OUT       merge the parts of a model into OUT; FIRST is the first part",
    "set": "set FILE KEY VALUE    change a key; a new file replaces the old one",
}
_DEFAULT_TENSORS = 128
_UNITS = {"M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and flags of the command."""
    parser.usage = "llamado gguf split|merge|set …\n\n  " + "\n  ".join(VERBS.values())
    parser.add_argument("words", nargs="*", metavar="split|merge|set", help=argparse.SUPPRESS)
    parser.add_argument("--split", action="store_true", help="same as the word split")
    parser.add_argument("--merge", action="store_true", help="same as the word merge")
    parser.add_argument("--split-max-tensors", type=int, metavar="N", help=f"tensors per part ({_DEFAULT_TENSORS})")
    parser.add_argument("--split-max-size", metavar="N(M|G)", help="maximum bytes of tensors per part: 300M, 2G")
    parser.add_argument("--no-tensor-first-split", action="store_true", help="write no tensors to the first part")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written without writing it")
    parser.add_argument("--type", metavar="TYPE", help="set: type of a new key (uint32, float32, string …)")
    parser.add_argument("-o", "--out", metavar="FILE", help="set: file to write instead of FILE")
    parser.add_argument("--force", action="store_true", help="set: even if the model does not run afterwards")


def run_gguf(given: argparse.Namespace) -> int:
    """Run the command. Raises FlagError, and GgufError for invalid files."""
    verb, words = _verb(given)
    actions: dict[str, tuple[int, Callable[[Sequence[str], argparse.Namespace], int]]] = {
        "split": (2, _split),
        "merge": (2, _merge),
        "set": (3, _set),
    }
    n_words, action = actions[verb]
    if len(words) != n_words:
        raise FlagError(f"gguf {verb}: expected {n_words} arguments, got {len(words)}: llamado gguf {VERBS[verb]}")
    return action(words, given)


def _verb(given: argparse.Namespace) -> tuple[str, list[str]]:
    words = list(given.words)
    named = {name for name in ("split", "merge") if getattr(given, name)}
    if words and words[0] in VERBS and not named:
        return words[0], words[1:]
    if len(named) > 1:
        raise FlagError("--split and --merge: give one of them")
    if not named and not words:
        raise FlagError(f"gguf: expected one of {', '.join(VERBS)}")
    return (named or {"split"}).pop(), words


def _split(words: Sequence[str], given: argparse.Namespace) -> int:
    size = _part_size(given)
    stem = Path(words[1])
    with GGUFFile.open(file_of(words[0])) as file:
        parts = plan_parts(file, stem.name, size, none_in_first=given.no_tensor_first_split)
        print(f"n_split: {len(parts)}")
        for i, part in enumerate(parts, 1):
            print(f"split {i:05d}: n_tensors = {len(part.tensors)}, total_size = {part.nbytes // 10**6}M")
        if not given.dry_run:
            with progress_bar(Console(stderr=True), stem.name) as progress:
                write_parts(file, parts, stem.parent, progress)
            for part in parts:
                print(stem.parent / part.name)
    return 0


def _part_size(given: argparse.Namespace) -> PartSize:
    n, text = given.split_max_tensors, given.split_max_size
    if text is None:
        n = _DEFAULT_TENSORS if n is None else n
        if n < 1:
            raise FlagError(f"--split-max-tensors: expected 1 or more, got {n}")
        return PartSize(tensors=n)
    if n is not None:
        raise FlagError("--split-max-tensors and --split-max-size: give one of them")
    match = re.fullmatch(r"([0-9]{1,9})([MG])", text)
    if match is None or int(match[1]) == 0:
        raise FlagError(f"--split-max-size: expected megabytes or gigabytes such as 300M or 2G, got {text!r}")
    return PartSize(nbytes=int(match[1]) * _UNITS[match[2]])


def _merge(words: Sequence[str], given: argparse.Namespace) -> int:
    to = Path(words[1])
    with GGUFFile.open(file_of(words[0])) as file:
        if given.dry_run:
            merged_fields(file)
        else:
            with progress_bar(Console(stderr=True), to.name) as progress:
                merge_parts(file, to, progress)
        print(f"{to}: {len(file.tensors)} tensors of {file.n_shards} parts")
    return 0


def _set(words: Sequence[str], given: argparse.Namespace) -> int:
    name, key, text = words
    with GGUFFile.open(name) as file:
        fields = with_value(file, key, text, given.type)
        header = header_with(file, fields)
        before, after = format_value(file.metadata, key) or "new", format_value(header.metadata, key)
        print(f"{key}: {before} → {after} ({header.metadata.type_name(key)})")
        if not given.force and _problem(file.header) is None and (reason := _problem(header)) is not None:
            raise GgufError(f"a model with {after} does not run; --force writes it anyway. {reason}", field=key)
        if not given.dry_run:
            to = Path(given.out or name)
            with progress_bar(Console(stderr=True), to.name) as progress:
                rewrite(file, fields, to, progress)
    return 0


def _problem(header: Header) -> str | None:
    """Return the reason for which a model or its tokenizer cannot be loaded, or None."""
    try:
        load_model(header)
        load_tokenizer(header.metadata)
    except LlamadoError as error:
        return str(error)
    return None
