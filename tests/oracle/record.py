"""Records the oracle: `make oracle`. Greedy tokens of the embedded model by transformers, in float32."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.oracle.entries import NUM_NEW_TOKENS, ORACLE_FILE
from tests.oracle.prompts import oracle_prompts
from tests.oracle.reference import greedy, load_reference, weights_file
from triptych.hub import resolve_model
from triptych.text.chat_template import ChatTemplate
from triptych.text.tokenizer import Tokenizer


def main() -> None:
    directory = resolve_model("embedded")
    tokenizer = Tokenizer.from_directory(directory)
    template = ChatTemplate(tokenizer)
    weights = weights_file(directory)
    model = load_reference(directory)
    entries = []
    for prompt in tqdm(oracle_prompts(tokenizer, template.render), desc="oracle", unit="prompt"):
        tokens, gaps = greedy(model, prompt, NUM_NEW_TOKENS)
        entries.append({"prompt": prompt, "tokens": tokens, "gaps": [round(gap, 7) for gap in gaps]})
    document = {
        "model": weights.name,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "dtype": "float32",
        "entries": entries,
    }
    ORACLE_FILE.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    print(f"{ORACLE_FILE}: {len(entries)} prompts, {NUM_NEW_TOKENS} new tokens each")


if __name__ == "__main__":
    main()
