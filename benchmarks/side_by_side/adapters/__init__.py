"""One file per engine: how it is loaded, given requests, stepped, and watched while it works."""
