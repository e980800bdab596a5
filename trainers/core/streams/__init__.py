"""Data sets without a length, which are read as they arrive."""
