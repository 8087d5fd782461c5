"""Encoded rows, their order, and the leaves that a step is cut into."""
