"""Merging of several processes' Prometheus metrics; labels tell their samples apart.

The format is Prometheus' text format (0.0.4): all samples of a metric follow its one HELP and TYPE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Possessive quantifiers: backtracking over malformed labels would take exponential time.
_LABEL = r'[a-zA-Z_]\w*+[ \t]*+=[ \t]*+"(?:\\.|[^"\\])*+"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*+)(?:[ \t]*+\{{[ \t]*+((?:{_LABEL}[ \t]*+,?+[ \t]*+)*+)\}})?([ \t]+\S.*)", re.ASCII
)
_ABOUT = re.compile(r"#[ \t]+(HELP|TYPE)[ \t]+(\S+)")
_PARTS = ("_bucket", "_sum", "_count", "_total", "_created")
"""Suffixes of a metric's sample names."""


@dataclass
class _Metric:
    about: dict[str, str] = field(default_factory=dict)
    """The HELP and TYPE lines."""
    samples: list[str] = field(default_factory=list)


def merge(texts: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """Merge (labels, text) pairs of processes. A sample's own label of the same name is renamed to `exported_…`."""
    metrics: dict[str, _Metric] = {}
    for labels, text in texts:
        about = ""
        for line in text.split("\n"):
            line = line.strip()
            if header := _ABOUT.match(line):
                about = header[2]
                metrics.setdefault(about, _Metric()).about.setdefault(header[1], line)
            elif sample := _SAMPLE.fullmatch(line):
                name, rest = sample[1], sample[3]
                if name != about and name not in {about + part for part in _PARTS}:
                    about = name
                metrics.setdefault(about, _Metric()).samples.append(f"{name}{_labeled(labels, sample[2])}{rest}")
    lines = (line for metric in metrics.values() for line in (*metric.about.values(), *metric.samples))
    return "".join(line + "\n" for line in lines)


def _labeled(labels: Mapping[str, str], own: str | None) -> str:
    """Return `labels` and a sample's own labels as text in braces."""
    shown = {name: _escaped(value) for name, value in labels.items()}
    given = []
    for label in re.finditer(_LABEL, own or ""):
        name, _, value = label[0].partition("=")
        name, value = name.strip(), value.strip()[1:-1]
        if shown.get(name, value) != value:
            name = f"exported_{name}"
        if name not in shown:
            given.append((name, value))
    text = ",".join(f'{name}="{value}"' for name, value in (*shown.items(), *given))
    return f"{{{text}}}" if text else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
