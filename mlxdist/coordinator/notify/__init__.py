"""Notifications: one POST to an address of the user when a run ends, waits, loses a node, or gets better."""
