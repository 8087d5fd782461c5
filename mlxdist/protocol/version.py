"""The version of mlxdist, below all that names it."""

VERSION = "0.1.0"
