"""A `\\` that is not the last character of its line ends a command: the error explains it."""

from __future__ import annotations

import re
import shlex

import pytest
from parsers import parser_of

from llamado.commands import cli
from llamado.commands.up.start import server_options
from llamado.flags import FlagError, parse

# From a tutorial for llama-server.
COPIED = """llama-server -m model.gguf \\
    --gpu-layers 35 \\     # Use GPU if available
    --flash-attn \\        # Flash attention for speed
    --mlock"""


def words_of(text: str, *, comments: bool = True) -> list[str]:
    """Split the first command like a shell. Interactive zsh has no comments."""
    return next(
        found for line in re.sub(r"\\\n", "", text).splitlines() if (found := shlex.split(line, comments=comments))
    )


def refused(*words: str, command: str = "serve") -> str:
    with pytest.raises(FlagError) as caught:
        parse(parser_of(command), command, list(words), {})
    return str(caught.value)


def test_words_of_the_shell() -> None:
    """shlex splits like bash: a word of one space, and no comment."""
    assert words_of(COPIED) == ["llama-server", "-m", "model.gguf", "--gpu-layers", "35", " "]
    assert words_of(COPIED, comments=False)[5:8] == [" ", "#", "Use"]


def test_a_comment_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words_of(COPIED)) == 2
    assert capsys.readouterr().err == (
        "llamado: a space or comment after the \\ at the end of a line ended the command, so the flags on the "
        "following lines are missing. A \\ continues a line only as its last character: put comments on lines of their "
        "own, before the command\n"
    )
    assert cli.main(words_of(COPIED, comments=False)) == 2
    assert "the comment '# Use GPU if available' after the \\ at the end of a line ended" in capsys.readouterr().err


@pytest.mark.parametrize("end", [" ", "   ", "\t", "\r", "\u00a0", "\\"])
@pytest.mark.parametrize("before", ["--mlock", "--flash-attn", "--flash-attn on", "--numa", "--port=9"])
def test_any_flag_before_the_break(before: str, end: str) -> None:
    """The flag may have an optional value: `--numa \\ # comment`."""
    assert "ended the command" in refused("-m", "x", *before.split(), end)


@pytest.mark.slow
def test_one_space_before_the_comment() -> None:
    """A shell turns `\\ # one space` into the word " #"."""
    assert "the comment '# one space' after" in refused("-m", "x", "--mlock", " #", "one", "space")


def test_other_commands() -> None:
    assert "ended the command" in refused("-p", "50052", "-c", " ", command="worker")
    assert "ended the command" in refused("-m", "x", "--n-prompt", "5", "--profile", " ", command="bench")
    with pytest.raises(FlagError, match="ended the command"):
        server_options(["-m", "x", "--metrics", " #", "behind"])
    assert server_options(["--api-key", "#key", "--metrics"]) == {"api-key": ["#key"], "metrics": True}


def test_a_command_that_ends_before_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for word in (" ", " #", "\\"):
        assert cli.main([word, "comment"]) == 2
        assert "no command: a \\ continues a line only" in capsys.readouterr().err


def test_values_may_be_anything() -> None:
    flags, _ = parse(parser_of("run"), "run", ["-m", "x", "-p", " "], {})
    assert flags.prompt == " "
    flags, _ = parse(parser_of("serve"), "serve", ["-m", "x", "--api-key", "#1", "--chat-template", "\\"], {})
    assert (flags.api_key, flags.chat_template) == (["#1"], "\\")
    flags, _ = parse(parser_of("serve"), "serve", ["-m", "x", "--dry-sequence-breaker", "\n"], {})
    assert flags.dry_sequence_breakers == ["\n"]
