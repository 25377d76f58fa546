"""Requests and answers as the engine writes them."""
