"""Bodies of type multipart/form-data: text fields and files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from llamado.http.bodies import MAX_MEDIA_BODY
from llamado.http.errors import invalid
from llamado.http.json_body import parse_body

MOST_FIELDS, MOST_FILES = 64, 1
MAX_FIELD = 1 << 20
"""Bytes of one text field."""
_PIECE = 1 << 18
"""Bytes that are parsed before other tasks run."""


@dataclass(frozen=True)
class Form:
    """The fields of a form by name, and the contents of its files."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


class _Parser(MultiPartParser):
    spool_max_size = MAX_MEDIA_BODY  # the body is in memory already: nothing is written to disk


async def read_fields(body: bytes, content_type: str) -> Any:
    """Return a JSON body's value, or the text fields of a form. Raises ApiError."""
    if is_form(content_type):
        return (await parse_form(body, content_type)).fields
    return await parse_body(body)


def is_form(content_type: str) -> bool:
    """Return True for the content type of a form with files."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


async def parse_form(body: bytes, content_type: str) -> Form:
    """Parse a form; of several fields with one name, the first counts. Raises ApiError."""
    if not is_form(content_type):
        raise invalid("expected a body of type multipart/form-data")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(body), _PIECE):
            yield body[at : at + _PIECE]
            await asyncio.sleep(0)

    parser = _Parser(
        Headers({"content-type": content_type}),
        pieces(),
        max_files=MOST_FILES,
        max_fields=MOST_FIELDS,
        max_part_size=MAX_FIELD,
    )
    try:
        found = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"the form cannot be read: {error.message}") from None
    except (KeyError, ValueError, LookupError) as error:
        raise invalid(f"the form cannot be read: {error!r}") from None
    form = Form()
    for name, value in found.multi_items():
        if isinstance(value, UploadFile):
            form.files.setdefault(name, await value.read())
        else:
            form.fields.setdefault(name, value)
    await found.close()
    return form
