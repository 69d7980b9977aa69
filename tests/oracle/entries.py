"""Recorded answers of transformers to the oracle's prompts, and their comparison. Needs no tokenizer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tests.oracle.reference import weights_file

ORACLE_FILE = Path(__file__).with_name("smollm2_greedy.json")
NUM_NEW_TOKENS = 64

NEAR_TIE = 1e-4  # logits this close may swap when sums are taken in another order
QUANTIZED_NEAR_TIE = 2e-3  # likewise when inputs of products keep 15 bits of their group's largest


@dataclass
class Entry:
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    """Gap of each token's logit to the next best."""


def read_entries(directory: Path) -> list[Entry]:
    """Those recorded from the weights of this model directory."""
    document = json.loads(ORACLE_FILE.read_text())
    digest = hashlib.sha256(weights_file(directory).read_bytes()).hexdigest()
    assert document["weights_sha256"] == digest, "the oracle was recorded from other weights: make oracle"
    return [Entry(**entry) for entry in document["entries"]]


def check(
    way: str,
    entries: list[Entry],
    outputs: list[list[int]],
    excused: list[str],
    *,
    near_tie: float = NEAR_TIE,
) -> None:
    """Every token is the recorded one up to the first near tie; what diverges there goes to `excused`."""
    for entry, output in zip(entries, outputs, strict=True):
        assert len(output) == NUM_NEW_TOKENS
        if output == entry.tokens:
            continue
        at = next(
            i for i, (ours, theirs) in enumerate(zip(output, entry.tokens, strict=True)) if ours != theirs
        )
        where = f"{way}, prompt of {len(entry.prompt)} tokens, token {at}, gap {entry.gaps[at]:.2g}"
        assert entry.gaps[at] <= near_tie, f"{where}: {output[at]} instead of {entry.tokens[at]}"
        excused.append(where)
