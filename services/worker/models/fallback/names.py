"""The tensors of a checkpoint under the names of transformers' modules, by transformers' own rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from triptych.errors import ModelError
from triptych_services.worker.layers.weights import LoadedTensor

_RANDOM = "random:"  # type of tensors that no file holds, which have the model's names


class TensorRules:
    """Renames a checkpoint's tensors, and joins or splits them where a module holds them otherwise."""

    def __init__(self, model: PreTrainedModel, tensor_types: Mapping[str, str]) -> None:
        """
        Args:
            model: The whole model, on the meta device.
            tensor_types: Name in the checkpoint -> form of its stored elements.
        """
        self._model = model
        state = model.state_dict()
        self._names = frozenset(state)
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        pattern_to_converter = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        self._alias_to_name = _aliases(model)
        self._ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
        self._ignored.append(re.compile(r"rotary_emb\.inv_freq$"))
        self._renamed: dict[str, str] = {}
        self._patterns: dict[str, str] = {}
        """Name in the checkpoint -> pattern of the converter that takes it."""
        self._groups: dict[str, list[str]] = {}
        """Name under which a converter's results are found -> the names that they are made of."""
        self._converters: dict[str, WeightConverter] = {}
        self.tensor_types: dict[str, str] = {}
        """Name in the model -> form of the stored elements."""
        prefix = model.base_model_prefix
        for name in sorted(tensor_types, key=dot_natural_key):
            if tensor_types[name].startswith(_RANDOM):
                self._renamed[name] = name
                continue
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if renamed not in state and name in state:
                renamed, pattern = rename_source_key(name, [], [], prefix, state)
            self._renamed[name] = renamed
            self.tensor_types[renamed] = tensor_types[name]
            if pattern is not None:
                self._patterns[name] = pattern
                self._groups.setdefault(renamed, []).append(name)
                self._converters.setdefault(renamed, deepcopy(pattern_to_converter[pattern]))

    def apply(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> Iterator[tuple[str, LoadedTensor]]:
        """Yield (name in the model, tensor); tensors that are joined are yielded when the last of them has come."""
        waiting: dict[str, dict[str, LoadedTensor]] = {}
        given: set[str] = set()
        for name, tensor in tensors:
            renamed = self._renamed[name]
            if name not in self._patterns:
                own = self._alias_to_name.get(renamed, renamed)
                if own != renamed and own in given:
                    continue  # one weight under two names
                is_ignored = own not in self._names and any(
                    pattern.search(renamed) or pattern.search(name) for pattern in self._ignored
                )
                if not is_ignored:
                    given.add(own)
                    yield own, tensor
                continue
            parts = waiting.setdefault(renamed, {})
            parts[name] = tensor
            if len(parts) == len(self._groups[renamed]):
                yield from self._convert(renamed, waiting.pop(renamed))

    def _convert(self, renamed: str, parts: dict[str, LoadedTensor]) -> Iterator[tuple[str, Tensor]]:
        converter = self._converters[renamed]
        for name in self._groups[renamed]:
            part = parts[name]
            whole = part.narrow(0, 0, part.shape[0])
            converter.add_tensor(renamed, name, self._patterns[name], _known(whole))
        try:
            made: dict[str, Any] = converter.convert(renamed, model=self._model, config=self._model.config)
        except Exception as error:  # whatever an operation raises for shapes that it does not expect
            raise ModelError(
                f"{renamed}: transformers cannot make it of {', '.join(parts)}: {error}"
            ) from error
        for name, tensor in made.items():
            whole = tensor[0] if isinstance(tensor, list) else tensor
            yield self._alias_to_name.get(name, name), whole


def _known(tensor: Tensor) -> Any:
    return lambda: tensor


def _aliases(model: PreTrainedModel) -> dict[str, str]:
    """Return further name -> name, for each weight that several modules share; the embedding's name counts first."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    first = {id(embedding.weight): f"{names[id(embedding)]}.weight"}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (own := first.setdefault(id(parameter), name)) != name:
            aliases[name] = own
    return aliases
