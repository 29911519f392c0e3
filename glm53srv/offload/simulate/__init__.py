"""A device that exists only in host memory and virtual time, and executes the same plans as the real one."""
