"""The nodes and the work they have in hand, without I/O: messages in, messages and events out."""
