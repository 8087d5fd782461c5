"""The parts of the loop, and the ways into and out of it: start, step, evaluation, save, resume."""
