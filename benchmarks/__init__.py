"""Commands that measure: `python -m benchmarks.FOLDER.NAME` from the repository's root; --help names the options."""
