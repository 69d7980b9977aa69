"""Models from the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.errors import ModelNotFound

ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
# Second copies of the weights, in the formats of other tools.
IGNORE_PATTERNS = ("original/*", "onnx/*", "consolidated*")


def fetch_snapshot(hub_id: str, *, progress: bool) -> Path:
    """Return the directory of the newest revision; what is cached already is not fetched again.

    Without a network the cached snapshot serves, if there is one. Set HF_HOME to move the cache,
    HF_TOKEN for gated models, HF_HUB_OFFLINE=1 to stay off the network.

    Raises:
        ModelNotFound: the hub does not have it, or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not progress:
        disable_progress_bars()
    try:
        directory = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(ALLOW_PATTERNS), ignore_patterns=list(IGNORE_PATTERNS)
        )
    except Exception as error:  # the client raises its own, its transport's and OSError, by version
        reason = f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]}"
        raise ModelNotFound(
            f"model: {hub_id!r} is no directory here, and the Hugging Face hub did not give it: {reason} "
            "(a wrong name, a gated model without HF_TOKEN, or no network). A directory or .gguf file "
            "works without a network, and so does `embedded` once it is in the cache"
        ) from error
    return Path(directory)
