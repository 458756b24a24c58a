"""Print a GGUF file: metadata, tensors, and totals per tensor type."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from llamado.gguf.header import Header, TensorInfo
from llamado.gguf.metadata import StringArray, Value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_TEXT = 120  # characters shown of a string
MAX_ITEMS = 6  # elements shown of an array


def render(file: Header, console: Console, *, tensors: bool = True) -> None:
    """Print a model's metadata, its tensors (unless `tensors` is false) and its totals."""
    from rich.text import Text

    shards = f", {file.n_shards} files" if file.n_shards > 1 else ""
    console.print(
        Text(
            f"{file.source}: GGUF version {file.version}, {size_text(file.file_bytes)}{shards}, "
            f"alignment {file.alignment}"
        )
    )
    console.print(_metadata_table(file))
    if tensors:
        console.print(_tensor_table(file))
    console.print(_totals_table(file))


def size_text(n: int) -> str:
    """Format a byte count with a decimal unit."""
    value = float(n)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{n} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def value_text(value: Value) -> str:
    """Format a metadata value on one line; long strings and arrays are cut and show their full length."""
    if isinstance(value, str):
        shown = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value)} characters)"
        # Control characters in a file must not reach the terminal.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    if isinstance(value, (StringArray, list, np.ndarray)):
        items = [_item_text(value[i]) for i in range(min(len(value), MAX_ITEMS))]
        more = f", … ({len(value)})" if len(value) > MAX_ITEMS else ""
        return f"[{', '.join(items)}{more}]"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _item_text(item: Any) -> str:
    if isinstance(item, np.generic):
        item = item.item()
    return f"'{value_text(item)}'" if isinstance(item, str) else value_text(item)


def _table(title: str, *columns: tuple[str, bool]) -> Table:
    """Return a table; `columns` are (heading, is numeric)."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, number in columns:
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def _metadata_table(file: Header) -> Table:
    from rich.text import Text

    table = _table(f"Metadata: {len(file.metadata)} keys", ("key", False), ("type", False), ("value", False))
    for key, value in file.metadata.items():
        # Text, not str: strings from a file must not be parsed as markup.
        table.add_row(Text(value_text(key)), file.metadata.type_name(key), Text(value_text(value)))
    return table


def _tensor_table(file: Header) -> Table:
    from rich.text import Text

    split = file.n_shards > 1
    columns = [("name", False), ("type", False), ("shape", True), ("size", True), ("offset", True)]
    table = _table(f"Tensors: {len(file.tensors)}", *columns, *([("file", True)] if split else []))
    for info in file.tensors.values():
        row = [info.type.name, _shape_text(info), size_text(info.nbytes), str(info.offset)]
        table.add_row(Text(value_text(info.name)), *row, *([str(info.shard + 1)] if split else []))
    return table


def _shape_text(info: TensorInfo) -> str:
    last = max((i for i, n in enumerate(info.ne) if n != 1), default=0)
    return " × ".join(str(n) for n in info.ne[: last + 1])


def _totals_table(file: Header) -> Table:
    table = _table(
        "By type", ("type", False), ("tensors", True), ("weights", True), ("size", True), ("bits per weight", True)
    )
    groups: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in file.tensors.values():
        groups[info.type.name].append(info)
    by_size = sorted(groups.items(), key=lambda group: -sum(info.nbytes for info in group[1]))
    for name, infos in [*by_size, ("all", list(file.tensors.values()))]:
        weights = sum(info.n_elements for info in infos)
        nbytes = sum(info.nbytes for info in infos)
        bits = f"{8 * nbytes / weights:.2f}" if weights else ""
        table.add_row(name, str(len(infos)), f"{weights:,}", size_text(nbytes), bits)
    return table
