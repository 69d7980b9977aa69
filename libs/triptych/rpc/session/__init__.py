"""The protocol of sessions that outlive their streams, shared by all four ends of the two internal streams.

docs/wire.md describes the protocol. The services add only what their messages mean.
"""
