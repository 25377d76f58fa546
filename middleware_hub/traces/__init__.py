"""OpenTelemetry spans that show how long each part of a turn took."""
