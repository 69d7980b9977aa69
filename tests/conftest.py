"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts us in the background has SIGINT ignored, which children inherit; tests send it to both.
signal.signal(signal.SIGINT, signal.default_int_handler)
