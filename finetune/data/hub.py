"""Checks quickly whether the Hugging Face hub is reachable: its own client retries six times, for half a minute."""

from __future__ import annotations

import functools
import socket
import urllib.request
from urllib.parse import urlsplit

from huggingface_hub import constants, is_offline_mode

REACH_SECONDS = 5.0


@functools.cache
def hub_is_reachable() -> bool:
    """False with HF_HUB_OFFLINE, or if the hub's host ($HF_ENDPOINT, or the public one) refuses connections. Always
    True behind a proxy, where the client has to find out."""
    if is_offline_mode():
        return False
    if urllib.request.getproxies():
        return True
    endpoint = urlsplit(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        with socket.create_connection((endpoint.hostname or "", port), timeout=REACH_SECONDS):
            return True
    except OSError:
        return False
