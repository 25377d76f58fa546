"""Text rollouts as episodes of the dashboard."""
