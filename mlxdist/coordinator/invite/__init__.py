"""Inviting other Macs: the port at which they exchange keys by a code, for a run that starts or goes on."""
