"""Every op in plain torch: runs on any device, at a fair speed."""
