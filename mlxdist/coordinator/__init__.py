"""The upper floor that owns the run: data, order, sums, steps, saves, reports."""
