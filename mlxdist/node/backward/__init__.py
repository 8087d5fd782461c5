"""The backward: in segments of layers, or over the whole graph where a model allows no segments."""
