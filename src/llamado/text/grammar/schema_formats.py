"""Regular expressions for the formats of JSON Schema, none wider than what validators accept.

llguidance's own let through dates that no calendar has, seconds after the 59th, and names of any length.
"""

from __future__ import annotations

from collections.abc import Mapping

_YEAR = "[12][0-9]{3}"
_LEAP_YEAR = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:12|16|20|24|28)00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DAYS = "(?:[0-9]{1,4}D|[0-9]{1,3}M(?:[0-9]{1,3}D)?|[0-9]{1,3}Y(?:[0-9]{1,3}M(?:[0-9]{1,3}D)?)?)"
_CLOCK = "T(?:[0-9]{1,3}S|[0-9]{1,3}M(?:[0-9]{1,3}S)?|[0-9]{1,3}H(?:[0-9]{1,3}M(?:[0-9]{1,3}S)?)?)"
_LABEL = "[a-zA-Z0-9]{1,20}(?:-[a-zA-Z0-9]{1,20}){0,2}"
_HOST = f"(?:{_LABEL}\\.){{0,3}}[a-zA-Z][a-zA-Z0-9]{{1,20}}(?:-[a-zA-Z0-9]{{1,20}}){{0,2}}"
_ATOM = "[a-zA-Z0-9_+-]{1,20}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_URI_PART = "[a-zA-Z0-9._~-]"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,3}}W)",
    "email": f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@(?:{_LABEL}\\.){{1,3}}[a-zA-Z]{{2,12}}",
    "hostname": _HOST,
    "ipv4": f"{_BYTE}(?:\\.{_BYTE}){{3}}",
    # In full, or with one run of zeros left out at either end or between two groups each.
    "ipv6": f"(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}|::(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{0,5}})?"
    f"|{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{0,2}}::{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{0,2}})",
    "uri": f"[a-z][a-z0-9+.-]{{1,11}}://{_HOST}(?::[1-9][0-9]{{1,3}})?(?:/{_URI_PART}{{0,40}}){{0,8}}"
    f"(?:\\?{_URI_PART}{{1,20}}=(?:{_URI_PART}{{0,40}}))?(?:#{_URI_PART}{{1,40}})?",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""Without anchors: the whole text must match."""
