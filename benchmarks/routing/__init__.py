"""Routing over several engines: policies in simulated time, and beside the routers of others over HTTP."""
