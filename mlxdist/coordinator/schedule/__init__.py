"""Assignments of leaves to nodes, and how long they may take; pure."""
