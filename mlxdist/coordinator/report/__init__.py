"""What a run tells: events in metrics.jsonl, lines and a live display on the terminal."""
