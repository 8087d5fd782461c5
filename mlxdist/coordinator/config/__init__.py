"""run.toml, hosts.toml and --set in, checked frozen values out."""
