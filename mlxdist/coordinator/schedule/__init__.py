"""Who computes which leaves and how long that may take; pure."""
