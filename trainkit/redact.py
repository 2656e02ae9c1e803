"""Keep secrets out of what leaves the process: parameters, tags, artifacts, error texts, addresses."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.errors import visible

HIDDEN = "[hidden]"

_WORDS = frozenset({
    "token", "secret", "password", "passwd", "passphrase", "pwd", "key", "cred", "creds", "auth", "authorization",
    "cookie",
})  # fmt: skip
_ENDINGS = ("token", "secret", "password", "passwd", "apikey", "accesskey", "privatekey", "credential", "credentials")

_VALUE = r"""\\?"[^"\n]*"|\\?'[^'\n]*'|[^\s,;&"'}\])]+"""
_NAMED = re.compile(
    # A name that ends like a secret, an equals sign or colon, and what follows. The name is bounded: else a text of
    # points would be gone through from each of them.
    rf"""(?ix) ( \b[\w.-]{{0,40}}? (?: token | secret | passw(?:or)?d | passphrase | [_-]pwd
    | (?:api|access|private|secret|account)[_-]?key | credentials? | authorization ) \\?["']? \s* [:=] \s* (?!\s) )
    (?: (?: bearer | basic | token ) \s+ )? (?! \[hidden\] ) ( {_VALUE} )"""
)
_COOKIE = re.compile(
    # To the end of the line: several stand in one header.
    r"""(?ix) ( \b(?:set-)?cookie \\?["']? \s* [:=] \s* (?!\s) ) (?! \[hidden\] ) ( "[^"\n]*" | '[^'\n]*' | [^\n]+ )"""
)
_WORD = re.compile(
    # The word of a command line after such an option, of a .netrc after the login; parts of a signed address.
    r"""(?ix) ( --[\w-]{0,40}? (?: token | secret | password | passphrase | key | credentials? ) \s+
    | \b login \s+ \S+ \s+ password \s+ | [?&] (?: x-amz-signature | x-goog-signature | sig | signature | key ) = )
    (?! \[hidden\] ) ( [^\s,;&"'}\])]+ )"""
)
_USER_INFO = re.compile(
    # After the slashes of an address, of one without its colon, or with one slash, too; a name and password anywhere.
    r"""(?ix) ( (?<!/)// | \bhttps?[:;]?[/\\]+ ) [^\s/@?#'"]* (?:@[^\s/@?#'"]*)* @ (?=[^\s@])
    | (?<![\w.%+~-]) [\w.%+~-]{1,64} : (?:[^\s/@'"]{0,256}@)+ (?=[\w\[])"""
)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web token
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|pypi-|npm_|dapi|AIza|ya29\.|dop_v1_)[\w-]{16,}"
    r"|\b[srp]k_(?:live|test)_\w{12,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|(?i:\bbearer\s+[\w.~+/-]{12,}=*)",
    re.DOTALL,
)


def is_secret_name(name: str) -> bool:
    """Return True for a dotted key that names a secret: `hub.api_key`, `HF_TOKEN`, but not `max_tokens` or `keep`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^a-zA-Z0-9]+", spaced.lower()) if word]
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def without_secrets(text: str) -> str:
    """Return a text without user-info in addresses, values of secret names, and what has the shape of a credential."""
    text = _SHAPES.sub(HIDDEN, text)
    text = _USER_INFO.sub(lambda found: found[1] or "", text)
    for pattern in (_COOKIE, _NAMED, _WORD):
        text = pattern.sub(lambda found: found[1] + HIDDEN, text)
    return text


def holds_secret(key: str, value: object) -> bool:
    """Return True for a setting that is a secret, by its name (`hub_token`, `apiKey`; not `key`) or its shape.

    Empty text and [hidden] are none.
    """
    if not isinstance(value, str) or not value.strip() or value == HIDDEN:
        return False
    squashed = re.sub("[^a-z]", "", key.lower())
    looks = _SHAPES.search(value) or re.search(r"(?:\w|//):[^\s/@]*@\w", value)
    return squashed.endswith(_ENDINGS) or bool(looks)


def hide_in_logs() -> None:
    """Hide secrets and terminal escapes in all log lines and warnings of this process, of any library, from now on."""
    make, form = logging.getLogRecordFactory(), warnings.formatwarning
    if isinstance(make, _Hiding):
        return
    logging.setLogRecordFactory(_Hiding(make))
    warnings.formatwarning = lambda *words, **more: visible(without_secrets(form(*words, **more)))


@dataclass(frozen=True)
class _Hiding:
    """Makes log records, without secrets, by another factory."""

    make: Callable[..., logging.LogRecord]

    def __call__(self, *args: Any, **more: Any) -> logging.LogRecord:
        record = self.make(*args, **more)
        with contextlib.suppress(TypeError, ValueError):  # words that do not fit their places: logging says so itself
            record.msg, record.args = visible(without_secrets(record.getMessage())), ()
        if record.exc_info:
            record.exc_text = visible(without_secrets(logging.Formatter().formatException(record.exc_info)))
        return record


def without_user_info(address: str) -> str:
    """Return an address, mistyped or not, without what stands before its last @, but for the scheme."""
    scheme = re.match(r"(?is)(?:[a-z][a-z0-9+.-]*[:;]?)?[/\\]+|", address)
    begin = scheme.end() if scheme is not None else 0
    return address[:begin] + address[begin:].rpartition("@")[2]
