"""The broker's and the server's machines and drivers; knows nothing of workers' code."""
