"""Other machines over ssh: what is run there, what an answer means, and how nodes start and end there."""
