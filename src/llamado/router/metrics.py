"""Metrics of several models as one text: each sample says by a label of whose process it is.

The text is Prometheus' exposition format (0.0.4): all samples of a metric stand together, behind one HELP and one TYPE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LABEL = r'[a-zA-Z_]\w*[ \t]*=[ \t]*"(?:\\.|[^"\\])*"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{{[ \t]*((?:{_LABEL}[ \t]*,?[ \t]*)*)\}})?([ \t]+\S.*)", re.ASCII
)
_ABOUT = re.compile(r"#[ \t]+(HELP|TYPE)[ \t]+(\S+)")
_PARTS = ("_bucket", "_sum", "_count", "_total", "_created")
"""What a metric's samples may be called beyond its name."""


@dataclass
class _Metric:
    about: dict[str, str] = field(default_factory=dict)
    """The lines HELP and TYPE."""
    samples: list[str] = field(default_factory=list)


def merge(texts: Iterable[tuple[str, str]]) -> str:
    """One text of (model, its process's text) pairs. A label "model" that is there becomes "exported_model"."""
    metrics: dict[str, _Metric] = {}
    for model, text in texts:
        label = 'model="' + model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        about = ""
        for line in text.split("\n"):
            line = line.strip()
            if told := _ABOUT.match(line):
                about = told[2]
                metrics.setdefault(about, _Metric()).about.setdefault(told[1], line)
            elif sample := _SAMPLE.fullmatch(line):
                name, labels, rest = sample[1], (sample[2] or "").rstrip(", \t"), sample[3]
                if name != about and name not in {about + part for part in _PARTS}:
                    about = name
                labels = re.sub(rf"({_LABEL})", _renamed, labels)
                metrics.setdefault(about, _Metric()).samples.append(
                    f"{name}{{{label}{',' if labels else ''}{labels}}}{rest}"
                )
    lines = (line for metric in metrics.values() for line in (*metric.about.values(), *metric.samples))
    return "".join(line + "\n" for line in lines)


def _renamed(label: re.Match[str]) -> str:
    return re.sub(r"^model(?=[ \t]*=)", "exported_model", label[1])
