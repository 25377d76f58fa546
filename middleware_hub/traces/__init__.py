"""Traces: where the time of each turn went, as spans of OpenTelemetry."""
