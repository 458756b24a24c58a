"""Generator of `docs/models.md`: supported architectures and projectors, and how they are verified."""

from __future__ import annotations

import sys

from llamado.models.encoder import Encoder
from llamado.models.encoders.registry import PICTURES, SOUNDS
from llamado.models.encoders.registry import UNSUPPORTED as NO_PROJECTORS
from llamado.models.registry import ARCHITECTURES, FOREIGN_NAMES, UNSUPPORTED, UNSUPPORTED_VARIANTS


def markdown() -> str:
    """Return the registry as a Markdown page."""
    lines = [
        "# Architectures",
        "",
        "Find out whether a model is supported. The architecture of a file is its `general.architecture`; `llamado "
        "inspect MODEL` shows it, also for a file that is still on a server. This page is generated from "
        "`src/llamado/models/registry.py` by `python -m llamado.models.architectures.page`.",
        "",
        f"{len(ARCHITECTURES)} architectures are supported. For each, the tests generate small files with random "
        "weights and the proportions of the real models, and compare the results with llama.cpp's:",
        "",
        "- **answers**: the probabilities of the next token at 500 positions of a text (llama-perplexity). The most "
        "likely token is the same in at least 99 % of the positions, and the logarithms of the ten largest "
        "probabilities differ by at most 0.01 on average. The logits have the same bits however a text is read: at "
        "once, in batches, token by token, beside other sequences, or continued from a snapshot;",
        "- **vectors**: the embeddings of each token and of whole texts, and the scores of rerankers (llama-server).",
        "",
        "The last column names the real model that the tests run and compare with llama.cpp. Most architectures "
        "have none, because no file is available where the tests run, or it does not fit the memory there.",
        "",
        "| `general.architecture` | models | compared with llama.cpp | real model |",
        "|---|---|---|---|",
    ]
    for name, row in sorted(ARCHITECTURES.items()):
        compared = "vectors" if issubclass(row.load(), Encoder) else "answers"
        lines.append(f"| `{name}` | {row.models} | {compared} | {row.tested} |")
        lines += [f"| `{name}` | {models} | {compared} |  |" for models in row.variants.values()]
    lines += [
        "",
        "## Unsupported architectures",
        "",
        "These architectures of llama.cpp (b11434) are not supported:",
        "",
    ]
    reasons: dict[str, list[str]] = {}
    for name, why in UNSUPPORTED.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    lines += [f"- {', '.join(names)}: {why}." for why, names in reasons.items()]
    lines += [
        "",
        "## Unsupported variants",
        "",
        "These variants of supported architectures are rejected with an error:",
        "",
    ]
    lines += [f"- {what}: {why}." for what, why in UNSUPPORTED_VARIANTS.items()]
    lines += ["", "## Other names", "", "Names that other programs write, and the file to use instead:", ""]
    lines += [f"- `{name}`: {instead}" for name, instead in FOREIGN_NAMES.items()]
    return "\n".join([*lines, *_projectors(), ""])


def _projectors() -> list[str]:
    """Return the section on projectors."""
    lines = [
        "",
        "## Projectors",
        "",
        "The encoder of a projector file (`--mmproj`) is its `clip.projector_type`, or `clip.vision.projector_type` "
        "and `clip.audio.projector_type`. For each, the tests compare the layout of the prompt and the embeddings with "
        "llama.cpp's (cosine of at least 0.9999 for every token, with F32 weights).",
        "",
        "| `projector_type` | input | models |",
        "|---|---|---|",
    ]
    for kind, table in (("pictures", PICTURES), ("sounds", SOUNDS)):
        lines += [f"| `{name}` | {kind} | {row.models} |" for name, row in sorted(table.items())]
    reasons: dict[str, list[str]] = {}
    for name, why in NO_PROJECTORS.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    lines += ["", "Not supported:", ""]
    return lines + [f"- {', '.join(names)}: {why}." for why, names in reasons.items()]


if __name__ == "__main__":
    sys.stdout.write(markdown())
