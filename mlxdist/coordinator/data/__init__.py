"""Files and data sets in, encoded rows out."""
