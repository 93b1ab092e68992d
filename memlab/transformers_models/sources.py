"""Find the config.json of a model: a path, a folder, or an id on the Hugging Face Hub.

An id such as "Qwen/Qwen2.5-7B" is looked up in the local cache first. If it is not there, its
config.json (a few KB) is downloaded, never its weights. HF_HUB_OFFLINE=1 prevents the download.

This module does not import torch.
"""

import json
import os
import re
import socket
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from memlab.configs.config_json import FILE, read_json

_SECONDS = 5  # to wait for the Hub
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """A model's config.json.

    name    as the user gave it
    path    of the file
    """

    name: str
    path: str

    def fields(self) -> dict[str, Any]:
        """Return the file's content. Raises ValueError if it is not a JSON object."""
        found = read_json(self.path)
        if not isinstance(found, dict):
            raise ValueError(f"{self.path} holds {json.dumps(found)[:60]}, wanted a JSON object")
        return found


def find_source(given: str) -> Source:
    """Return the config.json at a path, in a folder, or of an id on the Hub.

    Raises ValueError, in one sentence, if there is none.
    """
    path = os.path.expanduser(given)
    if os.path.isdir(path):
        path = os.path.join(path, FILE)
        if not os.path.isfile(path):
            raise ValueError(f"got the folder {given!r} as a model; it contains no {FILE}")
        return Source(given, path)
    if os.path.isfile(path):
        return Source(given, path)
    if given.endswith(".json") or not _ID.fullmatch(given):
        raise ValueError(f"got model {given!r}; there is no such file, folder or id on the Hub")
    return Source(given, _from_the_hub(given))


def _from_the_hub(given: str) -> str:
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    except ImportError as error:
        raise ValueError(
            f"got model {given!r}; to look it up in the Hugging Face cache, install transformers: "
            f"pip install 'memlab[transformers]'"
        ) from error
    found = try_to_load_from_cache(given, FILE)
    if isinstance(found, str):
        return found
    try:
        _require_network(constants.ENDPOINT)
        return hf_hub_download(given, FILE, etag_timeout=_SECONDS)
    except Exception as error:  # no network, no such model, no access
        raise ValueError(
            f"got model {given!r}; its {FILE} is not in the local Hugging Face cache and could not "
            f"be downloaded ({type(error).__name__}): give the path of the file instead"
        ) from error


def _require_network(endpoint: str) -> None:
    """Raise OSError at once if the Hub cannot be reached; huggingface_hub would retry for 20 s."""
    if urllib.request.getproxies():
        return
    url = urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    socket.create_connection((url.hostname, port), timeout=_SECONDS).close()
