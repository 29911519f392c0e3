"""The server as a user starts it: a process, a port, and real clients."""
