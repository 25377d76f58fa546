"""The calls of training frameworks' rollout code where they differ from the client's own: a folder for each
framework."""
