"""How the weights of a checkpoint are stored, module by module, as its quantization config says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from triptych.errors import ModelError

_MAX_PATTERN = 1000  # characters
_NESTED_REPEAT = re.compile(r"\([^()]*[+*}][^()]*\)[+*{]")
"""A repeated group with a repetition in it, which may take time exponential in the length of a name."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The form in which the weights of a module lie in the file.

    w = scale * (code - zero), or scale * table[code]; `group_rows` outputs and `group` inputs share a scale.
    """

    layout: str
    """Names, shapes and packing of the tensors: one of `services/worker/loader/layouts`."""
    bits: int
    """Bits of a code."""
    group: int = 0
    """Inputs that share a scale; 0: all."""
    group_rows: int = 1
    """Outputs that share a scale; 0: all."""
    table: str = ""
    """Values of the codes: nf4, fp4, bnb_fp4, e4m3. Empty: codes are integers."""
    is_symmetric: bool = True
    """Whether zero is the middle of the codes; False: it is stored for each group."""
    input_bits: int = 16
    """Bits to which its authors round the inputs of the product."""

    def __str__(self) -> str:
        """Return a description for people: `gptq 4-bit g128`."""
        if self.group_rows > 1 and self.group:
            group = f" {self.group_rows}x{self.group}"
        elif self.layout == "bnb":
            group = ""  # the files say it weight by weight
        elif self.group:
            group = f" g{self.group}"
        else:
            group = " per row" if self.group_rows == 1 else " per tensor"
        kind = self.table if self.table not in ("", self.layout) else ""
        zeros = "" if self.is_symmetric else " with zeros"
        return f"{self.layout} {self.bits}-bit{' ' * bool(kind)}{kind}{group}{zeros}"


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """A scheme of the modules with a name that a pattern matches."""

    pattern: str
    """A regular expression for the beginning of a name; empty: every name."""
    scheme: WeightScheme | None
    """The scheme; None: the modules are not quantized."""
    is_required: bool = False
    """Whether it is an error if no quantized module has it."""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The schemes of all weights of a checkpoint."""

    method: str
    """Name of the method: gptq."""
    source: str
    """File and key that say so: `config.json: quantization_config`."""
    rules: tuple[SchemeRule, ...]
    """The first that matches a name counts."""
    ignored: tuple[str, ...] = ()
    """Names of modules that are not quantized, whatever the rules say."""
    kv_cache: str = ""
    """Precision of keys and values that the checkpoint was made for: `8-bit float`; empty: it says nothing."""

    def __str__(self) -> str:
        """Return its schemes for people, `gptq 4-bit g128`; without any, as for random weights, its method."""
        return ", ".join(dict.fromkeys(str(rule.scheme) for rule in self.rules if rule.scheme)) or self.method

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts of all schemes, each once."""
        return tuple(dict.fromkeys(rule.scheme.layout for rule in self.rules if rule.scheme))

    def rule_finder(self) -> Callable[[str], SchemeRule | None]:
        """Return a function that finds the rule for a module's name; None: there is none, or the module is ignored.

        Raises:
            ModelError: A pattern is no regular expression, or one that may take forever.
        """
        compiled = [(self._compile(rule.pattern), rule) for rule in self.rules]
        ignored = frozenset(self.ignored)

        def find(module: str) -> SchemeRule | None:
            if module in ignored:
                return None
            return next((rule for pattern, rule in compiled if pattern.match(module)), None)

        return find

    def _compile(self, pattern: str) -> re.Pattern[str]:
        problem = "may take forever"
        if len(pattern) <= _MAX_PATTERN and not _NESTED_REPEAT.search(pattern):
            try:
                return re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                problem = f"is no regular expression: {error}"
        raise ModelError(f"{self.source}: the pattern {pattern[:200]!r} {problem}")
