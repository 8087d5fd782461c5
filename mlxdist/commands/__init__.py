"""The options and the commands of the command line that are not in `mlxdist.cli` itself."""
