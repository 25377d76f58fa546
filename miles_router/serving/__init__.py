"""The process: the listening socket, HTTP/1.1 towards clients, the banner, signals."""
