"""The memory that a run needs, and the settings that make it fit."""
