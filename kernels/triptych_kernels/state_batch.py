"""The layout of a step's rows for layers with a recurrent state: which page each row's state comes from and goes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def check(self, op: str, tokens: Tensor, state: Tensor) -> None:
        """Check the rows against one of the op's operands and the tensor of its states.

        Args:
            tokens: [num_tokens, …].
            state: [num_pages, …] float32, dense but for the first axis.
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

    def lens(self) -> tuple[int, ...]:
        """Return the tokens of each row, for which the host may wait."""
        return self.query_lens_list or tuple(self.query_starts.diff().tolist())
