"""The server process: listening sockets, HTTP/1.1 for clients, the start banner, signals, and the supervisor."""
