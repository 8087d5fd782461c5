"""`mlxdist inspect`: the contents of the data, and what a run would train on."""
