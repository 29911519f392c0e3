"""The suite mirrors the package; builders.py makes the objects that tests share."""
