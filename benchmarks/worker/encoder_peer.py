"""Computes what `benchmarks.worker.encoders` times, in a peer's Python: it imports nothing of this project.

    python encoder_peer.py MODEL sentence-transformers|onnxruntime|openvino|openvino-float32 embed|rerank THREADS BATCH

Each line on stdin is the path of an .npz file with token_ids and token_types, [num_texts, num_tokens]. Each answer is
one line on stdout: the seconds that their vectors or scores took, by the clock and of all cores together, and the path
of an .npy file with them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

NAMES = ("input_ids", "attention_mask", "token_type_ids")
Compute = Callable[[Any, Any], Any]


class Network(nn.Module):
    """The graph that is exported, with the pooling inside."""

    def __init__(self, directory: str, task: str) -> None:
        super().__init__()
        self.is_embedding = task == "embed"
        auto = (
            transformers.AutoModel if self.is_embedding else transformers.AutoModelForSequenceClassification
        )
        self.model = auto.from_pretrained(directory, dtype="float32").eval()

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        if not self.is_embedding:
            return out.logits
        mask = attention_mask[:, :, None].to(out[0].dtype)
        return nn.functional.normalize((out[0] * mask).sum(1) / mask.sum(1), dim=-1)


def export(directory: str, task: str) -> str:
    path = str(Path(tempfile.mkdtemp()) / "model.onnx")
    example = torch.ones(2, 8, dtype=torch.int64)
    torch.onnx.export(
        Network(directory, task),
        (example, example, example * 0),
        path,
        input_names=list(NAMES),
        output_names=["out"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in NAMES} | {"out": {0: "texts"}},
        dynamo=False,
    )
    return path


def with_sentence_transformers(directory: str, task: str, num_threads: int) -> Compute:
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(num_threads)
    if task == "embed":
        model = SentenceTransformer(directory, device="cpu")

        def embed(token_ids: Any, token_types: Any) -> Any:
            features = {
                "input_ids": torch.from_numpy(token_ids),
                "attention_mask": torch.ones(token_ids.shape, dtype=torch.int64),
                "token_type_ids": torch.from_numpy(token_types),
            }
            return model(features)["sentence_embedding"].numpy()

        return embed
    network = Network(directory, task)  # CrossEncoder is this model

    def rerank(token_ids: Any, token_types: Any) -> Any:
        ids = torch.from_numpy(token_ids)
        return network(ids, torch.ones_like(ids), torch.from_numpy(token_types)).numpy()

    return rerank


def with_onnxruntime(directory: str, task: str, num_threads: int) -> Compute:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = onnxruntime.InferenceSession(
        export(directory, task), options, providers=["CPUExecutionProvider"]
    )
    return lambda ids, types: session.run(
        None, dict(zip(NAMES, (ids, np.ones_like(ids), types), strict=True))
    )[0]


def with_openvino(directory: str, task: str, num_threads: int, *, precision: str = "") -> Compute:
    import openvino

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads, "PERFORMANCE_HINT": "LATENCY"}
    if precision:
        options["INFERENCE_PRECISION_HINT"] = precision
    request = openvino.Core().compile_model(export(directory, task), "CPU", options).create_infer_request()

    def compute(ids: Any, types: Any) -> Any:
        found = request.infer(dict(zip(NAMES, (ids, np.ones_like(ids), types), strict=True)))
        return np.array(next(iter(found.values())))

    return compute


def main() -> None:
    directory, peer, task, num_threads, batch = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    make = {"sentence-transformers": with_sentence_transformers, "onnxruntime": with_onnxruntime}.get(peer)
    if make is not None:
        compute = make(directory, task, num_threads)
    else:
        precision = "f32" if peer.endswith("float32") else ""
        compute = with_openvino(directory, task, num_threads, precision=precision)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        arrays = np.load(line.strip())
        ids, types = (arrays[name].astype(np.int64) for name in ("token_ids", "token_types"))
        started, cpu_started = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            parts = [
                compute(ids[at : at + batch], types[at : at + batch]) for at in range(0, len(ids), batch)
            ]
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        np.save(f"{line.strip()}.npy", np.concatenate(parts))
        answer = {"seconds": seconds, "cpu_s": cpu_s, "out": f"{line.strip()}.npy"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
