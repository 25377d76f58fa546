"""The wire format of the engines: parsers of requests, answers and streams, and one subpackage per engine. No I/O.

No other package names an engine.
"""
