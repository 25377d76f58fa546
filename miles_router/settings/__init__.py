"""Every setting, and the values they take."""
