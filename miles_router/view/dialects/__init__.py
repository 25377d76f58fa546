"""Samples files of training frameworks, a file for each of them."""
