"""The inputs of one call for vectors, in columns: a request is made of each when its turn comes.

    texts    Hello│world││abc      UTF-8, one behind the other
    ends         5    10 10  13    where each ends
    others   2 -> token ids        prompts that are no text, by their place

Thousands of requests would be made at once otherwise, each an object with twenty fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

from triptych_services.frontend.requests.raw import RawPrompt, RawRequest, with_remaining_time


class Prompts(Protocol):
    """The prompts of a call, by their places."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> RawPrompt: ...


class PackedPrompts:
    """Prompts as another process has packed them. A text is decoded each time that it is asked for."""

    def __init__(self, texts: bytes, ends: array[int], others: Mapping[int, RawPrompt]) -> None:
        self._texts = texts
        self._ends = ends
        self._others = others

    @classmethod
    def of(cls, prompts: Prompts) -> PackedPrompts:
        """Return the same prompts, packed."""
        others, texts = dict[int, RawPrompt](), list[bytes]()
        for place in range(len(prompts)):
            prompt = prompts[place]
            if isinstance(prompt, str):
                texts.append(prompt.encode("utf-8", "surrogatepass"))  # half of a pair is refused later
            else:
                texts.append(b"")
                others[place] = prompt
        return cls(b"".join(texts), array("Q", accumulate(map(len, texts))), others)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> RawPrompt:
        if place in self._others:
            return self._others[place]
        start = self._ends[place - 1] if place else 0
        return self._texts[start : self._ends[place]].decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True, eq=False)
class PooledCall:
    """The requests of one call, in the order of its inputs."""

    base: RawRequest
    """The fields that are equal in all of them, with `pooling`."""
    prompts: Prompts
    paths: Sequence[str]
    """Path of each prompt in the client's words."""
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Place of an input -> fields in which its request differs from `base`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PooledCall, (self.base, PackedPrompts.of(self.prompts), self.paths, self.changes)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> RawRequest:
        """Return the request of an input. Its id is numbered where there are several."""
        base = self.base
        changes = dict(self.changes.get(place, {}))
        if len(self) > 1 and base.head.request_id:
            changes["head"] = replace(base.head, request_id=f"{base.head.request_id}-{place}")
        paths = {**base.paths, **changes.pop("paths", {}), "prompt": self.paths[place]}
        return replace(base, prompt=self.prompts[place], paths=paths, **changes)

    def since(self, arrived: float) -> PooledCall:
        """Return the call with the time that is left of it, as `with_remaining_time`."""
        return replace(self, base=with_remaining_time(self.base, arrived))

    def with_prompt_name(self, name: str) -> PooledCall:
        """Return the call with the checkpoint's name of the text that precedes its inputs."""
        return replace(self, base=replace(self.base, prompt_name=name)) if name else self


@dataclass(frozen=True, slots=True, eq=False)
class Passages:
    """Texts of one side of a comparison."""

    texts: Prompts
    path: str
    """In the client's words."""
    is_list: bool = True
    """Whether the client sent a list; otherwise there is one text, which has the path of the field."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Passages, (PackedPrompts.of(self.texts), self.path, self.is_list)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> str:
        text = self.texts[place]
        assert isinstance(text, str), "only texts are compared"
        return text

    def path_of(self, place: int) -> str:
        """Return the path of a text in the client's words."""
        return f"{self.path}[{place}]" if self.is_list else self.path
