"""Tiles by measurement, and compilation before they are needed."""
