"""The report of a run: events in metrics.jsonl, a summary in metrics.json, lines or a live display on the terminal."""
