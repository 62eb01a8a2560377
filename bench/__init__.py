"""What the project's speed and memory claims rest on, measured by one command: ``python -m bench``."""
