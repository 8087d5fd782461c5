"""`mlxdist status`: a run as its files tell it, on this Mac or on another one, while it trains or later."""
