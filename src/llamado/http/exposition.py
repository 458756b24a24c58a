"""Metrics of several processes as one text: each sample says by labels of whose process it is.

The text is Prometheus' exposition format (0.0.4): all samples of a metric stand together, behind one HELP and one TYPE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Possessive: labels that are none would be tried in as many ways as there are to divide the blanks between them.
_LABEL = r'[a-zA-Z_]\w*+[ \t]*+=[ \t]*+"(?:\\.|[^"\\])*+"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*+)(?:[ \t]*+\{{[ \t]*+((?:{_LABEL}[ \t]*+,?+[ \t]*+)*+)\}})?([ \t]+\S.*)", re.ASCII
)
_ABOUT = re.compile(r"#[ \t]+(HELP|TYPE)[ \t]+(\S+)")
_PARTS = ("_bucket", "_sum", "_count", "_total", "_created")
"""What a metric's samples may be called beyond its name."""


@dataclass
class _Metric:
    about: dict[str, str] = field(default_factory=dict)
    """The lines HELP and TYPE."""
    samples: list[str] = field(default_factory=list)


def merge(texts: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """One text of (labels, its process's text) pairs; a label that a sample has with another value gets `exported_`."""
    metrics: dict[str, _Metric] = {}
    for labels, text in texts:
        about = ""
        for line in text.split("\n"):
            line = line.strip()
            if told := _ABOUT.match(line):
                about = told[2]
                metrics.setdefault(about, _Metric()).about.setdefault(told[1], line)
            elif sample := _SAMPLE.fullmatch(line):
                name, rest = sample[1], sample[3]
                if name != about and name not in {about + part for part in _PARTS}:
                    about = name
                metrics.setdefault(about, _Metric()).samples.append(f"{name}{_labeled(labels, sample[2])}{rest}")
    lines = (line for metric in metrics.values() for line in (*metric.about.values(), *metric.samples))
    return "".join(line + "\n" for line in lines)


def _labeled(labels: Mapping[str, str], own: str | None) -> str:
    """The labels and a sample's own ones, as text in braces."""
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
