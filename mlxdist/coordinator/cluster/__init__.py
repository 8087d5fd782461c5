"""The nodes and their work, without I/O: messages in, messages, news and partials out."""
