"""`mlxdist init`: a run.toml for some rows and this Mac."""
