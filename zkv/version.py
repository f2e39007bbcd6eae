"""The version of this package: what snapshots name, and `zkv --version`."""

VERSION = "0.1.0"
