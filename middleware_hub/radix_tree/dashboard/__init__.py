"""What the dashboard shows of text rollouts."""
