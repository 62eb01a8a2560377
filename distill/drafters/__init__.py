"""One file per drafting method; ``base.py`` holds the protocol and says how to add one."""
