"""Weights from files into a model: safetensors, GGUF, or drawn from a seed."""

from services.worker.loader.base import Checkpoint, StoredTensor, fingerprint
from services.worker.loader.load import load_model, open_checkpoint

__all__ = ["Checkpoint", "StoredTensor", "fingerprint", "load_model", "open_checkpoint"]
