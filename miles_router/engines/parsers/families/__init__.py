"""How model families write, a file for each."""
