"""The run folder: what is written in it, and how it survives a crash."""
