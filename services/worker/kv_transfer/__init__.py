"""KV blocks from worker to worker: a server of this worker's blocks, and pulls of others' (docs/adr/0035)."""
