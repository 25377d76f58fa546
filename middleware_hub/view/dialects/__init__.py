"""Readers of the samples files of training frameworks, one module for each framework."""
