"""`mlxdist evaluate`: the adapters of a run and its base model, scored over all validation rows or over test rows."""
