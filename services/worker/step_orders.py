"""Work that the steps of a session order beside their computing: when it may begin, and how it is taken back.

    steps sent        4 ─── 5 ─────────── 6 ──────────────►  received ahead, up to the window
    steps computed       └─── 4 ───── 5 ───── 6 ──────────►  one after the other
                              │       └ what step 5 has computed may be used, what step 6 orders may begin
                              └ what step 4 has computed may be used, what step 5 orders may begin

The engine gives blocks away as soon as no further step will use them, whatever steps are still in flight (decided in
`enginecore.kv`). Steps run in order, so they do not notice. Everything else must wait here for the steps before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

_NOT_OPEN = -1


class StepOrders:
    """The orders of one session that wait for steps. Owned by the session; all methods run on the event loop.

    An end is carried out when its step is received, before the step can be computed: it only frees memory for the step.
    A beginning waits for the result of the step before its own. There are no more waiting orders than in the steps of
    the window.
    """

    def __init__(self) -> None:
        self._last_computed = _NOT_OPEN
        """The last step with its result there; 0: the session is open, and nothing of an earlier one is computed."""
        self._step_to_orders: dict[int, list[tuple[Hashable, Callable[[], None]]]] = {}
        """Step -> name and action of each order that waits for its result."""

    def after(self, step_id: int, name: Hashable, act: Callable[[], None]) -> None:
        """Call `act` once the result of a step is there, at once if it is.

        Args:
            step_id: The step; 0: the beginning of the session.
            name: Names the order in `cancel`. Several orders may have one name.
            act: What is ordered.
        """
        if step_id <= self._last_computed:
            act()
        else:
            self._step_to_orders.setdefault(step_id, []).append((name, act))

    def cancel(self, name: Hashable) -> None:
        """Drop all orders of this name that still wait."""
        for step_id, orders in self._step_to_orders.items():
            self._step_to_orders[step_id] = [order for order in orders if order[0] != name]

    def note_computed(self, step_id: int) -> None:
        """Carry out what waits for a step: its result is there, and no earlier step is computed any more."""
        self._last_computed = step_id
        for _, act in self._step_to_orders.pop(step_id, ()):
            act()

    def close(self) -> None:
        """Drop all orders: the session has ended."""
        self._step_to_orders.clear()
