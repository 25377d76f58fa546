"""Records and samples of sessions, for trainers."""
