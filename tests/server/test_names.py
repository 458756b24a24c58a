"""Aliases and tags in llama-server's form: each once, in order; the first alias is the model's id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakes import INFO, FakeEngine, served

from llamado.commands.serve import serve_settings
from llamado.flags import FlagParser, add_flags, parse
from llamado.server.api.status import models_json
from llamado.server.settings import Settings


def settings(*arguments: str) -> Settings:
    parser = FlagParser(allow_abbrev=False)
    add_flags(parser, "serve")
    return serve_settings(parse(parser, "serve", ["-m", "a.gguf", *arguments], {})[0])


def test_names_of_a_model() -> None:
    given = settings("--alias", "b, a,,b", "--tags", "z,y,z, x")
    assert given.aliases == ("a", "b") and given.tags == ("x", "y", "z")
    info = replace(INFO, name=given.aliases[0], aliases=given.aliases, tags=given.tags)
    answer: Any = models_json(replace(served(FakeEngine()), info=info))
    (entry,) = answer["data"]
    assert (entry["id"], entry["aliases"], entry["tags"]) == ("a", ["a", "b"], ["x", "y", "z"])
    assert (answer["models"][0]["name"], answer["models"][0]["tags"]) == ("a", [""])


def test_verbose_answers_from_verbosity_ten_on() -> None:
    for arguments, verbose in (
        ([], False), (["-lv", "9"], False), (["-lv", "10"], True), (["-v"], True), (["--verbose"], True),
    ):  # fmt: skip
        assert settings(*arguments).switches.verbose is verbose, arguments
