"""Regular expressions for the formats of JSON Schema, none wider than what validators accept.

They follow the RFCs that JSON Schema names. A format that excludes real values is worse than none: a model asked to
copy such a value is forced to write another one. llguidance's own expressions accept dates that no calendar has,
seconds after the 59th, and names of any length.
"""

from __future__ import annotations

from collections.abc import Mapping

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_N = "[0-9]{1,15}"
_DAYS = f"(?:{_N}D|{_N}M(?:{_N}D)?|{_N}Y(?:{_N}M(?:{_N}D)?)?)"
_CLOCK = f"T(?:{_N}S|{_N}M(?:{_N}S)?|{_N}H(?:{_N}M(?:{_N}S)?)?)"

# RFC 1123, and RFC 5891: hyphens in the third and fourth place are reserved for encoded names.
_LETTER = "[a-zA-Z0-9]"
_INNER = "[a-zA-Z0-9-]"
_LABEL = (
    f"(?:{_LETTER}(?:{_LETTER}|{_INNER}{_LETTER}(?:{_INNER}{{0,59}}{_LETTER})?"
    f"|{_INNER}-{_LETTER}(?:{_INNER}{{0,58}}{_LETTER})?)?|xn--[a-z0-9](?:[a-z0-9-]{{0,57}}[a-z0-9])?)"
)
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"

# RFC 4291, as RFC 3986 spells it out.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    [
        f"(?:{_GROUP}:){{6}}{_LAST}",
        f"::(?:{_GROUP}:){{5}}{_LAST}",
        *(f"(?:{_GROUP}(?::{_GROUP}){{0,{4 - n}}})?::(?:{_GROUP}:){{{n}}}{_LAST}" for n in range(4, -1, -1)),
        f"(?:{_GROUP}(?::{_GROUP}){{0,5}})?::{_GROUP}",
        f"(?:{_GROUP}(?::{_GROUP}){{0,6}})?::",
    ]
) + ")"  # fmt: skip

# RFC 5321 without quoted names.
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = f"{_ATOM}(?:\\.{_ATOM})*@(?:{_HOST}|\\[(?:{_IPV4}|IPv6:{_IPV6})\\])"

_UNRESERVED = "a-zA-Z0-9._~\\-"
# RFC 3987's letters beyond ASCII, and those that only a query may have.
_LETTERS = "\\x{A0}-\\x{D7FF}\\x{F900}-\\x{FDCF}\\x{FDF0}-\\x{FFEF}" + "".join(
    f"\\x{{{plane:X}{0x1000 if plane == 14 else 0:04X}}}-\\x{{{plane:X}FFFD}}" for plane in range(1, 15)
)
_PRIVATE = "\\x{E000}-\\x{F8FF}\\x{F0000}-\\x{FFFFD}\\x{100000}-\\x{10FFFD}"


def _reference(letters: str = "", private: str = "") -> tuple[str, str]:
    """RFC 3986: a URI, and a reference that may be relative. `letters`, `private`: further characters (RFC 3987)."""
    escape = f"%{_HEX}{{2}}"

    def some(more: str) -> str:
        return f"(?:[{_UNRESERVED}{letters}!$&'()*+,;={more}]|{escape})"

    part = some(":@")
    address = f"\\[(?:{_IPV6}|[vV]{_HEX}+\\.[{_UNRESERVED}!$&'()*+,;=:]+)\\]"
    authority = f"(?:{some(':')}*@)?(?:{address}|{some('')}*)(?::[0-9]{{0,5}})?"
    network = f"//{authority}(?:/{part}*)*"
    absolute = f"/(?:{part}+(?:/{part}*)*)?"
    tail = f"(?:\\?(?:{some(':@/?' + private)})*)?(?:#{some(':@/?')}*)?"
    uri = f"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{network}|{absolute}|{part}+(?:/{part}*)*)?{tail}"
    relative = f"(?:{network}|{absolute}|{some('@')}+(?:/{part}*)*)?{tail}"
    return uri, f"(?:{uri}|{relative})"


_URI, _URI_REFERENCE = _reference()
_IRI, _IRI_REFERENCE = _reference(_LETTERS, _PRIVATE)

# RFC 6570 with erratum 6937
_NAME_CHARACTER = f"(?:[a-zA-Z0-9_]|%{_HEX}{{2}})"
_VARIABLE = f"{_NAME_CHARACTER}+(?:\\.{_NAME_CHARACTER}+)*(?::[1-9][0-9]{{0,3}}|\\*)?"
_URI_TEMPLATE = (
    f"(?:[!#$&'()*+,./0-9:;=?@A-Z\\[\\]_a-z~{_LETTERS}-]|%{_HEX}{{2}}"
    f"|\\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*"
)  # fmt: skip

_POINTER = "(?:/(?:[^/~]|~[01])*)*"  # RFC 6901

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|{_N}W)",
    "email": _EMAIL,
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""Without anchors: the whole text must match."""

LIMITS: Mapping[str, Mapping[str, object]] = {
    "email": {"maxLength": 254, "pattern": "^[^@]{1,64}@"},
    "hostname": {"maxLength": 253},
}
"""Schemas that must hold besides the expressions."""

NOT_REGULAR = frozenset(("idn-email", "idn-hostname", "regex"))
"""Formats that no regular expression describes."""
