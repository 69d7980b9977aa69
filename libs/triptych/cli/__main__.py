"""`python -m triptych.cli`: the `triptych` command where its script is not on the path."""

from __future__ import annotations

import sys

from triptych.cli import main

sys.exit(main())
