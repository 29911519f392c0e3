"""Programs that prepare a machine or check a build; each is run by its path."""
