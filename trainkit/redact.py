"""Keeping secrets out of what leaves the process: parameters, tags, artifacts, error texts, addresses."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

HIDDEN = "[hidden]"

_WORDS = frozenset(
    (
        "token",
        "secret",
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "key",
        "cred",
        "creds",
        "auth",
        "authorization",
        "cookie",
    )
)
_ENDINGS = ("token", "secret", "password", "passwd", "apikey", "accesskey", "privatekey", "credential", "credentials")

_NAMED = re.compile(
    # a name that ends like a secret, an equals sign or colon, and what follows
    r"""(?ix) ( \b[\w.-]*? (?: token | secret | passw(?:or)?d | passphrase | (?:api|access|private|secret)[_-]?key
    | credentials? | cookie | authorization ) ["']? \s* [:=] \s* ) (?: (?: bearer | basic ) \s+ )? (?! \[hidden\] )
    ( "[^"\n]*" | '[^'\n]*' | [^\s,;&"'}\])]+ )"""
)
_USER_INFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@?#'\"]*(?:@[^\s/@?#'\"]*)*@(?=[^\s@])")
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web token
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|pypi-|npm_|dapi)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|(?i:\bbearer\s+[\w.~+/-]{12,}=*)",
    re.DOTALL,
)


def is_secret_name(name: str) -> bool:
    """Whether a dotted key names a secret: `hub.api_key`, `HF_TOKEN`, but not `max_tokens` or `keep`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^a-zA-Z0-9]+", spaced.lower()) if word]
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def without_secrets(text: str) -> str:
    """The text without user-info in addresses, values of secret names, and what has the shape of a credential."""
    text = _SHAPES.sub(HIDDEN, text)
    text = _USER_INFO.sub(r"\1", text)
    return _NAMED.sub(lambda found: found[1] + HIDDEN, text)


def without_user_info(address: str) -> str:
    """An address without user name, password, query and fragment, for a person to open."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()
