"""`mlxdist inspect`: what is in the data and what would be trained."""
