"""The backward in segments of layers, and the ways around it."""
