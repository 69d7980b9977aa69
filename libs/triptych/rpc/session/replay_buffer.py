"""Sequence numbers: messages are kept until the other side has confirmed them, and each takes effect once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Generic, TypeVar

from triptych.errors import ProtocolViolation, SequenceGap

T = TypeVar("T")


class ReplayBuffer(Generic[T]):
    """Sent messages, numbered from 1 in each session, that a new stream may have to repeat.

    1  …  num_confirmed │ num_confirmed + 1  …  last_number
          forgotten     │ kept
    """

    def __init__(self, *, max_messages: int = 1 << 62, max_bytes: int = 1 << 62) -> None:
        """`max_messages`, `max_bytes`: the buffer is full at so many messages, or above so many bytes."""
        self.num_confirmed = 0
        """Number of the last message that the other side has confirmed. 0: none."""
        self.last_number = 0
        """Number of the last message that was appended. 0: none."""
        self.num_bytes = 0
        """Bytes of the messages that are kept, as given to `append`."""
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[T] = deque()
        self._sizes: deque[int] = deque()
        """Bytes of each of `_messages`."""

    def __len__(self) -> int:
        """Return how many messages are kept."""
        return len(self._messages)

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be appended."""
        return len(self._messages) >= self._max_messages or self.num_bytes > self._max_bytes

    def append(self, message: T, num_bytes: int = 0) -> int:
        """Keep one more message and return its number."""
        self._messages.append(message)
        self._sizes.append(num_bytes)
        self.num_bytes += num_bytes
        self.last_number += 1
        return self.last_number

    def confirm(self, number: int) -> Sequence[T]:
        """Forget the messages up to this number and return them.

        Raises:
            ProtocolViolation: There is no such message yet.
        """
        if number <= self.num_confirmed:
            return ()
        if number > self.last_number:
            raise self._never_sent(number)
        messages, sizes = self._messages, self._sizes
        forgotten = [messages.popleft()]
        self.num_bytes -= sizes.popleft()
        for _ in range(number - self.num_confirmed - 1):
            forgotten.append(messages.popleft())
            self.num_bytes -= sizes.popleft()
        self.num_confirmed = number
        return forgotten

    def get(self, number: int) -> T:
        """Return a message that is kept."""
        return self._messages[number - self.num_confirmed - 1]

    def after(self, number: int) -> list[T]:
        """Return the messages that are kept and have a higher number."""
        return list(islice(self._messages, max(0, number - self.num_confirmed), None))

    def can_replay_after(self, number: int) -> bool:
        """Return whether the message of this number was sent, or is 0, and all later ones are kept."""
        return self.num_confirmed <= number <= self.last_number

    def check_received(self, number: int) -> None:
        """Check the number of the last message that the other side says it has received.

        Raises:
            ProtocolViolation: It was never sent, or a later one has been confirmed.
        """
        if number > self.last_number:
            raise self._never_sent(number)
        if number < self.num_confirmed:
            raise ProtocolViolation(
                f"message {number} is said to be the last one received, but {self.num_confirmed} was confirmed"
            )

    def clear(self) -> None:
        """Forget all messages. Their numbers stay used."""
        self.num_confirmed, self.num_bytes = self.last_number, 0
        self._messages.clear()
        self._sizes.clear()

    def _never_sent(self, number: int) -> ProtocolViolation:
        return ProtocolViolation(
            f"message {number} is said to have arrived, but only {self.last_number} were sent"
        )


def is_repeated(number: int, last_received: int, what: str) -> bool:
    """Return whether a received message has been received before; if not, it is the next one.

    Args:
        number: The message's number.
        last_received: Number of the last message that has taken effect. 0: none.
        what: The kind of message, for the error.

    Raises:
        SequenceGap: It is neither. A new stream fills the gap.
    """
    if number > last_received + 1:
        raise SequenceGap(f"{what} {number} after {last_received}")
    return number <= last_received
