"""The tuner of the Triton kernels: measures the tiles that they declare, and stores the fastest for a device."""
