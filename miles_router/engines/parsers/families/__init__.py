"""The output formats of model families, one file for each."""
