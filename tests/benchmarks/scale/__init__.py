"""What several processes cost and give, measured on this machine and computed beyond it."""
