"""Frozen, slotted dataclasses that cross boundaries. They know nothing of protobuf, HTTP or torch."""
