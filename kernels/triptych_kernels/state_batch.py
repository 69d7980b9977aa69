"""The layout of a step's rows for layers with a recurrent state: which page each row's state comes from and goes to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GuessedTokens:
    """The tokens of a step that may be taken back, and those of earlier steps that were not.

    A state cannot go back. So a row's page is written before its guesses, and what each of these would change is kept
    apart. The row's next step takes the state through those that were right.

        step          a b|x y z|        c d|v w|
        page written  of b              of d, after x and y: the guess z was wrong
        kept          x y z             v w
        replayed      none              2

    Tensors are on the rank's device.
    """

    slots: Tensor
    """[num_rows] int32, the first index of `memory`; any number where both counts are 0."""
    replayed: Tensor
    """[num_rows] int32, tokens in the row's memory that its state is taken through before the step."""
    counts: Tensor
    """[num_rows] int32, the last tokens of each row that are guesses. One token at least is not."""
    memory: Tensor | None = None
    """[num_slots, most guesses of a row, elements] float32, what the layer keeps, the last axis dense. None: that of
    the layer is not named yet."""


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """The layout of one step's tokens and the pages of their states, the same for every layer.

    Row r owns the tokens `query_starts[r]:query_starts[r + 1]` of the step. Its state before the first of them is read
    from one page, and its state after the last of them is written to one page, which may be the same.

        step's tokens   a a a a b c c         three rows, query_starts [0, 4, 5, 7]
        read_pages      0 5 7                 the state of a begins as zeros
        write_pages     3 5 8                 b goes on in its page; page 7 stays as it is, a snapshot

    No page is written for two rows of a step, or written for one and read for another. Tensors are on the rank's
    device.
    """

    read_pages: Tensor
    """[num_rows] int32; 0: the state is all zeros, and page 0 is not read."""
    write_pages: Tensor
    """[num_rows] int32; 0: the row's state is not kept, and page 0 is not written."""
    query_starts: Tensor
    """[num_rows + 1] int32."""
    query_lens_list: tuple[int, ...] | None = None
    """[num_rows] differences of query_starts, each >= 1, for code that loops on the host. None: a program or a graph is
    recorded, or the host waits for the tensor."""
    guesses: GuessedTokens | None = None
    """Tokens that may be taken back; None: there are none. Only the native kernels take some."""

    def with_memory(self, memory: Tensor | None) -> StateBatch:
        """Return the same with what one op keeps of guesses; `memory`: as of `GuessedTokens`."""
        if self.guesses is None:
            return self
        return replace(self, guesses=replace(self.guesses, memory=memory))

    def require_no_guesses(self, op: str) -> None:
        """Raise ValueError if a row may have guesses."""
        if self.guesses is not None:
            raise ValueError(f"{op}: guesses are taken back by the native kernels only")

    def check(self, op: str, tokens: Tensor, state: Tensor, elements: int) -> None:
        """Check the rows against one of the op's operands and the tensor of its states.

        Args:
            tokens: [num_tokens, …].
            state: [num_pages, …] float32, dense but for the first axis.
            elements: Numbers that the op keeps of a guess.
        Raises:
            ValueError: Shapes, dtypes or lengths disagree; names both.
        """
        num_rows = len(self.read_pages)
        layout = self.read_pages, self.write_pages, self.query_starts
        if [tuple(x.shape) for x in layout] != [(num_rows,), (num_rows,), (num_rows + 1,)]:
            raise ValueError(
                f"{op}: read_pages {list(layout[0].shape)}, write_pages {list(layout[1].shape)} and query_starts "
                f"{list(layout[2].shape)} must be [num_rows], [num_rows] and [num_rows + 1]"
            )
        if any(x.dtype != torch.int32 for x in layout):
            raise ValueError(
                f"{op}: read_pages, write_pages and query_starts are {[x.dtype for x in layout]}; they must be "
                "torch.int32"
            )
        if state.dtype != torch.float32 or not state[0].is_contiguous():
            raise ValueError(
                f"{op}: state {list(state.shape)} of {state.dtype} with strides {state.stride()} must be "
                "torch.float32, each page dense"
            )
        lens = self.query_lens_list
        if lens is not None and (
            len(lens) != num_rows or sum(lens) != len(tokens) or min(lens, default=1) < 1
        ):
            raise ValueError(
                f"{op}: query_lens_list {lens} must be {num_rows} positive lengths that sum to the {len(tokens)} tokens"
            )
        if self.guesses is not None:
            self._check_guesses(op, self.guesses, elements)

    def _check_guesses(self, op: str, guesses: GuessedTokens, elements: int) -> None:
        columns = guesses.slots, guesses.replayed, guesses.counts
        if any(x.shape != self.read_pages.shape or x.dtype != torch.int32 for x in columns):
            raise ValueError(
                f"{op}: slots, replayed and counts of guesses are {[list(x.shape) for x in columns]} of "
                f"{[x.dtype for x in columns]}; they must be [num_rows = {len(self.read_pages)}] of torch.int32"
            )
        memory = guesses.memory
        if memory is None or memory.dtype != torch.float32 or memory.shape[2:] != (elements,):
            found = None if memory is None else f"{list(memory.shape)} of {memory.dtype}"
            raise ValueError(
                f"{op}: the memory of guesses is {found}; it must be [num_slots, guesses, {elements}] of torch.float32"
            )
        if memory.stride(2) != 1:
            raise ValueError(
                f"{op}: the memory of guesses has strides {memory.stride()}; the last axis must be dense"
            )

    def lens(self) -> tuple[int, ...]:
        """Return the tokens of each row, for which the host may wait."""
        return self.query_lens_list or tuple(self.query_starts.diff().tolist())
