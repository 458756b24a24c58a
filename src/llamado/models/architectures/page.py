"""`docs/models.md`: the architectures, models that have them, and how it is known that they are right."""

from __future__ import annotations

import sys

from llamado.models.encoder import Encoder
from llamado.models.registry import ARCHITECTURES, ELSEWHERE, NOT_HERE, REFUSED


def markdown() -> str:
    """The registry as a Markdown page."""
    lines = [
        "# Architectures",
        "",
        "Made from `src/llamado/models/registry.py` by `python -m llamado.models.architectures.page`. The architecture "
        "of a file is its `general.architecture` (`llamado inspect MODEL` shows it, also of a file that is still on a "
        "server).",
        "",
        f"{len(ARCHITECTURES)} run here. Of each the tests make small files with random weights and the proportions of "
        "the real ones, and give them to the real llama.cpp too:",
        "",
        "- **answers**: its probabilities of the next token at 500 places of a text (llama-perplexity). The likeliest "
        "token is the same at 99 of 100 at least, and the logarithms of the ten largest probabilities differ by 0.01 "
        "in the mean at most. The logits are the same bits however a text is read: at once, in batches, token by "
        "token, among others, going on from a stored place;",
        "- **vectors**: those of each token and of whole texts, and scores of those that rank (llama-server).",
        "",
        "The last column names the real model that the tests run, against llama.cpp's answers, too. Of most there is "
        "none: no file of them can be had where the tests run, or it is larger than the memory there.",
        "",
        "| `general.architecture` | models | compared with llama.cpp | real model |",
        "|---|---|---|---|",
    ]
    for name, row in sorted(ARCHITECTURES.items()):
        compared = "vectors" if issubclass(row.load(), Encoder) else "answers"
        lines.append(f"| `{name}` | {row.models} | {compared} | {row.tested} |")
        lines += [f"| `{name}` | {models} | {compared} |  |" for models in row.kinds.values()]
    lines += ["", "Of llama.cpp's list (b11434) these do not run here:", ""]
    reasons: dict[str, list[str]] = {}
    for name, why in NOT_HERE.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    lines += [f"- {', '.join(names)}: {why}." for why, names in reasons.items()]
    lines += ["", "What does not run of those that do, and is refused by name:", ""]
    lines += [f"- {what}: {why}." for what, why in REFUSED.items()]
    lines += ["", "Names that other programs write, and what to take instead:", ""]
    lines += [f"- `{name}`: {instead}" for name, instead in ELSEWHERE.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(markdown())
