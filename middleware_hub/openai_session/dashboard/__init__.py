"""What the dashboard shows of sessions."""
