"""`mlxdist report`: runs as one self-contained HTML file, to send to somebody."""
