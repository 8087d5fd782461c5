"""`mlxdist view`: the page that shows runs in a browser, read from their files."""
