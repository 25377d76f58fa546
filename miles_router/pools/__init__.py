"""The workers of each model behind one router, a fleet of its own each; and which of them takes a request."""
