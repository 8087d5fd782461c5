"""`mlxdist runs`: the runs below a folder, and two of them side by side."""
