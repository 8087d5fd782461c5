"""The health of a cluster."""
