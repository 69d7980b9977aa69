"""What crosses a boundary: frozen, slotted dataclasses that know nothing of protobuf, HTTP or torch."""
