"""The ground floor, which owns the meaning: messages, sums, objectives, hashes. No sockets, no files."""
