"""Sessions on the dashboard."""
