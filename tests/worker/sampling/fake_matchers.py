"""Matchers that behave as a test needs, and a compiler that hands them out."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from tests.helpers.byte_tokenizer import EOS, byte_tokenizer
from triptych_services.worker.sampling.grammars import Compilation

EOS_ID = byte_tokenizer().token_id(EOS)


class ExhaustedMatcher:
    """A matcher that gives up in its first mask, as llguidance's do: the mask allows the end only."""

    def __init__(self) -> None:
        self._has_failed = False

    def deep_copy(self):
        return self

    def validate_tokens(self, token_ids):
        return 0

    def compute_ff_tokens(self):
        return []

    def unsafe_compute_mask_ptr(self, address, num_bytes):
        mask = np.zeros(num_bytes * 8, np.uint8)
        mask[EOS_ID] = 1
        ctypes.memmove(address, np.packbits(mask, bitorder="little").tobytes(), num_bytes)
        self._has_failed = True

    def is_error(self):
        return self._has_failed

    def get_error(self):
        return "too many items\n<state>"


class HeldCompiler:
    """Compiles when a test says so."""

    def __init__(self, matcher=None) -> None:
        self.compilations: dict[str, Compilation] = {}
        self._matcher = matcher

    def start(self, grammar):
        compilation = self.compilations.setdefault(grammar, Compilation())
        if self._matcher is not None and not compilation.done():
            compilation.set_result(self._matcher)
        return compilation

    def finish(self, grammars):
        for grammar, compilation in self.compilations.items():
            if not compilation.done():
                compilation.set_result(grammars.start(grammar).result(30))


class SlowMatcher(ExhaustedMatcher):
    """Its masks cost much CPU time, and allow everything."""

    cpu_s = 0.02

    def unsafe_compute_mask_ptr(self, address, num_bytes):
        end = time.thread_time() + self.cpu_s
        while time.thread_time() < end:
            pass
        ctypes.memset(address, 0xFF, num_bytes)

    def is_accepting(self):
        return False

    def consume_token(self, token_id):
        return True
