"""The upper floor that owns the work: supervisor, worker, model, backward."""
