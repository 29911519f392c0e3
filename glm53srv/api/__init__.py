"""HTTP shell: the only package that knows Starlette."""
