"""The mathematics: array API only, no networks, environments, files or frameworks."""
