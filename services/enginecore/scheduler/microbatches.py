"""Divides the rows among the steps in flight where a model's stages compute different steps at the same time.

Two stages, and six rows that decode. While the last stage computes one half of them, the first one computes the other:

    step           1      2      3      4      5
    rows           a b c  d e f  a b c  d e f  a b c
    first stage    ██████ ██████ ██████ ██████ ██████
    last stage            ██████ ██████ ██████ ██████
                                 ▲ begins with the tokens of step 1, which has just left the last stage

Nothing assigns rows to groups. A step takes its share of the rows that have their tokens back when it begins, the
longest waiting first. So rows that were computed together stay together, and groups of unequal size even out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from triptych.config import SchedulerConfig
from triptych.types.step import NewRow
from triptych_services.enginecore.scheduler.running_rows import Ints, RunningRows, Slots
from triptych_services.enginecore.scheduler.step_results import StepsInFlight


class Microbatches:
    """Decides which rows a step may decode. The scheduler owns it."""

    def __init__(self, rows: RunningRows, in_flight: StepsInFlight, num_stages: int) -> None:
        """
        Args:
            num_stages: Stages of the worker, each of which computes one step at a time.
        """
        self._rows = rows
        self._in_flight = in_flight
        self.are_whole = num_stages == 1
        """Whether each step may compute all rows."""
        self._num_stages = num_stages
        self._sampled_in: Ints = np.zeros(len(rows.known), np.int64)
        """[max_num_seqs] the last step in which each slot's row sampled; 0: it has not."""

    def limit(self, slots: Slots, wanted: Ints, *, may_run_ahead: bool) -> Ints:
        """Return how many tokens each row may compute in the next step, [len(slots)]: all that it wants, or none.

        A prompt that is computed in chunks needs no token, so its next chunk may follow at once.

        Args:
            slots: [r] rows in the order of their admission.
            wanted: [r] tokens that each could compute.
            may_run_ahead: Whether rows may be planned that the first stage has to wait for, if there are no others. It
                hides the way to the engine and back, and holds up what is planned later.
        """
        if self._num_stages == 1:
            return wanted
        rows, sampled_in = self._rows, self._sampled_in[slots]
        has_sampled = sampled_in > 0
        decoding = np.flatnonzero((wanted > 0) & has_sampled)
        if not len(decoding):
            return wanted
        share = -(-len(decoding) // self._num_stages)
        is_back = rows.known[slots] == rows.num_expected[slots]
        will_be_back = sampled_in <= self._in_flight.next_step_id - self._num_stages
        ready = decoding[(is_back | will_be_back)[decoding]]
        if not len(ready) and may_run_ahead and not wanted[~has_sampled].any():
            is_short = len(self._in_flight) <= min(len(decoding), self._num_stages)
            ready = decoding if is_short else ready
        chosen = ready[np.argsort(sampled_in[ready], kind="stable")[:share]]
        limited = np.where(has_sampled, 0, wanted)
        limited[chosen] = wanted[chosen]
        return limited

    def note_planned(self, new_rows: Sequence[NewRow], sampling_slots: Slots) -> None:
        """Note the rows that enter with the next step, and the slots that sample in it. There are several stages."""
        self._sampled_in[[row.slot for row in new_rows]] = 0
        self._sampled_in[sampling_slots] = self._in_flight.next_step_id


def split_budget(config: SchedulerConfig, num_stages: int) -> SchedulerConfig:
    """Return the config with each step's part of the token budget, so that a long prompt fills the stages.

    A prompt that must be computed in one step keeps all of it.
    """
    if num_stages == 1 or not config.enable_chunked_prefill:
        return config
    return replace(config, max_num_batched_tokens=-(-config.max_num_batched_tokens // num_stages))
