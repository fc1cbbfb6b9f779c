"""Keeps credentials out of messages: passwords in addresses, and values of variables with names of secrets.

Credentials come from the environment alone: nothing that is written, sent to other machines or printed may contain one.
"""

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
_USER = r"[^/@\s'\"]"
_IN_ADDRESS = re.compile(rf"(?<=://){_USER}*:{_USER}*@|(?<=http://){_USER}+@|(?<=https://){_USER}+@")  # or a token
_SECRET_NAME = re.compile(r"(^|_)(PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|CREDENTIALS?|ACCESS_KEY|API_KEY)(_|$)")
_SHORTEST = 6  # characters; shorter values would hide words that are no secrets


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return a text without passwords in addresses and without the values of secret variables.

    Args:
        text: Text, such as an error of another program.
        environ: Environment whose secrets are hidden; this process's by default.
    """
    for value in sorted(_secret_values(os.environ if environ is None else environ), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(f"{HIDDEN}@", text)


def has_password(address: str) -> bool:
    """Whether an address, such as that of a git remote or a server, contains a password or a token."""
    return _IN_ADDRESS.search(address) is not None


def _secret_values(environ: Mapping[str, str]) -> set[str]:
    return {value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST}
