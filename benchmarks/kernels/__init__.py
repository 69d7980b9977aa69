"""Kernels: the native ones beside plain torch and the limits of the machine; operands for all devices."""
