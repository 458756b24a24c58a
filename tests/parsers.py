"""Parsers of commands, made once: they have hundreds of flags."""

from __future__ import annotations

from functools import cache

from llamado.commands import cli

parser_of = cache(cli.make_parser)
