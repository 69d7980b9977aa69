"""`LoRARequest` as vLLM has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for requests, which the first of them loads."""

    lora_name: str
    lora_int_id: int = 0
    """Has no effect: adapters are told apart by their names and contents."""
    lora_path: str = ""
    """PEFT's directory."""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each; None: none."""


class LoadedAdapters:
    """The adapters that requests have brought, each of which is loaded once."""

    def __init__(self) -> None:
        self._names_and_paths: set[tuple[str, str]] = set()

    def missing(self, given: LoRARequests) -> list[LoRARequest]:
        """Return those that are not loaded yet, each once."""
        requests = dict.fromkeys(filter(None, _listed(given)))
        return [each for each in requests if (each.lora_name, each.lora_path) not in self._names_and_paths]

    def note(self, request: LoRARequest) -> None:
        """Note that one has been loaded."""
        self._names_and_paths.add((request.lora_name, request.lora_path))


def names_of(given: LoRARequests) -> str | list[str]:
    """Return the names as `triptych.LLM.generate` takes them."""
    if given is None or isinstance(given, LoRARequest):
        return given.lora_name if given else ""
    return [each.lora_name if each else "" for each in given]


def _listed(given: LoRARequests) -> Iterable[LoRARequest | None]:
    listed = given if isinstance(given, Sequence) else [given]
    for each in listed:
        if each is not None and not isinstance(each, LoRARequest):
            raise InvalidRequest("lora_request", f"expected a LoRARequest, not {each!r:.80}")
    return listed
