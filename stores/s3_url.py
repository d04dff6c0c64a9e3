"""URLs in buckets: s3://BUCKET/PREFIX. Pure."""

from __future__ import annotations

import re

from staleflow.stores.errors import ConfigError

SCHEME = "s3://"
URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<prefix>[^/].*?)/*")

URL_REMEDY = "name one as s3://BUCKET/PREFIX, BUCKET of 3 to 63 small letters, digits, dots and dashes"
"""What to do about a URL that is none."""


def is_url(location: str) -> bool:
    """Whether a text is a URL rather than a path."""
    return location.startswith(SCHEME)


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into bucket and prefix. Raises ConfigError.

    >>> split_url("s3://bucket/runs/demo/")
    ('bucket', 'runs/demo')
    """
    match = URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"{url!r} is no place for a store; {URL_REMEDY}")
    return match["bucket"], match["prefix"]
