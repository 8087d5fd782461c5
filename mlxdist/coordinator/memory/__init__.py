"""How much memory a run needs, and the settings that make it fit."""
