"""`mlxdist selfcheck`: bits, memory, speed and settings of this machine."""
