"""Episodes: what their contracts allow, what they have used, and why they end."""
